"""What is read from the database: values of their own, apart from any row."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from fagen.outcome import GATE

if TYPE_CHECKING:
    from datetime import datetime

    from fagen.config import Config
    from fagen.outcome import Outcome, Status, Timing, Verdict
    from fagen.problem import Problem
    from fagen.target import Target, Toolchain


class Staleness(StrEnum):
    """What a record is worth to somebody: serve it, verify it first, or only start from it."""

    EXACT = "exact"
    OTHER_BUILD = "other_build"  # same device; another toolchain, source or gate by now
    OTHER_DEVICE = "other_device"


@dataclass(frozen=True)
class Record:
    """A stored trial. median_us is the interleaved one where the trial was a finalist.

    exactness names the gate that judged it. A shipped record has trial_id 0.
    """

    trial_id: int
    run_id: int
    problem: Problem
    target: Target
    toolchain: Toolchain
    exactness: str
    outcome: Outcome
    median_us: float | None
    created: datetime
    chosen: bool = False
    quarantined: str = ""
    shipped: bool = False

    def is_of(self, problem: Problem) -> bool:
        """Whether it was tuned for this very shape, and not for another of its class."""
        return self.problem.shape == problem.shape

    @property
    def source_text(self) -> str:
        """Where it lies, in words."""
        return "comes with fagen" if self.shipped else f"trial {self.trial_id}"

    @property
    def config(self) -> Config:
        return self.outcome.config

    @property
    def status(self) -> Status:
        return self.outcome.status

    @property
    def program_key(self) -> str:
        return self.outcome.program_key

    @property
    def verdict(self) -> Verdict | None:
        return self.outcome.verdict

    @property
    def predicted_us(self) -> float | None:
        return self.outcome.predicted_us

    @property
    def device_key(self) -> str:
        return self.target.device_key

    @property
    def toolchain_key(self) -> str:
        return self.toolchain.key

    def staleness(
        self, target: Target, toolchain: Toolchain, program_key: str | None = None
    ) -> Staleness:
        """For this device, toolchain and the gate of today; program_key is what the config is
        rendered to now."""
        if self.device_key != target.device_key:
            return Staleness.OTHER_DEVICE
        same_source = program_key is None or program_key == self.program_key
        if same_source and self.toolchain_key == toolchain.key and self.exactness == GATE:
            return Staleness.EXACT
        return Staleness.OTHER_BUILD


@dataclass(frozen=True)
class Plan:
    """How a run measures, judges and searches, and how much. trials None: no limit.

    policy and exactness are names: of the timing policy, and of the gate's.
    """

    policy: str
    exactness: str
    strategy: str
    seed: int
    trials: int | None
    timeout_s: float | None


@dataclass(frozen=True)
class Run:
    """One tuning run. state: running, finished, or interrupted, also when its process is gone."""

    run_id: int
    problem: Problem
    target: Target
    toolchain: Toolchain
    plan: Plan
    started: datetime
    ended: datetime | None
    state: str
    partial: bool
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Final:
    """A finalist (by program key) or a peer (by name); `reason` says why one has no timing."""

    name: str
    kind: str
    timing: Timing | None
    reason: str
    chosen: bool
