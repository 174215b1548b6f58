"""Searches run again on a measured space, without a GPU: what they find, and in how much time.

A trial gives one of the times that were measured for it and costs the seconds that it took then:
builds side by side as in `tune.pipeline`, checks and timing one after the other.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Protocol

from fagen.config import Config
from fagen.generate.model import predict_us
from fagen.generate.space import SearchSpace, seeds_of
from fagen.outcome import Status
from fagen.records.dataset import Dataset, Measured
from fagen.tune.finale import how_many
from fagen.tune.pipeline import AHEAD
from fagen.tune.search import OPTUNAS, Search
from fagen.tune.seeding import starting_points

CORES = 16  # that build at the same time: tune.pool.MOST_BUILDERS


class Searcher(Protocol):
    """As `tune.search.Search`."""

    def ask(self) -> Config | None: ...

    def tell(self, config: Config, value_us: float | None) -> None: ...


class Course:
    """A measured space to search. Its seeds are those of the problem that are in it."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.rows: dict[Config, Measured] = {row.config: row for row in dataset.rows}
        seeds = seeds_of(dataset.problem, dataset.target)
        self.space = SearchSpace(
            dataset.problem,
            dataset.target,
            tuple(self.rows),
            tuple(seed for seed in seeds if seed in self.rows),
            {},
        )
        self.optimum_us = dataset.optimum_us
        self.estimate: Callable[[Config], float] = cache(
            partial(predict_us, dataset.problem, dataset.target, built=None)
        )

    def told(self, seed: int) -> dict[Config, float | None]:
        """One of the times of every config, None for a failure; the same for the same seed."""
        dice = random.Random(seed)
        return {
            config: dice.choice(row.medians_us) if row.passes_us else None
            for config, row in self.rows.items()
        }


Strategy = Callable[[Course, int, int], Searcher]  # of a seed and a number of trials


class RandomOrder:
    """Every config once, in a random order: what a search has to beat."""

    def __init__(self, course: Course, seed: int, trials: int) -> None:
        self._left = list(course.space.configs)
        random.Random(seed).shuffle(self._left)

    def ask(self) -> Config | None:
        return self._left.pop() if self._left else None

    def tell(self, config: Config, value_us: float | None) -> None:
        pass


def default(course: Course, seed: int, trials: int) -> Searcher:
    """As `fagen tune` searches a shape of which nothing is known."""
    seeds = starting_points(course.space, (), ())
    return Search(course.space, seed, trials=trials, seeds=seeds, prior=course.estimate)


def without_seeds(course: Course, seed: int, trials: int, sampler: str = "estimate") -> Searcher:
    """What it finds by itself: its seeds are what races found best on one GPU."""
    space = replace(course.space, seeds=())
    return Search(space, seed, trials=trials, prior=course.estimate, sampler=sampler)


def blind(course: Course, seed: int, trials: int) -> Searcher:
    """Without seeds, and with an estimate that calls all configs equal."""
    return Search(replace(course.space, seeds=()), seed, trials=trials)


STRATEGIES: dict[str, Strategy] = {
    "default": default,
    "random": RandomOrder,
    "no-seeds": without_seeds,
    "blind": blind,
    **{f"no-seeds-{name}": partial(without_seeds, sampler=name) for name in OPTUNAS},
}


@dataclass(frozen=True)
class Replayed:
    """After each trial: the optimum's time over that of what would be picked then, and the
    seconds since the start."""

    found: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Score:
    """Of many seeds after so many trials: the share of the optimum that was found, its median and
    what nine of ten seeds reach, and the median of the seconds."""

    median: float
    p10: float
    seconds: float


def scores(
    course: Course, strategy: Strategy, trials: int, seeds: Iterable[int]
) -> dict[int, Score]:
    """By the number of trials: 16, 32, 64 and so on, and `trials`."""
    runs = [replay(course, strategy(course, seed, trials), trials, seed) for seed in seeds]
    return {count: _score(runs, count) for count in checkpoints(trials)}


def checkpoints(trials: int) -> list[int]:
    """16, its doubles up to `trials`, and `trials`."""
    counts = [16]
    while counts[-1] < trials:
        counts.append(counts[-1] * 2)
    return sorted({*(count for count in counts if count < trials), trials})


def _score(runs: Sequence[Replayed], count: int) -> Score:
    found = [run.found[min(count, len(run.found)) - 1] for run in runs]
    seconds = [run.seconds[min(count, len(run.seconds)) - 1] for run in runs]
    return Score(quantile(found, 0.5), quantile(found, 0.1), quantile(seconds, 0.5))


def replay(course: Course, searcher: Searcher, trials: int, seed: int) -> Replayed:
    """One run. The same seed tells every searcher the same time of a config."""
    told, shop = course.told(seed), _Shop()
    pending: deque[tuple[Config, float]] = deque()
    values: dict[Config, float] = {}
    found: list[float] = []
    seconds: list[float] = []
    asked = 0
    while len(found) < trials:
        while asked < trials and len(pending) < AHEAD:
            config = searcher.ask()
            if config is None:
                break
            asked += 1
            pending.append((config, shop.built_at(course.rows[config].seconds.build)))
        if not pending:
            break
        config, ready = pending.popleft()
        shop.work(ready, course.rows[config].seconds.device)
        value = told[config]
        searcher.tell(config, value)
        if value is not None:
            values[config] = value
        found.append(_share(course, values, len(found) + 1))
        seconds.append(shop.now)
    return Replayed(tuple(found), tuple(seconds))


def _share(course: Course, values: dict[Config, float], tried: int) -> float:
    """Of the optimum, what the race would end with after so many trials: it is near the truth.

    What was called slower when it was measured counts, too: as the fastest so far it would have
    been checked. Not so if it is faster than all that are right: it was slower than a wrong one.
    """
    picked = [c for c in values if _may_be_picked(course, c)]
    finalists = heapq.nsmallest(how_many(tried), picked, key=lambda c: values[c])
    times = [t for c in finalists if (t := course.rows[c].true_us) is not None]
    return course.optimum_us / min(times) if times else 0.0


def _may_be_picked(course: Course, config: Config) -> bool:
    row = course.rows[config]
    if row.status is not Status.SLOWER or row.true_us is None:
        return row.right
    return row.true_us >= course.optimum_us


class _Shop:
    """The clock of a run: CORES that build, and one device."""

    def __init__(self) -> None:
        self.now = 0.0
        self._cores = [0.0] * CORES

    def built_at(self, seconds: float) -> float:
        done = max(self.now, heapq.heappop(self._cores)) + seconds
        heapq.heappush(self._cores, done)
        return done

    def work(self, ready: float, seconds: float) -> None:
        self.now = max(self.now, ready) + seconds


def quantile(values: Sequence[float], share: float) -> float:
    """With a share of the values below it, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
