"""Child processes that run what can't be trusted: each can be killed and replaced at any moment.

A child is `python -m fagen.tune.worker ROLE`, never a spawn of the user's `__main__`, so tuning
works from notebooks and from scripts without a main guard. Jobs and replies are pickled over two
pipes of their own; what the child prints is kept (its last part) for the reason of a failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import site
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Literal

from fagen.errors import FagenError, WorkerDied

Role = Literal["build", "gpu", "interpret"]

START_LIMIT_S = 120.0  # importing torch and Triton on a loaded machine; 3 s on an idle one
TAIL_BYTES = 4000
REASON_CHARS = 600


@dataclass(frozen=True)
class Reply:
    """What a child sends back. `last`: the child ends itself now, its GPU context is spoilt."""

    value: Any
    last: bool = False


@dataclass(frozen=True)
class Raised:
    """The job raised; `kind` is the class of the exception."""

    kind: str
    message: str


class JobFailed(Exception):
    """A job raised in the child, which lives on."""

    def __init__(self, raised: Raised) -> None:
        super().__init__(f"{raised.kind}: {raised.message}")
        self.raised = raised


class Child:
    """One child process of a role, started at the first call and again after each death.

    It leads its own session: Ctrl-C in a terminal reaches only the parent. A `call` belongs to
    one thread at a time; `close` may come from any thread and ends a call that is under way.
    """

    def __init__(self, role: Role, module: str = "fagen.tune.worker") -> None:
        self.role = role
        self.module = module
        self.starts = 0  # how many processes there have been; a new one knows nothing yet
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: Connection | None = None
        self._replies: Connection | None = None
        self._lifeline: int | None = None
        self._tail: deque[bytes] = deque(maxlen=40)
        self._drain: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()  # of starting against closing
        self._busy = threading.RLock()  # held by the one thread that talks to the process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process unless it runs. Raises WorkerDied when it does not come up."""
        with self._busy:
            if self._process is not None and self._process.poll() is None:
                return
            self.kill()
            with self._lock:
                if self._closed:
                    raise WorkerDied("The child was closed.", timed_out=False)
                self._spawn()
            self._receive(time.monotonic() + START_LIMIT_S)  # its greeting, after slow imports

    def call(self, job: Any, deadline_s: float) -> Any:
        """The value of one job. The time to start a process is not counted against the deadline.

        Raises WorkerDied when the process ended or was killed at the deadline, JobFailed when
        the job raised.
        """
        with self._busy:
            self.start()
            self._tail.clear()  # what an earlier job printed is no reason of this one
            try:
                assert self._jobs is not None
                self._jobs.send(job)
            except OSError:
                raise self._died() from None
            reply = self._receive(time.monotonic() + deadline_s)
            if isinstance(reply, Raised):
                raise JobFailed(reply)
            if reply.last:
                self.kill()
            return reply.value

    def kill(self) -> None:
        """End the process and everything it started; the next call starts another."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads its group: start_new_session
        process.wait()
        if self._drain is not None:
            self._drain.join(timeout=1.0)
        for end in (self._jobs, self._replies):
            if end is not None:
                end.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._process = self._jobs = self._replies = self._lifeline = self._drain = None

    def close(self) -> None:
        """End the process for good. A call under way in another thread raises WorkerDied."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with self._busy:  # soon: a call that was under way sees its pipe end
            self.kill()

    def _spawn(self) -> None:
        job_end, jobs = os.pipe()
        replies, reply_end = os.pipe()
        life_end, lifeline = os.pipe()  # closes when this process dies, however it dies
        fds = (job_end, reply_end, life_end)
        command = [sys.executable, "-P", "-m", self.module, self.role, *map(str, fds)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,
                env=_environment(self.role),
            )
        finally:
            for fd in fds:
                os.close(fd)
        self.starts += 1
        self._jobs = Connection(jobs, readable=False)
        self._replies = Connection(replies, writable=False)
        self._lifeline = lifeline
        self._tail.clear()
        output = self._process.stdout
        assert output is not None
        self._drain = threading.Thread(target=_keep_tail, args=(output, self._tail), daemon=True)
        self._drain.start()

    def _receive(self, until: float) -> Any:
        assert self._replies is not None
        try:
            if not self._replies.poll(max(0.0, until - time.monotonic())):
                raise self._died(timed_out=True)
            return self._replies.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self, *, timed_out: bool = False) -> WorkerDied:
        process, drain = self._process, self._drain
        if process is not None and not timed_out:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2.0)  # its own exit code says more than our SIGKILL
        code = process.returncode if process is not None else None
        self.kill()
        if drain is not None:
            drain.join(timeout=1.0)
        how = "was killed at its deadline" if timed_out else f"ended: {_ending(code)}"
        text = b"".join(self._tail)[-TAIL_BYTES:].decode(errors="replace").strip()
        said = f" Last output: {text[-REASON_CHARS:]}" if text else ""
        return WorkerDied(f"The {self.role} process {how}.{said}", timed_out=timed_out)


def begun(begin: Callable[[], None], without: str) -> None:
    """`begin` a process, twice if it is killed meanwhile: no candidate is at fault there.

    Raises FagenError that says what can't be done `without`.
    """
    for last in (False, True):
        try:
            begin()
            return
        except WorkerDied as died:
            if last or died.timed_out:
                next_step = "Look at this machine, then run the same again: every row is kept."
                raise FagenError(f"{without}: {died.message}", next_step) from None


def _keep_tail(stream: IO[bytes], tail: deque[bytes]) -> None:
    with stream:
        while chunk := os.read(stream.fileno(), 4096):
            tail.append(chunk)


def _ending(code: int | None) -> str:
    if code is None:
        return "unknown"
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _environment(role: Role) -> dict[str, str]:
    env = dict(os.environ)
    root = Path(__file__).resolve().parents[2]
    installed = {Path(folder) for folder in [*site.getsitepackages(), site.getusersitepackages()]}
    if root not in installed:  # a checkout: the child must find it from any folder
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    env.pop("TRITON_INTERPRET", None)
    if role == "interpret":
        env["TRITON_INTERPRET"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    return env
