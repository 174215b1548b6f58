"""`fagen bench`."""

from __future__ import annotations

import click

from fagen.cli.options import db_option, json_option, place_options, shape_options
from fagen.cli.output import emit, emit_json, emit_table, note
from fagen.problem import Problem


@click.command("bench")
@shape_options(required=True)
@place_options
@db_option
@json_option
def command(
    problem: Problem, device: str | None, target: str | None, db: str | None, as_json: bool
) -> None:
    """Race a shape's kernel against torch's pinned backends and eager attention.

    With it: FLOPs, arithmetic intensity, extra memory and HBM traffic of standard attention and
    of both tiled loop orders. Without a GPU that analysis is all, and the exit code is 0.

    \b
    Example:
      fagen bench --seq 8192 --head-dim 128
    """
    from fagen import analysis
    from fagen.cli.places import place_of
    from fagen.report import serving

    where, has_gpu = place_of(device, target)
    costs = analysis.costs(problem, where)
    note(f"Measuring {problem} on {where}." if has_gpu else NO_GPU)
    raced = None
    if has_gpu:
        from fagen.serve.compare import compare

        raced = compare(problem, device, db)
    if as_json:
        emit_json(serving.bench_row(problem, where, costs, raced))
    else:
        emit("\n".join(serving.cost_lines(problem, where)))
        emit_table(serving.cost_table(costs, where))
        if raced is not None:
            emit_table(serving.race_table(raced))
            emit("\n".join(serving.race_lines(raced)))


NO_GPU = "No GPU is used: this is the analysis alone, timing needs a GPU."
