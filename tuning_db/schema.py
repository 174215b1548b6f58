"""Which version a database has, and bringing it to this one."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, inspect, text

from tuning_db.errors import ForeignDatabase, SchemaTooNew, SchemaTooOld
from tuning_db.tables import metadata

if TYPE_CHECKING:
    from tuning_db.place import Place

HEAD = 2
VERSION_TABLE = "fagen_schema_version"  # `alembic_version` is Optuna's in a shared file
MIGRATIONS = Path(__file__).parent / "migrations"


def version_of(connection: Connection, place: Place) -> int:
    """The schema version; 0 means: no table at all. Raises ForeignDatabase and SchemaTooNew."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return 0
    if VERSION_TABLE not in tables:
        raise ForeignDatabase(
            f"{place} is a database of something else (tables {', '.join(tables[:4])}).",
            "Nothing was written. Name another one with --db or FAGEN_DB.",
        )
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
    version = int(found[0]) if len(found) == 1 and str(found[0]).isdigit() else None
    if version is None or version > HEAD:
        raise SchemaTooNew(
            f"{place} has schema version {' '.join(map(str, found)) or 'unknown'}; "
            f"this fagen knows up to {HEAD}.",
            "Nothing was written. Update fagen, or name another database with --db or FAGEN_DB.",
        )
    return version


def lacking(connection: Connection) -> list[str]:
    """Tables and columns of this version that a database of this version does not have."""
    found = inspect(connection)
    present = set(found.get_table_names())
    missing = [f"there is no table {name}" for name in metadata.tables if name not in present]
    for name, table in metadata.tables.items():
        if name in present:
            columns = {column["name"] for column in found.get_columns(name)}
            missing += [
                f"{name} has no column {c.name}" for c in table.columns if c.name not in columns
            ]
    return missing


def too_old(place: Place, version: int) -> SchemaTooOld:
    return SchemaTooOld(
        f"{place} has schema version {version}; this fagen reads {HEAD}.",
        "Run: fagen db check (it keeps a backup beside the file).",
    )


def migrate(connection: Connection) -> None:
    """Every missing step inside the caller's transaction: all of them, or none."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    steps = ScriptDirectory(str(MIGRATIONS))

    def to_head(revision: Any, context: MigrationContext) -> Any:
        return steps._upgrade_revs("head", revision)

    context = MigrationContext.configure(
        connection, opts={"version_table": VERSION_TABLE, "fn": to_head}
    )
    with Operations.context(context):
        context.run_migrations()


def create(connection: Connection) -> None:
    """The head schema in one go, for a database in memory: no migration to load."""
    metadata.create_all(connection)
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL)"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES ('{HEAD:04}')"))


def back_up(path: Path, version: int) -> Path:
    """Copies a database beside itself, over no earlier backup. Returns the copy's path."""
    copy = path.with_name(f"{path.name}.backup-v{version}")
    number = 1
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.backup-v{version}.{number}")
    unfinished = copy.with_name(copy.name + ".part")
    unfinished.unlink(missing_ok=True)
    source = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    sink = sqlite3.connect(f"{unfinished.as_uri()}?mode=rwc", uri=True)
    try:
        source.backup(sink)
        # The copy must be one file, whatever the journal of the source.
        sink.execute("PRAGMA journal_mode=DELETE")
    finally:
        source.close()
        sink.close()
    return unfinished.rename(copy)
