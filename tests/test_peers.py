"""Peers are pinned and named; what does not run, or is wrong, is named with the reason."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.errors import BadSetting
from fagen.judge import reference
from fagen.judge.peers import (
    FUSED,
    STANDARD,
    Peer,
    Peers,
    backends_named,
    draw_inputs,
    lineup,
    packages,
    peer_launch,
    peers,
    sdpa,
)
from fagen.judge.peers.base import Attention, Backend
from fagen.problem import Problem, make_problem
from fagen.tune.worker import Bench

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


# The backward pass


def backward(*sizes: int, **words: Any) -> Problem:
    return make_problem(*sizes, dtype="fp32", direction="backward", **words)


def only(monkeypatch: pytest.MonkeyPatch, attention: Attention, problem: Problem) -> Peers:
    """What is found where this is the one backend."""
    fake = Backend("eager", lambda: "eager", lambda _: attention)
    monkeypatch.setitem(lineup.BACKENDS, "eager", fake)
    return peers(problem, "cpu", ["eager"])


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
def test_every_peer_found_computes_the_gradients(words: dict[str, object]) -> None:
    problem = backward(24, 16, heads=4, batch=2, **words)
    found = peers(problem, "cpu", TORCHS)
    assert {"auto", "math", "eager"} <= backends(found)
    assert len(found.found) + len(found.missing) == 6
    q, k, v, g = draw_inputs(problem, torch.device("cpu"), 1)
    right = reference.truth_gradients(q, k, v, g, problem.features, 0.4)
    for peer in found.found.values():
        gradients = peer.ready(q, k, v, g, 0.4)
        for _ in range(2):
            for one, wanted in zip(gradients(), right, strict=True):
                torch.testing.assert_close(one.double(), wanted, atol=2e-5, rtol=1e-4)
    assert not any(one.requires_grad for one in (q, k, v, g))


def test_a_peer_of_a_lower_precision_is_no_wrong_one() -> None:
    problem = backward(300, 64, heads=2, causal=True)
    for dtype in ("bf16", "fp16"):
        low = replace(problem, shape=replace(problem.shape, dtype=dtype))  # type: ignore[arg-type]
        assert {"math", "eager"} <= backends(peers(low, "cpu", ["math", "eager"]))


def test_inputs_of_a_backward_pass_have_a_gradient_of_the_output() -> None:
    problem = backward(24, 16, heads=4, kv_heads=2, head_dim_v=8, seq_kv=9)
    device = torch.device("cpu")
    *inputs, g = draw_inputs(problem, device, 3)
    assert g.shape == (1, 4, 24, 8)
    same = draw_inputs(replace(problem, direction="forward"), device, 3)
    assert all(map(torch.equal, inputs, same)) and len(inputs) == len(same)


class Doubled(torch.autograd.Function):
    """Right forward, twice the gradient of what came last."""

    @staticmethod
    def forward(_: Any, one: Tensor) -> Tensor:
        return one.clone()

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:
        return 2 * g


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_peer_with_one_wrong_gradient_is_missing(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = backward(24, 16, heads=2)
    right = sdpa.eager(problem)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        inputs = [q, k, v]
        inputs[wrong] = Doubled.apply(inputs[wrong])
        return right(*inputs, scale)

    found = only(monkeypatch, attend, problem)
    assert found.found == {}
    assert reason(found, "eager") == "wrong gradients: relative L2 error 1"
    forward = replace(problem, direction="forward")
    assert backends(only(monkeypatch, attend, forward)) == {"eager"}


@pytest.mark.parametrize("place", [0, -1])
def test_a_key_that_is_left_out_shows_at_the_ends(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = backward(2000, 16, heads=1)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        scores = (q @ k.mT) * scale
        hidden = torch.zeros_like(scores[0, 0, 0], dtype=torch.bool)
        hidden[place] = True
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    assert "wrong gradients" in reason(only(monkeypatch, attend, problem), "eager")
    monkeypatch.setattr(lineup, "PROBED_ROWS", 2000)
    assert backends(only(monkeypatch, attend, problem)) == {"eager"}


def test_a_gradient_that_is_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = backward(24, 16, heads=2)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = sdpa.eager(problem)(q, k, v, scale)
        return out + 0 * (v - v).sqrt().sum()  # 0 times an infinite slope, in dV alone

    assert "L2 error nan" in reason(only(monkeypatch, attend, problem), "eager")


def no_gradient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return sdpa.eager(make_problem(24, 16, heads=2))(q, k, v, scale).detach()


def raises_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    raise RuntimeError("CUDA out of memory\nof 3 GiB")


def raises_backward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    out = sdpa.eager(make_problem(24, 16, heads=2))(q, k, v, scale)

    def refuse(_: Tensor) -> Tensor:
        raise RuntimeError("This build does not support backward.")

    out.register_hook(refuse)
    return out


def forgets_v(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return sdpa.eager(make_problem(24, 16, heads=2))(q, k, v.detach(), scale)


@pytest.mark.parametrize(
    ("attend", "why"),
    [
        (no_gradient, "it has no backward pass"),
        (raises_forward, "CUDA out of memory"),
        (raises_backward, "This build does not support backward."),
        (forgets_v, "appears to not have been used in the graph"),
    ],
)
def test_a_peer_without_gradients_is_missing_with_the_reason(
    attend: Attention, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = only(monkeypatch, attend, backward(24, 16, heads=2))
    assert found.found == {}
    assert why in reason(found, "eager") and "\n" not in reason(found, "eager")


def test_flex_has_no_backward_pass_on_a_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    found = peers(backward(200, 16, heads=4), "cpu", ["flex"])
    assert "backward on CPU" in reason(found, "flex")


def test_score_matrices_of_a_backward_pass_count_four_times() -> None:
    fits = make_problem(4096, 128, batch=8)  # 4 GiB
    assert lineup._too_much_memory(fits) is None
    why = lineup._too_much_memory(replace(fits, direction="backward"))
    assert why == "its 4 score matrices take 16.0 GiB, more than 8 GiB"
    half = replace(make_problem(4096, 128, batch=4), direction="backward")  # type: ignore[arg-type]
    assert lineup._too_much_memory(half) is None


class Seen:
    """Attention of `problem` that notes what is pinned, and what reaches its backward pass."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.forwards = self.backwards = 0
        self.pinned = False
        self.pinned_at: list[bool] = []
        self.strides: list[tuple[int, ...]] = []
        self.peer = Peer("seen", "seen", self.attend, self.pin)

    @contextmanager
    def pin(self) -> Iterator[None]:
        self.pinned = True
        yield
        self.pinned = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.forwards += 1
        self.pinned_at.append(self.pinned)
        out = sdpa.eager(self.problem)(q, k, v, scale)
        rows_outside = out.transpose(1, 2).contiguous().transpose(1, 2)
        if rows_outside.requires_grad:
            rows_outside.register_hook(self._note)
        return rows_outside

    def _note(self, g: Tensor) -> None:
        self.backwards += 1
        self.strides.append(g.stride())


def test_the_forward_pass_is_pinned_and_runs_once_for_each_set_before_any_backward() -> None:
    problem = backward(24, 16, heads=2)
    sets = [draw_inputs(problem, torch.device("cpu"), seed) for seed in range(3)]
    seen = Seen(problem)
    launch = peer_launch(seen.peer, problem, sets)
    assert seen.forwards == 0
    launch(1)  # the first one, whichever set it is for
    assert (seen.forwards, seen.backwards) == (3, 1)
    launch(0)
    launch(2)
    assert (seen.forwards, seen.backwards) == (3, 3)
    assert seen.pinned_at == [True] * 3


def test_the_gradient_comes_in_the_memory_layout_of_the_output() -> None:
    problem = backward(24, 16, heads=2)
    [*inputs, g] = draw_inputs(problem, torch.device("cpu"), 0)
    seen = Seen(problem)
    seen.peer.ready(*inputs, g, 0.25)()
    assert seen.strides != [g.stride()]
    assert seen.strides == [g.transpose(1, 2).contiguous().transpose(1, 2).stride()]


def test_a_launch_of_a_forward_problem_is_the_output_alone() -> None:
    problem = make_problem(24, 16, heads=2, dtype="fp32")
    seen = Seen(problem)
    launch = peer_launch(seen.peer, problem, [draw_inputs(problem, torch.device("cpu"), 0)])
    launch(0)
    launch(0)
    assert (seen.forwards, seen.backwards) == (2, 0)


def test_forward_passes_that_fail_leave_no_half_made_launch() -> None:
    problem = backward(24, 16, heads=2)
    sets = [draw_inputs(problem, torch.device("cpu"), seed) for seed in range(2)]
    seen = Seen(problem)

    def attend(*given: Any) -> Tensor:
        if seen.forwards == 1:
            seen.forwards = 100
            raise RuntimeError("CUDA out of memory")
        return seen.attend(*given)

    launch = peer_launch(Peer("seen", "seen", attend), problem, sets)
    with pytest.raises(RuntimeError, match="out of memory"):
        launch(0)
    launch(1)
    assert seen.backwards == 1


def test_the_tuner_gives_a_peer_the_gradient_of_each_set() -> None:
    problem = backward(24, 16, heads=2, kv_heads=1)
    given: list[Tensor] = []

    def ready(*inputs: Tensor) -> Callable[[], None]:
        given.extend(inputs)
        return lambda: None

    bench = Bench()
    bench._job = SimpleNamespace(problem=problem)  # type: ignore[assignment]
    rest = [torch.empty(1) for _ in range(9)]  # q, k, v, o, lse, g, dq, dk, dv
    bench._sets = [tuple(rest)]  # type: ignore[list-item]
    bench._peer_launches(SimpleNamespace(ready=ready))(0)  # type: ignore[arg-type]
    assert [id(one) for one in given[:4]] == [id(rest[i]) for i in (0, 1, 2, 5)]
    assert given[4] == 16**-0.5


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
        rows = [one.transpose(1, 2) for one in (q, k, v)]
        ratio, hidden = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
        keys, values = (one.repeat_interleave(ratio, 1) for one in rows[1:])
        scores = rows[0] @ keys.transpose(2, 3) * softmax_scale
        if causal:
            seen = torch.ones_like(scores, dtype=torch.bool).tril(hidden)
            scores = scores.masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1) @ values).transpose(1, 2).contiguous()
        return (out, None) if self.as_tuple else out


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


def test_of_both_packages_flash_attention_4_alone_has_a_backward_pass(
    installed: dict[str, FakeFlash],
) -> None:
    problem = backward(24, 16, heads=4, kv_heads=2, head_dim_v=24, causal=True)
    found = peers(problem, "cpu", ["fa3", "fa4"])
    assert backends(found) == {"fa4"}
    assert "fa3-fwd, is built without the backward pass" in reason(found, "fa3")
    assert installed["fa3"].seen == []


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
