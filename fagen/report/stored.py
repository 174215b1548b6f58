"""Rows and lines of `fagen db`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from fagen.outcome import Built, Status
from fagen.report.plain import (
    Row,
    cell,
    check_line,
    iso,
    local,
    problem_row,
    shortened,
    tflops,
    verdict_row,
)

if TYPE_CHECKING:
    from fagen.records import Record, Run

TIMES = ("started", "ended", "created")


def run_rows(runs: Iterable[Run], winners: Iterable[Record]) -> list[Row]:
    """`fagen db list`; best: of the run's shape bucket, device and toolchain, from any run."""
    best = {_group(winner): winner for winner in winners}
    return [_run_row(run, best.get(_group(run))) for run in runs]


def _run_row(run: Run, winner: Record | None) -> Row:
    return {
        "run_id": run.run_id,
        **problem_row(run.problem),
        "target": run.target.name,
        "triton": run.toolchain.triton,
        "state": run.state,
        "partial": run.partial,
        "started": iso(run.started),
        "ended": iso(run.ended),
        "trials": sum(run.counts.values()),
        "ok": run.counts.get("ok", 0),
        "predicted": run.counts.get("predicted", 0),
        "best_us": None if winner is None else winner.median_us,
        "best_trial_id": None if winner is None else winner.trial_id,
    }


def _group(row: Run | Record) -> tuple[str, str, str]:
    return row.problem.bucket_key, row.target.device_key, row.toolchain.key


def _origin(record: Record) -> str:
    if record.shipped:
        return "shipped"
    return "predicted" if record.status is Status.PREDICTED else "tuned"


def record_row(record: Record) -> Row:
    """A stored trial, flat."""
    outcome = record.outcome
    verdict = outcome.verdict
    return {
        "trial_id": None if record.shipped else record.trial_id,
        "run_id": None if record.shipped else record.run_id,
        "origin": _origin(record),
        "status": outcome.status.value,
        "reason": shortened(outcome.reason),
        **problem_row(record.problem),
        "target": record.target.name,
        "triton": record.toolchain.triton,
        "family": outcome.config.family,
        "config": str(outcome.config),
        "median_us": record.median_us,
        "predicted_us": outcome.predicted_us,
        "tflops": tflops(record.problem, record.median_us),
        "source_key": outcome.program_key,
        "verified_on": None if verdict is None else verdict.where,
        "chosen": record.chosen,
        "quarantined": record.quarantined or None,
        "created": iso(record.created),
    }


def detail_row(record: Record) -> Row:
    """One trial with everything that was stored of it."""
    timing = record.outcome.timing
    return {
        **record_row(record),
        "reason": record.outcome.reason,
        "config": record.config.to_dict(),
        "template_digest": record.outcome.template_digest,
        "facts": facts_row(record),
        "verdict": verdict_row(record.verdict),
        "gate": record.exactness,
        "samples_us": None if timing is None else list(timing.samples_us),
        "measure_policy": None if timing is None else timing.policy,
    }


def facts_row(record: Record) -> Row | None:
    """What the compiled kernels use; None for what was never built."""
    built = record.outcome.built
    if built is None:
        return None
    return {
        "shared_bytes": built.shared_bytes,
        "registers": built.registers,
        "spill_bytes": built.spill_bytes,
        "findings": [finding for kernel in built.kernels for finding in kernel.findings],
    }


def facts_lines(built: Built | None) -> list[str]:
    """Each compiled kernel for people: what it uses, and what its machine code shows."""
    if built is None:
        return []
    lines = []
    for kernel in built.kernels:
        lines.append(
            f"{kernel.name}: {kernel.registers} registers, {kernel.shared_bytes} bytes of shared"
            f" memory, {kernel.spill_bytes} bytes spilled"
        )
        lines += [f"  {finding}" for finding in kernel.findings]
    return lines


def detail_lines(record: Record) -> list[str]:
    """One trial for people; times in their own zone."""
    facts = facts_row(record) or {}
    facts.pop("findings", None)  # a line each, below
    row = {**record_row(record), **facts, "gate": record.exactness}
    row["created"] = local(record.created)
    width = max(map(len, row))
    lines = [f"{name:<{width}}  {cell(value)}" for name, value in row.items()]
    checks = record.verdict.checks if record.verdict is not None else ()
    lines += [check_line(check) for check in checks]
    lines += facts_lines(record.outcome.built)
    number = record.trial_id
    return [*lines, f"Source: fagen show {number}. To try it again: fagen repro {number}"]


def localized(rows: Iterable[Row]) -> list[Row]:
    """The same rows with their times for people, zone said."""
    return [
        {**row, **{n: local(datetime.fromisoformat(row[n])) for n in TIMES if row.get(n)}}
        for row in rows
    ]
