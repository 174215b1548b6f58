"""Winners as lines of JSON: what is shipped with the package, exported and imported.

One object a line, with the fields of `Winner`. Diffs and reviews can read it, which they can't
of a database.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuning_db.columns import dump
from tuning_db.errors import StoreError
from tuning_db.owner import this_process
from tuning_db.rows import RunRow, TrialRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuning_db.rows import TrialView
    from tuning_db.store import Keys, Store

SHIPPED = Path(__file__).parent / "records"


@dataclass(frozen=True)
class Winner:
    """The fastest right kernel of one bucket on one device under one toolchain."""

    problem: dict[str, Any]
    problem_key: str
    class_key: str
    bucket_key: str
    target: dict[str, Any]
    device_key: str
    toolchain: dict[str, Any]
    toolchain_key: str
    config: dict[str, Any]
    config_key: str
    program_key: str
    template_digest: str
    measure_policy: str
    exactness_policy: str
    median_us: float
    checks: list[dict[str, Any]]
    checked_on: str
    created: str  # UTC, ISO 8601


@lru_cache(maxsize=1)
def shipped_rows() -> tuple[Winner, ...]:
    """What comes with the package, read once. Raises StoreError."""
    return tuple(row for file in sorted(SHIPPED.glob("*.jsonl")) for row in _read_file(file))


def _read_file(file: Path) -> list[Winner]:
    try:
        return read_lines(file.read_text(encoding="utf-8").splitlines())
    except UnicodeDecodeError as error:
        raise StoreError(f"{file} is no text: {error}.", "Install fagen again.") from error


def read_lines(lines: Iterable[str]) -> list[Winner]:
    """Raises StoreError with the number of the first line that holds no winner."""
    return [_read_line(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def export_lines(store: Store, keys: Keys | None = None) -> list[str]:
    """The verified winner of every bucket, device and toolchain."""
    views = store.best(keys=keys)
    return [line_of(winner_of(view)) for view in views if view.trial.checks]


def line_of(winner: Winner) -> str:
    """Strict JSON without a line's end; `read_lines` reads it back."""
    return dump(asdict(winner))


def winner_of(view: TrialView) -> Winner:
    """Its time is the interleaved one where there is one. The view must have a verdict."""
    values = {**asdict(view.trial), **{k: v for k, v in asdict(view.run).items() if k != "id"}}
    values |= {"median_us": view.best_us, "created": view.trial.created.isoformat()}
    return Winner(**{field.name: values[field.name] for field in fields(Winner)})


def import_lines(store: Store, lines: Iterable[str]) -> int:
    """Adds winners as runs of their own, without a verdict of this machine. Returns how many."""
    winners = read_lines(lines)
    for winner in winners:
        _add(store, winner)
    return len(winners)


def _read_line(number: int, line: str) -> Winner:
    try:
        plain = json.loads(line)
        return Winner(**{field.name: plain[field.name] for field in fields(Winner)})
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"Line {number} is no exported winner ({type(error).__name__}: {error}).",
            "Nothing was read. Export it again.",
        ) from error


def _add(store: Store, winner: Winner) -> None:
    host, pid, token = this_process()
    now = datetime.now(UTC)
    plain = asdict(winner)
    shared = {f.name: plain[f.name] for f in fields(RunRow) if f.name in plain}
    run = RunRow(
        **shared,
        strategy="import",
        seed=0,
        trials_budget=None,
        timeout_s=None,
        started=now,
        ended=now,
        state="finished",
        owner_host=host,
        owner_pid=pid,
        owner_token=token,
        heartbeat=now,
    )
    shared = {f.name: plain[f.name] for f in fields(TrialRow) if f.name in plain}
    created = datetime.fromisoformat(winner.created)
    run_id = store.add_run(run)
    store.add_trial(
        TrialRow(**{**shared, "created": created}, run_id=run_id, status="ok", reason="imported")
    )
