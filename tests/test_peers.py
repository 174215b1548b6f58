"""Peers are pinned and named; what does not run, or is wrong, is named with the reason."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fagen.errors import BadSetting
from fagen.judge import reference
from fagen.judge.peers import FUSED, STANDARD, Peers, backends_named, lineup, packages, peers, sdpa
from fagen.judge.peers.base import Attention, Backend
from fagen.problem import Features, Problem, make_problem

TORCHS = ("auto", "cudnn", "flash", "efficient", "math", "eager")


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
    found = peers(problem, "cpu", TORCHS)
    assert {"auto", "math", "eager"} <= backends(found)
    assert len(found.found) + len(found.missing) == 6
    q, k, v = inputs(problem)
    right, _ = reference.truth(q, k, v, problem.features, 0.4)
    for peer in found.found.values():
        torch.testing.assert_close(peer(q, k, v, 0.4).double(), right, atol=1e-5, rtol=1e-5)


def test_names_tell_backend_and_version() -> None:
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu", TORCHS)
    assert all(torch.__version__ in name for name in (*found.found, *found.missing))
    assert all(peer.backend in name for name, peer in found.found.items())


def test_a_backend_that_the_device_lacks_is_missing_with_torchs_reason() -> None:
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu", TORCHS)
    assert "cudnn" not in backends(found)
    assert "backend" in reason(found, "cudnn")


def test_a_backend_that_refuses_the_shape_says_which_size() -> None:
    found = peers(make_problem(24, 16, heads=2, head_dim_v=8, dtype="fp32"), "cpu", TORCHS)
    assert "same last dimension" in reason(found, "flash")


def test_score_matrices_too_large_are_refused_before_they_are_made() -> None:
    problem = make_problem(1 << 20, 8, heads=1, dtype="bf16")
    why = lineup._too_much_memory(problem)
    assert why is not None
    assert "2048.0 GiB" in why
    assert lineup._too_much_memory(make_problem(8192, 128)) is None


def test_a_guarded_peer_is_named_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineup, "SCORE_BYTES", 1000)
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu", TORCHS)
    assert not {"math", "eager"} & backends(found)
    assert "score matrix" in reason(found, "eager")


def test_a_peer_with_another_mask_is_missing_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    top_left = make_problem(24, 16, heads=2, seq_kv=48, dtype="fp32", causal=True)
    wrong = Backend("eager", lambda: "eager", lambda _: sdpa.eager(top_left))
    monkeypatch.setitem(lineup.BACKENDS, "eager", wrong)
    problem = make_problem(
        24, 16, heads=2, seq_kv=48, dtype="fp32", causal=True, causal_align="bottom_right"
    )
    found = peers(problem, "cpu", ["eager"])
    assert "eager" not in backends(found)
    assert "wrong result" in reason(found, "eager")


def test_whatever_a_backend_raises_becomes_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(_: Problem) -> Attention:
        raise KeyError("sm_42")

    monkeypatch.setitem(lineup.BACKENDS, "fa4", Backend("fa4", lambda: "fa4 (x 1)", attention))
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu", ["fa4", "eager"])
    assert found.missing == {"fa4 (x 1)": "'sm_42'"}
    assert backends(found) == {"eager"}


def test_only_within_its_pin_is_a_peer_pinned() -> None:
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu", ["math", "auto"])
    math, auto = found.found.values()
    assert torch.backends.cuda.flash_sdp_enabled()
    with math.pin():
        assert not torch.backends.cuda.flash_sdp_enabled()
    with auto.pin():
        assert torch.backends.cuda.flash_sdp_enabled()


def test_the_tuner_races_what_is_fused_and_bench_all_but_what_compiles_for_long() -> None:
    assert set(FUSED) == {"cudnn", "flash", "efficient", "fa3"}
    assert set(STANDARD) == {*TORCHS, "fa3", "flex"}
    assert backends_named(["fa3", "fa4", "fa3"]) == ("fa3", "fa4")
    with pytest.raises(BadSetting, match=r"'fa2' is unknown.*fa3, fa4, flex"):
        backends_named(["fa2"])


# Packages of their own


@pytest.mark.parametrize("key", ["fa3", "fa4"])
def test_a_peer_that_is_not_installed_is_missing_with_the_command(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fa3_fwd_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    found = peers(make_problem(24, 16, heads=2, dtype="fp32"), "cpu", [key])
    install = {"fa3": "pip install fa3-fwd", "fa4": "pip install 'flash-attn-4"}[key]
    assert found.found == {}
    assert f"not installed; run: {install}" in reason(found, key)


class FakeFlash(ModuleType):
    """Attention on (B, S, H, D) views, bottom-right, as both packages have it."""

    def __init__(self, name: str, as_tuple: bool) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.as_tuple = as_tuple
        self.seen: list[tuple[int, ...]] = []

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> object:
        self.seen.append(tuple(q.shape))
        assert not q.is_contiguous()  # a view: no copy is part of the call
        features = Features("bottom_right" if causal else "none")
        rows = (one.transpose(1, 2) for one in (q, k, v))
        out = reference.truth(*rows, features, softmax_scale)[0].float().transpose(1, 2)
        return (out.contiguous(), None) if self.as_tuple else out.contiguous()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeFlash]:
    fakes = {
        "fa3": FakeFlash("fa3_fwd_interface", as_tuple=False),
        "fa4": FakeFlash("flash_attn.cute", as_tuple=True),
    }
    package = ModuleType("flash_attn")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for fake in fakes.values():
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return fakes


@pytest.mark.parametrize("key", ["fa3", "fa4"])
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"causal": True},
        {"causal": True, "seq_kv": 40, "causal_align": "bottom_right"},
        {"kv_heads": 2, "head_dim_v": 24},
    ],
)
def test_flash_attention_gets_views_with_rows_outside(
    key: str, words: dict[str, object], installed: dict[str, FakeFlash]
) -> None:
    problem = make_problem(24, 16, heads=4, dtype="fp32", **words)  # type: ignore[arg-type]
    found = peers(problem, "cpu", [key])
    assert found.missing == {}
    assert installed[key].seen == [(1, 24, 4, 16)]
    q, k, v = inputs(problem)
    [peer] = found.found.values()
    right, _ = reference.truth(q, k, v, problem.features, 0.4)
    torch.testing.assert_close(peer(q, k, v, 0.4).double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("key", ["fa3", "fa4"])
def test_flash_attention_has_no_top_left_mask_of_a_rectangle(
    key: str, installed: dict[str, FakeFlash]
) -> None:
    problem = make_problem(24, 16, heads=4, seq_kv=40, dtype="fp32", causal=True)
    assert "top-left" in reason(peers(problem, "cpu", [key]), key)
    assert installed[key].seen == []


def test_names_of_packages_tell_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: f"{name}-9")
    names = [backend.name() for backend in packages.BACKENDS]
    assert names == ["fa3 (fa3-fwd fa3-fwd-9)", "fa4 (flash-attn-4 flash-attn-4-9)"]


# FlexAttention


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"causal": True, "kv_heads": 2},
        {"causal": True, "seq_kv": 300},
        {"causal": True, "seq_kv": 300, "causal_align": "bottom_right"},
    ],
)
def test_flex_computes_the_problem(
    words: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Uncompiled, which takes no minute; tests/gpu compiles it.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = make_problem(200, 16, heads=4, dtype="fp32", **words)  # type: ignore[arg-type]
    found = peers(problem, "cpu", ["flex"])
    assert found.missing == {}
    q, k, v = inputs(problem)
    [peer] = found.found.values()
    right, _ = reference.truth(q, k, v, problem.features, 0.4)
    torch.testing.assert_close(peer(q, k, v, 0.4).double(), right, atol=1e-5, rtol=1e-5)
