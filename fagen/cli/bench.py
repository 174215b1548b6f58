"""`fagen bench`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fagen.cli.options import (
    comma_list,
    db_option,
    grid_options,
    json_option,
    place_options,
)
from fagen.cli.output import emit, emit_json, emit_table, note
from fagen.errors import FagenError, NoDevice
from fagen.problem import Problem
from fagen.target import Target

if TYPE_CHECKING:
    from fagen.report.bench import Cell


@click.command("bench")
@grid_options
@click.option(
    "--peers",
    type=comma_list,
    multiple=True,
    metavar="NAME[,NAME...]",
    help="Whom to race: auto, cudnn, flash, efficient, math, eager, fa3, fa4, flex "
    "[default: all but fa4].",
)
@click.option("--fa4", is_flag=True, help="FlashAttention-4 too; it compiles for long.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw TFLOP/s over length: .png, .svg or .pdf.",
)
@place_options
@db_option
@json_option
def command(
    problems: list[Problem],
    peers: tuple[tuple[str, ...], ...],
    fa4: bool,
    plot: Path | None,
    device: str | None,
    target: str | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Race a shape's kernel, or those of a grid, against what you would run instead.

    Peers: torch's scaled_dot_product_attention as it is (auto) and pinned to each backend,
    FlashAttention-3 and -4, FlexAttention, plain torch (eager). Each is checked, then timed in
    turns with the kernel: kernel time, host time and call time. A peer that is not installed is
    named, with the command to install it. Without a GPU: FLOPs, memory and traffic on paper
    alone, and the exit code is 0.

    \b
    Example:
      fagen bench --seq 8192 --head-dim 128
      fagen bench --seq 1024,4096 --head-dim 64,128 --tokens 16384 --hidden 2048 --causal
    """
    from fagen.cli.places import place_of
    from fagen.report import plot as plots

    where, has_gpu = place_of(device, target)
    if plot is not None:
        plots.check(plot)
        if not has_gpu:
            raise NoDevice("--plot draws measured times, and there is no GPU.", "Leave it out.")
    named = _chosen([name for names in peers for name in names], fa4)
    chosen = named if has_gpu else None
    cells: list[Cell] = []
    try:
        for number, problem in enumerate(problems, 1):
            cells.append(_cell(problem, where, (number, len(problems)), (chosen, device, db)))
    except KeyboardInterrupt:
        if cells and not as_json:  # with --json an error leaves stdout empty
            with contextlib.suppress(OSError):  # Ctrl-C ended the reader of a pipe too
                _show(cells, len(problems), where)
        if cells and plot is not None:
            plots.draw(cells, where, plot)
        raise
    _finish(cells, where, plot, as_json)


def _chosen(names: list[str], fa4: bool) -> tuple[str, ...]:
    from fagen.judge.peers import STANDARD, backends_named

    return backends_named([*(names or STANDARD), *(["fa4"] if fa4 else [])])


def _cell(
    problem: Problem,
    target: Target,
    place: tuple[int, int],
    how: tuple[tuple[str, ...] | None, str | None, str | None],
) -> Cell:
    """One shape, measured where there are peers to race. In a grid its failure ends only it."""
    from fagen import analysis
    from fagen.report.bench import Cell, cell_line

    (number, count), (peers, device, db) = place, how
    costs = analysis.costs(problem, target)
    of = f"[{number}/{count}] " if count > 1 else ""
    if peers is None:
        if number == 1:
            note(NO_GPU)
        return Cell(problem, costs)
    from fagen.serve.compare import compare

    note(f"{of}Measuring {problem} on {target}.")
    try:
        found = Cell(problem, costs, compare(problem, device, db, backends=peers))
    except (FagenError, RuntimeError) as error:
        if count == 1:
            raise
        found = Cell(problem, costs, error=" ".join(str(error).split()))
    note(f"{of}{cell_line(found)}")
    return found


def _finish(cells: list[Cell], target: Target, plot: Path | None, as_json: bool) -> None:
    from fagen.report import bench
    from fagen.report import plot as plots

    if plot is not None:
        plots.draw(cells, target, plot)
        note(f"Drew {plot}.")
    if not as_json:
        _show(cells, len(cells), target)
    elif len(cells) == 1:
        emit_json(bench.bench_row(cells[0], target))
    else:
        emit_json([bench.bench_row(found, target) for found in cells])
    failed = [found for found in cells if found.error]
    if failed:
        raise FagenError(f"{len(failed)} of {len(cells)} shapes failed: {failed[0].error}")


def _show(cells: list[Cell], asked: int, target: Target) -> None:
    from fagen.report import bench

    if asked == 1 or all(found.raced is None and not found.error for found in cells):
        for found in cells:
            emit("\n".join(bench.cost_lines(found.problem, target)))
            emit_table(bench.cost_table(found.costs, target))
            if found.raced is not None:
                emit_table(bench.race_table(found.raced))
                emit("\n".join(bench.race_lines(found.raced)))
        return
    emit_table(bench.grid_table(cells, target))
    emit_table(bench.rate_table(cells))
    emit("\n".join(bench.grid_lines(cells, asked)))


NO_GPU = "No GPU is used: this is the analysis alone, timing needs a GPU."
