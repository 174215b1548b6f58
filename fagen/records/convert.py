"""Our values to rows of tuning_db, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fagen.config import Config
from fagen.outcome import Built, Check, KernelFacts, Outcome, Seconds, Status, Timing, Verdict
from fagen.problem import Problem, problem_from_dict
from fagen.records.values import Final, Plan, Record, Run
from fagen.target import Target, Toolchain
from tuning_db import FinalRow, Kind, RunRow, TrialRow, TrialView, VerdictRow
from tuning_db.owner import this_process
from tuning_db.store import is_abandoned

if TYPE_CHECKING:
    from tuning_db.exchange import Winner

Decode = Callable[[dict[str, Any]], Config]


def record_of(view: TrialView, decode: Decode) -> Record:
    trial, run = view.trial, view.run
    return Record(
        trial_id=trial.id or 0,
        run_id=trial.run_id,
        problem=problem_from_dict(run.problem),
        target=Target(**run.target),
        toolchain=Toolchain(**run.toolchain),
        exactness=run.exactness_policy,
        outcome=_outcome(trial, decode(trial.config)),
        median_us=view.best_us,
        created=trial.created,
        chosen=view.chosen,
        quarantined=trial.quarantined or "",
    )


def shipped_record(row: Winner, decode: Decode) -> Record:
    outcome = Outcome(
        config=decode(row.config),
        status=Status.OK,
        program_key=row.program_key,
        template_digest=row.template_digest,
        verdict=verdict_of(row.checks, row.checked_on),
    )
    return Record(
        trial_id=0,
        run_id=0,
        problem=problem_from_dict(row.problem),
        target=Target(**row.target),
        toolchain=Toolchain(**row.toolchain),
        exactness=row.exactness_policy,
        outcome=outcome,
        median_us=row.median_us,
        created=datetime.fromisoformat(row.created),
        chosen=True,
        shipped=True,
    )


def run_row(problem: Problem, target: Target, toolchain: Toolchain, plan: Plan) -> RunRow:
    """A run that begins now and belongs to this process."""
    now, owner = datetime.now(UTC), this_process()
    return RunRow(
        problem=problem.to_dict(),
        problem_key=problem.key,
        class_key=problem.class_key,
        bucket_key=problem.bucket_key,
        target=target.to_dict(),
        device_key=target.device_key,
        toolchain=asdict(toolchain),
        toolchain_key=toolchain.key,
        measure_policy=plan.policy,
        exactness_policy=plan.exactness,
        strategy=plan.strategy,
        seed=plan.seed,
        trials_budget=plan.trials,
        timeout_s=plan.timeout_s,
        started=now,
        owner_host=owner.host,
        owner_pid=owner.pid,
        owner_token=owner.token,
        heartbeat=now,
    )


def verdict_row(
    program_key: str, device_key: str, toolchain_key: str, exactness: str, verdict: Verdict
) -> VerdictRow:
    return VerdictRow(
        program_key=program_key,
        device_key=device_key,
        toolchain_key=toolchain_key,
        exactness=exactness,
        passed=verdict.passed,
        checks=_plain_checks(verdict),
        checked_on=verdict.where,
        created=datetime.now(UTC),
    )


def trial_row(run_id: int, outcome: Outcome) -> TrialRow:
    timing, verdict = outcome.timing, outcome.verdict
    return TrialRow(
        run_id=run_id,
        config=outcome.config.to_dict(),
        config_key=outcome.config.key,
        program_key=outcome.program_key,
        template_digest=outcome.template_digest,
        status=outcome.status.value,
        reason=outcome.reason,
        created=datetime.now(UTC),
        facts=None if outcome.built is None else asdict(outcome.built),
        checks=None if verdict is None else _plain_checks(verdict),
        checked_on=None if verdict is None else verdict.where,
        samples_us=None if timing is None else list(timing.samples_us),
        clocks_mhz=None if timing is None else list(timing.clock_mhz),
        measure_policy=None if timing is None else timing.policy,
        median_us=outcome.median_us,
        predicted_us=outcome.predicted_us,
        seconds=None if outcome.seconds is None else asdict(outcome.seconds),
    )


def final_row(
    run_id: int, name: str, kind: Kind, timing: Timing, chosen: bool = False
) -> FinalRow:
    return FinalRow(
        run_id=run_id,
        name=name,
        kind=kind,
        samples_us=list(timing.samples_us),
        clocks_mhz=list(timing.clock_mhz),
        measure_policy=timing.policy,
        median_us=timing.median_us,
        chosen=chosen,
    )


def _outcome(row: TrialRow, config: Config) -> Outcome:
    return Outcome(
        config=config,
        status=Status(row.status),
        reason=row.reason,
        program_key=row.program_key,
        template_digest=row.template_digest,
        built=None if row.facts is None else _built(row.facts),
        verdict=None if row.checks is None else verdict_of(row.checks, row.checked_on or ""),
        timing=_timing(row),
        predicted_us=row.predicted_us,
        seconds=None if row.seconds is None else Seconds(**row.seconds),
    )


def _built(facts: dict[str, Any]) -> Built:
    kernels = [
        KernelFacts(**{**kernel, "findings": tuple(kernel["findings"])})
        for kernel in facts["kernels"]
    ]
    return Built(facts["module_path"], tuple(kernels))


def _timing(row: TrialRow | FinalRow) -> Timing | None:
    if not row.samples_us:
        return None
    return Timing(tuple(row.samples_us), row.measure_policy or "", tuple(row.clocks_mhz or ()))


def _plain_checks(verdict: Verdict) -> list[dict[str, Any]]:
    # A wrong kernel's error may be NaN or infinite, which strict JSON has no number for.
    return [
        {
            **asdict(check),
            "error": _plain_number(check.error),
            "budget": _plain_number(check.budget),
        }
        for check in verdict.checks
    ]


def _plain_number(value: float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def verdict_of(checks: list[dict[str, Any]], where: str) -> Verdict:
    read = [
        Check(c["name"], float(c["error"]), float(c["budget"]), c.get("detail", ""))
        for c in checks
    ]
    return Verdict(tuple(read), where)


def run_of(row: RunRow, counts: dict[str, int]) -> Run:
    gone = is_abandoned(row, datetime.now(UTC))
    return Run(
        run_id=row.id or 0,
        problem=problem_from_dict(row.problem),
        target=Target(**row.target),
        toolchain=Toolchain(**row.toolchain),
        plan=Plan(
            policy=row.measure_policy,
            exactness=row.exactness_policy,
            strategy=row.strategy,
            seed=row.seed,
            trials=row.trials_budget,
            timeout_s=row.timeout_s,
        ),
        started=row.started,
        ended=row.heartbeat if gone else row.ended,
        state="interrupted" if gone else row.state,
        partial=row.partial or gone,
        counts=counts,
    )


def final_of(row: FinalRow) -> Final:
    return Final(row.name, row.kind, _timing(row), row.reason, row.chosen)
