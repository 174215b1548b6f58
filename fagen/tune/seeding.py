"""Configs to start a search from, besides each family's own seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fagen.config import Config
from fagen.generate.space import SearchSpace
from fagen.outcome import Outcome, Status

FROM_PREDICTED = 4
FROM_NEIGHBOURS = 4
FROM_SPACE = 6  # of what races found best for such a shape


def starting_points(
    space: SearchSpace,
    known: Iterable[Outcome],
    neighbours: Iterable[Config],
) -> list[Config]:
    """The default, neighbouring problems' winners, the best offline ones, the first seed of every
    family, so that even a short run has timed each, and the first few seeds of the space.

    The estimate's favourites are no seeds: the search itself begins with them.
    """
    valid = set(space.configs)
    near = [config for config in neighbours if config in valid][:FROM_NEIGHBOURS]
    offline = sorted(
        (o.predicted_us, o.config.key, o.config)
        for o in known
        if o.status == Status.PREDICTED and o.predicted_us is not None and o.config in valid
    )
    predicted = [config for _, _, config in offline[:FROM_PREDICTED]]
    chosen = [*space.seeds[:1], *near, *predicted, *in_any_case(space.seeds)]
    return list(dict.fromkeys(chosen))


def in_any_case(seeds: Sequence[Config]) -> list[Config]:
    """Of the space's seeds those that a run starts from whatever is known."""
    firsts = {config.family: config for config in reversed(seeds)}.values()
    return list(dict.fromkeys([*seeds[:1], *firsts, *seeds[:FROM_SPACE]]))
