"""Launches by the C function below Triton's: same bits, any stream, graphs, threads, devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fagen
from attention import assert_exact, plain_attention
from fagen.config import Config
from fagen.driver import devices
from fagen.generate.families import flash, kv_outer
from fagen.generate.render import render
from fagen.problem import make_problem
from fagen.run import counters
from fagen.run.kernel import LOG2_E, Runner, load
from fagen.run.launch import Direct
from fagen.target import detect, toolchain
from gpu_fixtures import here
from launch_programs import DIM, copying, counting, family

SCALE = 1 / LOG2_E  # `counting` then writes Q itself


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def through_triton(runner: Runner) -> Runner:
    """The same compiled kernels, launched as Triton launches them."""
    slow = [kernel.slow for kernel in runner._kernels if isinstance(kernel, Direct)]
    return Runner(runner.program, here(), runner.device, list(slow))


class Lane:
    """Tensors of one `counting` launch after another; each adds 1 to lse, once a row."""

    def __init__(self) -> None:
        self.q = draw(2, 4, 1024, DIM)
        self.o = torch.zeros_like(self.q)
        self.lse = torch.zeros(2, 4, 1024, device="cuda")
        torch.cuda.synchronize()

    def launch(self, runner: Runner) -> None:
        runner.launch(self.q, self.q, self.q, self.o, self.lse, SCALE)

    def captured(self, runner: Runner, launches: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                self.launch(runner)
        return graph

    def assert_launched(self, times: int) -> None:
        torch.cuda.synchronize()
        assert torch.equal(self.lse, torch.full_like(self.lse, times))
        assert torch.equal(self.o, self.q)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr("fagen.run.kernel.family_of", lambda config: family(persistent=True))
    return load(counting(), here(), "cuda:0")


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(counters, "_pools", {})
    monkeypatch.setattr(counters, "BLOCK", 16)
    monkeypatch.setattr(counters, "LOW", 8)
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("name", "knobs", "layout"),
    [
        ("flash", flash.Knobs(64, 64, 4, 2), "aligned16"),
        ("flash", flash.Knobs(64, 64, 4, 2), "any"),
        ("flash", flash.Knobs(64, 64, 4, 2, "tma", "plain", "every_tile"), "aligned16"),
        ("kv_outer", None, "aligned16"),
    ],
)
def test_the_direct_launch_gives_the_bits_of_tritons(name: str, knobs: Any, layout: Any):
    if knobs is not None and knobs.loads == "tma" and here().arch < 90:
        pytest.skip("this device has no TMA")
    problem = make_problem(512, 64, heads=6, kv_heads=2, layout=layout)
    seed = kv_outer.seeds(problem, here())[0] if knobs is None else knobs
    runner = load(render(problem, Config(name, seed), toolchain().triton_minor), here(), "cuda:0")
    assert set(runner.paths) == {"direct"}
    slow = through_triton(runner)
    for seq_q, seq_kv in ((300, 77), (1, 1), (64, 512)):
        q = draw(2, 6, seq_q, 64)
        k, v = (draw(2, seq_kv, 2, 64).transpose(1, 2) for _ in range(2))
        found = []
        for one in (runner, slow, runner):
            o, lse = torch.empty_like(q), torch.empty(2, 6, seq_q, device="cuda")
            one.launch_poisoned(q, k, v, o, lse, 0.125)
            found.append((o, lse))
        for o, lse in found[1:]:
            assert torch.equal(o, found[0][0]) and torch.equal(lse, found[0][1])
        assert_exact(*found[0], plain_attention(q, k, v, 0.125), v)


def test_descriptors_of_gluon_are_clipped_at_ragged_ends(monkeypatch: pytest.MonkeyPatch):
    if here().arch != 90:
        pytest.skip("its kernel is written for sm_90")
    monkeypatch.setattr("fagen.run.kernel.family_of", lambda config: family(persistent=False))
    runner = load(copying(), here(), "cuda:0")
    assert runner.paths == ("direct",)
    for one in (runner, through_triton(runner)):
        for seq in (100, 64, 1):
            q = draw(2, seq, 3, 2 * DIM)[..., :DIM].transpose(1, 2)
            room = draw(2 * 3 * seq + 64, DIM)
            before = room.clone()
            o = room[: 2 * 3 * seq].view(2, 3, seq, DIM)
            one.launch(q, q, q, o, torch.empty(2, 3, seq, device="cuda"), 1.0)
            torch.cuda.synchronize()
            assert torch.equal(o, q)
            assert torch.equal(room[2 * 3 * seq :], before[2 * 3 * seq :])


def test_maps_stay_right_when_memory_is_given_out_again():
    if here().arch < 90:
        pytest.skip("this device has no TMA")
    problem = make_problem(512, 64, heads=2)
    config = Config("flash", flash.Knobs(64, 64, 4, 2, "tma", "plain", "every_tile"))
    runner = load(render(problem, config, toolchain().triton_minor), here(), "cuda:0")
    for _ in range(200):
        q, k, v = (draw(1, 2, 128, 64) for _ in range(3))
        o, lse = torch.empty_like(q), torch.empty(1, 2, 128, device="cuda")
        runner.launch(q, k, v, o, lse, 0.125)
        assert_exact(o, lse, plain_attention(q, k, v, 0.125), v)


def test_launch_hooks_are_called():
    from triton import knobs

    runner = load(
        render(make_problem(512, 64), Config("flash", flash.Knobs(64, 64, 4, 2))), here(), "cuda:0"
    )
    q = draw(1, 2, 128, 64)
    first, second = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(1, 2, 128, device="cuda")
    seen: list[str] = []

    def note(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    runner.launch(q, q, q, first, lse, 0.125)
    assert seen == []
    knobs.runtime.launch_enter_hook.add(note)
    try:
        runner.launch(q, q, q, second, lse, 0.125)
    finally:
        knobs.runtime.launch_enter_hook.remove(note)
    assert seen == [runner.program.entries[0].function]
    assert torch.equal(first, second)


def test_a_counter_is_left_at_zero_for_the_next_launch(counter: Runner):
    assert counter.paths == ("direct",)
    lane = Lane()
    for _ in range(20):
        lane.launch(counter)
    lane.assert_launched(20)
    stream = torch.cuda.current_stream().cuda_stream
    assert counter._counters is not None
    assert counter._counters.take(stream).item() == 0


def test_launches_on_two_streams_at_once(counter: Runner):
    lanes = [Lane() for _ in range(3)]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(100):
        for lane, stream in zip(lanes, streams, strict=True):
            with torch.cuda.stream(stream):
                lane.launch(counter)
    for lane in lanes:
        lane.assert_launched(100)


def test_threads_with_streams_of_their_own(counter: Runner):
    lanes = [Lane() for _ in range(4)]
    failed: list[BaseException] = []

    def work(lane: Lane) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    lane.launch(counter)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for lane in lanes:
        lane.assert_launched(50)


def test_graphs_beside_graphs_and_eager_launches(counter: Runner):
    lanes = [Lane() for _ in range(3)]
    graphs = [lane.captured(counter, 5) for lane in lanes[:2]]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            lanes[2].launch(counter)
    for lane, times in zip(lanes, (100, 100, 20), strict=True):
        lane.assert_launched(times)


def test_one_graph_replayed_on_two_streams(counter: Runner):
    lane = Lane()
    graph = lane.captured(counter, 3)
    for stream in [torch.cuda.Stream() for _ in range(2)] * 10:
        with torch.cuda.stream(stream):
            graph.replay()
    lane.assert_launched(60)


def test_streams_that_fork_inside_a_capture(counter: Runner):
    here_lane, there = Lane(), Lane()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(5):
            here_lane.launch(counter)
            with torch.cuda.stream(side):
                there.launch(counter)
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(10):
        graph.replay()
    here_lane.assert_launched(50)
    there.assert_launched(50)


def test_graphs_beyond_the_pool(small_pool: None, counter: Runner):
    lanes = [Lane() for _ in range(4)]
    graphs = [lane.captured(counter, 40) for lane in lanes]  # each alone is more than the pool
    lanes[0].launch(counter)  # lets the pool grow again
    assert counters.pool_of(torch.device("cuda", 0)).left >= 8
    graphs.append(lanes[0].captured(counter, 3))
    streams = [torch.cuda.Stream() for _ in lanes]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    graphs[-1].replay()
    lanes[0].assert_launched(1 + 200 + 3)
    for lane in lanes[1:]:
        lane.assert_launched(200)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_second_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fagen.run.kernel.family_of", lambda config: family(persistent=True))
        second = load(counting(), detect("cuda:1"), "cuda:1")
    with torch.cuda.device(1):
        lane = Lane()
        lane.launch(second)
        lane.assert_launched(1)
    q, k, v = (draw(1, 2, 128, 64).to("cuda:1") for _ in range(3))
    kernel = fagen.get(q, k, v)
    o, lse = kernel(q, k, v, return_lse=True)
    assert o.device == lse.device == q.device and torch.cuda.current_device() == 0
    assert_exact(o, lse, plain_attention(q, k, v, 0.125), v)


def test_a_call_allocates_what_it_gives_back_alone():
    q, k, v = (draw(1, 8, 128, 128) for _ in range(3))
    kernel = fagen.get(q, k, v)
    o, lse = kernel(q, k, v, return_lse=True)
    assert o.is_contiguous() and o.shape == q.shape and o.dtype == q.dtype
    assert lse.is_contiguous() and lse.shape == (1, 8, 128) and lse.dtype == torch.float32
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    kernel(q, k, v)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    kernel(q, k, v, return_lse=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 3
    assert_exact(o, lse, plain_attention(q, k, v, 128**-0.5), v)


def test_the_driver_says_of_every_device_what_torch_says():
    for index in range(torch.cuda.device_count()):
        torchs, ours = torch.cuda.get_device_properties(index), devices()[index]
        assert (ours.name, ours.major, ours.minor) == (torchs.name, torchs.major, torchs.minor)
        assert ours.sm_count == torchs.multi_processor_count
        assert ours.l2_bytes == torchs.L2_cache_size
        assert ours.shared_bytes == torchs.shared_memory_per_block_optin
        assert ours.registers_sm == torchs.regs_per_multiprocessor
        assert ours.uuid == str(torchs.uuid)
    assert len(devices()) == torch.cuda.device_count()
