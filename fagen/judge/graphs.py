"""Timing on a GPU: batches of launches as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch

LaunchSet = Callable[[int], None]
Replay = Callable[[], float]
FLUSHED_LAUNCHES = 64  # a flushed launch takes the time of the flush too


class CudaClock:
    """Captures on a stream of its own. A graph lives as long as its replay function."""

    def __init__(self, device: torch.device, l2: Literal["rotate", "flush"]) -> None:
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.l2 = l2
        self._flush: torch.Tensor | None = None

    def batch(self, launch: LaunchSet, launches: int, sets: int) -> Replay:
        with torch.cuda.device(self.index):
            if self.l2 == "flush":
                return self._flushed(launch, min(launches, FLUSHED_LAUNCHES), sets)
            graph = self._captured(launch, range(launches), sets)
            start, end = _events(1)[0]

            def replay() -> float:
                with torch.cuda.device(self.index):
                    start.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                return float(start.elapsed_time(end)) * 1e3 / launches

            return replay

    def clock_mhz(self) -> int | None:
        return _sm_clock_mhz(self.index)

    def _captured(self, launch: LaunchSet, which: range, sets: int) -> torch.cuda.CUDAGraph:
        # Once outside of the graph: lazy loading and workspaces are not allowed inside.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(min(sets, len(which))):
                launch(i)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in which:
                launch(i % sets)
        return graph

    def _flushed(self, launch: LaunchSet, launches: int, sets: int) -> Replay:
        graphs = [self._captured(launch, range(i, i + 1), sets) for i in range(sets)]
        cache = self._flush_buffer()
        pairs = _events(launches)

        def replay() -> float:
            with torch.cuda.device(self.index):
                for i, (start, end) in enumerate(pairs):
                    cache.zero_()
                    start.record()
                    graphs[i % sets].replay()
                    end.record()
                torch.cuda.synchronize()
            return sum(float(start.elapsed_time(end)) for start, end in pairs) * 1e3 / launches

        return replay

    def _flush_buffer(self) -> torch.Tensor:
        """Twice the L2 cache and some more; freed with the clock."""
        if self._flush is None:
            l2_bytes = torch.cuda.get_device_properties(self.index).L2_cache_size
            size = 2 * l2_bytes + (1 << 20)
            self._flush = torch.empty(size, dtype=torch.int8, device=f"cuda:{self.index}")
        return self._flush


def _events(count: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    def event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    return [(event(), event()) for _ in range(count)]


def _sm_clock_mhz(index: int) -> int | None:
    """The SM clock by NVML, or None without pynvml or the right to ask."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old pynvml package warns at its import
        try:
            return int(torch.cuda.clock_rate(index))
        except Exception:  # NVML's own error type can't be named without pynvml
            return None
