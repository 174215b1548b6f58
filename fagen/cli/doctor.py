"""`fagen doctor`."""

from __future__ import annotations

import click

from fagen.cli.options import db_option, json_option
from fagen.cli.output import emit_json, emit_table


@click.command("doctor")
@db_option
@json_option
@click.pass_context
def command(ctx: click.Context, db: str | None, as_json: bool) -> None:
    """Say in plain words what this machine can do.

    Exit code 0 when tuning works, offline too; 1 when something must be done first.

    \b
    Example:
      fagen doctor
    """
    from fagen import doctor
    from fagen.report.serving import finding_rows

    findings = doctor.examine(db)
    rows = finding_rows(findings)
    if as_json:
        emit_json(rows)
    else:
        emit_table(rows)
    ctx.exit(0 if doctor.can_tune(findings) else 1)
