"""Workers side by side, each on a device of its own, and a thread for each."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from fagen.tune.jobs import Worker

T = TypeVar("T")


class Crew:
    """`begin` gives the next idle worker a task; tasks are begun in the order given."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.size = len(workers)
        self._workers = workers
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="fagen-try")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in workers:
            self._idle.put(worker)

    def all(self, task: Callable[[Worker], None]) -> None:
        """Every worker does it, at the same time. Raises what the first that fails raises."""
        for done in [self._threads.submit(task, worker) for worker in self._workers]:
            done.result()

    def begin(self, task: Callable[[Worker], T]) -> Future[T]:
        return self._threads.submit(self._done, task)

    def close(self) -> None:
        """Begin nothing more. What is under way ends when its worker is closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, task: Callable[[Worker], T]) -> T:
        worker = self._idle.get()
        try:
            return task(worker)
        finally:
            self._idle.put(worker)
