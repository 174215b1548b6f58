"""How much a run does, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Trials in all, and wall time with a GPU and without."""

    trials: int
    timeout_s: float
    offline_timeout_s: float


# On two measured spaces 16 trials find 0.995 of the optimum in 9 of 10 runs and 64 all of it
# (docs/search.md).
EFFORTS = {
    "quick": Effort(20, 60.0, 40.0),
    "normal": Effort(64, 150.0, 75.0),
    "full": Effort(256, 600.0, 300.0),
}
