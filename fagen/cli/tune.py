"""`fagen tune`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, cast

import click

from fagen.cli.options import comma_list, db_option, json_option, place_options, shape_options
from fagen.cli.output import emit, emit_json, emit_table, note
from fagen.errors import BadSetting, Interrupted, NoValidConfig
from fagen.problem import Problem
from fagen.tune.effort import EFFORTS

if TYPE_CHECKING:
    from fagen.cli.progress import Watcher
    from fagen.report.plain import Row
    from fagen.tune.result import TuneResult


def _of(name: str) -> str:
    *others, last = (f"{getattr(effort, name):g}" for effort in EFFORTS.values())
    return f"{', '.join(others)} or {last}"


@click.command("tune")
@shape_options(required=True, both=True)
@place_options
@click.option(
    "--devices",
    metavar="N,N",
    help="Several GPUs of one kind that share the run; the race is on the first.",
)
@click.option(
    "--effort",
    type=click.Choice(list(EFFORTS)),
    default="normal",
    show_default=True,
    help=f"{_of('trials')} trials, in {_of('timeout_s')} s at most; without a GPU "
    f"{_of('offline_timeout_s')}.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=0),
    help="Trials of this shape in all, earlier runs included [default: by --effort].",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wall time of this run [default: by --effort].",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search.")
@db_option
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def command(
    problems: list[Problem],
    device: str | None,
    target: str | None,
    devices: str | None,
    effort: str,
    trials: int | None,
    timeout: float | None,
    seed: int,
    db: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Generate, check and time kernels for a shape, and keep every result.

    Without a GPU it works offline for --target (default h200): everything but timing.
    Exit code 0 with a winner, 1 without, 130 or 143 when interrupted; what was measured is kept.
    --direction both tunes a forward pass and then its backward pass, also where that of the first
    has no winner; with --json as a list of those that have one.

    \b
    Example:
      fagen tune --seq 8192 --head-dim 128 --causal
      fagen tune --seq 8192 --head-dim 128 --direction both
    """
    from fagen.cli.places import place_of
    from fagen.report import tuning

    several = None if devices is None else comma_list(devices)
    if several is not None and (device is not None or target is not None):
        raise BadSetting("--devices stands alone.", "Leave out --device and --target.")
    where, has_gpu = place_of(device if several is None else several[0], target)
    words = {
        "target": None if has_gpu else where,
        "device": device,
        "devices": several,
        "effort": effort,
        "trials": trials,
        "timeout": timeout,
        "seed": seed,
        "db": db,
    }
    rows: list[Row] = []
    failed: NoValidConfig | None = None
    for problem in problems:
        if not quiet:
            offline = "" if has_gpu else ", offline: nothing will be timed"
            note(f"Tuning {problem} on {where}{offline}.")
        try:
            result, watcher = _tuned(problem, words, quiet=quiet, as_json=as_json)
        except NoValidConfig as error:
            if len(problems) == 1:
                raise
            note(f"fagen: {problem}: {error}")
            failed = error
            continue
        if as_json:
            rows.append(tuning.tune_row(result, watcher.rejected))
        else:
            _show(result, watcher, db)
    if rows:
        emit_json(rows if len(problems) > 1 else rows[0])
    if failed is not None:
        raise click.exceptions.Exit(failed.exit_code)


def _tuned(
    problem: Problem, words: dict[str, Any], *, quiet: bool, as_json: bool
) -> tuple[TuneResult, Watcher]:
    """The result, and what was seen on the way. One that is interrupted is shown and raised."""
    with _watcher(quiet) as watcher:
        from fagen.tune.tuner import tune  # slow to import: the first line is out by now

        try:
            return tune(problem, on_event=watcher, **words), watcher
        except Interrupted as stop:
            stopped = stop
    if stopped.result is not None and not as_json:  # with --json an error leaves stdout empty
        with contextlib.suppress(OSError):  # Ctrl-C ended the reader of a pipe too
            _show(cast("TuneResult", stopped.result), watcher, words["db"])
    raise stopped


def _watcher(quiet: bool) -> Watcher:
    from fagen.cli.progress import Bar, PlainLines, Quiet, Watcher

    if quiet:
        return Watcher(Quiet())
    return Watcher(Bar() if sys.stderr is not None and sys.stderr.isatty() else PlainLines())


def _show(result: TuneResult, watcher: Watcher, db: str | None) -> None:
    from fagen.report import tuning
    from fagen.serve.database import location

    emit(f"{result.problem} on {result.target}")
    emit_table(tuning.tune_table(result))
    cuts = watcher.started.cuts if watcher.started is not None else {}
    emit("\n".join(tuning.tune_lines(result, watcher.rejected, cuts, location(db))))
    if not result.timed:
        from fagen.report import serving
        from fagen.serve.library import why

        served = why(result.problem, target=result.target, db=db)
        if served.record is not None and served.origin != "predicted":
            emit(f"Until then fagen.get serves what was timed there. {serving.served(served)}")
