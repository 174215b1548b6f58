"""What a tuning run asks of the database, and what it leaves there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from fagen import records
from fagen.config import Config
from fagen.outcome import GATE, Outcome, Status, Timing
from fagen.problem import Problem
from fagen.records import Record, Records
from fagen.target import Target, Toolchain
from fagen.tune.result import Finale

STRATEGY = "seeds, estimate, polish, coverage"
INTERPRETER = "interpreter"  # where the gate says that it ran a kernel without a device
OTHER_DEVICE = 100.0  # further away than any size of the same device


class Budget(Protocol):
    """How long a run may take, as its row says it."""

    @property
    def policy_name(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def trials(self) -> int: ...

    @property
    def timeout_s(self) -> float: ...


class Ledger:
    """One problem's rows on one device and toolchain. Each save is one finished transaction."""

    def __init__(
        self, rows: Records, problem: Problem, target: Target, toolchain: Toolchain
    ) -> None:
        self._records = rows
        self._problem, self._target, self._toolchain = problem, target, toolchain
        self._run = 0

    def history(self, policy: str) -> list[Outcome]:
        """The last outcome of each config of exactly this problem and gate, oldest first."""
        return self._records.history(self._problem, self._target, self._toolchain, policy=policy)

    def incumbent(self) -> Config | None:
        """The winner of an earlier race, or else what ships for this very problem and place: what
        `fagen.get` serves so far."""
        best = self._records.best(self._problem, self._target, self._toolchain)
        if best is not None:
            return best.config if best.chosen else None
        known = self._records.candidates(self._problem.class_key)
        return next((r.config for r in known if r.shipped and self._is_own(r)), None)

    def neighbours(self) -> list[Config]:
        """Winners of other sizes, devices, toolchains and gates, and what ships, nearest first."""
        known = self._records.candidates(self._problem.class_key)
        timed = [r for r in known if r.status == Status.OK and not self._is_done(r)]
        ranked = sorted(timed, key=lambda r: (self._distance(r), r.median_us or 0.0, r.config.key))
        return list(dict.fromkeys(record.config for record in ranked))

    def begin(self, budget: Budget) -> int:
        """A new run's id."""
        plan = records.Plan(
            policy=budget.policy_name,
            exactness=GATE,
            strategy=STRATEGY,
            seed=budget.seed,
            trials=budget.trials,
            timeout_s=budget.timeout_s,
        )
        self._run = self._records.begin_run(self._problem, self._target, self._toolchain, plan)
        return self._run

    def save(self, outcome: Outcome) -> int:
        """A new trial's id. What the device got wrong is known to `fagen.get` too, and wins no
        more where an earlier gate let it pass."""
        verdict = outcome.verdict if outcome.status == Status.WRONG_RESULT else None
        # The interpreter ran a twin, and not on the target.
        if verdict is not None and verdict.where != INTERPRETER:
            keys = outcome.program_key, self._target.device_key, self._toolchain.key
            self._records.save_verdict(*keys, verdict)
            self._set_aside(outcome)
        return self._records.save(self._run, outcome)

    def reject(self, outcome: Outcome) -> None:
        """A finalist that failed its last check: a row that says so, and no older one wins."""
        self._set_aside(outcome)
        self.save(outcome)

    def _set_aside(self, outcome: Outcome) -> None:
        for record in self._records.trials(problem=self._problem, status=Status.OK):
            same = self._is_own(record) and record.program_key == outcome.program_key
            if same and not record.quarantined:
                self._records.quarantine(record.trial_id, outcome.reason)

    def finish(self, finale: Finale, *, interrupted: bool) -> None:
        """The race, and the end of the run."""
        programs: Mapping[str, Timing] = {
            f.name: f.timing for f in finale.finals if f.kind == "program"
        }
        peers = {f.name: f.timing for f in finale.finals if f.kind == "peer"}
        chosen = next((f.name for f in finale.finals if f.chosen), None)
        if programs or peers:
            self._records.save_finals(
                self._run, programs, peers=peers, missing=finale.missing, chosen=chosen
            )
        self._records.finish_run(self._run, interrupted=interrupted)

    def _is_own(self, record: Record) -> bool:
        keys = self._target.device_key, self._toolchain.key
        same_place = (record.device_key, record.toolchain_key) == keys
        return same_place and record.problem == self._problem

    def _is_done(self, record: Record) -> bool:
        return self._is_own(record) and record.exactness == GATE and not record.shipped

    def _distance(self, record: Record) -> float:
        sizes = zip(record.problem.bucket, self._problem.bucket, strict=True)
        apart = sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in sizes)
        return apart + OTHER_DEVICE * (record.device_key != self._target.device_key)
