"""The bridge between fagen's values and the rows of tuning_db. Nothing else crosses it."""

from fagen.records.convert import Decode
from fagen.records.ledger import Records, runs_ended, shipped
from fagen.records.values import Final, Plan, Record, Run, Staleness

__all__ = [
    "Decode",
    "Final",
    "Plan",
    "Record",
    "Records",
    "Run",
    "Staleness",
    "runs_ended",
    "shipped",
]
