"""The backward pass on the device: drawn legal problems, repeats, training, graphs, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fagen
from attention import assert_gradients, make_gradient, make_inputs
from exact_variants import exact_variants
from fagen.generate.families import families_of
from fagen.generate.program import Sizes
from fagen.generate.render import render
from fagen.problem import make_problem
from fagen.run.kernel import Runner, load
from fagen.target import toolchain
from gpu_fixtures import build_all, here, on_device

EXAMPLES = 260
KINDS = [
    ("bf16", 128, 128),
    ("fp16", 64, 64),
    ("bf16", 80, 40),
    ("fp32", 64, 64),
    ("bf16", 256, 256),
    ("fp16", 1, 8),
    ("bf16", 192, 128),
    ("fp16", 96, 96),
]
SIZES = st.sampled_from([0, 1, 2, 15, 17, 63, 64, 65, 127, 128, 129, 255, 257, 300, 640, 1000])
MB = 1 << 20


@pytest.fixture(scope="module")
def runners() -> list[Runner]:
    minor = toolchain().triton_minor
    variants = exact_variants(here(), KINDS, each=2, direction="backward")
    programs = [render(problem, config, minor) for problem, config in variants]
    build_all(programs)
    return [load(program, here(), "cuda:0") for program in programs]


@st.composite
def calls(draw: Any) -> tuple[int, int, int, int, int, int, float]:
    """(program, batch, heads_kv, ratio, seq_q, seq_kv, scale)"""
    return (
        draw(st.integers(0, 10_000)),
        draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.sampled_from([1, 2, 5])),
        draw(st.sampled_from([1, 1, 2, 3, 8])),
        draw(SIZES),
        draw(SIZES),
        draw(st.sampled_from([0.0, 0.05, 0.3, 1.0, -0.2])),
    )


# N01, N02, N04, N05, N09
def test_any_legal_problem_has_exact_gradients(runners: list[Runner]):
    seen: set[tuple[str, str]] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(call=calls())
    def check(call: tuple[int, int, int, int, int, int, float]) -> None:
        number, batch, heads_kv, ratio, seq_q, seq_kv, scale = call
        runner = runners[number % len(runners)]
        made_for = runner.program.problem
        s, f = made_for.shape, made_for.features
        problem = make_problem(
            seq_q,
            s.head_dim,
            batch=batch,
            heads=heads_kv * ratio,
            kv_heads=heads_kv,
            seq_kv=seq_kv,
            head_dim_v=s.head_dim_v,
            dtype=s.dtype,
            causal=f.causal != "none",
            causal_align=f.causal if f.causal != "none" else "top_left",
            layout=made_for.layout,
            scale_sign=f.scale,
            direction="backward",
        )
        if runner.program.why_unfit(Sizes.of(problem)) is not None:
            return
        if f.scale != "any" and scale <= 0:
            scale = s.head_dim**-0.5
        dice = torch.Generator().manual_seed(number)
        q, k, v = (on_device(x) for x in make_inputs(problem, dice))
        g = on_device(make_gradient(problem, dice))
        assert_gradients(runner.launch_poisoned, problem, (q, k, v), g, scale)
        seen.add((runner.program.config.family, runner.program.name))

    check()
    made = Counter(runner.program.config.family for runner in runners)
    reached = Counter(family for family, _ in seen)
    assert all(reached[family] >= count * 3 // 4 for family, count in made.items())
    wanted = {
        family.NAME
        for family in families_of("backward")
        for dtype, dim, dim_v in KINDS
        if not family.why_unsupported(
            make_problem(200, dim, head_dim_v=dim_v, dtype=dtype, direction="backward"), here()
        )
    }
    assert set(made) >= wanted


# Through fagen.get, with what it serves without any tuning.


def leaves(seq: int, dim: int = 128, heads: int = 8, kv_heads: int = 2) -> list[Tensor]:
    dice = torch.Generator("cuda").manual_seed(seq)

    def leaf(count: int) -> Tensor:
        dims = (2, count, seq, dim)
        made = torch.randn(dims, generator=dice, device="cuda", dtype=torch.bfloat16)
        return made.requires_grad_()

    return [leaf(heads), leaf(kv_heads), leaf(kv_heads)]


def by_torch(qkv: list[Tensor], g: Tensor) -> tuple[Tensor, ...]:
    leafs = [x.detach().float().requires_grad_() for x in qkv]
    out = torch.nn.functional.scaled_dot_product_attention(*leafs, is_causal=True, enable_gqa=True)
    return torch.autograd.grad(out, leafs, g.float())


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = fagen.get(q, k, v, causal=True)(q, k, v)
    assert isinstance(out, Tensor)
    return out


def assert_near(found: Any, right: Any) -> None:
    """bf16 against fp32: another mask, or one head of a group, is far off."""
    for one, other in zip(found, right, strict=True):
        assert (one.float() - other).norm() <= 0.01 * other.norm()


# torch's own fp32 products, on autograd's thread
NO_CONTEXT = "ignore:Attempting to run cuBLAS:UserWarning"


# B02
@pytest.mark.filterwarnings(NO_CONTEXT)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_training_steps_get_the_gradients_of_torch(dim: int):
    qkv = leaves(700, dim)
    g = torch.randn(2, 8, 700, dim, device="cuda", dtype=torch.bfloat16)
    right = by_torch(qkv, g)
    assert_near(torch.autograd.grad(attend(*qkv), qkv, g), right)
    out = checkpoint(attend, *qkv, use_reentrant=False)
    assert_near(torch.autograd.grad(out, qkv, g), right)
    (dk,) = torch.autograd.grad(attend(*qkv), qkv[1], g)
    assert_near([dk], right[1:2])


# R02
@pytest.mark.filterwarnings(NO_CONTEXT)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch in its own compiler
def test_a_compiled_step_gets_them_too():
    qkv = leaves(512)
    kernel = fagen.get(*qkv, causal=True)
    compiled = torch.compile(lambda q, k, v: kernel(q * 1.0, k, v) * 2.0, fullgraph=True)
    out = compiled(*qkv)
    g = torch.randn_like(out)
    assert_near(torch.autograd.grad(out, qkv, g), by_torch(qkv, 2.0 * g))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# B01, N10
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_torchs_switch_gives_the_same_bits_in_every_run(deterministic: None, dim: int):
    qkv = leaves(1000, dim)
    g = torch.randn(2, 8, 1000, dim, device="cuda", dtype=torch.bfloat16)
    first, *others = (torch.autograd.grad(attend(*qkv), qkv, g) for _ in range(10))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("seq", [4096, 16384, 65536])
def test_memory_is_linear_in_the_length(seq: int):
    """O and LSE for the backward pass, three gradients, and what its kernels work with."""
    q, k, v = (
        torch.randn(1, 4, seq, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    kernel = fagen.get(q, k, v, causal=True)
    g = torch.randn(q.shape, device="cuda", dtype=torch.bfloat16)
    torch.autograd.grad(kernel(q, k, v), (q, k, v), g)  # loads and checks what it needs
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(kernel(q, k, v), (q, k, v), g)
    taken = torch.cuda.max_memory_allocated() - before
    assert len(gradients) == 3
    tensor, rows = q.numel() * 2, 4 * seq * 4
    program = kernel.gradient.chosen.program
    spaces = _workspaces(program, Sizes.of(fagen.make_problem(seq, 128, heads=4)))
    assert taken <= 1.05 * (4 * tensor + rows + spaces) + MB
    assert spaces <= 2 * tensor + 3 * rows + MB  # an fp32 dQ at most, and rows' numbers


def _workspaces(program: Any, sizes: Sizes) -> int:
    from math import prod

    from fagen.generate.families import family_of

    spaces = family_of(program.config).workspaces(program.config.knobs, sizes)
    return sum(4 * prod(space.shape) for space in spaces)
