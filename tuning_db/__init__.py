"""The tuning database: runs, trials, finals and verdicts in SQL.

Knows rows of plain values and nothing of what they mean: no kernels, no shapes, no devices.
"""

from tuning_db.errors import (
    DatabaseDamaged,
    DatabaseLocked,
    DatabaseMissing,
    DatabaseReadOnly,
    ForeignDatabase,
    SchemaTooNew,
    SchemaTooOld,
    StoreError,
)
from tuning_db.rows import FinalRow, Kind, RunRow, State, TrialRow, TrialView, VerdictRow
from tuning_db.store import Mode, Store

__all__ = [
    "DatabaseDamaged",
    "DatabaseLocked",
    "DatabaseMissing",
    "DatabaseReadOnly",
    "FinalRow",
    "ForeignDatabase",
    "Kind",
    "Mode",
    "RunRow",
    "SchemaTooNew",
    "SchemaTooOld",
    "State",
    "Store",
    "StoreError",
    "TrialRow",
    "TrialView",
    "VerdictRow",
]
