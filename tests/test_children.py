"""Real child processes: each way to die costs one job, and none outlives its parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from acting import acting_environment, alive, awaited, gone, left_over
from fagen.config import Config
from fagen.errors import CacheError, DeviceBusy, FagenError, WorkerDied
from fagen.generate.families import flash
from fagen.generate.program import Entry, Program
from fagen.generate.render import render
from fagen.outcome import Status, Timing
from fagen.problem import make_problem
from fagen.tune.children import TAIL_BYTES, Child, JobFailed, Raised
from fagen.tune.device import device_lock, lock_path, others_in
from fagen.tune.events import Event, WaitingForDevice, ignore
from fagen.tune.jobs import BuildReply, Confirm, Prepare, Race, RaceReply, Tried, TryProgram
from fagen.tune.pool import BuildPool, builder_count
from fagen.tune.proxies import GpuWorker, InterpretWorker, interpretable
from fagen.tune.worker import failure, is_spoilt
from fakes import PROBLEM, TARGET, Policy, built_fake, full_space, render_fake

# A child of the same protocol as fagen.tune.worker whose jobs are Python statements.
ODD_WORKER = """
    import os, signal, subprocess, sys, time
    from multiprocessing.connection import Connection
    from fagen.outcome import Status
    from fagen.tune.children import Reply
    from fagen.tune.worker import die_with_parent, serve_one
    from fagen.tune.jobs import Tried

    role, *fds = sys.argv[1:]
    job_end, reply_end, life_end = map(int, fds)
    die_with_parent(life_end)
    jobs, replies = Connection(job_end, writable=False), Connection(reply_end, readable=False)
    replies.send(Reply(None))

    def run(code):
        names = {"os": os, "signal": signal, "subprocess": subprocess, "sys": sys, "time": time,
                 "Tried": Tried, "Status": Status}
        exec(code, names)
        return names.get("value")

    while True:
        serve_one(jobs, replies, {str: run})
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    (tmp_path / "odd_worker.py").write_text(textwrap.dedent(ODD_WORKER))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Child("build", module="odd_worker")
    yield made
    made.close()


def test_a_child_answers_jobs_one_after_the_other_in_one_process(child: Child) -> None:
    pids = {child.call("value = os.getpid()", 10.0) for _ in range(3)}
    assert pids == {child.pid}
    assert child.starts == 1
    assert child.call("value = os.getpgid(0)", 10.0) == child.pid != os.getpgid(0)


def test_a_job_that_raises_leaves_the_child_alive(child: Child) -> None:
    with pytest.raises(JobFailed, match="ValueError: no such tile"):
        child.call("raise ValueError('no such tile')", 10.0)
    assert child.call("value = 7", 10.0) == 7
    assert child.starts == 1


def test_a_hang_is_killed_at_its_deadline_and_the_next_job_has_a_new_process(child: Child) -> None:
    first = child.call("value = os.getpid()", 10.0)
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match="killed at its deadline") as caught:
        child.call("print('in the loop', flush=True)\nwhile True: pass", 0.5)
    assert 0.5 <= time.monotonic() - begun < 2.5
    assert caught.value.timed_out
    assert "in the loop" in str(caught.value)
    assert gone(first)
    assert child.call("value = 7", 10.0) == 7
    assert child.starts == 2


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os.abort()", "SIGABRT"),
        ("os._exit(134)", "exit code 134"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_child_that_dies_says_how_and_what_it_printed_last(
    child: Child, code: str, how: str
) -> None:
    said = "import faulthandler\nfaulthandler.disable()\n"
    shout = "sys.stderr.write('LLVM ERROR: out of tiles'); sys.stderr.flush()\n"
    with pytest.raises(WorkerDied, match=how) as caught:
        child.call(said + shout + code, 10.0)
    assert not caught.value.timed_out
    assert "LLVM ERROR: out of tiles" in str(caught.value)
    assert child.call("value = 7", 10.0) == 7


def test_endless_output_is_kept_only_at_its_end(child: Child) -> None:
    with pytest.raises(WorkerDied) as caught:
        child.call("for i in range(20000): print('line', i)\nsys.stdout.flush()\nos.abort()", 20.0)
    assert "line 19999" in str(caught.value)
    assert len(str(caught.value)) < TAIL_BYTES


def test_a_child_that_dies_does_not_say_what_an_earlier_job_printed(child: Child) -> None:
    child.call("print('ptxas of another candidate', flush=True)", 10.0)
    assert awaited(lambda: child._tail, 5.0)
    with pytest.raises(WorkerDied, match="SIGABRT") as caught:
        child.call("sys.stderr.write('out of tiles'); sys.stderr.flush(); os.abort()", 10.0)
    assert "out of tiles" in str(caught.value) and "another" not in str(caught.value)


def test_what_a_child_started_dies_with_it(child: Child) -> None:
    grandchild = (
        "value = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid"
    )
    pid = child.call(grandchild, 10.0)
    assert alive(pid)
    child.kill()
    assert gone(pid)


def test_a_child_that_spoilt_its_device_is_replaced_after_its_answer(child: Child) -> None:
    reply = child.call(
        "value = Tried(Status.CRASHED, 'CUDA error: an illegal memory access was encountered')",
        10.0,
    )
    assert reply.status == Status.CRASHED
    assert child.pid is None
    assert child.call("value = 7", 10.0) == 7
    assert child.starts == 2


def test_close_ends_a_call_of_another_thread_and_nothing_starts_after(child: Child) -> None:
    child.start()
    pid = child.pid
    failed: list[WorkerDied] = []

    def hang() -> None:
        try:
            child.call("time.sleep(60)", 60.0)
        except WorkerDied as died:
            failed.append(died)

    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.2)
    child.close()
    thread.join(timeout=5.0)
    assert len(failed) == 1
    assert pid is not None and gone(pid)
    with pytest.raises(WorkerDied, match="closed"):
        child.call("value = 7", 10.0)


@pytest.mark.parametrize(
    "busy",
    [
        "while True: time.sleep(1)",
        "import ctypes; ctypes.PyDLL(None).sleep(60)",  # no other thread of the child runs
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
    ],
    ids=["runs", "holds the GIL", "stopped", "waits for its own child"],
)
def test_a_child_dies_with_a_parent_that_was_killed(
    tmp_path: Path, child: Child, busy: str
) -> None:
    script, flag = tmp_path / "parent.py", tmp_path / "busy"
    script.write_text(
        textwrap.dedent(
            f"""
            from fagen.tune.children import Child
            child = Child("build", module="odd_worker")
            child.call("open({str(flag)!r}, 'w').close()\\n" + {busy!r}, 60.0)
            """
        )
    )
    env = {**os.environ, **acting_environment(tmp_path)}
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    with subprocess.Popen([sys.executable, script], env=env) as parent:
        assert awaited(flag.exists, 20.0)
        parent.kill()
    awaited(lambda: not left_over(tmp_path), 2.0)
    orphans = left_over(tmp_path)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    assert orphans == {}


def test_ctrl_c_in_a_terminal_does_not_reach_the_children(child: Child) -> None:
    assert child.call("value = os.getsid(0)", 10.0) != os.getsid(0)


def test_the_users_main_is_not_imported_by_a_child(tmp_path: Path, child: Child) -> None:
    script = tmp_path / "no_guard.py"
    script.write_text(
        "from fagen.tune.children import Child\n"
        "print('main')\n"
        "child = Child('build', module='odd_worker')\n"
        "print(child.call('value = 3', 20.0))\n"
        "child.close()\n"
    )
    root = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("main\n3\n", "")


# The pool and the proxies, over a child that answers at once.


class StubChild:
    """Answers by the class of the job; an exception is raised."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.jobs: list[object] = []
        self.starts = 1

    def start(self) -> None: ...

    def call(self, job: object, deadline_s: float) -> object:
        self.jobs.append(job)
        if isinstance(job, Prepare):
            return None
        answer = self.answers.pop(0)
        if isinstance(answer, WorkerDied):
            self.starts += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None: ...


def programs(count: int) -> list[Program]:
    return [render_fake(PROBLEM, c) for c in full_space().configs[:count]]


def test_a_compiler_that_dies_or_hangs_is_an_answer_like_any_other() -> None:
    pool = BuildPool(TARGET, 1)
    built = BuildReply(built_fake(full_space().configs[0]))
    stub = StubChild(
        WorkerDied("ended: SIGABRT", timed_out=False), WorkerDied("killed", timed_out=True), built
    )
    pool._idle.get()
    pool._idle.put(stub)  # type: ignore[arg-type]
    replies = [pool.submit(program).result(10) for program in programs(3)]
    pool.close()
    assert [r.status for r in replies] == [Status.BUILD_ERROR, Status.TIMED_OUT, Status.OK]
    assert replies[2].built == built.built
    assert 1 <= builder_count() <= 16


def test_build_processes_are_there_before_their_first_job() -> None:
    pool = BuildPool(TARGET, 2)
    pool.start()
    end = time.monotonic() + 20.0
    while None in (pids := [child.pid for child in pool._children]) and time.monotonic() < end:
        time.sleep(0.02)
    pool.close()
    assert [child.starts for child in pool._children] == [1, 1]
    assert all(pid is not None and gone(pid) for pid in pids)


def test_a_program_is_built_once_however_often_it_is_submitted() -> None:
    pool = BuildPool(TARGET, 1)
    stub = StubChild(BuildReply(built_fake(full_space().configs[0])), BuildReply(None))
    pool._idle.get()
    pool._idle.put(stub)  # type: ignore[arg-type]
    one, other = programs(2)
    first, again, second = pool.submit(one), pool.submit(one), pool.submit(other)
    assert first.result(10) is again.result(10)
    assert second.result(10).built is None
    pool.close()
    assert len(stub.jobs) == 2


def test_a_folder_that_can_not_be_written_is_no_candidates_fault() -> None:
    pool = BuildPool(TARGET, 1)
    stub = StubChild(
        JobFailed(Raised("CacheError", "Can't write.")), JobFailed(Raised("KeyError", "'x'"))
    )
    pool._idle.get()
    pool._idle.put(stub)  # type: ignore[arg-type]
    first, second = (pool.submit(program) for program in programs(2))
    with pytest.raises(CacheError, match="Look at FAGEN_CACHE"):
        first.result(10)
    assert second.result(10).status == Status.BUILD_ERROR
    pool.close()


def test_a_new_gpu_child_is_prepared_again() -> None:
    worker, stub = (
        GpuWorker("cuda:0"),
        StubChild(WorkerDied("boom", timed_out=False), Tried(Status.OK)),
    )
    worker._child = stub  # type: ignore[assignment]
    worker.prepare(PROBLEM, TARGET, Policy())
    first, second = programs(2)
    with pytest.raises(WorkerDied):
        worker.try_program(first, 10.0)
    assert worker.try_program(second, 10.0) == Tried(Status.OK)
    kinds = [type(job) for job in stub.jobs]
    assert kinds == [Prepare, TryProgram, Prepare, TryProgram]


def raced(rounds: dict[str, int]) -> RaceReply:
    return RaceReply({key: Timing((1.0,) * n, "fake timer") for key, n in rounds.items()})


def racing(*answers: object) -> tuple[GpuWorker, StubChild]:
    worker, stub = GpuWorker("cuda:0"), StubChild(*answers)
    worker._child = stub  # type: ignore[assignment]
    worker.prepare(PROBLEM, TARGET, Policy())
    return worker, stub


def test_who_stays_in_a_race_to_its_end_is_checked_as_a_finalist() -> None:
    one, two, three = programs(3)
    reply = raced({one.key: 5, two.key: 3, three.key: 5})
    worker, stub = racing(reply, Tried(Status.OK), Tried(Status.OK))
    assert worker.race([one, two, three], 5, 10.0) == reply
    assert stub.jobs[1:] == [
        Race((one, two, three), 5, leaving=True),
        Confirm(one, "finalist"),
        Confirm(three, "finalist"),
    ]


def test_a_finalist_that_kills_its_process_is_rejected_and_the_others_race_again() -> None:
    one, two, three = programs(3)
    worker, stub = racing(
        raced({one.key: 3, two.key: 5, three.key: 3}),
        WorkerDied("ended: SIGSEGV", timed_out=False),
        Tried(Status.OK),
        Tried(Status.WRONG_RESULT),
        raced({one.key: 5}),
    )
    reply = worker.race([one, two, three], 5, 10.0)
    assert {key: t.status for key, t in reply.rejected.items()} == {
        two.key: Status.CRASHED,
        three.key: Status.WRONG_RESULT,
    }
    assert list(reply.programs) == [one.key]
    assert [job for job in stub.jobs if not isinstance(job, Prepare)] == [
        Race((one, two, three), 5, leaving=True),
        Confirm(two, "finalist"),
        Confirm(one, "finalist"),
        Confirm(three, "finalist"),
        Race((one,), 5, leaving=True),
    ]


def test_who_kills_the_race_is_refused_and_the_others_race_after_all() -> None:
    one, two = programs(2)
    died = WorkerDied("ended: SIGSEGV", timed_out=False)
    worker, stub = racing(died, Tried(Status.OK), died, raced({one.key: 5}))
    reply = worker.race([one, two], 5, 10.0)
    assert (list(reply.programs), reply.note) == ([one.key], "")
    assert {key: t.status for key, t in reply.rejected.items()} == {two.key: Status.CRASHED}
    assert stub.jobs[-1] == Race((one,), 5, leaving=True)


def test_a_race_that_dies_with_nobody_to_blame_is_noted() -> None:
    died = WorkerDied("ended: SIGSEGV", timed_out=False)
    worker, stub = racing(died, Tried(Status.OK))
    reply = worker.race(programs(1), 5, 10.0)
    assert (reply.programs, reply.rejected) == ({}, {}) and "SIGSEGV" in reply.note
    assert [type(job) for job in stub.jobs].count(Race) == 1


def test_the_interpreter_gets_a_twin_in_a_dtype_it_computes_right() -> None:
    refused = JobFailed(Raised("NotImplementedError", "inline asm"))
    stub = StubChild(refused, Tried(Status.PREDICTED))
    worker = InterpretWorker(render_fake)
    worker._child = stub  # type: ignore[assignment]
    worker.prepare(PROBLEM, TARGET, None)
    first, second = programs(2)
    assert worker.try_program(first, 5.0).verdict is None
    worker.try_program(second, 5.0)
    assert {job.program.problem.shape.dtype for job in stub.jobs} == {"fp16"}  # type: ignore[attr-defined]
    assert interpretable(interpretable(PROBLEM)) == interpretable(PROBLEM)


def test_an_interpreter_that_does_not_start_is_no_candidates_fault() -> None:
    class Unborn(StubChild):
        def start(self) -> None:
            if self.answers and self.answers.pop(0) is None:
                raise WorkerDied("ended: SIGKILL", timed_out=False)

    worker = InterpretWorker(render_fake)
    worker.prepare(PROBLEM, TARGET, None)
    worker._child = Unborn(None, "started", Tried(Status.PREDICTED))  # type: ignore[assignment]
    [program] = programs(1)
    assert worker.try_program(program, 5.0).status == Status.PREDICTED
    worker._child = Unborn(None, None)  # type: ignore[assignment]
    with pytest.raises(FagenError, match="Nothing can be verified: ended: SIGKILL"):
        worker.try_program(program, 5.0)


@pytest.mark.parametrize(
    ("error", "status", "spoilt"),
    [
        (
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            Status.CRASHED,
            True,
        ),
        (RuntimeError("CUDA error: misaligned address"), Status.CRASHED, True),
        (RuntimeError("CUDA error: unspecified launch failure"), Status.CRASHED, True),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"),
            Status.OUT_OF_RESOURCES,
            False,
        ),
        (ValueError("out of resource: shared memory"), Status.OUT_OF_RESOURCES, False),
        (TypeError("launch() takes 3 arguments"), Status.CRASHED, False),
    ],
)
def test_what_a_candidate_raises_is_told_apart(
    error: Exception, status: Status, spoilt: bool
) -> None:
    tried = failure(error)
    assert (tried.status, is_spoilt(tried)) == (status, spoilt)


# T02
def test_the_real_build_process_answers_for_a_source_that_is_no_python() -> None:
    broken = replace(
        render_fake(PROBLEM, full_space().configs[0]),
        source="def (:\n",
        entries=(Entry("kernel", (), 4, 1),),
    )
    pool = BuildPool(TARGET, 1)
    try:
        replies = [pool.submit(program).result(120) for program in (broken, broken)]
    finally:
        pool.close()
    assert [(r.built, r.status) for r in replies] == [(None, Status.BUILD_ERROR)] * 2
    assert "SyntaxError" in replies[0].reason


# C04
def test_a_compiler_that_can_not_keep_its_results_is_no_candidates_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    problem = make_problem(64, 16)
    program = render(problem, Config("flash", flash.Knobs(64, 32, 4, 1)))
    pool = BuildPool(TARGET, 1)
    try:
        with pytest.raises(CacheError, match=re.escape(str(tmp_path / "file"))):
            pool.submit(program).result(120)
    finally:
        pool.close()


# The lock of a device.


def test_a_second_tuner_waits_says_so_and_gives_up() -> None:
    said: list[Event] = []
    with device_lock("GPU-1234", 1.0, said.append):
        begun = time.monotonic()
        with (
            pytest.raises(DeviceBusy, match=f"process {os.getpid()}"),
            device_lock("GPU-1234", 0.6, said.append),
        ):
            pass
        assert 0.6 <= time.monotonic() - begun < 3.0
        with device_lock("GPU-5678", 0.0, said.append):
            pass
    assert [type(event) for event in said] == [WaitingForDevice]
    with device_lock("GPU-1234", 0.0, said.append):
        assert lock_path("GPU-1234").exists()


def test_two_caches_share_the_lock_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "a"))
    with device_lock("GPU-9999", 0.0, ignore):
        monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "b"))
        with pytest.raises(DeviceBusy), device_lock("GPU-9999", 0.0, ignore):
            pass
        assert lock_path("GPU-9999").parent.stat().st_mode & 0o777 == 0o700


def test_other_processes_on_the_same_card_are_told_and_our_own_are_not() -> None:
    shown = (
        "GPU-aa, 10, 512 MiB\nGPU-aa, 11, 70000 MiB\nGPU-bb, 12, 1 MiB\n"
        "[Not Supported], [N/A], [N/A]\n\n"
    )
    assert others_in(shown, "aa", 10) == ["process 11 also uses this GPU (70000 MiB)"]
    assert others_in(shown, "", 10) == []
    assert others_in("no devices", "aa", 1) == []
