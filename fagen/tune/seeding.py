"""Configs to start a search from, besides each family's own seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields

from fagen.config import Config
from fagen.generate.space import SearchSpace
from fagen.outcome import Outcome, Status

FROM_MODEL = 8
FROM_PREDICTED = 4
FROM_NEIGHBOURS = 4
APART = 2  # knobs in which two configs of the model's choice differ at least


def starting_points(
    space: SearchSpace,
    model: Callable[[Config], float],
    known: Iterable[Outcome],
    neighbours: Iterable[Config],
) -> list[Config]:
    """The default, neighbouring shapes' winners, the best offline ones, the model's favourites,
    and the first seed of every family, so that even a short run has timed each.
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
    firsts = {config.family: config for config in reversed(space.seeds)}.values()
    return list(dict.fromkeys([*space.seeds[:1], *near, *predicted, *favourites, *firsts]))


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
