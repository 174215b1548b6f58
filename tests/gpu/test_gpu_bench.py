"""Peers and call times on a GPU: who runs, who is right, and what a call costs beside a kernel."""

from __future__ import annotations

import pytest
import torch

from fagen.judge.measure import race
from fagen.judge.peers import draw_inputs, peer_launch, peers
from fagen.problem import make_problem
from fagen.report.bench import short
from fagen.serve.compare import DETERMINISTIC, KERNEL, compare
from gpu_fixtures import QUICK

TORCHS = ("auto", "cudnn", "flash", "efficient", "math", "eager")


@pytest.mark.parametrize("causal", [False, True])
def test_every_backend_of_torch_runs_and_is_right(causal: bool):
    found = peers(make_problem(256, 64, heads=4, causal=causal), "cuda", TORCHS)
    assert found.missing == {}
    assert [peer.backend for peer in found.found.values()] == [*TORCHS]


@pytest.mark.parametrize(
    "words",
    [
        {"causal": True},
        {"causal": True, "kv_heads": 2},
        {"causal": True, "seq_kv": 700, "causal_align": "bottom_right"},
    ],
)
def test_flex_is_compiled_for_shape_after_shape(words: dict[str, object]):
    found = peers(make_problem(300, 64, heads=4, **words), "cuda", ["flex"])  # type: ignore[arg-type]
    assert found.missing == {}


@pytest.mark.parametrize("key", ["fa3", "fa4"])
def test_flash_attention_runs_on_views_or_says_how_to_install_it(key: str):
    problem = make_problem(300, 128, heads=4, kv_heads=2, causal=True)
    found = peers(problem, "cuda", [key])
    if found.missing:
        [reason] = found.missing.values()
        assert reason.startswith("not installed; run: pip install")
        return
    q, k, v = (
        torch.randn(1, heads, 300, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    [peer] = found.found.values()
    out = peer(q, k, v, 128**-0.5)
    torch.cuda.synchronize()
    free = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = peer(q, k, v, 128**-0.5)
    # Besides the new output: LSE and scheduler data, yet no copy of q, k or v.
    extra = torch.cuda.max_memory_allocated() - free - out.nbytes
    assert extra < k.nbytes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key", [*TORCHS, "flex", "fa4"])
def test_gradients_are_right_and_a_graph_of_them_is_too(key: str, causal: bool):
    problem = make_problem(300, 64, heads=4, causal=causal, direction="backward")
    found = peers(problem, "cuda", [key])
    if key == "fa4" and found.missing:
        [reason] = found.missing.values()
        assert reason.startswith("not installed; run: pip install")
        return
    assert found.missing == {}
    [peer] = found.found.values()
    sets = [draw_inputs(problem, torch.device("cuda"), seed) for seed in range(2)]
    gradients = peer.ready(*sets[0], 0.125)
    wanted = [one.clone() for one in gradients()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for one in captured:
        one.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for one, right in zip(captured, wanted, strict=True):
        assert (one.float() - right.float()).norm() < 1e-3 * right.float().norm()
    timings = race({key: peer_launch(peer, problem, sets)}, QUICK, 2, device="cuda", sets=2)
    assert timings[key].median_us > 1


def test_a_call_takes_longer_than_its_host_part_and_than_its_kernel():
    problem = make_problem(128, 128, heads=8)
    raced = compare(problem, None, None, backends=["auto", "flash"], policy=QUICK, rounds=5)
    assert raced.missing == {}
    assert [short(name) for name in raced.timings] == [KERNEL, "auto", "flash"]
    for name, timing in raced.calls.items():
        assert 1.0 < timing.host.median_us < timing.call.median_us
        assert raced.timings[name].median_us < timing.call.median_us


@pytest.mark.parametrize("causal", [False, True])
def test_a_backward_pass_is_raced_with_its_peers(causal: bool):
    problem = make_problem(300, 64, heads=4, causal=causal, direction="backward")
    raced = compare(problem, None, None, backends=["cudnn", "flash"], policy=QUICK, rounds=3)
    assert raced.missing == {}
    ours = [KERNEL] if raced.deterministic is None else [KERNEL, DETERMINISTIC]
    assert [short(name) for name in raced.timings] == [*ours, "cudnn", "flash"]
    for name, timing in raced.calls.items():
        assert 1.0 < raced.timings[name].median_us < timing.call.median_us
