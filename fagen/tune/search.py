"""Which config to try next: seeds, then in turns Optuna, local polish and coverage of every knob.

Polish tries the neighbours of the best config, and of others that are nearly as good and unlike
it: one odd tile shape can be the best by far and look poor until its other knobs are right.
Optuna's sampler is the one of `tune.sampler`.

Only valid configs are proposed and none twice. Optuna sees plain indices into each knob's values,
lives in memory and is rebuilt from our rows, so a space that changed never breaks a resumed run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import combinations, product
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial

from fagen.config import Config
from fagen.generate.space import SearchSpace
from fagen.tune.sampler import EstimateSampler

VALUES_TIMED = 2  # of every knob that has so many in the space
COVER_TRIES = 4  # candidates spent on one knob whose other values keep failing
SEEDED = 0.5  # share of the trials that seeds may take,
SEEDS_AT_LEAST = 12  # but so many in any case
# After the seeds the turns go round: a neighbour of the best configs; Optuna's choice; a config
# that gives a knob a value, or a tile a shape, which was not timed. What has nothing to propose
# leaves its turn to Optuna. On measured spaces neighbours cost nothing where the estimate is
# right, and find more where it is wrong (docs/search.md).
TURNS = 3
# What blocks a multiprocessor can hold. Each shape has its turn even if the estimate is wrong
# about it, as it was for 64x128 on 4 warps in one stage of flash, 60th of 128 predicted and the
# best by 12 % (bf16 D128 N8192 full, one H200).
SHAPE = ("block_m", "block_n", "num_warps", "num_stages")
INCUMBENTS = 3  # configs whose neighbours are tried
INCUMBENTS_APART = 3  # knobs in which they differ from each other at least
INCUMBENT_WITHIN = 1.2  # of the best's time, to be one
BEST_TURN = 2  # every second neighbour is one of the best's

# Optuna's own, to compare with. group: the knobs of each family are modelled together, apart from
# the other families'. GP needs scipy; it takes no parameters that hang on another, as knobs do on
# the family, and draws those at random.
OPTUNAS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "tpe": lambda seed: optuna.samplers.TPESampler(
        seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=0
    ),
    "tpe-univariate": lambda seed: optuna.samplers.TPESampler(
        seed=seed, multivariate=False, constant_liar=True, n_startup_trials=0
    ),
    "gp": lambda seed: optuna.samplers.GPSampler(
        seed=seed,
        n_startup_trials=4,
        deterministic_objective=False,
        warn_independent_sampling=False,
    ),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
}

Point = tuple[int, ...]  # an index into the values of each knob of one family


class Search:
    """`ask` for the next config, `tell` what it was worth; deterministic for a seed and tells.

    history: configs that were tried before, with what they were worth. seeds: configs to try
    first, by default those of the space; they take half of the trials at most, or twelve. prior:
    an estimate of a config's time, above zero. sampler: "estimate", or one of OPTUNAS.
    """

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        history: Sequence[tuple[Config, float | None]] = (),
        *,
        trials: int = 64,
        seeds: Iterable[Config] | None = None,
        prior: Callable[[Config], float] | None = None,
        sampler: str = "estimate",
    ) -> None:
        self._grids = _grids(space.configs)
        self._prior = prior or (lambda config: 1.0)
        self._untried = dict.fromkeys(space.configs)
        self._values: dict[Config, float] = {}
        self._asked: dict[Config, optuna.Trial] = {}
        self._turns = 0
        self._polishes = 0
        self._study = _study(self._sampler(sampler, space, seed))
        self._cover = _Coverage(self._grids)
        for config, value_us in history:
            self._recall(config, value_us)
        first = space.seeds if seeds is None else seeds
        untried = [c for c in dict.fromkeys(first) if c in self._untried]
        self._seeds = untried[: max(SEEDS_AT_LEAST, int(trials * SEEDED))]
        self._shapes = self._best_of_each_shape(space.configs)
        self._bases = {c.family: c for c in reversed(space.seeds)}

    def ask(self) -> Config | None:
        """The next untried valid config, or None when there is none left."""
        if not self._untried:
            return None
        config = self._seed() or self._in_turn()
        del self._untried[config]
        self._cover.asked(config)
        self._asked[config] = self._pending(config)
        return config

    def tell(self, config: Config, value_us: float | None) -> None:
        """The value of an asked config; None when it failed."""
        trial = self._asked.pop(config)
        self._cover.told(config, ok=value_us is not None)
        if value_us is None:
            # PRUNED without a value ranks last; FAIL would be ignored, and asked for again.
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._values[config] = value_us
            self._study.tell(trial, value_us)

    def again(self, configs: Sequence[Config]) -> None:
        """These were told a value that no longer counts: they are asked for next."""
        for config in configs:
            self._values.pop(config, None)
            self._untried[config] = None
        self._seeds = [*configs, *self._seeds]

    @property
    def best(self) -> Config | None:
        return min(self._values, key=lambda c: self._values[c], default=None)

    @property
    def best_us(self) -> float | None:
        return min(self._values.values(), default=None)

    def _recall(self, config: Config, value_us: float | None) -> None:
        if config not in self._untried:
            return
        del self._untried[config]
        self._cover.asked(config)
        self._cover.told(config, ok=value_us is not None)
        params, distributions = self._parameters(config)
        state = TrialState.PRUNED if value_us is None else TrialState.COMPLETE
        self._study.add_trial(
            create_trial(params=params, distributions=distributions, value=value_us, state=state)
        )
        if value_us is not None:
            self._values[config] = value_us

    def _sampler(self, name: str, space: SearchSpace, seed: int) -> optuna.samplers.BaseSampler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if name == "estimate":
                known = [self._parameters(config)[0] for config in space.configs]
                return EstimateSampler(known, [self._prior(c) for c in space.configs], seed)
            return OPTUNAS[name](seed)

    def _seed(self) -> Config | None:
        while self._seeds:
            config = self._seeds.pop(0)
            if config in self._untried:
                return config
        return None

    def _uncovered(self) -> Config | None:
        for family, knob, values in self._cover.wanted():
            grid = self._grids[family]
            base = self._base(family)
            for value in values:
                point = (*base[:knob], value, *base[knob + 1 :])
                found = self._nearest(grid, point, fixed=knob)
                if found is not None:
                    return found
        return None

    def _base(self, family: str) -> Point:
        tried = [c for c in self._values if c.family == family]
        best = min(tried, key=lambda c: self._values[c], default=self._bases.get(family))
        grid = self._grids[family]
        return grid.points[best] if best is not None else next(iter(grid.configs))

    def _in_turn(self) -> Config:
        turn = self._turns % TURNS
        self._turns += 1
        found = None
        if turn == 0:
            found = self._polished()
        elif turn == 2:
            found = self._uncovered() or self._untried_shape()
        return found or self._modelled()

    def _best_of_each_shape(self, configs: Iterable[Config]) -> list[Config]:
        """By the estimate, and in its order."""
        best: dict[tuple[Any, ...], Config] = {}
        for config in sorted(configs, key=self._prior):
            best.setdefault(_shape(config), config)
        return list(best.values())

    def _untried_shape(self) -> Config | None:
        tried = {_shape(config) for config in (*self._values, *self._asked)}
        self._shapes = [c for c in self._shapes if c in self._untried]
        return next((c for c in self._shapes if _shape(c) not in tried), None)

    def _polished(self) -> Config | None:
        incumbents = self._incumbents()
        self._polishes += 1
        if self._polishes % BEST_TURN and len(incumbents) > 1:
            turn = self._polishes // BEST_TURN % (len(incumbents) - 1) + 1
            incumbents.insert(0, incumbents.pop(turn))
        for incumbent in incumbents:
            near = self._grids[incumbent.family].near(incumbent)
            found = min((c for c in near if c in self._untried), key=self._prior, default=None)
            if found is not None:
                return found
        return None

    def _incumbents(self) -> list[Config]:
        """The best config and others, nearly as good, that are not its like."""
        picked: list[Config] = []
        for config in sorted(self._values, key=lambda c: self._values[c]):
            too_slow = picked and self._values[config] > INCUMBENT_WITHIN * self._values[picked[0]]
            if too_slow or len(picked) == INCUMBENTS:
                break
            if all(self._unlike(config, other) for other in picked):
                picked.append(config)
        return picked

    def _unlike(self, config: Config, other: Config) -> bool:
        if config.family != other.family:
            return True
        points = self._grids[config.family].points
        return _distance(points[config], points[other]) >= INCUMBENTS_APART

    def _modelled(self) -> Config:
        trial = self._study.ask()
        family = trial.suggest_categorical("family", list(self._grids))
        grid = self._grids[family]
        point = tuple(
            trial.suggest_categorical(f"{family}.{knob}", list(range(len(values))))
            for knob, values in grid.values.items()
        )
        known = grid.configs.get(point)
        # An invalid proposal counts against its region. A repeat must not: FAIL is ignored.
        self._study.tell(trial, state=TrialState.PRUNED if known is None else TrialState.FAIL)
        if known is not None and known in self._untried:
            return known
        return self._nearest(grid, point) or next(iter(self._untried))

    def _nearest(self, grid: _Grid, point: Point, fixed: int | None = None) -> Config | None:
        """The untried config of a family with the fewest other knob values, first in order."""

        def fits(candidate: Point) -> bool:
            if fixed is not None and candidate[fixed] != point[fixed]:
                return False
            config = grid.configs.get(candidate)
            return config is not None and config in self._untried

        for radius in range(3):
            for candidate in grid.around(point, radius):
                if fits(candidate):
                    return grid.configs[candidate]
        far = min(filter(fits, grid.configs), key=lambda p: _distance(p, point), default=None)
        return grid.configs[far] if far is not None else None

    def _pending(self, config: Config) -> optuna.Trial:
        """A running trial with just this config's values, which the sampler keeps away from."""
        params, distributions = self._parameters(config)
        self._study.enqueue_trial(params)
        return self._study.ask(fixed_distributions=distributions)

    def _parameters(self, config: Config) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        grid = self._grids[config.family]
        names = [f"{config.family}.{knob}" for knob in grid.values]
        params = dict(zip(names, grid.points[config], strict=True))
        distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(tuple(range(len(values))))
            for name, values in zip(names, grid.values.values(), strict=True)
        }
        families = CategoricalDistribution(tuple(self._grids))
        return {"family": config.family, **params}, {"family": families, **distributions}


class _Grid:
    """The valid configs of one family by their points."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.values: dict[str, list[Any]] = {}
        for field in fields(configs[0].knobs):
            seen = dict.fromkeys(getattr(c.knobs, field.name) for c in configs)
            self.values[field.name] = list(seen)
        index = {knob: {v: i for i, v in enumerate(vs)} for knob, vs in self.values.items()}
        self.points: dict[Config, Point] = {
            c: tuple(index[knob][getattr(c.knobs, knob)] for knob in self.values) for c in configs
        }
        self.configs = {point: config for config, point in self.points.items()}
        self._near: dict[Config, list[Config]] = {}

    def near(self, config: Config) -> list[Config]:
        """Valid configs that differ in one knob, or in two that rules tie to each other: where
        one of them alone can't change.
        """
        if config not in self._near:
            start = self.points[config]
            one = [p for p in self.around(start, 1) if p in self.configs]
            singles = set(one)
            two = [
                p
                for p in self.around(start, 2)
                if p in self.configs and not self._halves(start, p) <= singles
            ]
            self._near[config] = [self.configs[p] for p in [*one, *two]]
        return self._near[config]

    def _halves(self, start: Point, end: Point) -> set[Point]:
        """The points that share one of the two changed knobs with each."""
        places = [i for i, (a, b) in enumerate(zip(start, end, strict=True)) if a != b]
        return {(*start[:i], end[i], *start[i + 1 :]) for i in places}

    def around(self, point: Point, radius: int) -> Iterator[Point]:
        """Each point, valid or not, that differs in exactly `radius` knobs, in a fixed order."""
        sizes = [len(values) for values in self.values.values()]
        for places in combinations(range(len(point)), radius):
            others = [[i for i in range(sizes[p]) if i != point[p]] for p in places]
            for chosen in product(*others):
                changed = list(point)
                for place, value in zip(places, chosen, strict=True):
                    changed[place] = value
                yield tuple(changed)


class _Coverage:
    """Which values of each knob have been timed, or are about to be."""

    def __init__(self, grids: dict[str, _Grid]) -> None:
        self._grids = grids
        self._good: dict[tuple[str, int], list[int]] = {
            (family, knob): [0] * len(values)
            for family, grid in grids.items()
            for knob, values in enumerate(grid.values.values())
        }
        self._failed = {place: 0 for place in self._good}

    def asked(self, config: Config) -> None:
        self._count(config, 1)

    def told(self, config: Config, *, ok: bool) -> None:
        if not ok:
            self._count(config, -1)
            for place in self._places(config):
                self._failed[place] += self._is_short(place)

    def wanted(self) -> Iterator[tuple[str, int, list[int]]]:
        """(family, knob, values nobody timed) of knobs with too few values timed."""
        for (family, knob), counts in self._good.items():
            if self._is_short((family, knob)) and self._failed[family, knob] < COVER_TRIES:
                yield family, knob, [i for i, n in enumerate(counts) if n == 0]

    def _is_short(self, place: tuple[str, int]) -> bool:
        counts = self._good[place]
        return sum(n > 0 for n in counts) < min(VALUES_TIMED, len(counts))

    def _count(self, config: Config, step: int) -> None:
        for place, value in zip(self._places(config), self._point(config), strict=True):
            self._good[place][value] += step

    def _places(self, config: Config) -> list[tuple[str, int]]:
        return [(config.family, knob) for knob in range(len(self._point(config)))]

    def _point(self, config: Config) -> Point:
        return self._grids[config.family].points[config]


def _grids(configs: Sequence[Config]) -> dict[str, _Grid]:
    families: dict[str, list[Config]] = {}
    for config in configs:
        families.setdefault(config.family, []).append(config)
    return {family: _Grid(members) for family, members in families.items()}


def _study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it reports each new study
    study = optuna.create_study(direction="minimize", sampler=sampler)
    optuna.logging.set_verbosity(before)
    return study


def _shape(config: Config) -> tuple[Any, ...]:
    return config.family, *(getattr(config.knobs, name, None) for name in SHAPE)


def _distance(a: Point, b: Point) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))
