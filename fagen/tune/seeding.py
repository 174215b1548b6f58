"""Configs to start a search from, besides each family's own seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from fagen.config import Config
from fagen.generate.space import SearchSpace
from fagen.outcome import Outcome, Status

FROM_MODEL = 8
FROM_PREDICTED = 4
FROM_NEIGHBOURS = 4
# Every shape of flash at D128, even if the model is wrong about shapes: as it was for 64x128 on 4
# warps in one stage, 60th of 128 predicted and the best by 12 % (bf16 D128 N8192 full, one H200).
FROM_SHAPES = 36
SHAPE = ("block_m", "block_n", "num_warps", "num_stages")  # what blocks a multiprocessor can hold
# Of what races found best for such a shape: in a run of 14 trials before the model's favourites.
FROM_SPACE = 6
APART = 2  # knobs in which two configs of the model's choice differ at least


def starting_points(
    space: SearchSpace,
    model: Callable[[Config], float],
    known: Iterable[Outcome],
    neighbours: Iterable[Config],
) -> list[Config]:
    """The default, neighbouring problems' winners, the best offline ones, the first few seeds of
    the space, the first seed of every family, so that even a short run has timed each, the model's
    favourites and its best of each tile shape.
    """
    valid = set(space.configs)
    near = [config for config in neighbours if config in valid][:FROM_NEIGHBOURS]
    offline = sorted(
        (o.predicted_us, o.config.key, o.config)
        for o in known
        if o.status == Status.PREDICTED and o.predicted_us is not None and o.config in valid
    )
    predicted = [config for _, _, config in offline[:FROM_PREDICTED]]
    ranked = sorted(space.configs, key=model)
    favourites = spread_out(ranked, FROM_MODEL)
    shapes = best_of_each(ranked, FROM_SHAPES)
    own = in_any_case(space.seeds)
    chosen = [*space.seeds[:1], *near, *predicted, *own, *favourites, *shapes]
    return list(dict.fromkeys(chosen))


def in_any_case(seeds: Sequence[Config]) -> list[Config]:
    """Of the space's seeds those that a run starts from whatever is known."""
    firsts = {config.family: config for config in reversed(seeds)}.values()
    return list(dict.fromkeys([*seeds[:FROM_SPACE], *firsts]))


def spread_out(ranked: Iterable[Config], count: int) -> list[Config]:
    """The first `count` that differ from each other in at least APART knobs."""
    picked: list[Config] = []
    for config in ranked:
        if len(picked) == count:
            break
        if all(_differing(config, other) >= APART for other in picked):
            picked.append(config)
    return picked


def _differing(a: Config, b: Config) -> int:
    if a.family != b.family:
        return APART
    return sum(getattr(a.knobs, f.name) != getattr(b.knobs, f.name) for f in fields(a.knobs))


def best_of_each(ranked: Iterable[Config], count: int) -> list[Config]:
    """The first config of each of the first `count` shapes."""
    first: dict[tuple[Any, ...], Config] = {}
    for config in ranked:
        shape = (config.family, *(getattr(config.knobs, name, None) for name in SHAPE))
        first.setdefault(shape, config)
        if len(first) == count:
            break
    return list(first.values())
