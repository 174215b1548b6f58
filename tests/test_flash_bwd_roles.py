"""flash_bwd_roles without a GPU: its kernels step by step in numpy, against float64 gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fagen.config import Config
from fagen.generate.families import FAMILIES, bwd_q, flash_bwd_roles
from fagen.generate.families.base import every_choice, why_invalid
from fagen.generate.families.flash_bwd_roles import Knobs
from fagen.generate.program import Program, Sizes
from fagen.generate.render import render
from fagen.judge import reference
from fagen.judge.verify import Gate
from fagen.outcome import Verdict
from fagen.problem import Problem, make_problem
from fagen.target import preset
from gluon_steps import Deadlock, Stepper
from mutations import MUTATIONS, Mutation, edited, mutated

H200 = preset("h200")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FACTOR, SLACK = 3.0, 1e-4  # of the baseline's error, and beside it
CAUSAL: dict[str, dict[str, Any]] = {
    "none": {},
    "top_left": {"causal": True},
    "bottom_right": {"causal": True, "causal_align": "bottom_right"},
}
EVERY = list(every_choice(Knobs))
ONE = Knobs(32, 2, False, 2, 1)
TWO = Knobs(32, 2, True, 2, 2)
EARLY = Knobs(32, 2, False, 2, 2, kv_early=True)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, flash_bwd_roles.NAME, flash_bwd_roles)
        yield
    torch.set_num_threads(threads)


def backward(seq: int, dim: int, causal: str = "none", **words: Any) -> Problem:
    return replace(make_problem(seq, dim, **CAUSAL[causal], **words), direction="backward")


def why_not(problem: Problem, knobs: Knobs) -> str | None:
    return why_invalid(flash_bwd_roles, problem, H200, knobs)


def program_of(problem: Problem, knobs: Knobs, triton_minor: tuple[int, int] = (3, 6)) -> Program:
    return render(problem, Config(flash_bwd_roles.NAME, knobs), triton_minor)


# What it takes


def test_it_is_for_wide_heads_on_hopper() -> None:
    wide = backward(1024, 256)
    assert why_not(wide, ONE) is None
    for other in (
        replace(wide, direction="forward"),
        backward(1024, 128),
        backward(1024, 256, dtype="fp32"),
        backward(1024, 250),
        backward(1024, 256, layout="any"),
    ):
        assert why_not(other, ONE) is not None
    assert flash_bwd_roles.why_unsupported(wide, preset("b200")) is not None


@pytest.mark.parametrize(("dim", "dim_v"), [(256, 256), (192, 128), (192, 192), (64, 256)])
def test_seeds_fit_and_repeat_their_bits(dim: int, dim_v: int) -> None:
    problem = backward(4096, dim, "top_left", head_dim_v=dim_v)
    valid = [k for k in flash_bwd_roles.seeds(problem, H200) if why_not(problem, k) is None]
    assert {k.p_slots for k in valid} == {1, 2}
    assert all(flash_bwd_roles.repeats(k) for k in valid)


def test_shared_memory_is_not_underestimated() -> None:
    """Compiled for sm_90 with Triton 3.6 and 3.7: 214592 bytes for dK and dV, 196984 for dQ."""
    problem = backward(8192, 256)
    assert flash_bwd_roles.shared_bytes(problem, TWO) >= 214592
    assert bwd_q.shared_bytes(problem, TWO) >= 196984


# Gradients


def draw(problem: Problem, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = problem.shape
    dice = torch.Generator().manual_seed(seed)

    def one(heads: int, rows: int, columns: int) -> Tensor:
        drawn = torch.randn((s.batch, heads, rows, columns), generator=dice)
        return drawn.to(DTYPES[s.dtype])

    return (
        one(s.heads_q, s.seq_q, s.head_dim),
        one(s.heads_kv, s.seq_kv, s.head_dim),
        one(s.heads_kv, s.seq_kv, s.head_dim_v),
        one(s.heads_q, s.seq_q, s.head_dim_v),
    )


def gradients(program: Program, scale: float = 0.1, seed: int = 0) -> list[Tensor]:
    """dQ, dK and dV of drawn inputs; another seed only takes partitions in another order."""
    q, k, v, g = draw(program.problem, 0)
    o, lse = reference.baseline(q, k, v, program.problem.features, scale)
    outputs = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    Stepper(program, seed=seed).launch(q, k, v, o, lse, g, *outputs, scale)
    return outputs


def assert_exact(problem: Problem, knobs: Knobs, scale: float, seed: int = 0) -> None:
    q, k, v, g = draw(problem, 0)
    given = (q, k, v, g, problem.features, scale)
    truths, bases = reference.truth_gradients(*given), reference.baseline_gradients(*given)
    found = gradients(program_of(problem, knobs), scale, seed)
    for name, one, true, base in zip(("dQ", "dK", "dV"), found, truths, bases, strict=True):
        assert not one.isnan().any(), f"{name} has NaN, or was not written"
        if one.numel():
            error, allowed = ((x.double() - true).abs().max().item() for x in (one, base))
            assert error <= FACTOR * allowed + SLACK, f"{name}: {error} of {allowed}"


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("dim", "dim_v"), [(256, 256), (192, 128), (40, 160)])
@pytest.mark.parametrize(
    ("seq", "seq_kv"),
    [(200, 200), (130, 330), (330, 130), (1, 5), (129, 64), (64, 129), (200, 20)],
)
def test_gradients_are_exact(seq: int, seq_kv: int, dim: int, dim_v: int, causal: str) -> None:
    words = {"seq_kv": seq_kv, "heads": 4, "kv_heads": 2, "head_dim_v": dim_v}
    knobs = TWO if seq % 2 else ONE
    assert_exact(backward(seq, dim, causal, **words), knobs, 0.1)


@st.composite
def calls(draw_one: Any) -> tuple[Problem, Knobs, float, int]:
    lengths = st.sampled_from([0, 1, 2, 31, 63, 64, 65, 127, 128, 129, 193, 260])
    heads_kv = draw_one(st.sampled_from([1, 2]))
    dim, dim_v = draw_one(
        st.sampled_from([(256, 256), (192, 128), (136, 64), (64, 256), (8, 136), (160, 160)])
    )
    problem = backward(
        draw_one(lengths),
        dim,
        draw_one(st.sampled_from(list(CAUSAL))),
        seq_kv=draw_one(lengths),
        batch=draw_one(st.sampled_from([1, 1, 2])),
        heads=heads_kv * draw_one(st.sampled_from([1, 2, 3])),
        kv_heads=heads_kv,
        head_dim_v=dim_v,
        dtype=draw_one(st.sampled_from(["bf16", "fp16"])),
        scale_sign="any",
    )
    seed = draw_one(st.integers(0, 1 << 20))
    valid = [knobs for knobs in EVERY if why_not(problem, knobs) is None]
    scale = draw_one(st.sampled_from([0.15, 0.5, -0.1, 0.0]))
    return problem, valid[seed % len(valid)], scale, seed


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(call=calls())
def test_any_legal_problem_has_exact_gradients(call: tuple[Problem, Knobs, float, int]) -> None:
    problem, knobs, scale, seed = call
    assert_exact(problem, knobs, scale, seed)


def test_both_dialects_of_a_program_do_the_same() -> None:
    problem = backward(150, 256, "bottom_right", seq_kv=100, heads=2)
    old, new = (gradients(program_of(problem, ONE, minor)) for minor in ((3, 6), (3, 9)))
    assert all(torch.equal(one, other) for one, other in zip(old, new, strict=True))


def test_offsets_are_those_of_the_padded_rows() -> None:
    """What the dQ kernel reads of a head begins where the kernel before has written it."""
    problem = backward(130, 256, heads=3, batch=2)
    spaces = flash_bwd_roles.workspaces(ONE, Sizes.of(problem))
    assert {space.name: space.shape for space in spaces} == {
        "LSE2": (2 * 3 * 256,),
        "DELTA": (2 * 3 * 256,),
    }


# The gate


@pytest.fixture(scope="module")
def gates() -> dict[str, Gate]:
    return {}


def judged(gates: dict[str, Gate], program: Program) -> Verdict:
    problem = program.problem
    gate = gates.setdefault(problem.key, Gate(problem, torch.device("cpu")))
    tile = flash_bwd_roles.tile(program.config.knobs)
    return gate.check(Stepper(program).launch, tile, program.limits, level="quick")


FULL = backward(300, 256, heads=2)
GROUPED = backward(300, 256, "bottom_right", heads=4, kv_heads=2)
UNEQUAL = backward(300, 192, "top_left", heads=2, head_dim_v=128, dtype="fp16", scale_sign="any")
CUT = backward(200, 160, "bottom_right", heads=2, seq_kv=300, head_dim_v=144)


@pytest.mark.parametrize("knobs", [ONE, TWO, EARLY])
@pytest.mark.parametrize("problem", [FULL, GROUPED, UNEQUAL, CUT], ids=str)
def test_the_gate_lets_it_through(gates: dict[str, Gate], problem: Problem, knobs: Knobs) -> None:
    verdict = judged(gates, program_of(problem, knobs))
    assert [check for check in verdict.checks if not check.passed] == []


@pytest.mark.parametrize("fault", MUTATIONS[flash_bwd_roles.NAME], ids=lambda fault: fault.name)
def test_the_gate_catches_a_planted_fault(gates: dict[str, Gate], fault: Mutation) -> None:
    assert not judged(gates, mutated(fault)).passed


# Faults of order, which a device shows only now and then. Not that K or V, which come first, are
# not waited for: here loads land in order. Nor that dK does not wait for K, since P of the last
# step says that S of it is done.

WAIT = r" +mbarrier.wait\({}.*\n"
UNORDERED = {
    "Q read before it landed": (WAIT.format("q.full"), ""),
    "dO read before it landed": (WAIT.format("g.full"), ""),
    "P read before it is there": (WAIT.format("p.full"), ""),
    "P overwritten before it was read": (WAIT.format("p.empty"), ""),
    "P of the other phase": (
        r"\(p.full.index\(p_slot\), step // P_SLOTS & 1\)",
        "(p.full.index(p_slot), step // P_SLOTS & 1 ^ 1)",
    ),
    "dV where V is still read": (WAIT.format("v.empty.index.0."), ""),
    "Q handed back before dK has read it": (
        r"(    dk = warpgroup_mma_wait.*\n)( +mbarrier.expect\(q.empty.*\n)",
        r"    mbarrier.expect(q.empty.index(slot), 0)\n    \1",
    ),
    "K of dQ handed back before it was read": (
        r"( +dq = warpgroup_mma_wait.*\n)( +mbarrier.expect\(k.empty.*\n)",
        r"\2\1",
    ),
}
# The last two tiles of keys have no step: nothing but barriers keeps dK and dV from K and V there.
ORDERED = backward(200, 256, "top_left", seq_kv=380, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def right() -> list[Tensor]:
    return gradients(program_of(ORDERED, ONE))


def test_the_order_of_partitions_changes_no_bit(right: list[Tensor]) -> None:
    for seed in range(1, 5):
        for one, other in zip(right, gradients(program_of(ORDERED, ONE), seed=seed), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("fault", UNORDERED)
def test_a_missing_wait_shows(right: list[Tensor], fault: str) -> None:
    program = edited(program_of(ORDERED, ONE), fault, *UNORDERED[fault])
    # A partition may also run so far ahead that the phase of a barrier comes round again.
    with suppress(Deadlock, AssertionError):
        for seed in range(4):
            found = gradients(program, seed=seed)
            if not all(torch.equal(one, other) for one, other in zip(right, found, strict=True)):
                return
        pytest.fail("nothing shows")


@pytest.mark.parametrize("ring", ["q.empty", "g.empty", "p.empty", "k.empty", "v.empty"])
def test_a_slot_that_is_not_given_back_stops_the_kernel(ring: str) -> None:
    given_back = rf"mbarrier.(expect|arrive)\({ring}[^\n]*"
    program = edited(program_of(ORDERED, ONE), f"kept {ring}", given_back, "pass")
    with pytest.raises(Deadlock):
        gradients(program)
