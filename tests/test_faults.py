"""Whole runs with real children and a real database, in which candidates, the machine and the user
do their worst."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from acting import (
    HANG,
    RIGHT,
    TESTS,
    Act,
    acting_environment,
    awaited,
    killing,
    left_over,
    rendering,
)
from acting_tune import CANDIDATES
from fagen.config import Config
from fagen.errors import CacheError, DatabaseError, FagenError
from fagen.generate.families import config_from_dict
from fagen.generate.program import Program
from fagen.generate.space import SearchSpace
from fagen.outcome import Status
from fagen.records import Record, Records
from fagen.target import Toolchain
from fagen.tune.children import Child
from fagen.tune.events import Event, TrialDone
from fagen.tune.ledger import Ledger
from fagen.tune.plan import Plan
from fagen.tune.pool import BuildPool
from fagen.tune.proxies import GpuWorker
from fagen.tune.tuner import run
from fakes import PROBLEM, TARGET, Policy, formula_us, small_space
from store_rows import sql
from tuning_db import Store, place

Tuner = subprocess.Popen[str]
TOOLCHAIN = Toolchain("3.7.1", "12.9.86")
# Says who it is to a test that kills it; that it is not killed is a time-out, and another status.
VICTIM = "Path(os.environ['ACTING'], '{0}').write_text(str(os.getpid()))\n" + HANG
SHOUT = "sys.stderr.write('{0}'); sys.stderr.flush(); "
WRONG = "value = Tried(Status.WRONG_RESULT, 'o_max[ragged]: error 0.9 over budget 0.002', FAILED)"

FAULTS = {
    "a compiler that hangs": Act(HANG, status=Status.TIMED_OUT, reason="build .*deadline"),
    "a compiler that hangs in a process of its own": Act(
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
        status=Status.TIMED_OUT,
        reason="build .*deadline",
    ),
    "a compiler that aborts": Act(
        SHOUT.format("LLVM ERROR: out of tiles") + "os.abort()",
        status=Status.BUILD_ERROR,
        reason="build .*SIGABRT.*LLVM ERROR: out of tiles",
    ),
    "a compiler that ends with 134": Act(
        "os._exit(134)", status=Status.BUILD_ERROR, reason="build .*exit code 134"
    ),
    "a compiler killed from outside": Act(
        VICTIM.format("victim-build"), status=Status.BUILD_ERROR, reason="build .*SIGKILL"
    ),
    "a source that ptxas refuses": Act(
        "raise BuildFailed('ptxas fatal: no such thing', Status.BUILD_ERROR)",
        status=Status.BUILD_ERROR,
        reason="ptxas fatal",
    ),
    "a template that does not work": Act(
        "raise KeyError('block_q')", status=Status.BUILD_ERROR, reason="KeyError: 'block_q'"
    ),
    "too much shared memory": Act(
        "raise BuildFailed('needs 400000 bytes of shared memory', Status.OUT_OF_RESOURCES)",
        status=Status.OUT_OF_RESOURCES,
        reason="400000 bytes of shared memory",
    ),
    "an endless kernel": Act(
        device=HANG, status=Status.TIMED_OUT, reason="gpu .*deadline", ends=True
    ),
    "a kernel that stops its process": Act(
        device="os.kill(os.getpid(), signal.SIGSTOP)",
        status=Status.TIMED_OUT,
        reason="gpu .*deadline",
        ends=True,
    ),
    "a segmentation fault": Act(
        device="os.kill(os.getpid(), signal.SIGSEGV)",
        status=Status.CRASHED,
        reason="gpu .*SIGSEGV",
        ends=True,
    ),
    "a driver that aborts": Act(
        device=SHOUT.format("terminate called") + "os.abort()",
        status=Status.CRASHED,
        reason="gpu .*SIGABRT.*terminate called",
        ends=True,
    ),
    "an exit": Act(
        device="sys.exit(3)", status=Status.CRASHED, reason="gpu .*exit code 3", ends=True
    ),
    "a worker killed from outside": Act(
        device=VICTIM.format("victim-gpu"),
        status=Status.CRASHED,
        reason="gpu .*SIGKILL",
        ends=True,
    ),
    "an illegal access": Act(
        device="raise RuntimeError('CUDA error: an illegal memory access was encountered')",
        status=Status.CRASHED,
        reason="illegal memory access",
        ends=True,
    ),
    "a misaligned address": Act(
        device="raise RuntimeError('CUDA error: misaligned address')",
        status=Status.CRASHED,
        reason="misaligned address",
        ends=True,
    ),
    "a launch that raises": Act(
        device="raise TypeError('launch() takes 3 arguments')",
        status=Status.CRASHED,
        reason="takes 3 arguments",
    ),
    "device memory": Act(
        device="raise RuntimeError('CUDA out of memory. Tried to allocate 20 GiB')",
        status=Status.OUT_OF_RESOURCES,
        reason="CUDA out of memory",
    ),
    "registers": Act(
        device="raise RuntimeError('Triton Error [CUDA]: too many resources requested')",
        status=Status.OUT_OF_RESOURCES,
        reason="too many resources",
    ),
    "host memory": Act(device="raise MemoryError", status=Status.CRASHED, reason="MemoryError"),
    "a wrong result": Act(device=WRONG, status=Status.WRONG_RESULT, reason="0.9 over budget"),
    "another wrong result": Act(device=WRONG, status=Status.WRONG_RESULT, reason="over budget"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where acting children look, and what they are marked with."""
    for module in ("pool", "proxies"):
        acting = partial(Child, module="acting_worker")
        monkeypatch.setattr(f"fagen.tune.{module}.Child", acting)
    for name, value in acting_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def records(folder: Path) -> Iterator[Records]:
    with Records.open(str(folder / "t.db"), "write", config_from_dict) as opened:
        yield opened


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.tune.proxies.TRY_LIMIT_S", 3.0)
    monkeypatch.setattr("fagen.tune.proxies.FIRST_LIMIT_S", 4.0)


def plan_of(
    records: Records, space: SearchSpace, acts: dict[Config, Act], **changes: object
) -> Plan:
    words: dict[str, object] = {
        "problem": PROBLEM,
        "target": TARGET,
        "space": space,
        "ledger": Ledger(records, PROBLEM, TARGET, TOOLCHAIN),
        "workers": (GpuWorker("cuda:0"),),
        "builder": BuildPool(TARGET, 2, limit_s=3.0),
        "render": rendering(lambda config: acts.get(config, RIGHT)),
        "policy": Policy(),
        "timed": True,
        "trials": len(space.configs),
        "timeout_s": 120.0,
    }
    return Plan(**(words | changes))  # type: ignore[arg-type]


def rows_of(records: Records) -> list[Record]:
    """In the order in which they were stored."""
    return sorted(records.trials(), key=lambda record: record.trial_id)


# T02, T03
def test_a_fault_of_every_kind_costs_its_own_row_and_nothing_else(
    folder: Path, records: Records, short_limits: None
) -> None:
    space = small_space(48)
    fastest_first = sorted(space.configs, key=formula_us)
    acts = dict(zip(fastest_first[::2], FAULTS.values(), strict=False))
    assert len(acts) == len(FAULTS) >= 20
    plan = plan_of(records, space, acts)
    open_files = len(os.listdir("/proc/self/fd"))
    with killing(folder / "victim-build", folder / "victim-gpu") as killed:
        result = run(plan)
    assert len(killed) == 2
    assert left_over(folder) == {}
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert result.state == "finished" and result.seconds < plan.timeout_s
    rows = rows_of(records)
    assert Counter(row.config for row in rows) == Counter(space.configs)
    for row in rows:
        act = acts.get(row.config, RIGHT)
        assert (row.status, row.median_us) == (
            act.status,
            formula_us(row.config) if act is RIGHT else None,
        )
        assert re.search(act.reason, row.outcome.reason), (act, row.outcome.reason)
    assert_replaced_where_needed(rows, acts)
    best = min((c for c in space.configs if c not in acts), key=formula_us)
    assert result.winner is not None and result.winner.config == best
    assert result.winner_us == formula_us(best)
    served = records.best(PROBLEM, TARGET, TOOLCHAIN)
    assert served is not None and served.config == best and served.chosen
    again = run(plan_of(records, space, acts))
    assert again.counts == {} and again.tried == 48
    assert len(rows_of(records)) == 48


def assert_replaced_where_needed(rows: list[Record], acts: dict[Config, Act]) -> None:
    """Right candidates were tried in one process, until one between them ended it."""
    processes: list[str] = []
    ended = True
    for row in rows:
        ended |= acts.get(row.config, RIGHT).ends
        if row.status is Status.OK:
            assert row.verdict is not None
            assert ended == (row.verdict.where not in processes[-1:]), row
            processes.append(row.verdict.where)
            ended = False
    assert len(set(processes)) >= 3


# T03
@pytest.mark.parametrize("where", ["build", "device"])
def test_candidates_that_hang_do_not_take_a_run_past_its_budget(
    folder: Path, records: Records, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    timeout_s, space = 8.0, small_space(12)
    # Room for a loaded machine, which starts a child slowly.
    monkeypatch.setattr("fagen.tune.plan.RACE_SHARE", 0.5)
    acts = {config: Act(**{where: HANG}) for config in space.configs[1:]}
    plan = plan_of(records, space, acts, timeout_s=timeout_s, builder=BuildPool(TARGET, 2))
    result = run(plan)
    assert result.state == "time_up" and result.seconds < timeout_s
    assert result.winner is not None and result.winner.config == space.configs[0]
    # Cut off by the run's own end: not the fault of whoever was under way.
    assert [row.config for row in rows_of(records)] == [space.configs[0]]
    assert left_over(folder) == {}


# What kills a process between two candidates is no candidate's fault.


def at_third_row(act: Callable[[], None]) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if isinstance(event, TrialDone) and event.done == 3:
            act()

    return on_event


def kill(child: Child) -> None:
    process = child._process
    assert process is not None
    process.kill()
    assert awaited(lambda: process.poll() is not None, 5.0)


@pytest.mark.parametrize("moment", ["idle", "starting-gpu", "preparing-gpu"])
def test_a_gpu_process_killed_between_candidates_costs_no_row(
    folder: Path, records: Records, moment: str
) -> None:
    space, worker = small_space(8), GpuWorker("cuda:0")

    def strike() -> None:
        (folder / moment).touch()
        kill(worker._child)

    plan = plan_of(records, space, {}, workers=(worker,), on_event=at_third_row(strike))
    result = run(plan)
    assert result.counts == {Status.OK: 8}
    assert len({row.verdict.where for row in rows_of(records) if row.verdict is not None}) == 2


@pytest.mark.parametrize("moment", ["starting-gpu", "preparing-gpu"])
def test_a_gpu_that_is_lost_ends_the_run_and_is_no_candidates_fault(
    folder: Path, records: Records, moment: str
) -> None:
    space, worker = small_space(8), GpuWorker("cuda:0")

    def strike() -> None:
        (folder / moment).write_text("every time")
        kill(worker._child)

    plan = plan_of(records, space, {}, workers=(worker,), on_event=at_third_row(strike))
    with pytest.raises(FagenError, match=r"GPU .*SIGKILL") as lost:
        run(plan)
    assert lost.value.next_step
    assert [row.status for row in rows_of(records)] == [Status.OK] * 3
    assert left_over(folder) == {}
    (folder / moment).unlink()
    assert run(plan_of(records, space, {})).counts == {Status.OK: 5}


def test_a_build_process_killed_between_candidates_costs_no_row(folder: Path) -> None:
    programs = [plan_render(config) for config in small_space(4).configs]
    pool = BuildPool(TARGET, 1)
    try:
        assert pool.submit(programs[0]).result(60).status is Status.OK
        for moment, program in zip(["idle", "starting-build"], programs[1:], strict=False):
            (folder / moment).touch()
            kill(pool._children[0])
            assert pool.submit(program).result(60).status is Status.OK
        (folder / "starting-build").write_text("every time")
        kill(pool._children[0])
        with pytest.raises(FagenError, match=r"build .*SIGKILL") as lost:
            pool.submit(programs[3]).result(60)
        assert lost.value.next_step
    finally:
        pool.close()
    assert left_over(folder) == {}


def plan_render(config: Config) -> Program:
    return rendering(lambda _: RIGHT)(PROBLEM, config)


@pytest.mark.parametrize("lost", [False, True], ids=["others race", "the GPU is lost"])
def test_a_finalist_that_kills_its_process_does_not_win_and_blames_no_other(
    folder: Path, records: Records, lost: bool
) -> None:
    space = small_space(8)
    best, second = sorted(space.configs, key=formula_us)[:2]
    break_gpu = "Path(os.environ['ACTING'], 'preparing-gpu').write_text('every time')\n"
    acts = {best: Act(confirm=break_gpu * lost + "os.abort()")}
    result = run(plan_of(records, space, acts))
    assert result.winner is not None and result.winner.config == second
    if lost:
        assert re.search("No race: The GPU can't be used: .*SIGKILL", result.note)
    else:
        assert (result.note, result.winner_us) == ("", formula_us(second))
    rows = Counter((row.config, row.status) for row in rows_of(records))
    assert rows == Counter([(c, Status.OK) for c in space.configs] + [(best, Status.CRASHED)])
    served = records.best(PROBLEM, TARGET, TOOLCHAIN)
    assert served is not None and served.config == second
    assert left_over(folder) == {}


# The database fails under a run.


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """As by another process that writes, and does not come to an end."""
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """A limit on the file's pages says the same as the disk would."""
    pages = int(sql(path, "PRAGMA page_count")[0][0])
    configured = place._configured

    def full(connection: sqlite3.Connection) -> sqlite3.Connection:
        connection.execute(f"PRAGMA max_page_count={pages}")
        return configured(connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "_configured", full)
        yield


# C02, C03
@pytest.mark.parametrize(
    ("trouble", "error", "state"),
    [
        (locked, r"t\.db is locked by another process .*Try again when .* finished", "running"),
        (full_disk, r"t\.db can't grow: the disk is full .*Free some space", "interrupted"),
    ],
    ids=["locked", "full"],
)
def test_a_database_that_fails_ends_the_run_with_its_reason_and_loses_no_row(
    folder: Path, trouble: Any, error: str, state: str
) -> None:
    path, space = folder / "t.db", small_space(40)
    with ExitStack() as until_mended:
        store = Store(path, "write", wait_s=0.5)
        records = until_mended.enter_context(closing(Records(store, config_from_dict)))
        said: list[int] = []

        def on_event(event: Event) -> None:
            if isinstance(event, TrialDone):
                said.append(event.done)
                if event.done == 5:
                    until_mended.enter_context(trouble(path))

        with pytest.raises(DatabaseError, match=error):
            run(plan_of(records, space, {}, on_event=on_event))
    assert left_over(folder) == {}
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]
    with Records.open(str(path), "write", config_from_dict) as records:
        rows = rows_of(records)
        assert len(rows) == len(said) >= 5 and {row.status for row in rows} == {Status.OK}
        # While its process lives, a run whose end could not be written counts as running.
        assert [r.state for r in records.runs()] == [state]
        again = run(plan_of(records, space, {}))
        assert again.counts == {Status.OK: 40 - len(rows)}


# C04
def test_a_disk_that_is_full_of_kernels_ends_the_run_and_blames_no_candidate(
    folder: Path, records: Records
) -> None:
    space, seen = small_space(40), dict[Config, Act]()

    def act_of(config: Config) -> Act:
        full = Act(build="raise OSError(28, 'No space left on device')")
        return seen.setdefault(config, full if len(seen) > 20 else RIGHT)

    with pytest.raises(CacheError, match=r"No space left on device.*Look at FAGEN_CACHE"):
        run(plan_of(records, space, {}, render=rendering(act_of)))
    rows = rows_of(records)
    assert rows and {row.status for row in rows} == {Status.OK}
    assert left_over(folder) == {}
    assert run(plan_of(records, space, {})).counts == {Status.OK: 40 - len(rows)}


# The tuner's own process is killed or interrupted.


def tuning(folder: Path, right: int, seconds: float, where: str = "device") -> Tuner:
    command = [sys.executable, TESTS / "acting_tune.py", str(right), str(seconds), where]
    env = {**os.environ, **acting_environment(folder), "FAGEN_DB": str(folder / "t.db")}
    return subprocess.Popen(command, env=env, text=True, stdout=-1, stderr=-1)


def line_beginning(process: Tuner, words: str) -> str:
    """The next line of stdout that begins so; AssertionError where there is none."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(words):
            return line
    raise AssertionError(f"{words!r} was never said")


def ended(process: Tuner) -> tuple[str, str]:
    """The rest of stdout, and stderr. Not by `communicate`, which loses what was read ahead."""
    assert process.stdout is not None and process.stderr is not None
    with process, process.stdout, process.stderr:
        return process.stdout.read(), process.stderr.read()


def stored(folder: Path) -> list[Record]:
    if not (folder / "t.db").exists():
        return []
    with Records.open(str(folder / "t.db"), "read", config_from_dict) as records:
        return rows_of(records)


# O03, T03
def test_a_killed_tuner_loses_at_most_the_trial_in_flight(tmp_path: Path) -> None:
    dice = random.Random(5)
    for before in (None, 1, 4, 7, 10):  # rows that are there when the kill is near; None: no child
        process = tuning(tmp_path, CANDIDATES, 0.1)
        if before is not None:
            line_beginning(process, f"done {before}")
        time.sleep(dice.uniform(0.0, 0.3 if before else 1.5))
        process.kill()
        said, _ = ended(process)
        told = before or 0
        for line in said.splitlines():
            told = int(line.removeprefix("done "))
        assert awaited(lambda: not left_over(tmp_path), 2.0), left_over(tmp_path)
        rows = stored(tmp_path)
        assert told <= len(rows) <= told + 1
        assert {row.status for row in rows} <= {Status.OK}
        if rows:
            assert sql(tmp_path / "t.db", "PRAGMA integrity_check") == [("ok",)]
    process = tuning(tmp_path, CANDIDATES, 0.0)
    _, err = ended(process)
    assert process.returncode == 0, err
    rows = stored(tmp_path)
    assert Counter(row.config for row in rows) == Counter(small_space(CANDIDATES).configs)
    with Records.open(str(tmp_path / "t.db"), "read", config_from_dict) as records:
        states = Counter(r.state for r in records.runs())
        assert states["running"] == 0 and states["finished"] == 1 and states["interrupted"] >= 4
        best = records.best(PROBLEM, TARGET)
    fastest = min(small_space(CANDIDATES).configs, key=formula_us)
    assert best is not None and best.config == fastest and best.chosen
    assert left_over(tmp_path) == {}


# T06
@pytest.mark.parametrize("where", ["build", "device"])
def test_ctrl_c_while_a_candidate_hangs_shows_the_best_so_far_and_leaves_no_child(
    tmp_path: Path, where: str
) -> None:
    process = tuning(tmp_path, 5, 0.0, where)
    line_beginning(process, "done 5" if where == "device" else "done 4")
    assert awaited((tmp_path / "hanging").exists, 20.0)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    shown = line_beginning(process, "winner")
    assert time.monotonic() - begun < 2.0
    out, err = ended(process)
    assert process.returncode == 130
    rows = stored(tmp_path)
    best = min(row.median_us for row in rows if row.median_us is not None)
    assert f"best so far {best:.1f} us" in err and "Traceback" not in err
    assert f"{best:.4g}" in shown and "Partial: the run was interrupted" in out
    assert {row.status for row in rows} == {Status.OK}
    assert left_over(tmp_path) == {}
