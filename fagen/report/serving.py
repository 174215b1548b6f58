"""Rows and lines of `fagen why`, `show` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fagen.report.plain import Row, cell, local, problem_row, verdict_row
from fagen.report.stored import facts_lines, facts_row

if TYPE_CHECKING:
    from fagen.doctor import Finding
    from fagen.serve.explain import Explanation
    from fagen.serve.source import Shown


def finding_rows(findings: Iterable[Finding]) -> list[Row]:
    return [
        {"name": f.name, "state": f.state, "text": f.text, "next_step": f.next_step}
        for f in findings
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
