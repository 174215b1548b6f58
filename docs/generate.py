"""Writes docs/configuration.md and docs/commands.md from the code that they describe.

python docs/generate.py           write them
python docs/generate.py --check   say which one differs, and exit with 1
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from fagen import errors, settings
from fagen.cli.main import cli
from fagen.generate.families import FAMILIES

DOCS = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/generate.py. Change the code, then run: make docs -->"
WIDTH = 88


def configuration() -> str:
    """Environment variables, the knobs of each family, and errors with their exit codes."""
    parts = [
        "# Configuration",
        NOTE,
        "## Environment variables",
        _table(["variable", "meaning"], [[f"`{k}`", v] for k, v in settings.VARIABLES.items()]),
        "## Kernel families and their knobs",
        "`fagen tune` searches over these. A config that breaks a rule is never built; "
        "`fagen why` says which rule.",
    ]
    for family in FAMILIES.values():
        knobs = [_knob_row(knob) for knob in fields(family.Knobs)]
        rules = [[f"`{rule.name}`", rule.reason] for rule in family.CONSTRAINTS]
        parts += [
            f"### `{family.NAME}`",
            _table(["knob", "default", "values", "meaning"], knobs),
            _table(["rule", "said when it is broken"], rules),
        ]
    parts += ["## Errors", _table(["error", "exit code", "meaning"], list(_errors()))]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """What `--help` says, of every command."""
    parts = ["# Commands", NOTE]
    for context in _walk(_context(cli, "fagen", None)):
        shown = "\n".join(line.rstrip() for line in context.get_help().splitlines())
        parts.append(f"## `{context.command_path}`\n\n```\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    return {DOCS / "configuration.md": configuration(), DOCS / "commands.md": commands()}


def differing() -> list[str]:
    """Names of the pages that are missing or do not say what the code says."""
    return [
        path.name
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    # A width of its own: help must not depend on the terminal of whoever runs this.
    return command.make_context(
        name,
        [],
        parent,
        resilient_parsing=True,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
    )


def _walk(context: click.Context) -> Iterator[click.Context]:
    yield context
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, f"{context.command_path} lists {name} and lacks it"
            yield from _walk(_context(inner, name, context))


def _knob_row(knob: Field[Any]) -> list[str]:
    values = ", ".join(f"`{value}`" for value in knob.metadata["choices"])
    return [f"`{knob.name}`", f"`{knob.default}`", values, knob.metadata["doc"]]


def _errors() -> Iterator[list[str]]:
    for name, found in vars(errors).items():
        if isinstance(found, type) and issubclass(found, errors.FagenError):
            meaning = (found.__doc__ or "").split("\n\n")[0]
            yield [f"`{name}`", str(found.exit_code), meaning]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    if "--check" in sys.argv[1:]:
        stale = differing()
        print("\n".join(f"docs/{name} is out of date. Run: make docs" for name in stale))
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote docs/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
