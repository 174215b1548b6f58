"""`fagen show`."""

from __future__ import annotations

import click

from fagen.cli.options import ID, db_option, json_option, place_options, shape_options
from fagen.cli.output import emit, emit_json, note
from fagen.problem import Problem


@click.command("show")
@click.argument("trial", type=ID, required=False)
@shape_options(required=False)
@place_options
@click.option("--config", metavar="JSON", help="A config instead of the one that would be chosen.")
@db_option
@json_option
def command(
    trial: int | None,
    problem: Problem | None,
    device: str | None,
    target: str | None,
    config: str | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Print the generated source of a TRIAL, or of the kernel that a shape would get.

    stdout holds the source alone, so that it can be saved and run. stderr says what the compiled
    kernel uses and what its machine code shows, where that is stored. `fagen repro TRIAL` writes
    a script that builds, checks and times it.

    \b
    Example:
      fagen show 12
      fagen show --seq 8192 --head-dim 128 --target h200 > kernel.py
    """
    from fagen.cli.places import target_of
    from fagen.report.serving import source_lines, source_row
    from fagen.serve.source import source_of_problem, source_of_trial

    if trial is not None and problem is None:
        shown = source_of_trial(trial, db)
    elif problem is not None and trial is None:
        shown = source_of_problem(problem, target_of(device, target), config, db)
    else:
        raise click.UsageError("Name either a trial or a shape (--seq and --head-dim).")
    if as_json:
        emit_json(source_row(shown))
    else:
        emit(shown.program.source.rstrip("\n"))
        for line in source_lines(shown):
            note(line)
