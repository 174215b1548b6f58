"""Paths and files: what each kind of bad one does, and folders that can't be written."""

from __future__ import annotations

import random
import shutil
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from store_rows import (
    V2,
    python,
    run_row,
    sql,
    trial_row,
)
from tuning_db import (
    DatabaseDamaged,
    DatabaseLocked,
    DatabaseMissing,
    DatabaseReadOnly,
    ForeignDatabase,
    Store,
    StoreError,
    place,
)
from tuning_db.place import network_file_system, place_of


@pytest.mark.parametrize("name", ["a?b#c%20d e.db", "mode=ro&x.db", "ü/neu/t.db", "[1]:2@3.db"])
def test_any_character_may_be_in_a_path(tmp_path: Path, name: str) -> None:
    Store(str(tmp_path / name), "write").add_run(run_row())
    assert (tmp_path / name).is_file()
    assert len(Store(str(tmp_path / name)).runs()) == 1


def test_relative_paths_and_urls_mean_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("t.db", "write")
    monkeypatch.chdir("/")
    store.add_run(run_row())
    assert len(Store(f"sqlite:///{tmp_path}/t.db").runs()) == 1
    assert place_of("sqlite:///x.db").path == Path("/x.db")
    assert place_of("sqlite://").path is None


@pytest.mark.parametrize(
    "where", ["nosuchthing://host/db", "sqlite:///x.db?mode=ro", "sqlite:///file:x", "a\0b"]
)
def test_a_setting_that_can_not_be_used_says_so(where: str) -> None:
    with pytest.raises(StoreError) as raised:
        Store(where, "write")
    assert raised.value.next_step


def _random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(5000))


def _foreign(path: Path) -> None:
    sql(path, "CREATE TABLE photos (name TEXT)")


def _cut(path: Path) -> None:
    path.write_bytes(V2.read_bytes()[: V2.stat().st_size // 2])


BAD_FILES: dict[str, Any] = {
    "header only": (lambda path: path.write_bytes(V2.read_bytes()[:100]), DatabaseDamaged),
    "cut in half": (_cut, DatabaseDamaged),
    "random bytes": (_random_bytes, DatabaseDamaged),
    "text": (lambda path: path.write_text("hello\n" * 100), DatabaseDamaged),
    "one byte": (lambda path: path.write_bytes(b"S"), DatabaseDamaged),
    "directory": (lambda path: path.mkdir(), DatabaseDamaged),
    "other tables": (_foreign, ForeignDatabase),
}


# C02
@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_named_and_left_as_it_is(tmp_path: Path, kind: str, mode: Any) -> None:
    make, error = BAD_FILES[kind]
    path = tmp_path / "bad.db"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(error) as raised:
        Store(path, mode, wait_s=0.1)
    assert str(path) in raised.value.message
    assert raised.value.next_step
    assert before == (path.read_bytes() if path.is_file() else b"")


# C02
def test_an_empty_file_is_no_database_to_read_and_a_new_one_to_write(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    path.touch()
    with pytest.raises(DatabaseDamaged, match="0 bytes"):
        Store(path)
    assert Store(path, "write").add_run(run_row()) == 1


def test_reading_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(DatabaseMissing):
        Store(tmp_path / "folder" / "t.db")
    assert list(tmp_path.iterdir()) == []


def test_wal_is_on_and_readers_do_not_block_the_writer(tmp_path: Path) -> None:
    store = Store(tmp_path / "t.db", "write", wait_s=0.2)
    store.add_run(run_row())
    reader = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM run").fetchone() == (1,)
    store.add_run(run_row())
    assert reader.execute("SELECT count(*) FROM run").fetchone() == (1,)
    reader.close()
    assert len(store.runs()) == 2


def test_a_lock_is_waited_for_and_then_named(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    store = Store(path, "write", wait_s=0.1)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseLocked, match=r"t\.db"):
        store.add_run(run_row())
    with pytest.raises(DatabaseLocked, match=r"t\.db"):
        Store(path, "write", wait_s=0.1)
    assert Store(path).runs() == []
    holder.execute("ROLLBACK")
    holder.close()
    assert store.add_run(run_row()) == 1


# C02
def test_a_full_disk_is_named_and_costs_the_row_at_hand_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured = place._configured

    def small(connection: sqlite3.Connection) -> sqlite3.Connection:
        connection.execute("PRAGMA max_page_count=18")
        return configured(connection)

    store = Store(tmp_path / "t.db", "write")
    run_id = store.add_run(run_row())
    monkeypatch.setattr(place, "_configured", small)
    ids: list[int] = []
    with pytest.raises(StoreError, match="disk is full"):
        while len(ids) < 1000:
            ids.append(store.add_trial(trial_row(run_id, 1.0, reason="x" * 500)))
    assert ids
    assert sorted(v.trial.id or 0 for v in store.trials()) == ids
    assert sql(tmp_path / "t.db", "PRAGMA integrity_check") == [("ok",)]


# T06
def test_ctrl_c_while_a_connection_closes_logs_no_traceback_and_the_row_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupted(sqlite3.Connection):
        def close(self) -> None:
            super().close()
            raise KeyboardInterrupt

    store = Store(tmp_path / "t.db", "write")
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Interrupted))
    with pytest.raises(KeyboardInterrupt):
        store.add_run(run_row())
    monkeypatch.undo()
    assert caplog.text == ""
    assert len(store.runs()) == 1


# C04
def test_a_path_below_a_file_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatabaseReadOnly, match="folder"):
        Store(tmp_path / "file" / "sub" / "t.db", "write")
    with pytest.raises(DatabaseMissing):
        Store(tmp_path / "file" / "t.db")


AS_A_USER = """
import ctypes, os, sys
sys.path[:0] = sys.argv[3:]
from store_rows import run_row
from tuning_db import DatabaseReadOnly, Store
if os.getuid() == 0:  # give up CAP_DAC_OVERRIDE, by which no file mode stops root
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, of 0 to 31, then 32 up
    assert libc.capget(header, rights) == 0
    rights[0] &= ~2
    rights[1] &= ~2
    assert libc.capset(header, rights) == 0
path = sys.argv[1]
"""
CUT_OFF = (
    AS_A_USER
    + """
try:
    Store(path)
except DatabaseReadOnly as error:
    print("middle of a write" in str(error))
"""
)
READ_ONLY = (
    AS_A_USER
    + """
print(len(Store(path).trials()), sorted(os.listdir(os.path.dirname(path))))
try:
    Store(path, "write").add_run(run_row())
except DatabaseReadOnly as error:
    print(path in str(error), bool(error.next_step))
"""
)


# C02
def test_a_write_that_was_cut_off_is_not_read_where_it_can_not_be_repaired(
    tmp_path: Path,
) -> None:
    path = Path(shutil.copy(V2, tmp_path / "t.db"))
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA cache_size=1")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("CREATE TABLE half AS SELECT * FROM trial, trial AS b, trial AS c")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (path, path.with_name("t.db-journal")):
        shutil.copy(file, copy)
    holder.close()
    copy.chmod(0o555)
    try:
        shown = python(CUT_OFF, copy / "t.db", 0)
    finally:
        copy.chmod(0o755)
    assert shown == "True\n"
    assert len(Store(copy / "t.db", "write").trials()) == 3


# C04
@pytest.mark.parametrize("kind", ["delete", "wal", "wal with newer rows"])
def test_a_copy_in_a_folder_that_can_not_be_written_is_read(tmp_path: Path, kind: str) -> None:
    path = Path(shutil.copy(V2, tmp_path / "t.db"))
    sql(path, f"PRAGMA journal_mode={kind.split()[0]}")
    beside = ["t.db-wal"] if "newer" in kind else []
    for name_beside in beside:
        (tmp_path / name_beside).write_bytes(b"what a checkpoint has not moved yet")
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        shown = python(READ_ONLY, path, 0)
    finally:
        tmp_path.chmod(0o755)
    assert shown.splitlines() == [f"3 {['t.db', *beside]}", "True True"]


@pytest.mark.parametrize(
    ("mount", "kind"), [("srv:/x / nfs4 rw 0 0\n", "nfs4"), ("/dev/vda / ext4 rw 0 0\n", None)]
)
def test_a_network_file_system_is_known_by_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, kind: str | None
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: mount)
    assert network_file_system(tmp_path / "t.db") == kind


def test_on_a_network_file_system_wal_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tuning_db.opening.network_file_system", lambda _: "nfs4")
    Store(tmp_path / "t.db", "write").add_run(run_row())
    assert sql(tmp_path / "t.db", "PRAGMA journal_mode") == [("delete",)]
    assert "nfs4" in caplog.text
