"""Compiling ahead: some build processes, each driven by a thread."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from fagen.errors import CacheError, WorkerDied
from fagen.generate.program import Program
from fagen.outcome import Status
from fagen.target import Target
from fagen.tune.children import Child, JobFailed, begun
from fagen.tune.jobs import BuildJob, BuildReply

MOST_BUILDERS = 16  # for each device
# A candidate compiles in 1.5-5 s on one core; 12 times that leaves room for a loaded machine.
BUILD_LIMIT_S = 60.0
# Of this machine, not of a candidate: as a row it would never be tried again.
STORAGE = ("CacheError", "OSError", "PermissionError", "FileNotFoundError", "NotADirectoryError")


def builder_count(devices: int = 1) -> int:
    """One process a core that this process may use, at most MOST_BUILDERS for each device."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(usable or 1, devices * MOST_BUILDERS))


class BuildPool:
    """A crash or a hang of the compiler costs one row. Only what this machine lacks raises, as the
    result: CacheError for a folder that can't be written, FagenError where no process comes up."""

    def __init__(self, target: Target, size: int, limit_s: float = BUILD_LIMIT_S) -> None:
        self.size = size
        self._target = target
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="fagen-build")
        self._futures: dict[str, Future[BuildReply]] = {}  # by the program's key
        self._children = [Child("build") for _ in range(size)]
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()  # the warm ones first
        for child in self._children:
            self._idle.put(child)

    def start(self) -> None:
        """Begin to start every process; otherwise each starts with its first job. Their imports
        take 2 to 4 s, in which the caller has other things to do."""
        for child in self._children:
            self._threads.submit(_start, child)

    def submit(self, program: Program) -> Future[BuildReply]:
        """The program's build, under way or done if it was submitted before."""
        if program.key not in self._futures:
            self._futures[program.key] = self._threads.submit(self._build, program)
        return self._futures[program.key]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
        self._threads.shutdown(wait=True)

    def _build(self, program: Program) -> BuildReply:
        child = self._idle.get()
        try:
            begun(child.start, "Nothing can be compiled")
            began = time.monotonic()
            reply = self._built(child, program)
            return replace(reply, seconds=time.monotonic() - began)
        finally:
            self._idle.put(child)

    def _built(self, child: Child, program: Program) -> BuildReply:
        try:
            reply: BuildReply = child.call(BuildJob(program, self._target), self._limit_s)
            return reply
        except WorkerDied as died:
            status = Status.TIMED_OUT if died.timed_out else Status.BUILD_ERROR
            return BuildReply(None, status, died.message)
        except JobFailed as failed:
            if failed.raised.kind in STORAGE:
                raise CacheError(
                    f"A kernel could not be written: {failed.raised.message}",
                    "Look at FAGEN_CACHE, TRITON_CACHE_DIR and the disk, then run the same again.",
                ) from None
            return BuildReply(None, Status.BUILD_ERROR, str(failed))


def _start(child: Child) -> None:
    with contextlib.suppress(WorkerDied):  # the first job tells
        child.start()
