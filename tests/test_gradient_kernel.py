"""Training through `fagen.get`: autograd, graphs, what is kept, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fagen
from fagen.errors import BadInput, NoKernel
from fagen.generate.families import flash_bwd, flash_bwd_roles, flash_bwd_ws, repeats
from fagen.serve import library, operator
from fagen.serve.gradient import GradientKernel
from serve_fixtures import FakeMachine, attention, faked

CPU = torch.device("cpu")
NAMES = ("DQ", "DK", "DV")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return faked(monkeypatch)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def leaves(
    heads: int = 4, heads_kv: int = 2, seq: int = 12, seq_kv: int = 12, dim_v: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, seq, 16, generator=dice, requires_grad=True)
    k = torch.randn(2, heads_kv, seq_kv, 16, generator=dice, requires_grad=True)
    v = torch.randn(2, heads_kv, seq_kv, dim_v, generator=dice, requires_grad=True)
    return q, k, v


def halves() -> tuple[Tensor, Tensor, Tensor]:
    """Of a kind that has several configs."""
    q, k, v = (x.detach().half().requires_grad_() for x in leaves(seq=128, seq_kv=128))
    return q, k, v


def of_torch(qkv: tuple[Tensor, ...], g: Tensor, causal: str, scale: float) -> list[Tensor]:
    """By torch's autograd, of the formula in fp64."""
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    out, _ = attention(*doubles, causal, scale)
    return [x.float() for x in torch.autograd.grad(out, doubles, g.double())]


def assert_like(found: Any, right: Any) -> None:
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


# N01, N05, B01
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(("seq", "seq_kv"), [(12, 12), (7, 15), (15, 7)])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_backward_gives_the_gradients_of_the_formula(
    causal: str, seq: int, seq_kv: int, heads_kv: int
) -> None:
    q, k, v = leaves(heads_kv=heads_kv, seq=seq, seq_kv=seq_kv)
    words: dict[str, Any] = {} if causal == "none" else {"causal": True, "causal_align": causal}
    out = fagen.get(q, k, v, **words)(q, k, v, scale=0.3)
    g = torch.randn_like(out)
    out.backward(g)
    right = of_torch((q, k, v), g, causal, 0.3)
    assert_like((q.grad, k.grad, v.grad), right)


def test_gradients_are_computed_for_the_inputs_that_require_them(machine: FakeMachine) -> None:
    for number in range(3):
        q, k, v = (x.detach().requires_grad_(i == number) for i, x in enumerate(leaves()))
        fagen.get(q, k, v)(q, k, v).sum().backward()
        assert [x.grad is not None for x in (q, k, v)] == [i == number for i in range(3)]
    (backward,) = (r for r in machine.loaded if r.program.problem.direction == "backward")
    assert backward.wanted == [(name,) for name in NAMES]


def test_a_gradient_that_is_one_number_for_all_is_laid_out_first(machine: FakeMachine) -> None:
    q, k, v = leaves()
    fagen.get(q, k, v)(q, k, v).sum().backward()
    assert_like(
        (q.grad, k.grad, v.grad), of_torch((q, k, v), torch.ones(2, 4, 12, 8), "none", 0.25)
    )
    assert {r.program.problem.layout for r in machine.loaded} == {"aligned16"}


def test_unaligned_tensors_get_gradients_of_a_twin(machine: FakeMachine) -> None:
    q, k, v = leaves()
    wide = torch.zeros(2, 4, 12, 32)
    wide[..., ::2] = q.detach()
    q = wide[..., ::2].requires_grad_()
    out = fagen.get(q, k, v)(q, k, v)
    g = torch.randn_like(out)
    assert_like(torch.autograd.grad(out, (q, k, v), g), of_torch((q, k, v), g, "none", 0.25))
    assert machine.loaded[-1].program.problem.layout == "any"


def test_the_lse_has_no_gradient() -> None:
    q, k, v = leaves()
    out, lse = fagen.get(q, k, v)(q, k, v, return_lse=True)
    assert out.requires_grad and not lse.requires_grad


def test_a_second_derivative_is_refused_and_the_first_is_not() -> None:
    q, k, v = leaves()
    (dq,) = torch.autograd.grad(fagen.get(q, k, v)(q, k, v).sum(), q, create_graph=True)
    assert_like([dq], of_torch((q, k, v), torch.ones(2, 4, 12, 8), "none", 0.25)[:1])
    with pytest.raises(BadInput, match="no gradients of their own"):
        dq.sum().backward()


def test_an_input_changed_in_place_before_backward_is_an_error() -> None:
    q, k, v = leaves()
    double = q * 2
    out = fagen.get(q, k, v)(double, k, v)
    double.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_is_kept_for_backward_is_linear_in_the_length() -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    q, k, v = leaves(seq=64, seq_kv=64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fagen.get(q, k, v)(q, k, v)
    assert sum(kept) == q.numel() + k.numel() + v.numel() + out.numel() + 2 * 4 * 64


def test_activation_checkpointing_computes_the_forward_pass_again(machine: FakeMachine) -> None:
    q, k, v = leaves()
    kernel = fagen.get(q, k, v)
    out = checkpoint(lambda x: kernel(x, k, v), q, use_reentrant=False)
    g = torch.randn_like(out)
    out.backward(g)
    assert_like((q.grad, k.grad, v.grad), of_torch((q, k, v), g, "none", 0.25))
    assert len(machine.loaded[0].launches) == 2


# Graphs


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_compiled_function_holds_the_operator(return_lse: bool) -> None:
    q, k, v = leaves()
    kernel = fagen.get(q, k, v, causal=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = kernel(q * 2, k, v, scale=0.1, return_lse=return_lse)
        return (found[0] if return_lse else found) + 1

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    assert_like([out], [attend(q, k, v)])
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), g)
    assert_like(found, torch.autograd.grad(attend(q, k, v), (q, k, v), g))


def test_what_watches_operators_sees_the_operator() -> None:
    q, k, v = (x.detach() for x in leaves())
    kernel = fagen.get(q, k, v)
    graph = make_fx(lambda *qkv: kernel(*qkv) * 2)(q, k, v)
    names = [str(node.target) for node in graph.graph.nodes]
    assert "fagen.attention.default" in names
    twice = [x * 2 for x in (q, k, v)]
    assert_like([graph(*twice)], [kernel(*twice) * 2])


@pytest.mark.parametrize("saves", [False, True])
def test_selective_checkpointing_can_keep_what_attention_gave(
    saves: bool, machine: FakeMachine
) -> None:
    q, k, v = leaves()
    kernel = fagen.get(q, k, v)

    def policy(_: Any, op: Any, *args: Any, **words: Any) -> CheckpointPolicy:
        keeps = saves and op == torch.ops.fagen.attention.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(lambda x: kernel(x, k, v), q, use_reentrant=False, context_fn=contexts)
    g = torch.randn_like(out)
    out.backward(g)
    assert_like((q.grad, k.grad, v.grad), of_torch((q, k, v), g, "none", 0.25))
    assert len(machine.loaded[0].launches) == (1 if saves else 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo looks at
def test_a_backward_pass_is_compiled_behind_an_eager_forward_one() -> None:
    q, k, v = leaves()
    kernel = fagen.get(q, k, v)
    eagerly = torch._dynamo.disable(lambda *qkv: kernel(*qkv))

    def step(*qkv: Tensor) -> None:
        (eagerly(*qkv) * 2).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(q, k, v)
    twos = torch.full((2, 4, 12, 8), 2.0)
    assert_like((q.grad, k.grad, v.grad), of_torch((q, k, v), twos, "none", 0.25))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_computes_the_gradients_that_are_wanted_alone(
    compiled: bool, machine: FakeMachine
) -> None:
    q, k, v = leaves()
    kernel = fagen.get(q, k, v)
    k.requires_grad_(False)

    def attend(*qkv: Tensor) -> Tensor:
        return kernel(*qkv).sum()

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    run(q, k, v).backward()
    assert k.grad is None and q.grad is not None and v.grad is not None
    assert machine.loaded[-1].wanted[-1] == ("DQ", "DV")


def test_the_operators_are_as_torch_wants_them() -> None:
    q, k, v = leaves()
    kernel = fagen.get(q, k, v)
    name = kernel._operator
    torch.library.opcheck(torch.ops.fagen.attention.default, (q, k, v, name, None))
    o, lse = (x.detach() for x in kernel(q, k, v, return_lse=True))
    given = (*(x.detach() for x in (q, k, v)), o, lse, torch.randn_like(o), name, 0.3)
    for wanted in ([True, True, True], [False, True, False]):
        torch.library.opcheck(torch.ops.fagen.attention_backward.default, (*given, wanted))


def test_an_operator_finds_its_kernel_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in leaves())
    kernel = fagen.get(q, k, v, causal=True)
    right = kernel(q, k, v)
    monkeypatch.setattr(operator, "_kernels", {})  # as where nothing was asked for yet
    library.forget()
    out, _ = torch.ops.fagen.attention(q, k, v, kernel._operator, None)
    assert torch.equal(out, right)


# Copies and pickles


def test_a_copy_of_a_module_shares_its_kernels() -> None:
    kernel = fagen.get(*leaves())
    kernel(*leaves()).sum().backward()
    for one in (kernel, kernel.gradient):
        assert copy.copy(one) is copy.deepcopy(one) is one


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_pickled_kernel_is_found_anew(direction: Any) -> None:
    words = {"causal": True, "direction": direction, "deterministic": True}
    kernel = fagen.get(*leaves(), **words)
    loaded = pickle.loads(pickle.dumps(kernel))
    assert loaded is kernel  # of this process
    library.forget()
    loaded = pickle.loads(pickle.dumps(kernel))
    assert loaded is not kernel
    assert type(loaded) is type(kernel)
    assert (loaded.problem, loaded.config) == (kernel.problem, kernel.config)
    assert (loaded.device, loaded.asked) == (kernel.device, kernel.asked)


def test_a_kernel_that_is_loaded_without_a_gpu_can_be_read() -> None:
    kernel = fagen.get(*leaves())
    function, words = kernel.__reduce__()
    loaded = function(*words[:-1], "cuda")  # as pickled on a GPU
    assert loaded.device is None and loaded.source == kernel.source


# The kernel of the backward pass by itself


def called(kernel: GradientKernel, **changed: Any) -> Any:
    q, k, v = (x.detach() for x in leaves())
    o, lse = attention(q, k, v, "none", 0.25)
    given = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "g": torch.ones_like(o), **changed}
    return kernel(**given)


def test_it_can_be_asked_for_and_says_what_it_is() -> None:
    kernel = fagen.get(*leaves(), direction="backward")
    assert isinstance(kernel, GradientKernel)
    assert repr(kernel).startswith("<fagen.GradientKernel flash_bwd(")
    right = of_torch(leaves(), torch.ones(2, 4, 12, 8), "none", 0.25)
    assert_like(called(kernel), right)
    dq, dk, dv = called(kernel, wanted=(True, False, True))
    assert dk is None
    assert_like((dq, dv), (right[0], right[2]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"o": torch.zeros(2, 4, 12, 16)}, r"o must be \(2, 4, 12, 8\)"),
        ({"lse": torch.zeros(2, 4, 11)}, r"lse must be \(2, 4, 12\)"),
        ({"lse": torch.zeros(2, 4, 12).half()}, "got .* of torch.float16"),
        ({"g": torch.zeros(2, 4, 12, 8).half()}, "g must be"),
        ({"o": torch.zeros(2, 12, 4, 8).transpose(1, 2)}, "o is not contiguous"),
        ({"g": 1.0}, "g must be a tensor"),
        ({"lse": None}, "lse must be a tensor"),
        ({"o": torch._neg_view(torch.zeros(2, 4, 12, 8))}, "o is a negated view"),
        ({"q": torch.zeros(2, 4, 12, 24)}, "differ in head size"),
    ],
)
def test_what_no_forward_call_left_is_refused(changed: dict[str, Tensor], said: str) -> None:
    kernel = fagen.get(*leaves(), direction="backward")
    with pytest.raises(BadInput, match=said):
        called(kernel, **changed)


def shifted(x: Tensor) -> Tensor:
    """At an address that is no multiple of 16 bytes."""
    room = torch.zeros(x.numel() + 16, dtype=x.dtype)
    found = room[1 : 1 + x.numel()].view(x.shape).copy_(x)
    assert found.data_ptr() % 16
    return found


@pytest.mark.parametrize("first", [(), ("g",)])
@pytest.mark.parametrize(
    "names", [("q",), ("k",), ("v",), ("g",), ("o",), ("lse",), ("q", "g"), ("o", "lse", "g")]
)
def test_any_address_is_seen_whatever_came_before(
    first: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """FakeRunner refuses what a kernel must not be given."""
    q, k, v = (x.detach() for x in leaves())
    o, lse = attention(q, k, v, "none", 0.25)
    given = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "g": torch.randn_like(o)}
    kernel = fagen.get(q, k, v, direction="backward")
    right = kernel(**given)
    for moved in (first, names):
        found = kernel(**{**given, **{name: shifted(given[name]) for name in moved}})
        assert_like(found, right)


def test_a_negated_gradient_is_made_plain() -> None:
    q, k, v = leaves()
    out = fagen.get(q, k, v)(q, k, v)
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), torch._neg_view(g))
    assert_like(found, of_torch((q, k, v), -g, "none", 0.25))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # of torch's own forward mode
def test_a_tangent_is_refused_where_it_would_be_lost() -> None:
    q, k, v = (x.detach() for x in leaves())
    kernel = fagen.get(q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(BadInput, match="forward-mode"):
            kernel(q, k, dual)
        assert_like([kernel(q, k, v)], [attention(q, k, v, "none", 0.25)[0]])


def test_a_scale_that_requires_grad_is_refused() -> None:
    q, k, v = leaves()
    with pytest.raises(BadInput, match="scale requires grad"):
        fagen.get(q, k, v)(q, k, v, scale=torch.tensor(0.3, requires_grad=True))


# N10


def test_torchs_switch_keeps_to_kernels_that_repeat(
    machine: FakeMachine, deterministic: None
) -> None:
    q, k, v = halves()
    kernel = fagen.get(q, k, v)
    kernel(q, k, v).sum().backward()
    used = machine.loaded[-1]
    assert used.launches and repeats(used.program.config)
    torch.use_deterministic_algorithms(False)
    kernel(q, k, v).sum().backward()
    assert not repeats(kernel.gradient.config)
    assert [len(r.launches) for r in machine.loaded[-2:]] == [1, 1]


def test_a_kernel_can_be_asked_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = halves()
    assert not repeats(fagen.get(q, k, v).gradient.config)
    assert repeats(fagen.get(q, k, v, deterministic=True).gradient.config)
    for family in (flash_bwd, flash_bwd_ws, flash_bwd_roles):
        monkeypatch.setattr(family, "repeats", lambda knobs: False)
    library.forget()
    with pytest.raises(NoKernel, match="backward"):
        _ = fagen.get(q, k, v, deterministic=True).gradient


class Stopped(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        return None


@pytest.mark.parametrize("as_operator", [False, True])
def test_no_gradient_of_o_means_none_of_the_inputs(
    as_operator: bool, machine: FakeMachine
) -> None:
    q, k, v = halves()
    kernel = fagen.get(q, k, v)
    if as_operator:
        o, _ = torch.ops.fagen.attention(q, k, v, kernel._operator, None)
    else:
        o = kernel(q, k, v)
    launched = len(machine.loaded)
    Stopped.apply(o).sum().backward()
    assert (q.grad, k.grad, v.grad) == (None, None, None)
    assert len(machine.loaded) == launched


def test_calls_with_and_without_gradients_each_have_a_quick_way() -> None:
    q, k, v = leaves()
    kernel = fagen.get(q, k, v)
    for _ in range(2):
        kernel(q, k, v).sum().backward()
        with torch.no_grad():
            kernel(q.detach(), k.detach(), v.detach())
    for training in (True, False):
        given = [x.detach().requires_grad_(training) for x in (q, k, v)]
        kernel(*given)
        assert kernel._last is not None and kernel._last.alike(*given)
