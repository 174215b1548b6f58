"""`fagen db`: what the tuning database knows."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from fagen.cli.options import ID, db_option, json_option, shape_options
from fagen.cli.output import emit, emit_json, emit_rows, note
from fagen.outcome import Status
from fagen.problem import Problem

EMPTY = "Nothing is stored yet. Run: fagen tune --seq 8192 --head-dim 128"
NO_MATCH = "Nothing that is stored matches. Without options it is all listed."
NOT_TIMED = "Nothing was timed yet. Predictions: fagen db trials. Times: fagen tune, with a GPU."


def _when(_ctx: click.Context, _param: click.Parameter, value: str | None) -> datetime | None:
    """An ISO date or time; without an offset it is meant in local time."""
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is no ISO date or time, as in 2026-11-01 or 2026-11-01T01:30+09:00."
        ) from None


since_option = click.option(
    "--since", callback=_when, metavar="DATE", help="From this ISO date or time on [local time]."
)
limit_option = click.option("--limit", type=ID, help="At most so many, newest.")


@click.group("db")
def command() -> None:
    """Look at the tuning database. Only `db check` changes it.

    \b
    Example:
      fagen db list --since 2026-11-01
    """


@command.command("path")
@db_option
@json_option
def path(db: str | None, as_json: bool) -> None:
    """Say where the database is.

    \b
    Example:
      fagen db path
    """
    from fagen.serve.database import location

    if as_json:
        emit_json({"path": location(db)})
    else:
        emit(location(db))


@command.command("list")
@since_option
@limit_option
@db_option
@json_option
def list_runs(since: datetime | None, limit: int | None, db: str | None, as_json: bool) -> None:
    """List the tuning runs, newest first, with the best time known for each.

    \b
    Example:
      fagen db list --since 2026-11-01
    """
    from fagen.report import stored
    from fagen.serve.database import reading

    with reading(db) as records:
        rows = stored.run_rows(records.runs(since=since, limit=limit), records.winners())
    columns = ["run_id", "started", "state", "problem", "target", "trials", "best_us"]
    nothing = EMPTY if since is None else NO_MATCH
    rows = rows if as_json else stored.localized(rows)
    emit_rows(rows, columns, as_json=as_json, nothing=nothing)


@command.command("best")
@db_option
@json_option
def best(db: str | None, as_json: bool) -> None:
    """List the best kernel of every shape bucket, device and toolchain, and what came with fagen.

    \b
    Example:
      fagen db best --json
    """
    from fagen.generate.families import config_from_dict
    from fagen.records import shipped
    from fagen.report import stored
    from fagen.serve.database import reading

    with reading(db) as records:
        found = [*records.winners(), *shipped(None, config_from_dict)]
        nothing = NOT_TIMED if records.trials(limit=1) else EMPTY
    rows = [stored.record_row(record) for record in found]
    columns = ["origin", "trial_id", "problem", "target", "triton", "median_us", "config"]
    emit_rows(rows, columns, as_json=as_json, nothing=nothing)


@command.command("trials")
@click.option("--run", "run_id", type=ID, metavar="ID", help="Of one run.")
@click.option("--status", type=click.Choice([s.value for s in Status]), help="With one status.")
@shape_options(required=False)
@since_option
@limit_option
@db_option
@json_option
def trials(
    run_id: int | None,
    status: str | None,
    problem: Problem | None,
    since: datetime | None,
    limit: int | None,
    db: str | None,
    as_json: bool,
) -> None:
    """List the trials, newest first, with what became of each and why.

    `fagen repro TRIAL` writes a script that tries one of them again.

    \b
    Example:
      fagen db trials --run 3 --status wrong_result
    """
    from fagen.report import stored
    from fagen.serve.database import reading

    state = None if status is None else Status(status)
    with reading(db) as records:
        found = records.trials(
            run_id=run_id, problem=problem, status=state, since=since, limit=limit
        )
    rows = [stored.record_row(record) for record in found]
    columns = ["trial_id", "run_id", "status", "median_us", "predicted_us", "config", "reason"]
    narrowed = any(value is not None for value in (run_id, problem, status, since))
    emit_rows(rows, columns, as_json=as_json, nothing=NO_MATCH if narrowed else EMPTY)


@command.command("show")
@click.argument("trial", type=ID)
@db_option
@json_option
def show(trial: int, db: str | None, as_json: bool) -> None:
    """Show one TRIAL: config, facts, errors beside their budgets, times.

    \b
    Example:
      fagen db show 12
    """
    from fagen.report import stored
    from fagen.serve.database import reading

    with reading(db) as records:
        record = records.trial(trial)
    if as_json:
        emit_json(stored.detail_row(record))
    else:
        emit("\n".join(stored.detail_lines(record)))


@command.command("export")
@shape_options(required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="The file to write; compressed where its name ends in .gz.",
)
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@db_option
@json_option
def export(problem: Problem, out: Path, force: bool, db: str | None, as_json: bool) -> None:
    """Write all trials of a shape as a data set: every config, its times and what it cost.

    Predictions and quarantined trials are left out, and those of another device, toolchain, gate
    or measuring policy than most have. fagen bench-tuner searches a data set again.

    \b
    Example:
      fagen db export --seq 8192 --head-dim 128 --out d128.jsonl.gz
    """
    from fagen.errors import BadSetting
    from fagen.report import replays
    from fagen.serve.database import exported

    if out.exists() and not force:
        raise BadSetting(f"{out} exists.", "Name another file, or say --force.")
    found, left_out = exported(db, problem, out)
    if as_json:
        row = {"file": str(out), "problem": str(problem), "configs": len(found.rows)}
        emit_json({**row, "optimum_us": found.optimum_us, "trials_left_out": left_out})
        return
    emit(f"{replays.heading(found)}")
    if left_out:
        note(f"{left_out} trial(s) of another device, toolchain, gate or policy are left out.")
    note(f"Wrote {out}. Next: fagen bench-tuner --replay {out}")


@command.command("check")
@db_option
@json_option
def check(db: str | None, as_json: bool) -> None:
    """Check the database, and bring an older one to this version after a backup.

    \b
    Example:
      fagen db check --db copy.db
    """
    from fagen.serve.database import checked

    text = checked(db)
    if as_json:
        emit_json({"ok": True, "text": text})
    else:
        emit(text)
