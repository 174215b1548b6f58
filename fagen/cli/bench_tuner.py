"""`fagen bench-tuner`."""

from __future__ import annotations

from pathlib import Path

import click

from fagen.cli.options import json_option
from fagen.cli.output import emit_json, emit_table, note

USUAL = ("default", "no-seeds", "random")


@click.command("bench-tuner")
@click.option(
    "--replay",
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help="A data set, as fagen db export writes it.",
)
@click.option(
    "--trials", type=click.IntRange(min=1), default=64, show_default=True, help="Of each run."
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=30, show_default=True, help="Runs of each."
)
@click.option(
    "--strategy",
    "names",
    multiple=True,
    metavar="NAME",
    help=f"One or more of them [default: {', '.join(USUAL)}].",
)
@json_option
def command(file: Path, trials: int, seeds: int, names: tuple[str, ...], as_json: bool) -> None:
    """Run the tuner's search on a measured space, again and again, without a GPU.

    A trial costs the seconds it took when it was measured: builds on 16 cores, the device one
    after the other. Shown is the share of the best config's speed that would have been picked
    after so many trials: the median over the seeds, what nine of ten seeds reach (p10), and the
    median of the seconds. `random` takes configs without repeats; `no-seeds` leaves out what
    fagen's authors found best by hand; `blind` has no estimate of a config's time either.

    \b
    Example:
      fagen bench-tuner --replay benchmarks/spaces/d128-full.jsonl.gz
    """
    from fagen.errors import BadSetting
    from fagen.report import replays
    from fagen.serve.database import dataset
    from fagen.tune.replay import STRATEGIES, Course, scores

    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        raise BadSetting(f"There is no strategy {unknown[0]!r}.", f"Say {', '.join(STRATEGIES)}.")
    course = Course(dataset(file))
    found = {}
    trials = min(trials, len(course.rows))
    for name in dict.fromkeys(names or USUAL):
        if not as_json:
            note(f"{name}: {seeds} runs of {trials} trials")
        found[name] = scores(course, STRATEGIES[name], trials, range(seeds))
    if as_json:
        emit_json(replays.replay_rows(course.dataset, found, trials, seeds))
    else:
        note(replays.heading(course.dataset))
        emit_table(replays.replay_table(found))
