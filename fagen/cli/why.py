"""`fagen why`."""

from __future__ import annotations

import click

from fagen.cli.options import db_option, json_option, place_options, shape_options
from fagen.cli.output import emit, emit_json, emit_table
from fagen.problem import Problem


@click.command("why")
@shape_options(required=True)
@click.option(
    "--deterministic",
    is_flag=True,
    help="as with fagen.get(..., deterministic=True): gradients of the same bits in every run",
)
@place_options
@db_option
@json_option
def command(
    problem: Problem,
    deterministic: bool,
    device: str | None,
    target: str | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Show which kernel a shape would get, and the reason, field by field.

    \b
    Example:
      fagen why --seq 8192 --head-dim 128 --causal
      fagen why --seq 8192 --head-dim 128 --direction backward --deterministic
    """
    from fagen.cli.places import target_of
    from fagen.report import serving
    from fagen.serve.library import why

    place = target_of(device, target)
    found = why(problem, target=place, db=db, deterministic=deterministic)
    if as_json:
        emit_json(serving.explanation_row(found))
    else:
        emit_table(serving.field_rows(found))
        emit("\n".join(serving.explanation_lines(found)))
