"""Options that commands share, as decorators: a shape, a place, a database, the output form."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from fagen.problem import Problem, make_problem

Command = Callable[..., Any]
ID = click.IntRange(1, 2**63 - 1)  # what a database can count
SHAPE_WORDS = (
    "seq",
    "head_dim",
    "batch",
    "heads",
    "kv_heads",
    "seq_kv",
    "head_dim_v",
    "dtype",
    "causal",
    "causal_align",
)


def shape_options(*, required: bool) -> Callable[[Command], Command]:
    """A shape, handed to the command as `problem`; None when not required and not given."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_problem(**given: Any) -> Any:
            words = {name: given.pop(name) for name in SHAPE_WORDS}
            return command(problem=_problem(words), **given)

        return _stack(with_problem, _shape_options(required))

    return decorate


def place_options(command: Command) -> Command:
    """Where the kernel is to run: `device` and `target`, both None by default."""
    return _stack(
        command,
        [
            click.option("--device", metavar="N", help="CUDA device [default: the current one]."),
            click.option(
                "--target",
                metavar="NAME",
                help="Work offline for a GPU by name: h100, h200, a100, l40s, rtx4090, b200.",
            ),
        ],
    )


def db_option(command: Command) -> Command:
    return click.option(
        "--db",
        metavar="PATH|URL",
        help="Tuning database [default: FAGEN_DB, or the user's data directory].",
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout.")(command)


def _shape_options(required: bool) -> list[Callable[[Command], Command]]:
    def size(name: str, doc: str, **more: Any) -> Callable[[Command], Command]:
        return click.option(name, type=int, metavar="N", help=doc, **more)

    return [
        size("--seq", "Query length.", required=required),
        size("--head-dim", "Head size of q and k, 1 to 256.", required=required),
        size("--batch", "Batch size.", default=1, show_default=True),
        size("--heads", "Query heads.", default=16, show_default=True),
        size("--kv-heads", "Key/value heads [default: --heads]."),
        size("--seq-kv", "Key/value length [default: --seq]."),
        size("--head-dim-v", "Head size of v [default: --head-dim]."),
        click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16 or fp32."),
        click.option("--causal/--no-causal", default=False, show_default=True),
        click.option(
            "--causal-align",
            type=click.Choice(["top_left", "bottom_right"]),
            help="Corner that --causal is lined up with [default: top_left, as in torch].",
        ),
    ]


def _problem(words: dict[str, Any]) -> Problem | None:
    if words["seq"] is None and words["head_dim"] is None:
        return None
    if words["seq"] is None or words["head_dim"] is None:
        raise click.UsageError("A shape needs both --seq and --head-dim.")
    align = words.pop("causal_align")
    if align is not None and not words["causal"]:
        raise click.UsageError("--causal-align says nothing without --causal.")
    return make_problem(
        words.pop("seq"), words.pop("head_dim"), causal_align=align or "top_left", **words
    )


def _stack(command: Command, options: list[Callable[[Command], Command]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
