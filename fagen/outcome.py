"""What became of a candidate. A candidate's failure is data; only a bug in fagen raises."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from fagen.config import Config

# What a verdict was given by, and is worth only under. Raise the number whenever a check, a budget
# or a case of `judge/` becomes stricter, so that what passed before is verified again.
GATE = "3: fp64 truth, 2x baseline + 1e-5"


class Status(StrEnum):
    """Stored as text. `ok`: verified and timed; `slower`: right on a first case and, by a few
    samples, clearly slower than the fastest, so neither checked further nor ever served;
    `predicted`: never timed, so only ever a seed."""

    OK = "ok"
    SLOWER = "slower"
    INVALID = "invalid"
    BUILD_ERROR = "build_error"
    OUT_OF_RESOURCES = "out_of_resources"
    LINT_REJECTED = "lint_rejected"
    WRONG_RESULT = "wrong_result"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    PREDICTED = "predicted"


@dataclass(frozen=True)
class KernelFacts:
    """What the cubin of one entry kernel says. spill_bytes: local stores plus loads, static."""

    name: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """A compiled Program: where its module is and what each entry kernel uses."""

    module_path: str
    kernels: tuple[KernelFacts, ...]

    @property
    def shared_bytes(self) -> int:
        return max((k.shared_bytes for k in self.kernels), default=0)

    @property
    def registers(self) -> int:
        return max((k.registers for k in self.kernels), default=0)

    @property
    def spill_bytes(self) -> int:
        return sum(k.spill_bytes for k in self.kernels)


@dataclass(frozen=True)
class Check:
    """One measured error beside what it may be, both absolute unless the name says relative."""

    name: str
    error: float
    budget: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.budget  # NaN fails

    @property
    def share(self) -> float:
        """How much of the budget the error takes: above 1 it failed."""
        if self.error != self.error:
            return float("inf")
        return self.error / self.budget if self.budget > 0 else 1e30 * (self.error > 0)


@dataclass(frozen=True)
class Verdict:
    """passed only if there is at least one check and every check passed.

    `where` says what ran the kernel: a device name, or "interpreter".
    """

    checks: tuple[Check, ...]
    where: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def worst(self) -> Check | None:
        """The check that is nearest its budget, or furthest over it."""
        return max(self.checks, key=lambda check: check.share, default=None)


@dataclass(frozen=True)
class Timing:
    """Samples in microseconds, each one launch's share of a timed batch, in the order taken."""

    samples_us: tuple[float, ...]
    policy: str
    clock_mhz: tuple[int, ...] = ()

    @property
    def median_us(self) -> float:
        return median(self.samples_us)

    @property
    def p20_us(self) -> float:
        return _quantile(self.samples_us, 0.2)

    @property
    def p80_us(self) -> float:
        return _quantile(self.samples_us, 0.8)


@dataclass(frozen=True)
class Seconds:
    """Wall time that a candidate took: of one core to build it, of the device to check and to time
    it. Checking holds everything else that the device's process did for it."""

    build: float = 0.0
    check: float = 0.0
    time: float = 0.0

    @property
    def device(self) -> float:
        return self.check + self.time


@dataclass(frozen=True)
class Outcome:
    """One candidate's whole story. `program_key` is the digest of the emitted source."""

    config: Config
    status: Status
    reason: str = ""
    program_key: str = ""
    template_digest: str = ""
    built: Built | None = None
    verdict: Verdict | None = None
    timing: Timing | None = None
    predicted_us: float | None = None
    seconds: Seconds | None = None  # None: it was not tried itself, or by an older version

    @property
    def median_us(self) -> float | None:
        return self.timing.median_us if self.timing is not None else None

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["config"] = self.config.to_dict()
        return plain


def _quantile(samples: tuple[float, ...], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
