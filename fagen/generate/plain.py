"""A Program as plain values beside its source, and back: to be run where no template is read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fagen.generate.families import config_from_dict
from fagen.generate.program import Arg, Entry, Program
from fagen.problem import problem_from_dict


def program_to_dict(program: Program) -> dict[str, Any]:
    """Everything but the source, as JSON can hold it."""
    return {
        "name": program.name,
        "key": program.key,
        "template_digest": program.template_digest,
        "problem": program.problem.to_dict(),
        "config": program.config.to_dict(),
        "entries": [asdict(entry) for entry in program.entries],
        "limits": {name: [r.start, r.stop, r.step] for name, r in program.limits.items()},
    }


def program_from_dict(plain: dict[str, Any], source: str) -> Program:
    """The inverse. Grids and workspaces come from the config's family, as for every Program.

    Raises BadConfig for a family, knob or value that this version does not know.
    """
    return Program(
        problem=problem_from_dict(plain["problem"]),
        config=config_from_dict(plain["config"]),
        name=plain["name"],
        source=source,
        key=plain["key"],
        template_digest=plain["template_digest"],
        entries=tuple(_entry(entry) for entry in plain["entries"]),
        limits={name: range(*bounds) for name, bounds in plain["limits"].items()},
    )


def _entry(plain: dict[str, Any]) -> Entry:
    args = tuple(Arg(**arg) for arg in plain["args"])
    return Entry(**{**plain, "args": args, "gives": tuple(plain["gives"])})
