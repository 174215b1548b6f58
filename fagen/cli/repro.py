"""`fagen repro`."""

from __future__ import annotations

from pathlib import Path

import click

from fagen.cli.options import ID, db_option, json_option
from fagen.cli.output import emit, emit_json, note


@click.command("repro")
@click.argument("trial", type=ID)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write it there.")
@click.option("--force", is_flag=True, help="Write over a FILE that exists.")
@db_option
@json_option
def command(trial: int, out: Path | None, force: bool, db: str | None, as_json: bool) -> None:
    """Write a Python script that builds, checks and times one TRIAL again, without the database.

    It holds the problem, the config, what was measured, and the whole source that was tried; it
    needs fagen, torch and Triton. Without a GPU it builds for the trial's target, and checks what
    Triton's interpreter can run. Its exit code is 0 when the kernel is right, 1 when it is wrong,
    or is not built or does not end.

    \b
    Example:
      fagen repro 12 --out trial12.py && python trial12.py
    """
    from fagen.report import repro
    from fagen.serve.database import refuse_database
    from fagen.serve.source import tried_source

    if force and out is None:
        raise click.UsageError("--force says nothing without --out.")
    tried = tried_source(trial, db)
    script = repro.script(tried)
    if out is not None:
        refuse_database(out, db)
        _write(out, script, force)
        note(f"Wrote {out}. To run it: python {out}")
    if as_json:
        emit_json(repro.script_row(tried, script, None if out is None else str(out)))
    elif out is None:
        emit(script.rstrip("\n"))
    if warning := repro.warning(tried):
        note(f"fagen: warning: {warning}")


def _write(path: Path, text: str, force: bool) -> None:
    if path.is_dir():
        raise click.UsageError(f"{path} is a folder. Name a file in it.")
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.UsageError(f"{path} exists. Say --force to write over it.") from None
