"""A stored trial as a script of its own, to be tried again where its database is not."""

from __future__ import annotations

import ast
import math
import textwrap
from dataclasses import asdict
from pprint import pformat
from typing import TYPE_CHECKING, Any

import fagen
from fagen.generate.plain import program_to_dict
from fagen.generate.render import environment
from fagen.outcome import Check
from fagen.report.plain import Row, problem_row

if TYPE_CHECKING:
    from fagen.serve.source import TriedSource

TEMPLATE = "repro.py.j2"
WIDTH = 99
STALE = (
    "this is today's source of that config ({today}), not the one that was tried ({tried}): "
    "fagen emits another one now, and no file of it is in the kernel cache."
)


def script(tried: TriedSource) -> str:
    """The script's text; `fagen.rerun` is what it runs."""
    template = environment().get_template(TEMPLATE)
    return template.render(
        trial_id=tried.record.trial_id,
        problem=tried.record.problem,
        config=_filled(f"{tried.record.config}."),
        version=fagen.__version__,
        warning=_filled(warning(tried)),
        trial=pformat(_trial(tried), width=WIDTH, sort_dicts=False),
        source=literal(tried.program.source),
    )


def warning(tried: TriedSource) -> str:
    """That the source is not the one that was tried, or nothing."""
    if not tried.changed:
        return ""
    return STALE.format(today=tried.program.key, tried=tried.record.program_key)


def script_row(tried: TriedSource, text: str, path: str | None) -> Row:
    """`fagen repro --json`; path: where it was written, besides."""
    return {
        **problem_row(tried.record.problem),
        "target": tried.record.target.name,
        "trial_id": tried.record.trial_id,
        "config": tried.record.config.to_dict(),
        "name": tried.program.name,
        "source_key": tried.program.key,
        "stored_source_key": tried.record.program_key,
        "warning": warning(tried),
        "path": path,
        "script": text,
    }


def literal(text: str) -> str:
    """The text as a Python literal in ASCII, with its lines as they are where that is possible."""
    raw = f"r'''{text}'''"
    try:
        if text.isascii() and ast.literal_eval(raw) == text:
            return raw
    except (SyntaxError, ValueError):  # it holds three quotes, or ends in one, or holds a NUL
        pass
    return ascii(text)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False)


def _trial(tried: TriedSource) -> dict[str, Any]:
    """What the script keeps besides the source."""
    record = tried.record
    return {
        "trial_id": record.trial_id,
        "created": record.created.isoformat(),
        "fagen": fagen.__version__,
        "program": program_to_dict(tried.program),
        "target": record.target.to_dict(),
        "toolchain": asdict(record.toolchain),
        "gate": record.exactness,
        "tried_key": record.program_key,
        "measured": _measured(tried),
    }


def _measured(tried: TriedSource) -> dict[str, Any]:
    """median_us: of the race where the trial was a finalist; samples_us: of its own pass."""
    outcome = tried.record.outcome
    timing, verdict, built = outcome.timing, outcome.verdict, outcome.built
    worst = None if verdict is None else verdict.worst
    return {
        "status": outcome.status.value,
        "reason": outcome.reason,
        "median_us": tried.record.median_us,
        "samples_us": [] if timing is None else list(timing.samples_us),
        "policy": "" if timing is None else timing.policy,
        "checked_on": "" if verdict is None else verdict.where,
        "worst": None if worst is None else _plain_check(worst),
        "kernels": [] if built is None else [asdict(kernel) for kernel in built.kernels],
    }


def _plain_check(check: Check) -> dict[str, Any]:
    """NaN and infinities as text: Python has no literal for them."""
    numbers = {"error": check.error, "budget": check.budget}
    odd = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    return {**asdict(check), **odd}
