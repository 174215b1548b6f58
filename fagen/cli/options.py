"""Options that commands share, as decorators: a shape, a place, a database, the output form."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource

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
    "direction",
)
DIRECTIONS = ("forward", "backward")
BOTH = "both"


def shape_options(*, required: bool, both: bool = False) -> Callable[[Command], Command]:
    """A shape, handed to the command as `problem`; None when not required and not given.

    both: --direction takes both, and the command `problems`, a list.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_problem(**given: Any) -> Any:
            words = {name: given.pop(name) for name in SHAPE_WORDS}
            if not both:
                return command(problem=_problem(words), **given)
            which = DIRECTIONS if words["direction"] == BOTH else (words["direction"],)
            problems = [_problem({**words, "direction": one}) for one in which]
            return command(problems=problems, **given)

        return _stack(with_problem, _shape_options(required, both=both))

    return decorate


def grid_options(command: Command) -> Command:
    """One shape or several, handed to the command as `problems`, a list without repeats.

    The words of `shape_options`; --seq, --head-dim and --causal/--no-causal take several values,
    and --tokens and --hidden make batch and heads follow from them.
    """

    @wraps(command)
    def with_problems(**given: Any) -> Any:
        words = {name: given.pop(name) for name in (*SHAPE_WORDS, "tokens", "hidden")}
        return command(problems=_problems(words), **given)

    return _stack(with_problems, _shape_options(required=True, many=True))


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


def comma_list(text: str) -> tuple[str, ...]:
    """The words of an option's value; with `multiple`, the option may be repeated too."""
    return tuple(word.strip() for word in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in comma_list(text))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no whole number, nor several as 512,1024."
        ) from None


def _shape_options(
    required: bool, many: bool = False, both: bool = False
) -> list[Callable[[Command], Command]]:
    def size(name: str, doc: str, **more: Any) -> Callable[[Command], Command]:
        return click.option(name, type=int, metavar="N", help=doc, **more)

    def sizes(name: str, doc: str) -> Callable[[Command], Command]:
        if not many:
            return size(name, f"{doc}.", required=required)
        return click.option(
            name,
            type=_numbers,
            metavar="N[,N...]",
            multiple=True,
            required=required,
            help=f"{doc}; several make a grid.",
        )

    return [
        sizes("--seq", "Query length"),
        sizes("--head-dim", "Head size of q and k, 1 to 256"),
        size("--batch", "Batch size.", default=1, show_default=True),
        size("--heads", "Query heads.", default=16, show_default=True),
        *(_following() if many else []),
        size("--kv-heads", "Key/value heads [default: --heads]."),
        size("--seq-kv", "Key/value length [default: --seq]."),
        size("--head-dim-v", "Head size of v [default: --head-dim]."),
        click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16 or fp32."),
        *(_masks() if many else [_mask()]),
        click.option(
            "--causal-align",
            type=click.Choice(["top_left", "bottom_right"]),
            help="Corner that --causal is lined up with [default: top_left, as in torch].",
        ),
        click.option(
            "--direction",
            type=click.Choice([*DIRECTIONS, *((BOTH,) if both else ())]),
            default="forward",
            show_default=True,
            help="backward: the gradients of q, k and v.",
        ),
    ]


def _following() -> list[Callable[[Command], Command]]:
    return [
        click.option(
            "--tokens",
            type=click.IntRange(min=1),
            metavar="N",
            help="Batch times query length: the batch is N / --seq.",
        ),
        click.option(
            "--hidden",
            type=click.IntRange(min=1),
            metavar="N",
            help="Query heads times head size: there are N / --head-dim heads.",
        ),
    ]


def _mask() -> Callable[[Command], Command]:
    return click.option("--causal/--no-causal", default=False, show_default=True)


def _masks() -> list[Callable[[Command], Command]]:
    # As two options of one name, since a flag that is on or off can't be given twice.
    return [
        click.option("--causal", "causal", flag_value="causal", multiple=True),
        click.option(
            "--no-causal",
            "causal",
            flag_value="full",
            multiple=True,
            help="Without a mask, the default; both make a grid.",
        ),
    ]


def _problems(words: dict[str, Any]) -> list[Problem]:
    dims = [size for sizes in words["head_dim"] for size in sizes]
    seqs = [size for sizes in words["seq"] for size in sizes]
    masks = list(dict.fromkeys(words["causal"])) or ["full"]
    if words["causal_align"] is not None and "causal" not in masks:
        raise click.UsageError("--causal-align says nothing without --causal.")
    for whole, part in (("tokens", "batch"), ("hidden", "heads")):
        if words[whole] is not None and _was_given(part):
            raise click.UsageError(f"--{whole} makes --{part} follow; name one of them.")
    grid = [
        _cell(words, seq, dim, mask == "causal") for dim in dims for mask in masks for seq in seqs
    ]
    return list(dict.fromkeys(grid))


def _cell(words: dict[str, Any], seq: int, head_dim: int, causal: bool) -> Problem:
    """One shape of a grid. Raises BadProblem, UsageError."""
    names = ("kv_heads", "seq_kv", "head_dim_v", "dtype", "direction")
    fixed = {name: words[name] for name in names}
    align = words["causal_align"] if causal else None
    return make_problem(
        seq,
        head_dim,
        batch=_share("tokens", words["tokens"], "seq", seq, words["batch"]),
        heads=_share("hidden", words["hidden"], "head-dim", head_dim, words["heads"]),
        causal=causal,
        causal_align=align or "top_left",
        **fixed,
    )


def _share(name: str, whole: int | None, part_name: str, part: int, otherwise: int) -> int:
    if whole is None:
        return otherwise
    if part < 1 or whole % part:
        raise click.UsageError(f"--{name} {whole} is no multiple of --{part_name} {part}.")
    return whole // part


def _was_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def _problem(words: dict[str, Any]) -> Problem | None:
    if words["seq"] is None and words["head_dim"] is None:
        for name in filter(_was_given, SHAPE_WORDS):
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} says nothing without --seq and --head-dim.")
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
