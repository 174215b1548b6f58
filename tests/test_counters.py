"""Tile counters: one a stream, one a captured launch, and none for two that may meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fagen.run import counters
from fagen.run.counters import BLOCK, LOW, PER_THREAD_STREAM, Counters, Pool, pool_of

CUDA = torch.device("cuda", 0)


@dataclass
class FakeCuda:
    """torch's CUDA side on the CPU: what was zeroed, and whether a capture is on."""

    capturing: bool = False
    zeroed: list[tuple[int, bool]] = field(default_factory=list)  # (elements, during a capture)
    synchronized: int = 0

    def synchronize(self) -> None:
        assert not self.capturing
        self.synchronized += 1


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake, zeros = FakeCuda(), torch.zeros

    def on_cpu(count: int, dtype: torch.dtype, device: torch.device) -> Any:
        assert device in (CUDA, torch.device("cpu"))
        fake.zeroed.append((count, fake.capturing))
        return zeros(count, dtype=dtype)

    monkeypatch.setattr("torch.zeros", on_cpu)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: fake)
    monkeypatch.setattr(counters, "capturing", lambda: lambda: fake.capturing)
    monkeypatch.setattr(counters, "_pools", {})
    yield fake


def test_a_stream_keeps_its_counter_and_shares_it_with_no_other() -> None:
    of_one_kernel = Counters(CUDA)
    first, second = of_one_kernel.take(0), of_one_kernel.take(1234)
    assert first.dtype == torch.int32 and first.shape == (1,) and int(first) == 0
    assert first.data_ptr() != second.data_ptr()
    assert of_one_kernel.take(0) is first and of_one_kernel.take(1234) is second
    assert Counters(CUDA).take(0).data_ptr() != first.data_ptr()


def test_each_captured_launch_gets_a_slot_of_its_own(cuda: FakeCuda) -> None:
    one, other = Counters(CUDA), Counters(CUDA)
    eager = one.take(7)
    cuda.capturing, before = True, len(cuda.zeroed)
    slots = [kernel.take(7) for kernel in (one, other) for _ in range(100)]
    assert len({slot.data_ptr() for slot in slots} | {eager.data_ptr()}) == 201
    assert len(cuda.zeroed) == before
    assert cuda.synchronized == 1  # the pool was zero for every stream before any capture


def test_a_pool_that_a_capture_uses_up_gives_way_to_memory_zeroed_in_it(cuda: FakeCuda) -> None:
    kernel = Counters(CUDA)
    cuda.capturing = True
    slots = [kernel.take(7) for _ in range(BLOCK)]
    assert len({slot.data_ptr() for slot in slots}) == BLOCK
    assert (1, True) not in cuda.zeroed
    kernel.take(7)
    assert cuda.zeroed[-1] == (1, True)


def test_the_pool_grows_outside_of_captures_and_keeps_what_it_gave(cuda: FakeCuda) -> None:
    kernel = Counters(CUDA)
    pool = pool_of(CUDA)
    seen: set[int] = set()
    for _ in range(5):
        cuda.capturing = True
        seen |= {kernel.take(7).data_ptr() for _ in range(LOW + 1)}
        cuda.capturing = False
        kernel.take(7)
        assert pool.left >= LOW
    assert len(seen) == 5 * (LOW + 1)
    assert all(not during for _, during in cuda.zeroed)


def test_no_counter_is_made_for_a_stream_in_a_capture(cuda: FakeCuda) -> None:
    kernel = Counters(CUDA)
    cuda.capturing = True
    captured = kernel.take(7)
    cuda.capturing = False
    assert kernel.take(7).data_ptr() != captured.data_ptr()
    assert cuda.zeroed[-1] == (1, False)


def test_threads_share_a_stream_but_not_the_per_thread_stream() -> None:
    kernel, found = Counters(CUDA), {}

    def take(name: int) -> None:
        found[name] = kernel.take(7).data_ptr(), kernel.take(PER_THREAD_STREAM).data_ptr()
        barrier.wait()  # a thread's identity may be used again once it has ended

    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=take, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({shared for shared, _ in found.values()}) == 1
    assert len({own for _, own in found.values()}) == 8


def test_slots_are_given_once_to_threads_too() -> None:
    pool = Pool(CUDA)
    pool.top_up()
    taken: list[int] = []

    def take() -> None:
        for _ in range(200):
            slot = pool.take()
            assert slot is not None
            taken.append(slot.data_ptr())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 800


def test_on_the_cpu_nothing_asks_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(counters, "capturing")
    kernel = Counters(torch.device("cpu"))
    assert kernel.take(0) is kernel.take(0)
