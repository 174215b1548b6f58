"""Where a persistent kernel counts the tiles that it has handed out: one int32, 0 before a launch.

The kernel puts the counter back to 0 when it ends, so launches that follow one another share one.
Launches that may run side by side must not:

- Eager launches on one stream run one after another, so each kernel has one counter a stream. It
  is zeroed on that stream when it is made, ahead of its first launch. It belongs to one kernel, so
  that a faulty one, which leaves it at something else, spoils nobody but itself, and the gate
  sees that. A stream is known by its handle. CUDA's per-thread default stream is one handle for
  many streams: there, the thread is part of the key. torch never destroys its streams; one of
  somebody else's that is destroyed under a running kernel may pass its handle on too early.
- A captured launch may be replayed at any time on any stream, beside eager launches and beside
  other graphs, but never beside itself: CUDA runs a graph's replays one after another. So every
  captured launch gets a slot that is never given out again, of a pool that was zeroed before.
  The pool grows outside of captures, when it runs low: the zeroing of memory made during a
  capture would be a node of that graph. Where a single capture uses the pool up, that is what
  happens: right, but each replay zeroes that counter once more.

A graph holds an address and no reference, so the pool keeps its memory for as long as the process
lives: 4 bytes a captured launch.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fagen.run.cuda import capturing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 4096  # slots that a pool grows by
LOW = 2048  # it grows when fewer are left; above any number of launches that is captured at once
PER_THREAD_STREAM = 2  # cudaStreamPerThread


class Pool:
    """Zeroed int32 slots of one CUDA device, each given out once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._blocks: list[Tensor] = []
        self._used = 0
        self.low = True  # few are left: asked at every launch

    @property
    def left(self) -> int:
        return len(self._blocks) * BLOCK - self._used

    def top_up(self) -> None:
        """Grow if few are left. Not during a capture."""
        if not self.low:
            return
        import torch

        block = torch.zeros(BLOCK, dtype=torch.int32, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()  # zero for every stream from now on
        with self._lock:
            self._blocks.append(block)
            self.low = self.left < LOW

    def take(self) -> Tensor | None:
        """A slot (1,) for a captured launch; None when all are used."""
        with self._lock:
            if not self.left:
                return None
            block, place = divmod(self._used, BLOCK)
            self._used += 1
            self.low = self.left < LOW
        return self._blocks[block][place : place + 1]


_pools: dict[torch.device, Pool] = {}


def pool_of(device: torch.device) -> Pool:
    """The one pool of a device."""
    found = _pools.get(device)
    return _pools.setdefault(device, Pool(device)) if found is None else found


class Counters:
    """The counters of one loaded kernel. Made and used with `device` as the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_stream: dict[int | tuple[int, int], Tensor] = {}
        self._pool = pool_of(device) if device.type == "cuda" else None
        if self._pool is not None:
            self._capturing = capturing()
            self._pool.top_up()

    def take(self, stream: int) -> Tensor:
        """The counter (1,) of a launch on the current stream, whose handle is `stream`."""
        pool = self._pool
        if pool is not None:
            if self._capturing():
                slot = pool.take()
                return self._zeroed() if slot is None else slot
            if pool.low:
                pool.top_up()
        key = stream if stream != PER_THREAD_STREAM else (stream, threading.get_ident())
        found = self._of_stream.get(key)
        # Of two threads that make it at once, both use the first one's: it was zeroed on the same
        # stream before either of them launches.
        return self._of_stream.setdefault(key, self._zeroed()) if found is None else found

    def _zeroed(self) -> Tensor:
        import torch

        return torch.zeros(1, dtype=torch.int32, device=self._device)
