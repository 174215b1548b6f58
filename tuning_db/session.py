"""Transactions, and what the driver's errors mean."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from tuning_db.errors import (
    DatabaseDamaged,
    DatabaseLocked,
    DatabaseReadOnly,
    StoreError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

    from tuning_db.place import Place

_OTHER_PLACE = "Name another one with --db or FAGEN_DB."
_MEANING: dict[str, tuple[type[StoreError], str, str]] = {
    "SQLITE_BUSY": (
        DatabaseLocked,
        "is locked by another process",
        "Try again when that process has finished.",
    ),
    "SQLITE_LOCKED": (DatabaseLocked, "is locked", "Try again."),
    "SQLITE_READONLY": (DatabaseReadOnly, "can't be written", _OTHER_PLACE),
    "SQLITE_CANTOPEN": (DatabaseReadOnly, "or a file beside it can't be opened", _OTHER_PLACE),
    "SQLITE_PERM": (DatabaseReadOnly, "can't be opened by this user", _OTHER_PLACE),
    "SQLITE_FULL": (StoreError, "can't grow: the disk is full", "Free some space."),
    "SQLITE_IOERR": (StoreError, "can't be read or written", "Look at the disk, then try again."),
    "SQLITE_CORRUPT": (DatabaseDamaged, "is damaged", f"Move it aside. {_OTHER_PLACE}"),
    "SQLITE_NOTADB": (DatabaseDamaged, "is no SQLite database", _OTHER_PLACE),
}


@contextmanager
def transaction(engine: Engine, place: Place, *, writes: bool) -> Iterator[Connection]:
    """The one place that opens, commits and rolls back. Driver errors leave as StoreError.

    A value that a column refuses leaves as ValueError.
    """
    try:
        with engine.connect().execution_options(writes=writes) as connection, connection.begin():
            yield connection
    except SQLAlchemyError as error:
        raise meaning(error, place) from error


def meaning(error: SQLAlchemyError, place: Place) -> Exception:
    """What a driver's error says to a user."""
    if isinstance(error, DBAPIError):
        name = getattr(error.orig, "sqlite_errorname", "")
        for prefix, (kind, what, next_step) in _MEANING.items():
            if name.startswith(prefix):
                return kind(f"Database {place} {what} ({error.orig}).", next_step)
        return StoreError(f"Database {place}: {error.orig}.", "Run: fagen db check")
    if isinstance(error, StatementError) and isinstance(error.orig, (ValueError, TypeError)):
        return ValueError(str(error.orig))
    return StoreError(f"Database {place}: {error}.", "Run: fagen db check")
