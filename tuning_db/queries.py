"""The questions that take more than one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, FromClause, Select, and_, case, func, select

from tuning_db import tables

if TYPE_CHECKING:
    from collections.abc import Mapping

_trial, _run, _final = tables.trial, tables.run, tables.final
# Where a race's times and choice hold.
_SAME = ("problem_key", "device_key", "toolchain_key", "exactness_policy")


def views() -> Select[Any]:
    """Trials with their runs and their last interleaved measurement; `rows.read_view` reads it."""
    return _views_with(_latest_finals())


def best(
    status: str, each: int, keys: Mapping[str, str], exactness: str | None = None
) -> Select[Any]:
    """The best `each` sources with a status, of every bucket, device and toolchain.

    With `exactness`, trials of runs under that policy come before all others.

    What a run chose among its interleaved finalists comes first, the newest run's choice in
    front, for older winners were among its finalists. Then by time: interleaved where there is
    one, else the single pass, which drifts, else predicted. Quarantined trials never count.
    """
    latest = _latest_finals()
    group = (_run.c.bucket_key, _run.c.device_key, _run.c.toolchain_key)
    order = [*_judged_by(exactness), *_order(latest)]
    within_source = func.row_number().over(
        partition_by=[*group, _trial.c.program_key], order_by=order
    )
    per_source = (
        select(_trial.c.id, within_source.label("place"))
        .select_from(_joined(latest))
        .where(
            _trial.c.status == status,
            _us(latest).is_not(None),
            _trial.c.quarantined.is_(None),
            *(_run.c[name] == key for name, key in keys.items()),
        )
        .subquery()
    )
    place = func.row_number().over(partition_by=group, order_by=order).label("place")
    ranked = (
        select(_trial.c.id, place)
        .select_from(_joined(latest).join(per_source, per_source.c.id == _trial.c.id))
        .where(per_source.c.place == 1)
        .subquery()
    )
    first = _views_with(latest).join(ranked, ranked.c.id == _trial.c.id)
    return first.where(ranked.c.place <= each).order_by(*group, ranked.c.place)


def same_source(trial_id: int) -> Select[Any]:
    """Ids of the trials with the source of this one, on its device and toolchain."""
    trial, run = _trial.alias(), _run.alias()
    this = (
        select(trial.c.program_key, run.c.device_key, run.c.toolchain_key)
        .join(run, run.c.id == trial.c.run_id)
        .where(trial.c.id == trial_id)
        .subquery()
    )
    return (
        select(_trial.c.id)
        .join(_run, _run.c.id == _trial.c.run_id)
        .join(
            this,
            and_(
                this.c.program_key == _trial.c.program_key,
                this.c.device_key == _run.c.device_key,
                this.c.toolchain_key == _run.c.toolchain_key,
            ),
        )
    )


def _views_with(latest: FromClause) -> Select[Any]:
    return select(
        *(column.label(f"trial_{column.name}") for column in _trial.c),
        *(column.label(f"run_{column.name}") for column in _run.c),
        latest.c.median_us.label("final_us"),
        func.coalesce(latest.c.chosen, False).label("chosen"),
    ).select_from(_joined(latest))


def _joined(latest: FromClause) -> FromClause:
    # A finalist may come from an earlier run, so finals meet trials by source, not by run.
    alike = [latest.c[name] == _run.c[name] for name in _SAME]
    return _trial.join(_run, _run.c.id == _trial.c.run_id).outerjoin(
        latest, and_(latest.c.name == _trial.c.program_key, *alike)
    )


def _latest_finals() -> FromClause:
    same = [_run.c[name] for name in _SAME]
    newest = func.row_number().over(
        partition_by=[_final.c.name, *same], order_by=_final.c.run_id.desc()
    )
    ranked = (
        select(
            _final.c.name,
            _final.c.run_id,
            _final.c.median_us,
            _final.c.chosen,
            *same,
            newest.label("place"),
        )
        .join(_run, _run.c.id == _final.c.run_id)
        .where(_final.c.kind == "program")
        .subquery()
    )
    return select(ranked).where(ranked.c.place == 1).subquery("latest")


def _judged_by(exactness: str | None) -> list[ColumnElement[Any]]:
    if exactness is None:
        return []
    return [case((_run.c.exactness_policy == exactness, 0), else_=1)]


def _order(latest: FromClause) -> list[ColumnElement[Any]]:
    chosen_in = case((latest.c.chosen, latest.c.run_id), else_=0)
    return [chosen_in.desc(), _us(latest), _trial.c.id]


def _us(latest: FromClause) -> ColumnElement[Any]:
    return func.coalesce(latest.c.median_us, _trial.c.median_us, _trial.c.predicted_us)
