"""What a tuning run found, and the rule that picks its winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fagen.config import Config
from fagen.generate.families import repeats
from fagen.judge.measure import LOST, NOISE
from fagen.judge.ratios import least_slowdown, slowdown
from fagen.outcome import Outcome, Status, Timing
from fagen.problem import Problem
from fagen.target import Target

REPEATING = 2  # finalists that repeat bit for bit, beside a winner that may not

State = Literal["finished", "exhausted", "time_up", "interrupted"]


@dataclass(frozen=True)
class Final:
    """A program or a peer in the race. `outcome` is None for a peer."""

    name: str
    kind: Literal["program", "peer"]
    timing: Timing
    outcome: Outcome | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Finale:
    """The race. rejected: finalists that failed the last check, as what they now are."""

    finals: tuple[Final, ...] = ()
    rejected: tuple[Outcome, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class TuneResult:
    """winner: verified, and timed if `timed`; None only in a run that was interrupted early.

    tried: candidates of this key so far, earlier runs included. counts: of this run, by status.
    missing: peers that can't run here, with the reason. note: why there was no race. unverified:
    offline, what is predicted faster than the winner and could not be verified without a GPU.
    """

    problem: Problem
    target: Target
    run_id: int
    state: State
    timed: bool
    winner: Outcome | None
    default: Config
    tried: int
    space: int
    counts: dict[Status, int]
    seconds: float
    finals: tuple[Final, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    note: str = ""
    unverified: Outcome | None = None

    def __repr__(self) -> str:
        """One line; the fields hold the rest."""
        found = "no winner"
        if self.winner is not None and self.winner_us is not None:
            found = f"{self.winner.config}, {self.winner_us:.4g} us"
            found += "" if self.timed else " predicted"
        tried = f"{self.tried} of {self.space} configs tried, {self.state}"
        return f"<TuneResult {self.problem} on {self.target}: {found}; {tried}>"

    @property
    def partial(self) -> bool:
        return self.state == "interrupted"

    @property
    def winner_us(self) -> float | None:
        """From the race where there was one, else the single pass, else the prediction."""
        if self.winner is None:
            return None
        raced = [f.timing.median_us for f in self.finals if f.chosen]
        if raced:
            return raced[0]
        return self.winner.median_us if self.timed else self.winner.predicted_us

    @property
    def default_us(self) -> float | None:
        """The default config's time in the race."""
        for final in self.finals:
            if final.outcome is not None and final.outcome.config == self.default:
                return final.timing.median_us
        return None


def is_time(value_us: float | None) -> bool:
    """NaN, infinity, zero and negative times are failures, not fast kernels."""
    return value_us is not None and math.isfinite(value_us) and value_us > 0


def value_of(outcome: Outcome, *, timed: bool) -> float | None:
    """What the search minimises; None for a failure."""
    if timed:
        return outcome.median_us if outcome.status in (Status.OK, Status.SLOWER) else None
    return outcome.predicted_us if outcome.status in (Status.PREDICTED, Status.OK) else None


def doubted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those called slower that are not, beside the best that is right: what made them look slow
    was refused later."""
    right = [o.median_us for o in outcomes if o.status == Status.OK and o.median_us is not None]
    best = min(right, default=math.inf)
    return [
        o
        for o in outcomes
        if o.status == Status.SLOWER
        and o.timing is not None
        and min(o.timing.samples_us) <= LOST[-1] * best
    ]


def finalists(
    outcomes: Sequence[Outcome], default: Config, incumbent: Config | None, keep: int
) -> list[Outcome]:
    """The best `keep` by single-pass time, one of each source, then the fastest that give the same
    bits in every run, which some callers ask for, and the default and the earlier winner; only
    what is right."""
    right = [o for o in outcomes if o.status == Status.OK and o.median_us is not None]
    right.sort(key=lambda o: (o.median_us or 0.0, o.config.key))
    distinct: dict[str, Outcome] = {}
    for outcome in right:
        distinct.setdefault(outcome.program_key, outcome)
    best = list(distinct.values())[:keep]
    if not all(repeats(o.config) for o in best):
        repeating = [o for o in distinct.values() if repeats(o.config)]
        best += [o for o in repeating[:REPEATING] if o not in best]
    keys = {o.program_key for o in best}
    always = [o for o in right if o.config in (default, incumbent) and o.program_key not in keys]
    return best + list({o.program_key: o for o in always}.values())


def choose(finals: Sequence[Final], incumbent: Config | None, default: Config) -> Final | None:
    """The incumbent, else the default, unless another is faster beyond NOISE and beyond what the
    race can tell; then the fastest, and of those within NOISE of it the one that takes least of a
    multiprocessor, the one predicted fastest, the first by config key. Who left the race before
    its end was clearly slower than one of them."""
    programs = [f for f in finals if f.outcome is not None]
    if not programs:
        return None
    rounds = max(len(f.timing.samples_us) for f in programs)
    stayed = [f for f in programs if len(f.timing.samples_us) == rounds]
    fastest = min(stayed, key=lambda f: f.timing.median_us)
    by_config = {f.outcome.config: f for f in programs if f.outcome is not None}
    for first in (by_config.get(config) for config in (incumbent, default) if config is not None):
        if first is not None and not _is_slower(first.timing, fastest.timing):
            return first
    tied = [f for f in stayed if _slowdown(f.timing, fastest.timing) <= 1 + NOISE]
    return min(tied, key=lambda f: _preference(f.outcome))


def _slowdown(a: Timing, b: Timing) -> float:
    return slowdown(a.samples_us, b.samples_us)


def _is_slower(a: Timing, b: Timing) -> bool:
    return _slowdown(a, b) > 1 + NOISE and least_slowdown(a.samples_us, b.samples_us) > 1


def _preference(outcome: Outcome | None) -> tuple[int, float, str]:
    assert outcome is not None
    config, built = outcome.config, outcome.built
    warps = int(getattr(config.knobs, "num_warps", 4))
    bytes_used = built.shared_bytes + 4 * 32 * warps * built.registers if built else 0
    return bytes_used, outcome.predicted_us or 0.0, config.key
