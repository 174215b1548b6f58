"""Right kernels of every family, over knobs and problems: the gate must keep all of them."""

from __future__ import annotations

import random

from fagen.config import Config
from fagen.generate.space import SearchSpace
from fagen.problem import Problem, make_problem
from fagen.target import preset

EACH = 4  # of a family and a problem, where it has so many


def exact_variants(
    dtypes: tuple[str, ...], *, dims: tuple[int, ...] = (16, 24), seq: int = 200
) -> list[tuple[Problem, Config]]:
    """Drawn with a fixed seed from the valid configs, a few for each family and problem."""
    dice = random.Random(0)
    variants: list[tuple[Problem, Config]] = []
    for problem in _problems(dtypes, dims, seq):
        space = SearchSpace.of(problem, preset("h200"))
        for family in sorted({config.family for config in space.configs}):
            # Small tiles: the gate's shapes follow them.
            configs = [c for c in space.configs if c.family == family and _small(c)]
            variants += [
                (problem, config) for config in dice.sample(configs, min(EACH, len(configs)))
            ]
    return variants


def _small(config: Config) -> bool:
    return config.knobs.block_m <= 64 and config.knobs.block_n <= 64


def _problems(dtypes: tuple[str, ...], dims: tuple[int, ...], seq: int) -> list[Problem]:
    return [
        make_problem(
            seq,
            dims[i % len(dims)],
            dtype=dtypes[i % len(dtypes)],
            causal=causal != "none",
            causal_align=causal if causal != "none" else "top_left",
            layout=layout,  # type: ignore[arg-type]
            scale_sign=sign,  # type: ignore[arg-type]
            heads=4,
            kv_heads=heads_kv,
        )
        for i, (causal, layout, sign, heads_kv) in enumerate(
            (
                ("none", "aligned16", "positive", 4),
                ("top_left", "aligned16", "positive", 2),
                ("bottom_right", "aligned16", "positive", 4),
                ("top_left", "any", "any", 4),
                ("none", "any", "positive", 1),
                ("bottom_right", "any", "any", 2),
            )
        )
    ]
