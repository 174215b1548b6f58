"""Peers are pinned and named; what does not run, or is wrong, is named with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fagen.judge import peers as judge_peers
from fagen.judge import reference
from fagen.judge.peers import Peers, peers
from fagen.problem import Problem, make_problem


def backends(found: Peers) -> set[str]:
    return {peer.backend for peer in found.found.values()}


def reason(found: Peers, backend: str) -> str:
    return next(why for name, why in found.missing.items() if backend in name)


def inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    s = problem.shape
    dice = torch.Generator().manual_seed(1)
    return (
        torch.randn(s.batch, s.heads_q, s.seq_q, s.head_dim, generator=dice),
        torch.randn(s.batch, s.heads_kv, s.seq_kv, s.head_dim, generator=dice),
        torch.randn(s.batch, s.heads_kv, s.seq_kv, s.head_dim_v, generator=dice),
    )


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"causal": True},
        {"causal": True, "seq_kv": 40},
        {"causal": True, "seq_kv": 9},
        {"causal": True, "seq_kv": 40, "causal_align": "bottom_right"},
        {"kv_heads": 2},
        {"head_dim_v": 24},
    ],
)
def test_every_peer_found_computes_the_problem(words: dict[str, object]) -> None:
    problem = make_problem(24, 16, heads=4, dtype="fp32", **words)  # type: ignore[arg-type]
    found = peers(problem, "cpu")
    assert {"math", "eager"} <= backends(found)
    assert len(found.found) + len(found.missing) == 5
    q, k, v = inputs(problem)
    right, _ = reference.truth(q, k, v, problem.features, 0.4)
    for peer in found.found.values():
        torch.testing.assert_close(peer(q, k, v, 0.4).double(), right, atol=1e-5, rtol=1e-5)


def test_names_tell_backend_and_version() -> None:
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu")
    assert all(torch.__version__ in name for name in (*found.found, *found.missing))
    assert all(peer.backend in name for name, peer in found.found.items())


def test_a_backend_that_the_device_lacks_is_missing_with_torchs_reason() -> None:
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu")
    assert "cudnn" not in backends(found)
    assert "backend" in reason(found, "cudnn")


def test_a_backend_that_refuses_the_shape_says_which_size() -> None:
    found = peers(make_problem(24, 16, heads=2, head_dim_v=8, dtype="fp32"), "cpu")
    assert "same last dimension" in reason(found, "flash")


def test_score_matrices_too_large_are_refused_before_they_are_made() -> None:
    problem = make_problem(1 << 20, 8, heads=1, dtype="bf16")
    why = judge_peers._too_much_memory(problem)
    assert why is not None
    assert "2048.0 GiB" in why
    assert judge_peers._too_much_memory(make_problem(8192, 128)) is None


def test_a_guarded_peer_is_named_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_peers, "SCORE_BYTES", 1000)
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu")
    assert not {"math", "eager"} & backends(found)
    assert "score matrix" in reason(found, "eager")


def test_a_peer_with_another_mask_is_missing_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    top_left = make_problem(24, 16, heads=2, seq_kv=48, dtype="fp32", causal=True)
    monkeypatch.setattr(judge_peers, "_eager", lambda _: judge_peers._attention(top_left, "math"))
    problem = make_problem(
        24, 16, heads=2, seq_kv=48, dtype="fp32", causal=True, causal_align="bottom_right"
    )
    found = peers(problem, "cpu")
    assert "eager" not in backends(found)
    assert "wrong result" in reason(found, "eager")
