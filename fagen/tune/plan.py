"""What one tuning run works with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fagen.config import Config
from fagen.generate.model import predict_us
from fagen.generate.space import SearchSpace
from fagen.outcome import Built
from fagen.problem import Problem
from fagen.target import Target
from fagen.tune import events
from fagen.tune.jobs import Builder, Renderer, Worker

if TYPE_CHECKING:
    from fagen.tune.ledger import Ledger

# Of the time, what is kept for the race of the finalists.
RACE_SHARE, RACE_MOST_S = 0.2, 25.0


@dataclass(frozen=True)
class Plan:
    """A run's inputs; a test puts its own workers, builder, ledger and clock in.

    workers: one for each device; the first one holds the race.
    timed: False when nothing can be measured, so candidates are predicted and interpreted.
    trials: the total for this key, earlier runs included. started: when the caller began, by
    `clock`; everything since then counts against timeout_s.
    """

    problem: Problem
    target: Target
    space: SearchSpace
    ledger: Ledger
    workers: tuple[Worker, ...]
    builder: Builder
    render: Renderer
    policy: Any
    timed: bool
    trials: int
    timeout_s: float
    seed: int = 0
    on_event: events.OnEvent = events.ignore
    clock: Callable[[], float] = time.monotonic
    started: float = field(default_factory=time.monotonic)

    def predict(self, config: Config, built: Built | None = None) -> float:
        return predict_us(self.problem, self.target, config, built)

    @property
    def policy_name(self) -> str:
        return str(self.policy.name)

    @property
    def seconds(self) -> float:
        """Since the caller began."""
        return self.clock() - self.started

    @property
    def seconds_left(self) -> float:
        """For candidates: what is kept for the race is not among them."""
        kept = min(RACE_MOST_S, RACE_SHARE * self.timeout_s) if self.timed else 0.0
        return self.timeout_s - kept - self.seconds

    def close(self) -> None:
        """Kill every child."""
        self.builder.close()
        for worker in self.workers:
            worker.close()
