"""Migrations: where they arrive, and that they happen as a whole or not at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, MetaData, Table, Text

from store_rows import (
    NOW,
    V2,
    V3_STEP,
    copy_of_v1,
    run_row,
    sql,
    third_version,
)
from tuning_db import (
    DatabaseLocked,
    SchemaTooNew,
    SchemaTooOld,
    Store,
    StoreError,
    schema,
    tables,
)
from tuning_db.place import engine_of, place_of
from tuning_db.session import transaction

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def version_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A schema 3 that this process takes for its own; the folder of its migrations."""
    monkeypatch.setattr(schema, "MIGRATIONS", third_version(tmp_path))
    monkeypatch.setattr(schema, "HEAD", 3)
    return schema.MIGRATIONS


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return copy_of_v1(tmp_path)


def test_migrations_arrive_at_the_tables(tmp_path: Path) -> None:
    here = place_of(tmp_path / "t.db")
    Store(here.path, "write")
    more = MetaData()
    for table in tables.metadata.tables.values():
        table.to_metadata(more)
    Table("extra", more, Column("name", Text))
    with transaction(engine_of(here, "ro", 1), here, writes=False) as connection:
        opts = {"compare_type": True, "version_table": schema.VERSION_TABLE}
        context = MigrationContext.configure(connection, opts=opts)
        assert compare_metadata(context, tables.metadata) == []
        assert [change[0] for change in compare_metadata(context, more)] == ["add_table"]


def test_the_steps_still_make_the_schema_of_version_2(tmp_path: Path) -> None:
    Store(tmp_path / "t.db", "write")
    schemas = [sql(path, "SELECT * FROM sqlite_master") for path in (tmp_path / "t.db", V2)]
    made, committed = ({(row[1], row[4]) for row in rows} for rows in schemas)
    assert made == committed


def test_memory_has_the_tables_that_a_file_has(tmp_path: Path) -> None:
    Store(tmp_path / "t.db", "write")
    memory = Store(None, "write")
    with closing(memory), memory._session() as connection:
        rows = connection.exec_driver_sql("SELECT name FROM sqlite_master ORDER BY name")
        assert [tuple(row) for row in rows] == sql(
            tmp_path / "t.db",
            "SELECT name FROM sqlite_master WHERE name NOT LIKE "
            "'sqlite_autoindex_fagen%' ORDER BY name",
        )


def test_version_2_is_read() -> None:
    store = Store(V2, "read")
    [run] = store.runs()
    assert (run.problem["shape"]["seq_q"], run.state, run.started) == (8192, "finished", NOW)
    assert [(v.trial.program_key, v.best_us) for v in store.best(each=9)] == [
        ("slow-but-chosen", 11.0),
        ("fast-once", 12.0),
    ]


# D05
def test_an_older_schema_is_migrated_with_a_backup(old: Path, version_3: Path) -> None:
    before = sql(old, "SELECT * FROM trial")
    store = Store(old, "write")
    assert sql(old, f"SELECT version_num FROM {schema.VERSION_TABLE}") == [("0003",)]
    assert sql(old, "SELECT note FROM run") == [(None,)]
    assert sql(old, "SELECT * FROM trial") == [(*row, None) for row in before]  # `seconds`
    backup = old.with_name("old.db.backup-v1")
    assert sql(backup, f"SELECT version_num FROM {schema.VERSION_TABLE}") == [("0001",)]
    assert sql(backup, "SELECT * FROM trial") == before
    store.add_run(run_row())
    Store(old, "write")
    assert sorted(p.name for p in old.parent.glob("old.db.*")) == ["old.db.backup-v1"]


@pytest.mark.parametrize("options", [{"mode": "read"}, {"mode": "write", "migrates": False}])
def test_an_older_schema_is_left_alone_by_who_may_not_migrate(
    old: Path, version_3: Path, options: Any
) -> None:
    before = old.read_bytes()
    with pytest.raises(SchemaTooOld, match=r"old\.db has schema version 1"):
        Store(old, **options)
    assert old.read_bytes() == before
    assert not list(old.parent.glob("*.backup*"))


# D05
@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("version", ["9999", "abc"])
def test_a_newer_schema_is_refused_and_not_written(old: Path, mode: Any, version: str) -> None:
    sql(old, f"UPDATE {schema.VERSION_TABLE} SET version_num = '{version}'")
    before = old.read_bytes()
    with pytest.raises(SchemaTooNew, match=version):
        Store(old, mode)
    assert old.read_bytes() == before


# D05
def test_a_migration_that_fails_leaves_the_old_schema(old: Path, version_3: Path) -> None:
    step = version_3 / "versions" / "v0003_note.py"
    step.write_text(V3_STEP + "    op.execute('INSERT INTO nothing VALUES (1)')\n")
    with pytest.raises(StoreError):
        Store(old, "write")
    assert sql(old, f"SELECT version_num FROM {schema.VERSION_TABLE}") == [("0001",)]
    assert "note" not in {row[1] for row in sql(old, "PRAGMA table_info(run)")}
    step.write_text(V3_STEP)
    Store(old, "write")
    assert "note" in {row[1] for row in sql(old, "PRAGMA table_info(run)")}


# D05
def test_a_migration_waits_for_a_lock_and_then_fails_as_a_whole(
    old: Path, version_3: Path
) -> None:
    holder = sqlite3.connect(old, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(DatabaseLocked):
        Store(old, "write", wait_s=0.1)
    holder.execute("ROLLBACK")
    holder.close()
    assert sql(old, f"SELECT version_num FROM {schema.VERSION_TABLE}") == [("0001",)]
    assert len(Store(old, "write").runs()) == 1


def test_other_tables_beside_ours_are_nobodys_business(tmp_path: Path) -> None:
    Store(tmp_path / "t.db", "write")
    sql(tmp_path / "t.db", "CREATE TABLE alembic_version (version_num TEXT)")
    sql(tmp_path / "t.db", "INSERT INTO alembic_version VALUES ('v3.2.0.a')")
    assert Store(tmp_path / "t.db", "write").add_run(run_row()) == 1
