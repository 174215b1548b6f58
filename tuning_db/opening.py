"""Opening a database: checks before anything is written, then a schema that is this version's."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from tuning_db import schema
from tuning_db.errors import (
    DatabaseDamaged,
    DatabaseMissing,
    DatabaseReadOnly,
    StoreError,
)
from tuning_db.place import Place, engine_of, network_file_system
from tuning_db.session import transaction

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

_MAGIC = b"SQLite format 3\0"
_ANOTHER = "Name another one with --db or FAGEN_DB."

log = logging.getLogger(__name__)


def open_for_reading(place: Place, wait_s: float) -> Engine:
    """Makes no file and changes none. Raises a StoreError that names the place."""
    path = place.path
    if path is None:
        return _new_memory(place) if place.url is None else _reader(place, wait_s)
    if not _present(path):
        raise DatabaseMissing(
            f"There is no database {path}.", "Run fagen tune to make one, or look at --db."
        )
    if _size_of_sqlite(path) == 0:
        raise DatabaseDamaged(
            f"{path} is empty (0 bytes), no database.", "Tune into it to fill it, or look at --db."
        )
    return _reader(place, wait_s)


def open_for_writing(place: Place, wait_s: float, *, migrates: bool = True) -> Engine:
    """Makes the folder and the file where they are missing, and migrates an older schema.

    A place that can't be written says so now, not after an hour of tuning.
    """
    if place.path is None and place.url is None:
        return _new_memory(place)
    if place.path is not None:
        _make_folder(place.path)
        if _present(place.path):
            _size_of_sqlite(place.path)
    engine = engine_of(place, "rwc", wait_s)
    with transaction(engine, place, writes=False) as connection:
        version = schema.version_of(connection, place)
    if version != schema.HEAD:
        _bring_to_head(engine, place, migrates)
    with transaction(engine, place, writes=True):
        pass  # takes the lock, which needs a file that can be written
    if place.path is not None:
        _set_journal(engine, place.path, wait_s)
    return engine


def _new_memory(place: Place) -> Engine:
    engine = engine_of(place, "rwc", 0)
    with transaction(engine, place, writes=True) as connection:
        schema.create(connection)
    return engine


def _reader(place: Place, wait_s: float) -> Engine:
    engine = engine_of(place, "ro", wait_s)
    with transaction(engine, place, writes=False) as connection:
        version = schema.version_of(connection, place)
    if version == 0:
        raise DatabaseDamaged(f"{place} has no tables yet.", "Tune into it to fill it.")
    if version < schema.HEAD:
        raise schema.too_old(place, version)
    return engine


def _bring_to_head(engine: Engine, place: Place, migrates: bool) -> None:
    with transaction(engine, place, writes=True) as connection:
        version = schema.version_of(connection, place)  # again: others may have been faster
        if version == schema.HEAD:
            return
        if version and not migrates:
            raise schema.too_old(place, version)
        if version and place.path is not None:
            copy = schema.back_up(place.path, version)
            log.warning("%s: schema %d -> %d, backup %s", place, version, schema.HEAD, copy.name)
        schema.migrate(connection)


def _set_journal(engine: Engine, path: Path, wait_s: float) -> None:
    """WAL, so that readers and the writer don't wait for each other; kept off network mounts,
    where its shared memory does not reach the other hosts and the file would be damaged."""
    network = network_file_system(path)
    if network is not None:
        log.warning("%s is on %s, a network file system: tune on one host only", path, network)
    wanted = "delete" if network else "wal"
    deadline = time.monotonic() + wait_s
    while True:
        try:
            if _journal_is(engine, wanted):
                return
        except (sqlite3.OperationalError, DBAPIError) as error:
            # SQLite does not wait for its lock here, as it does everywhere else.
            if "locked" in str(error) and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
        log.warning("%s: journal mode %s could not be set; going on without", path, wanted)
        return


def _journal_is(engine: Engine, wanted: str) -> bool:
    # On the driver's own connection: outside of any transaction, as SQLite demands.
    with closing(engine.raw_connection()) as connection:
        cursor = connection.cursor()
        now = cursor.execute("PRAGMA journal_mode").fetchone()[0]
        if now != wanted:
            now = cursor.execute(f"PRAGMA journal_mode={wanted}").fetchone()[0]
        return bool(now == wanted)


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseReadOnly(
            f"Can't make the folder of database {path}: {error.strerror}.", _ANOTHER
        ) from error
    if not os.access(path.parent, os.W_OK):  # SQLite needs files beside the database
        raise DatabaseReadOnly(f"The folder of database {path} can't be written.", _ANOTHER)


def _present(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreError(f"Can't look at {path}: {error.strerror}.", _ANOTHER) from error
    return True


def _size_of_sqlite(path: Path) -> int:
    """The size of a file that is empty or begins as SQLite's do. Raises DatabaseDamaged."""
    if path.is_dir():
        raise DatabaseDamaged(f"{path} is a directory, no database.", "Name a file in it.")
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise StoreError(f"Can't read {path}: {error.strerror}.", _ANOTHER) from error
    if head and head != _MAGIC:
        raise DatabaseDamaged(
            f"{path} is no SQLite database.", f"It was left as it is. {_ANOTHER}"
        )
    return _length(path)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
