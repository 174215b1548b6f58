"""Single values, shown: for people short and in their own clock, for JSON whole."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fagen.outcome import Check, Verdict
from fagen.problem import Problem

Row = dict[str, Any]


def cell(value: Any) -> str:
    """One value for people: four digits, dashes for what is missing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return " ".join(str(value).split())


def iso(when: datetime | None) -> str | None:
    """A stored time for JSON, with its offset."""
    return None if when is None else when.isoformat()


def local(when: datetime | None) -> str:
    """A stored time for people: their own clock, with the zone said."""
    return "-" if when is None else f"{when.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def shortened(text: str) -> str:
    """One line of at most 160 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:157] + "..."


def problem_row(problem: Problem) -> Row:
    """A problem's fields, flat."""
    shape, features = problem.shape, problem.features
    return {
        "problem": str(problem),
        "direction": problem.direction,
        "dtype": shape.dtype,
        "batch": shape.batch,
        "heads": shape.heads_q,
        "kv_heads": shape.heads_kv,
        "seq": shape.seq_q,
        "seq_kv": shape.seq_kv,
        "head_dim": shape.head_dim,
        "head_dim_v": shape.head_dim_v,
        "causal": features.causal,
    }


def verdict_row(verdict: Verdict | None) -> Row | None:
    """A verdict with each measured error beside its budget."""
    if verdict is None:
        return None
    checks = [
        {"name": c.name, "error": c.error, "budget": c.budget, "passed": c.passed}
        for c in verdict.checks
    ]
    return {"passed": verdict.passed, "where": verdict.where, "checks": checks}


def check_line(check: Check) -> str:
    """One check of a verdict for people."""
    said = "ok" if check.passed else "FAILED"
    return f"{said}  {check.name}: {check.error:.3g} of {check.budget:.3g}"


def missing_rows(missing: Mapping[str, str]) -> list[Row]:
    """Peers that were not timed, with the reason."""
    return [{"name": name, "reason": reason} for name, reason in missing.items()]


def tflops(problem: Problem, time_us: float | None) -> float | None:
    return problem.flops / time_us / 1e6 if time_us else None
