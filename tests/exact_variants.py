"""Right kernels of every family, over knobs and problems: the gate must keep all of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from fagen.config import Config
from fagen.generate.space import SearchSpace
from fagen.problem import Direction, Problem, make_problem
from fagen.target import Target

# (causal, layout, scale sign, key/value heads) of four query heads
KINDS = (
    ("none", "aligned16", "positive", 4),
    ("top_left", "aligned16", "positive", 2),
    ("bottom_right", "aligned16", "positive", 4),
    ("top_left", "any", "any", 4),
    ("none", "any", "positive", 1),
    ("bottom_right", "any", "any", 2),
)


def exact_variants(
    target: Target,
    kinds: list[tuple[str, int, int]],
    *,
    each: int,
    keep: Callable[[Config], bool] = lambda config: True,
    direction: Direction = "forward",
) -> list[tuple[Problem, Config]]:
    """`each` configs of every family, for each of KINDS; drawn with a fixed seed, all valid.

    kinds: (dtype, head_dim, head_dim_v), taken in turns.
    """
    dice = random.Random(0)
    variants: list[tuple[Problem, Config]] = []
    for i, (causal, layout, sign, heads_kv) in enumerate(KINDS * -(-len(kinds) // len(KINDS))):
        dtype, dim, dim_v = kinds[i % len(kinds)]
        problem = make_problem(
            200,
            dim,
            head_dim_v=dim_v,
            dtype=dtype,
            causal=causal != "none",
            causal_align=causal if causal != "none" else "top_left",
            layout=layout,  # type: ignore[arg-type]
            scale_sign=sign,  # type: ignore[arg-type]
            heads=4,
            kv_heads=heads_kv,
            direction=direction,
        )
        variants += [(problem, config) for config in _drawn(problem, target, each, keep, dice)]
    return variants


def _drawn(
    problem: Problem,
    target: Target,
    each: int,
    keep: Callable[[Config], bool],
    dice: random.Random,
) -> list[Config]:
    space = SearchSpace.of(problem, target)
    drawn: list[Config] = []
    for family in sorted({config.family for config in space.configs}):
        configs = [c for c in space.configs if c.family == family and keep(c)]
        drawn += dice.sample(configs, min(each, len(configs)))
    return drawn
