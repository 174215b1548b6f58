"""Who works on a run: the build processes, and the worker on the GPU or in the interpreter."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fagen.errors import WorkerDied
from fagen.tune.jobs import Builder, Renderer, Worker
from fagen.tune.place import Place
from fagen.tune.pool import BuildPool, builder_count
from fagen.tune.proxies import GpuWorker, InterpretWorker


@dataclass(frozen=True)
class Untimed:
    """The measuring policy of an offline run."""

    name: str = "nothing timed"


def policy_of(place: Place) -> Any:
    """How a place measures: a `judge.measure.MeasurePolicy`, or not at all."""
    if place.device is None:
        return Untimed()
    from fagen.judge.measure import MeasurePolicy  # brings torch

    return MeasurePolicy()


@contextmanager
def staff(place: Place, render: Renderer) -> Iterator[tuple[tuple[Worker, ...], Builder]]:
    """The children of a run, a worker for each device; none is left at the end, however it
    ends."""
    workers: tuple[GpuWorker | InterpretWorker, ...]
    if place.device is None:  # the interpreter takes a core to itself
        workers = (InterpretWorker(render),)
        builder = BuildPool(place.target, max(1, builder_count() - 1))
    else:
        names = [place.device, *(name for name, _ in place.others)]
        workers = tuple(map(GpuWorker, names))
        builder = BuildPool(place.target, builder_count(len(names)))
    builder.start()
    for worker in workers:
        _start_early(worker)
    try:
        yield workers, builder
    finally:
        builder.close()
        for worker in workers:
            worker.close()


def _start_early(worker: GpuWorker | InterpretWorker) -> None:
    """Its imports take seconds, in which the search space is made and candidates are built."""

    def start() -> None:
        with contextlib.suppress(WorkerDied):  # the first job tells
            worker.start()

    threading.Thread(target=start, daemon=True).start()
