"""Rows and lines of `fagen why`, `show`, `bench` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from fagen.analysis import Cost
from fagen.problem import Problem
from fagen.report.plain import Row, cell, local, problem_row, tflops, verdict_row
from fagen.report.stored import facts_lines, facts_row
from fagen.target import Target

if TYPE_CHECKING:
    from fagen.doctor import Finding
    from fagen.serve.compare import Comparison
    from fagen.serve.explain import Explanation
    from fagen.serve.source import Shown


def finding_rows(findings: Iterable[Finding]) -> list[Row]:
    return [
        {"name": f.name, "state": f.state, "text": f.text, "next_step": f.next_step}
        for f in findings
    ]


def cost_rows(costs: Iterable[Cost], target: Target) -> list[Row]:
    """The analysis of `fagen bench`, on a target's peak rates."""
    return [
        {
            "form": cost.form,
            "flops": cost.flops,
            "flops_per_byte": cost.flops_per_byte,
            "extra_bytes": cost.extra_bytes,
            "asked_bytes": cost.asked_bytes,
            "hbm_bytes": cost.hbm_bytes,
            "least_us": cost.least_us(target),
        }
        for cost in costs
    ]


def cost_table(costs: Sequence[Cost], target: Target) -> list[Row]:
    return [
        {
            "form": cost.form,
            "GFLOP": cost.flops / 1e9,
            "extra MiB": cost.extra_bytes / 2**20,
            "asked MiB": cost.asked_bytes / 2**20,
            "HBM MiB": cost.hbm_bytes / 2**20,
            "FLOP/byte": cost.flops_per_byte,
            "least us": cost.least_us(target),
        }
        for cost in costs
    ]


def cost_lines(problem: Problem, target: Target) -> list[str]:
    """The heading of the analysis."""
    ridge = target.tensor_tflops * 1e3 / target.memory_gbps
    return [
        f"On paper: {problem}; q, k, v, o and LSE take {problem.io_bytes / 2**20:.4g} MiB.",
        f"{target} turns from memory to compute bound at {ridge:.0f} FLOP a byte of HBM.",
    ]


def explanation_row(found: Explanation) -> Row:
    """`fagen why` as one JSON object; `fields` are its key fields."""
    record, verdict = found.record, found.verdict
    return {
        **problem_row(found.problem),
        "target": found.place.target.name,
        "origin": found.origin,
        "reason": found.reason,
        "config": None if found.config is None else found.config.to_dict(),
        "source_key": None if found.program is None else found.program.key,
        "trial_id": None if record is None else record.trial_id,
        "median_us": None if record is None else record.median_us,
        "verified_on": None if verdict is None else verdict.where,
        "fields": field_rows(found),
        "next_step": found.next_step,
    }


def field_rows(found: Explanation) -> list[Row]:
    return [
        {"field": f.name, "rule": f.rule, "wanted": f.wanted, "found": f.found, "match": f.match}
        for f in found.fields
    ]


def explanation_lines(found: Explanation) -> list[str]:
    """The story under the table of key fields."""
    lines = [f"{found.origin or 'no kernel'}: {found.reason}"]
    if found.config is not None:
        lines.append(f"config: {found.config}")
    if found.record is not None:
        time = f", {cell(found.record.median_us)} us" if found.record.median_us else ""
        lines.append(f"trial {found.record.trial_id}, {local(found.record.created)}{time}")
    if found.config is not None and found.verdict is None:
        lines.append("not verified here yet: fagen.get verifies it at its first use")
    if found.verdict is not None:
        lines.append(f"verified on {found.verdict.where}")
    return [*lines, found.next_step] if found.next_step else lines


def source_row(shown: Shown) -> Row:
    """`fagen show --json`: the source and what is known of it."""
    program, record = shown.program, shown.record
    return {
        **problem_row(program.problem),
        "target": shown.target.name,
        "origin": shown.origin,
        "trial_id": None if record is None else record.trial_id,
        "config": program.config.to_dict(),
        "name": program.name,
        "source_key": program.key,
        "stored_source_key": None if record is None else record.program_key,
        "source": program.source,
        "facts": None if record is None else facts_row(record),
        "verdict": verdict_row(shown.verdict),
    }


def source_lines(shown: Shown) -> list[str]:
    """What is known of a shown source beside its text, for people."""
    if shown.record is None:
        return []
    lines = facts_lines(shown.record)
    if lines and shown.changed:
        lines.insert(0, "fagen emits another source now than when these were read:")
    return lines


def bench_row(
    problem: Problem, target: Target, costs: Sequence[Cost], raced: Comparison | None
) -> Row:
    """`fagen bench --json`; `raced` and `missing` are empty where nothing could be timed."""
    return {
        **problem_row(problem),
        "target": target.name,
        "flops": problem.flops,
        "least_bytes": problem.io_bytes,
        "analysis": cost_rows(costs, target),
        "raced": [] if raced is None else race_rows(raced),
        "missing": [] if raced is None else missing_rows(raced.missing),
        "measure_policy": None if raced is None else raced.policy,
    }


def race_rows(raced: Comparison) -> list[Row]:
    """The kernel and its peers, fastest first. times_kernel: above 1 is slower than fagen."""
    problem, base = raced.kernel.problem, raced.timings.get("fagen")
    rows = [
        {
            "name": name,
            "median_us": timing.median_us,
            "p20_us": timing.p20_us,
            "p80_us": timing.p80_us,
            "tflops": tflops(problem, timing.median_us),
            "times_kernel": None if base is None else timing.median_us / base.median_us,
        }
        for name, timing in raced.timings.items()
    ]
    return sorted(rows, key=lambda row: cast("float", row["median_us"]))


def race_table(raced: Comparison) -> list[Row]:
    return race_rows(raced)


def race_lines(raced: Comparison) -> list[str]:
    """Who fagen's entry is, how it was timed, and who is missing."""
    lines = [f"fagen is {raced.kernel!r}", f"Timed by {raced.policy}, in interleaved rounds."]
    return [*lines, *(f"Not measured: {name}: {why}" for name, why in raced.missing.items())]


def missing_rows(missing: Mapping[str, str]) -> list[Row]:
    return [{"name": name, "reason": reason} for name, reason in missing.items()]
