"""An Optuna sampler for a list of valid configs and an estimate of each one's time.

A Gaussian process over the logarithm of measured by estimated time: where the estimate is right it
is zero everywhere, and what one config's time says of the estimate holds for others the more, the
more knobs they share (Hamming distance). The next config is the one with the greatest expected
improvement (D. R. Jones, M. Schonlau, W. J. Welch, 1998) of all that were not tried: only valid
ones are ever proposed, and none twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

# Chosen on the two measured spaces of D128, and kept on the others (docs/search.md).
REACH = 3.0  # knobs in which two configs differ until they have 1/e of the correlation in common
SHARED = 0.3  # of the estimate's error, what a whole family has in common
NOISE = 0.02  # variance of one measurement, as a share of the variance of the estimate's errors
LEAST_SPREAD = 0.02  # standard deviation of those errors at the least, as a logarithm
FAILED = 0.3  # a failure counts as this much slower than the slowest, as a logarithm
FAR_OFF = 1.0  # errors further from the median than this count as this

Params = Mapping[str, Any]
Vector = NDArray[np.float64]


class EstimateSampler(optuna.samplers.BaseSampler):
    """configs: the parameters of each valid config, `family` and one for each of its knobs.
    estimates: of each one's time, in any unit; lower is better.
    """

    def __init__(self, configs: Sequence[Params], estimates: Sequence[float], seed: int) -> None:
        self._configs = configs
        self._index = {_key(params): i for i, params in enumerate(configs)}
        self._estimates = np.log(np.asarray(estimates, dtype=np.float64))
        self._families = np.asarray([params["family"] for params in configs])
        self._process = _Process(configs)
        self._dice = np.random.default_rng(seed)
        self._order: list[int] = []  # configs in the order in which they were asked for
        self._values: dict[int, float | None] = {}  # of those with an outcome; None: failed
        self._guesses: dict[int, float] = {}  # of the others, from when they were asked for
        self._seen: dict[int, int] = {}  # by a trial's number

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}  # the names differ by family; sample_independent is asked for each

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._chosen: Params | None = None

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        if self._chosen is None:
            self._look(study)
            self._chosen = self._configs[self._best()]
        return self._chosen[param_name]

    def _look(self, study: optuna.Study) -> None:
        """What was asked for and told since the last time. FAIL says nothing of a config."""
        for trial in study.get_trials(deepcopy=False):
            if trial.state is TrialState.FAIL or not trial.params:
                continue
            place = self._index.get(_key(trial.params))
            if place is None:
                continue
            if trial.number not in self._seen:
                self._seen[trial.number] = place
                self._guesses[place] = float(self._means()[place])
                self._process.add(place)
                self._order.append(place)
            if trial.state is TrialState.COMPLETE and trial.value is not None:
                self._values[place] = math.log(trial.value)
            elif trial.state is TrialState.PRUNED:
                self._values[place] = None

    def _best(self) -> int:
        """The untried config with the greatest expected improvement."""
        untried = np.ones(len(self._configs), dtype=bool)
        untried[self._order] = False
        left = np.flatnonzero(untried)
        if not len(left):
            return 0
        means = self._means()[left]
        known = [value for value in self._values.values() if value is not None]
        if not known:
            gains = -means
        else:
            spread = self._spread() * np.sqrt(self._process.variances()[left])
            gains = _log_improvement(min(known) - means, spread)
        ties = self._dice.random(len(left))
        return int(left[np.lexsort((ties, -gains))[0]])

    def _means(self) -> Vector:
        """The expected logarithm of every config's time."""
        errors, middles = self._errors()
        return self._estimates + middles + self._process.means(errors - middles[self._order])

    def _errors(self) -> tuple[Vector, Vector]:
        """Of the estimate, for each config that was asked for, those without an outcome as
        guessed; and the median of each config's family, zero for one that nothing is known of."""
        times = [value for value in self._values.values() if value is not None]
        slowest = max(times, default=0.0) + FAILED
        order = np.asarray(self._order, dtype=int)
        found = np.empty(len(order))
        for row, place in enumerate(self._order):
            value = self._values.get(place, self._guesses[place])
            found[row] = (slowest if value is None else value) - self._estimates[place]
        known = np.asarray([place in self._values for place in self._order], dtype=bool)
        middles = np.zeros(len(self._configs))
        for family in set(self._families[order]):
            mine = self._families[order] == family
            middle = float(np.median(found[mine & known])) if (mine & known).any() else 0.0
            middles[self._families == family] = middle
            found[mine] = np.clip(found[mine], middle - FAR_OFF, middle + FAR_OFF)
        return found, middles

    def _spread(self) -> float:
        """Standard deviation of the estimate's errors within families."""
        errors, middles = self._errors()
        known = [place in self._values for place in self._order]
        off = (errors - middles[self._order])[known]
        return max(float(np.sqrt(np.mean(off**2))), LEAST_SPREAD)


class _Process:
    """A Gaussian process of unit variance over all configs, given those added so far."""

    def __init__(self, configs: Sequence[Params]) -> None:
        columns: dict[tuple[str, Any], int] = {}
        for params in configs:
            for pair in params.items():
                columns.setdefault(pair, len(columns))
        self._hot = np.zeros((len(configs), len(columns)), dtype=np.float32)
        for row, params in enumerate(configs):
            self._hot[row, [columns[pair] for pair in params.items()]] = 1.0
        self._family = np.asarray([params["family"] for params in configs])
        self._knobs = np.asarray([len(params) for params in configs], dtype=np.float32)
        self._count = 0
        self._places: list[int] = []
        # Row i: the i-th added one's share of every config, by a Cholesky factor that grows.
        self._rows = np.zeros((16, len(configs)))
        self._factor = np.zeros((16, 16))

    def add(self, place: int) -> None:
        """O(added x configs)."""
        n = self._count
        if n == len(self._rows):
            self._rows = np.pad(self._rows, ((0, n), (0, 0)))
            self._factor = np.pad(self._factor, ((0, n), (0, n)))
        below = self._rows[:n, place]
        pivot = math.sqrt(1.0 + NOISE - float(below @ below))
        self._factor[n, :n], self._factor[n, n] = below, pivot
        self._rows[n] = (self._correlations(place) - below @ self._rows[:n]) / pivot
        self._places.append(place)
        self._count += 1

    def means(self, values: Vector) -> Vector:
        """Of every config, with these values at the added ones."""
        n = self._count
        if not n:
            return np.zeros(len(self._hot))
        shares: Vector = _solved(self._factor[:n, :n], values) @ self._rows[:n]
        return shares

    def variances(self) -> Vector:
        rows = self._rows[: self._count]
        left: Vector = np.maximum(1.0 - np.einsum("ij,ij->j", rows, rows), 1e-9)
        return left

    def _correlations(self, place: int) -> Vector:
        apart = self._knobs - self._hot @ self._hot[place]
        near = SHARED + (1.0 - SHARED) * np.exp(-apart / REACH)
        near[self._family != self._family[place]] = 0.0
        return np.asarray(near, dtype=np.float64)


def _solved(lower: Vector, right: Vector) -> Vector:
    """x in lower @ x = right."""
    x = np.array(right)
    for row in range(len(x)):
        x[row] = (x[row] - lower[row, :row] @ x[:row]) / lower[row, row]
    return x


def _log_improvement(gain: Vector, spread: Vector) -> Vector:
    """The logarithm of E[max(0, N(gain, spread^2))], up to a term where it is below 1e-300."""
    z = gain / spread
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    below = 0.5 * np.vectorize(math.erfc)(-z / math.sqrt(2))
    expected = spread * (z * below + density)
    return np.where(expected > 1e-300, np.log(np.maximum(expected, 1e-300)), -1e3 + z)


def _key(params: Params) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))
