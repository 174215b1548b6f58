"""Where a database is, and how a connection to it is made."""

from __future__ import annotations

import logging
import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import NullPool, StaticPool

from tuning_db.errors import DatabaseReadOnly, StoreError

Access = Literal["rwc", "ro"]

log = logging.getLogger(__name__)

_URL = re.compile(r"[a-z][a-z0-9_+]*://")
_NETWORK = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "fuse.sshfs")


@dataclass(frozen=True)
class Place:
    """A file, a server's URL, or neither: memory."""

    path: Path | None = None
    url: URL | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return self.url.render_as_string() if self.url is not None else "memory"


def place_of(where: str | Path | None) -> Place:
    """Reads a setting: a path (taken as it is, whatever characters it has), an SQLAlchemy URL,
    or None or ":memory:" for a database that ends with its Store."""
    if where is None or where == ":memory:":
        return Place()
    if isinstance(where, Path) or not _URL.match(where):
        if "\0" in str(where):
            raise StoreError(f"{str(where)!r} is no path.", "Give a path or an SQLAlchemy URL.")
        return Place(path=Path(where).absolute())
    try:
        url = make_url(where)
    except ArgumentError as error:
        raise StoreError(
            f"{where!r} is no SQLAlchemy URL.", "Give a path, or sqlite:///path."
        ) from error
    if url.get_backend_name() != "sqlite":
        return Place(url=url)
    if url.database in (None, "", ":memory:"):
        return Place()
    if url.query or str(url.database).startswith("file:"):
        raise StoreError(f"{where!r} has SQLite options.", "Give the path alone.")
    return Place(path=Path(str(url.database)).absolute())


def engine_of(place: Place, access: Access, wait_s: float) -> Engine:
    """An engine whose transactions begin when they are told to, and wait at most wait_s."""
    if place.url is not None:
        return _server_engine(place.url)
    if place.path is None:
        # One connection is one memory database: every transaction must see the same one.
        engine = create_engine(URL.create("sqlite"), creator=_memory, poolclass=StaticPool)
    else:
        path = place.path
        # No connection outlives its transaction: nothing to inherit over a fork, and the last
        # one to close folds the write-ahead log into the file, which can then be copied.
        engine = create_engine(
            URL.create("sqlite"),
            creator=lambda: _connect(path, access, wait_s),
            poolclass=NullPool,
        )
        # It logs the traceback of what it raises anyway; most of a write is the closing.
        logging.getLogger("sqlalchemy.pool.impl.NullPool").addFilter(_no_interrupt)
    event.listen(engine, "begin", _begin)
    return engine


def network_file_system(path: Path) -> str | None:
    """The kind of network file system that holds a path, or None. Known on Linux alone."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        real = path.resolve()
    except OSError:
        return None
    holder, kind = Path("/"), ""
    for line in mounts:
        mounted, fs_type = line.split()[1:3]
        folder = Path(mounted.replace("\\040", " "))
        if real.is_relative_to(folder) and len(folder.parts) >= len(holder.parts):
            holder, kind = folder, fs_type
    return kind if kind.startswith(_NETWORK) else None


def _no_interrupt(record: logging.LogRecord) -> bool:
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, KeyboardInterrupt)


def _server_engine(url: URL) -> Engine:
    try:
        return create_engine(url, pool_pre_ping=True)
    except (NoSuchModuleError, ImportError) as error:
        raise StoreError(
            f"No driver for {url.render_as_string()}: {error}.",
            "Install the driver, or give a path.",
        ) from error


def _connect(path: Path, access: Access, wait_s: float) -> sqlite3.Connection:
    if access == "rwc":
        return _open(path, "mode=rwc", wait_s)
    try:
        return _open(path, "mode=ro", wait_s)
    except sqlite3.OperationalError as error:
        if not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
            raise
    # SQLite wants files beside a database in WAL mode, and can't make them here. A writer would
    # have made them, so there is none, and for one transaction the file never changes.
    if _has_bytes(path, "-journal"):
        raise DatabaseReadOnly(
            f"{path} was left in the middle of a write and can't be repaired here.",
            "Copy it with the files beside it to a folder that can be written.",
        )
    if _has_bytes(path, "-wal"):
        _tell_of_unread_rows(path)
    return _open(path, "mode=ro&immutable=1", wait_s)


def _open(path: Path, options: str, wait_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.as_uri()}?{options}",  # as_uri quotes ?, # and %
        uri=True,
        timeout=wait_s,
        isolation_level=None,  # the driver would begin too late: after the first read
        check_same_thread=False,
    )
    return _configured(connection)


def _has_bytes(path: Path, ending: str) -> bool:
    beside = path.with_name(path.name + ending)
    return beside.exists() and beside.stat().st_size > 0


@lru_cache(maxsize=16)
def _tell_of_unread_rows(path: Path) -> None:
    log.warning("%s: the newest rows, in %s-wal, can't be read here", path, path.name)


def _memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    return _configured(connection)


def _configured(connection: sqlite3.Connection) -> sqlite3.Connection:
    try:
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1")  # what can't be read says so
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _begin(connection: Connection) -> None:
    # A write transaction takes its lock at once: one that began by reading could not wait for it.
    writes: Any = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
