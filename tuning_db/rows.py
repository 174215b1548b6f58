"""Rows as frozen values: one field a column, same names as in `tables`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tuning_db.columns import Damaged, positive

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from sqlalchemy import RowMapping

State = Literal["running", "finished", "interrupted"]
Kind = Literal["program", "peer"]
Row = TypeVar("Row")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRow:
    """One tuning run. Who owns it (host, pid, token) tells a live run from one that was killed."""

    problem: dict[str, Any]
    problem_key: str
    class_key: str
    bucket_key: str
    target: dict[str, Any]
    device_key: str
    toolchain: dict[str, Any]
    toolchain_key: str
    measure_policy: str
    exactness_policy: str
    strategy: str
    seed: int
    trials_budget: int | None
    timeout_s: float | None
    started: datetime
    owner_host: str
    owner_pid: int
    owner_token: str
    heartbeat: datetime
    ended: datetime | None = None
    state: State = "running"
    partial: bool = False
    id: int | None = None


@dataclass(frozen=True)
class TrialRow:
    """One candidate of a run, whatever became of it. Times are in microseconds.

    seconds: what it took to `build`, to `check` and to `time` it.
    """

    run_id: int
    config: dict[str, Any]
    config_key: str
    program_key: str
    template_digest: str
    status: str
    reason: str
    created: datetime
    facts: dict[str, Any] | None = None
    checks: list[dict[str, Any]] | None = None
    checked_on: str | None = None
    samples_us: list[float] | None = None
    clocks_mhz: list[int] | None = None
    measure_policy: str | None = None
    median_us: float | None = None
    predicted_us: float | None = None
    quarantined: str | None = None
    seconds: dict[str, float] | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        _refuse_bad_samples(self.samples_us)


@dataclass(frozen=True)
class FinalRow:
    """A finalist or a peer, measured interleaved with the others. Without samples: why not."""

    run_id: int
    name: str
    kind: Kind
    samples_us: list[float] | None = None
    clocks_mhz: list[int] | None = None
    measure_policy: str | None = None
    median_us: float | None = None
    reason: str = ""
    chosen: bool = False
    id: int | None = None

    def __post_init__(self) -> None:
        _refuse_bad_samples(self.samples_us)


@dataclass(frozen=True)
class VerdictRow:
    """What a gate said of a source on a device under a toolchain; one row, the last one said.

    exactness names the gate, like a run's exactness_policy.
    """

    program_key: str
    device_key: str
    toolchain_key: str
    exactness: str
    passed: bool
    checks: list[dict[str, Any]]
    checked_on: str
    created: datetime


@dataclass(frozen=True)
class TrialView:
    """A trial with its run, and with its interleaved measurement where it was a finalist."""

    trial: TrialRow
    run: RunRow
    final_us: float | None
    chosen: bool

    @property
    def best_us(self) -> float | None:
        """The interleaved median where there is one: single passes drift apart by 15 %."""
        return self.final_us if self.final_us is not None else self.trial.median_us


def values_of(row: Any) -> dict[str, Any]:
    """What an INSERT takes; the database gives the id."""
    return {f.name: getattr(row, f.name) for f in fields(row) if f.name != "id"}


def read_row(kind: type[Row], mapping: RowMapping, prefix: str = "") -> Row:
    """A row value from a result mapping. Raises ValueError when a stored value is damaged."""
    values = {f.name: mapping[prefix + f.name] for f in fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if isinstance(value, Damaged):
            raise ValueError(f"{name} holds {value.stored!r:.60}")
    return kind(**values)


def read_view(mapping: RowMapping) -> TrialView:
    """A TrialView from a row of `queries.views`."""
    return TrialView(
        read_row(TrialRow, mapping, "trial_"),
        read_row(RunRow, mapping, "run_"),
        mapping["final_us"],
        bool(mapping["chosen"]),
    )


def readable(mappings: Iterable[RowMapping], read: Any, place: str) -> list[Any]:
    """Every row that can be read. The others are left out, with one warning for all of them."""
    kept, bad = [], []
    for mapping in mappings:
        try:
            kept.append(read(mapping))
        except ValueError as error:
            bad.append(str(error))
    if bad:
        log.warning("%s: %d damaged row(s) left out; the first: %s", place, len(bad), bad[0])
    return kept


def _refuse_bad_samples(samples: list[float] | None) -> None:
    for sample in samples or ():
        positive(sample)
