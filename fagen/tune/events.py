"""What a tuning run tells whoever watches it. The library itself prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fagen.outcome import Outcome, Timing
from fagen.problem import Problem
from fagen.target import Target


@dataclass(frozen=True)
class Started:
    """timed: False when there is no GPU, so that everything is only predicted.

    known: candidates that earlier runs tried. cuts: combinations left out, by family and reason.
    """

    problem: Problem
    target: Target
    timed: bool
    space: int
    known: int
    trials: int
    timeout_s: float
    cuts: dict[tuple[str, str], int]


@dataclass(frozen=True)
class WaitingForDevice:
    """Another tuner holds the GPU; `holder` is what it wrote into the lock."""

    holder: str
    seconds_left: float


@dataclass(frozen=True)
class OtherLoad:
    """Somebody else computes on the card: times will be noisy."""

    note: str


@dataclass(frozen=True)
class Preparing:
    """Inputs, truth and baseline are being made in the worker."""


@dataclass(frozen=True)
class TrialDone:
    """done counts earlier runs too. best_us: measured, or predicted when nothing is timed."""

    outcome: Outcome
    done: int
    total: int
    best_us: float | None
    seconds_left: float


@dataclass(frozen=True)
class Racing:
    """The finalists are measured interleaved with the default and peers; who stays is checked."""

    programs: int


@dataclass(frozen=True)
class Raced:
    """The interleaved timings, by config text and by peer name."""

    programs: dict[str, Timing]
    peers: dict[str, Timing]


@dataclass(frozen=True)
class Finished:
    """state: finished, exhausted, time_up or interrupted."""

    state: str
    seconds: float


Event = Started | WaitingForDevice | OtherLoad | Preparing | TrialDone | Racing | Raced | Finished
OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The watcher of a run that nobody watches."""
