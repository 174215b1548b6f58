"""Every valid config of a problem on a target, each cut with its reason, before any compile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fagen.config import Config
from fagen.generate.families import base, families_of, family_of
from fagen.problem import Problem
from fagen.target import Target


@dataclass(frozen=True)
class SearchSpace:
    """`configs` in a fixed order; `seeds` are valid ones to try first, the default at the front.

    `cuts` counts the combinations that were left out, by family and reason.
    """

    problem: Problem
    target: Target
    configs: tuple[Config, ...]
    seeds: tuple[Config, ...]
    cuts: dict[tuple[str, str], int]

    @classmethod
    def of(cls, problem: Problem, target: Target) -> SearchSpace:
        configs: list[Config] = []
        cuts: Counter[tuple[str, str]] = Counter()
        for family in families_of(problem.direction):
            unsupported = family.why_unsupported(problem, target)
            if unsupported is not None:
                cuts[family.NAME, unsupported] += 1
                continue
            for knobs in base.every_choice(family.Knobs):
                broken = _broken(family, problem, target, knobs)
                if broken is None:
                    configs.append(Config(family.NAME, knobs))
                else:
                    cuts[family.NAME, broken] += 1
        return cls(problem, target, tuple(configs), seeds_of(problem, target), dict(cuts))


def seeds_of(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Valid configs to try first, the default at the front; known long before the whole space."""
    families = families_of(problem.direction)
    supported = [f for f in families if f.why_unsupported(problem, target) is None]
    seeds = (Config(f.NAME, knobs) for f in supported for knobs in f.seeds(problem, target))
    return tuple(dict.fromkeys(s for s in seeds if why_invalid(problem, target, s) is None))


def _broken(family: base.Family, problem: Problem, target: Target, knobs: object) -> str | None:
    # The reason without the knobs' values, so that cuts add up by rule.
    for rule in family.CONSTRAINTS:
        if not rule.holds(problem, target, knobs):
            return rule.name
    return None


def why_invalid(problem: Problem, target: Target, config: Config) -> str | None:
    """The first rule that a config breaks, as a sentence, or None."""
    return base.why_invalid(family_of(config), problem, target, config.knobs)
