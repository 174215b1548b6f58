"""Many processes on one database: nothing is lost, nothing is half done, nobody waits for ever."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from store_rows import (
    NOW,
    OLD_GATE,
    V3_STEP,
    copy_of_v1,
    run_row,
    sql,
    third_version,
    verdict_row,
)
from tuning_db import Store, schema

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
Process = subprocess.Popen[str]


@contextmanager
def workers(jobs: list[tuple[object, ...]]) -> Iterator[list[Process]]:
    """One process a job, all loaded and waiting for `start`; none outlives the block."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    started = [
        subprocess.Popen(
            [sys.executable, HERE / "store_worker.py", *map(str, job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for job in jobs
    ]
    try:
        for process in started:
            assert line(process) == "ready"
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def start(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def last_line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.read().splitlines()[-1]


def integrity(path: Path) -> str:
    return str(sql(path, "PRAGMA integrity_check")[0][0])


# C03
def test_eight_processes_that_meet_on_an_empty_path_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.db"
    with workers([(path, "write", f"w{n}", 50) for n in range(8)]) as processes:
        for process in processes:
            start(process)
        assert [last_line(process) for process in processes] == ["done"] * 8
    store = Store(path)
    stored = {view.trial.program_key for view in store.trials()}
    assert stored == {f"w{n}-{i}" for n in range(8) for i in range(50)}
    assert len(store.trials()) == 400
    assert {view.trial.program_key for view in store.best()} == {f"w{n}-0" for n in range(8)}
    assert integrity(path) == "ok"


# C03
def test_sixteen_writers_of_a_thousand_trials_lose_none_and_readers_see_them_improve(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.db"
    Store(path, "write")
    writers = [(path, "improve", f"w{n}", 1000) for n in range(16)]
    readers = [(path, "watch", "", 16)] * 2
    with workers([*writers, *readers]) as processes:
        for process in processes:
            start(process)
        said = [process.communicate()[0].splitlines() for process in processes[:16]]
        assert [lines[-1] for lines in said] == ["done"] * 16
        asked = [process.communicate()[0].splitlines() for process in processes[16:]]
    assert [lines[-1] for lines in asked] == ["done"] * 2
    assert all(int(times) >= 5 for times, _ in asked), asked
    stored = sql(path, "SELECT id, program_key FROM trial")
    assert len(stored) == 16_000
    assert dict(stored) == {
        int(lines[i]): f"w{n}-{i}" for n, lines in enumerate(said) for i in range(1000)
    }
    best = {
        view.run.problem_key: (view.trial.program_key, view.best_us) for view in Store(path).best()
    }
    assert best == {f"w{n}": (f"w{n}-999", 11.0) for n in range(16)}
    assert integrity(path) == "ok"


def test_eight_processes_on_one_key_keep_every_row_and_the_fastest_is_best(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.db"
    Store(path, "write")
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM trial").fetchone() == (0,)
        with workers([(path, "write", "same", 10 + n) for n in range(8)]) as processes:
            for process in processes:
                start(process)
            assert [last_line(process) for process in processes] == ["done"] * 8
        assert reader.execute("SELECT count(*) FROM trial").fetchone() == (0,)
    store = Store(path)
    assert len(store.trials(keys={"problem_key": "same"})) == sum(range(10, 18))
    [best] = store.best()
    assert (best.trial.program_key, best.best_us, best.chosen) == ("same-0", 10.0, True)
    assert store.verdict("of all", "dev", "tool", OLD_GATE) == verdict_row(program="of all")


# C02
def test_a_process_killed_while_it_writes_loses_at_most_the_row_at_hand(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    stored = 0
    jobs: list[tuple[object, ...]] = [(path, "write", f"k{n}", 10**6) for n in range(5)]
    with workers(jobs) as processes:
        for number, process in enumerate(processes):
            start(process)
            said = [line(process) for _ in range(3 + 4 * number)]
            process.send_signal(signal.SIGKILL)
            assert process.stdout is not None
            said += process.stdout.read().splitlines()  # communicate() loses what was read ahead
            assert said[0] == "0"
            stored += len(said)
            rows = len(Store(path).trials())
            assert stored <= rows <= stored + number + 1
            assert integrity(path) == "ok"
            assert len(Store(path, "write").trials()) == rows


# O03
def test_a_killed_run_is_interrupted_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with workers([(path, "hold", "killed", 0), (path, "hold", "alive", 0)]) as processes:
        for process in processes:
            start(process)
            assert line(process) == "held"
        processes[0].kill()
        processes[0].wait()
        store = Store(path, "write")
        assert store.end_abandoned_runs(NOW) == 1
        states = {run.problem_key: (run.state, run.partial) for run in store.runs()}
    assert states == {"killed": ("interrupted", True), "alive": ("running", False)}


def add_to_step(migrations: Path, tail: str) -> None:
    (migrations / "versions" / "v0003_note.py").write_text(V3_STEP + tail)


def version(path: Path) -> str:
    return str(sql(path, f"SELECT * FROM {schema.VERSION_TABLE}")[0][0])


# D05
def test_two_migrations_at_once_are_one(tmp_path: Path) -> None:
    path, version_3 = copy_of_v1(tmp_path), third_version(tmp_path)
    add_to_step(version_3, "    time.sleep(0.3)\n")
    with workers([(path, "migrate", version_3, 3)] * 2) as processes:
        for process in processes:
            start(process)
        assert [last_line(process) for process in processes] == ["done"] * 2
    assert version(path) == "0003"
    assert [p.name for p in tmp_path.glob("old.db.*")] == ["old.db.backup-v1"]
    assert sql(path, "SELECT count(*), count(note) FROM run") == [(3, 0)]


# D05
def test_a_migration_killed_in_the_middle_never_happened(tmp_path: Path) -> None:
    path, version_3 = copy_of_v1(tmp_path), third_version(tmp_path)
    flag = tmp_path / "in the middle"
    add_to_step(version_3, f"    pathlib.Path({str(flag)!r}).touch()\n    time.sleep(60)\n")
    with workers([(path, "migrate", version_3, 3)]) as [process]:
        start(process)
        deadline = time.monotonic() + 30
        while not flag.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert flag.exists()
    assert version(path) == "0001"
    assert Store(path, "write").add_run(run_row()) == 2  # this process is of version 2
    add_to_step(version_3, "")
    with workers([(path, "migrate", version_3, 3)]) as [process]:
        start(process)
        assert last_line(process) == "done"
    assert version(path) == "0003"
    assert integrity(path) == "ok"
