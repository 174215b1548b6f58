"""Rows and lines of `fagen why`, `show` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fagen.report.plain import Row, cell, local, problem_row, verdict_row
from fagen.report.stored import facts_lines, facts_row

if TYPE_CHECKING:
    from fagen.doctor import Finding
    from fagen.records import Record
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
        "trial_id": _trial_id(record),
        "tuned_for": None if record is None else str(record.problem),
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
        lines.append(_measured(found.record))
    if found.config is not None and found.verdict is None:
        lines.append("not verified here yet: fagen.get verifies it at its first use")
        lines += _checks_elsewhere(found.record)
    if found.verdict is not None:
        lines.append(f"verified on {found.verdict.where}")
    return [*lines, found.next_step] if found.next_step else lines


def served(found: Explanation) -> str:
    """In one line."""
    measured = "" if found.record is None else f", {_measured(found.record)}"
    return f"{found.origin}: {found.config}{measured}"


def _measured(record: Record) -> str:
    """Where the row lies, of which shape it is, and its time there."""
    time = f": {cell(record.median_us)} us" if record.median_us else ""
    made = f"Triton {record.toolchain.triton}, {local(record.created)}"
    return f"{record.source_text}, tuned for {record.problem}{time} ({made})"


def _checks_elsewhere(record: Record | None) -> list[str]:
    """What a gate said where the row was made, which is no verdict for here."""
    if record is None or record.verdict is None:
        return []
    verdict, worst = record.verdict, record.verdict.worst
    nearest = (
        "" if worst is None else f", worst {worst.name}: {worst.error:.3g} of {worst.budget:.3g}"
    )
    said = "passed" if verdict.passed else "failed"
    return [f"where it was tuned ({verdict.where}): {said} {len(verdict.checks)} checks{nearest}"]


def _trial_id(record: Record | None) -> int | None:
    return None if record is None or record.shipped else record.trial_id


def source_row(shown: Shown) -> Row:
    """`fagen show --json`: the source and what is known of it."""
    program, record = shown.program, shown.record
    return {
        **problem_row(program.problem),
        "target": shown.target.name,
        "origin": shown.origin,
        "trial_id": _trial_id(record),
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
    lines = facts_lines(shown.record.outcome.built)
    if lines and shown.changed:
        lines.insert(0, "fagen emits another source now than when these were read:")
    return lines
