"""flash_bwd_ws without a GPU: its kernels step by step in numpy, against gradients in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fagen.config import Config
from fagen.generate.families import flash_bwd_ws
from fagen.generate.families.base import every_choice, why_invalid
from fagen.generate.families.flash_bwd_ws import Knobs
from fagen.generate.program import Program
from fagen.generate.render import render
from fagen.judge import reference
from fagen.judge.verify import Gate
from fagen.outcome import Verdict
from fagen.problem import Problem, make_problem
from fagen.target import preset
from gluon_steps import Deadlock, Stepper
from mutations import MUTATIONS, Mutation, edited, mutated

H200 = preset("h200")
CPU = torch.device("cpu")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FACTOR, SLACK = 3.0, 1e-4  # of the baseline's error, and beside it
ADDED = Knobs(kv_block_m=64)
TALL = Knobs(kv_block_m=128, early_scores=False)
APART = Knobs(kv_block_m=64, dq="kernel")
ORDERED = Knobs(kv_block_m=64, dq="ordered")
ORDERED_TALL = Knobs(kv_block_m=128, dq="ordered")
WALKING = replace(ADDED, persistent=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def backward(seq: int, dim: int, causal: str = "none", **words: Any) -> Problem:
    align = "top_left" if causal == "none" else causal
    words = {"dtype": "fp16", "layout": "aligned16", **words}
    problem = make_problem(seq, dim, causal=causal != "none", causal_align=align, **words)
    return replace(problem, direction="backward")


def program_of(problem: Problem, knobs: Knobs, minor: tuple[int, int] = (3, 6)) -> Program:
    assert why_broken(problem, knobs) is None
    return render(problem, Config(flash_bwd_ws.NAME, knobs), minor)


def why_broken(problem: Problem, knobs: Knobs) -> str | None:
    return why_invalid(flash_bwd_ws, problem, H200, knobs)


def inputs_of(problem: Problem, scale: float, low: float = 0.0) -> list[Tensor]:
    """q, k, v, o, lse and g. low: added to every score, by a column of Q and K."""
    s, dtype = problem.shape, DTYPES[problem.shape.dtype]
    dice = torch.Generator().manual_seed(s.seq_q * 1000 + s.seq_kv)

    def draw(heads: int, rows: int, columns: int) -> Tensor:
        return torch.randn((s.batch, heads, rows, columns), generator=dice).to(dtype)

    q, g = draw(s.heads_q, s.seq_q, s.head_dim), draw(s.heads_q, s.seq_q, s.head_dim_v)
    k, v = draw(s.heads_kv, s.seq_kv, s.head_dim), draw(s.heads_kv, s.seq_kv, s.head_dim_v)
    if low:
        q[..., 0], k[..., 0] = 8.0, low / (8.0 * scale)
    return [q, k, v, *reference.baseline(q, k, v, problem.features, scale), g]


def launched(program: Program, inputs: list[Tensor], scale: float, seed: int = 0) -> list[Tensor]:
    outputs = [torch.full_like(x, torch.nan) for x in inputs[:3]]
    Stepper(program, seed=seed).launch(*inputs, *outputs, scale)
    return outputs


def why_wrong(program: Program, scale: float = 0.2, low: float = 0.0, seed: int = 0) -> str | None:
    """What of the gradients is wrong, if anything."""
    inputs = inputs_of(program.problem, scale, low)
    outputs = launched(program, inputs, scale, seed)
    q, k, v, _, _, g = inputs
    features = program.problem.features
    truths = reference.truth_gradients(q, k, v, g, features, scale)
    bases = reference.baseline_gradients(q, k, v, g, features, scale)
    for name, found, true, base in zip(("dQ", "dK", "dV"), outputs, truths, bases, strict=True):
        if found.isnan().any():
            return f"{name} has NaN, or was not written"
        error, allowed = ((x.double() - true).abs().max().item() for x in (found, base))
        if error > FACTOR * allowed + SLACK:
            return f"{name}: {error} of {allowed}"
    return None


# Whole programs

CAUSAL = ["none", "top_left", "bottom_right"]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("seq", "seq_kv"), [(256, 256), (200, 330), (330, 150), (1, 65)])
@pytest.mark.parametrize(
    ("dim", "knobs"),
    [
        (128, ADDED),
        (96, replace(ADDED, early_scores=False)),
        (64, TALL),
        (64, APART),
        (128, ORDERED),
        (64, ORDERED_TALL),
        (96, WALKING),
        (64, replace(TALL, persistent=True)),
        (128, replace(APART, persistent=True)),
    ],
)
def test_gradients_are_exact(seq: int, seq_kv: int, causal: str, dim: int, knobs: Knobs) -> None:
    problem = backward(seq, dim, causal, seq_kv=seq_kv, heads=2, kv_heads=1)
    assert why_wrong(program_of(problem, knobs)) is None


@pytest.mark.parametrize("knobs", [ADDED, replace(ADDED, early_scores=False), APART])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("low", [-300.0, 90.0])
def test_scores_far_below_and_above_zero_meet_ragged_ends(
    low: float, causal: str, knobs: Knobs
) -> None:
    problem = backward(140, 128, causal, seq_kv=200, heads=1, dtype="bf16")
    assert why_wrong(program_of(problem, knobs), 0.25, low) is None


def test_any_legal_problem_has_exact_gradients() -> None:
    sizes = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 193, 260])
    dims = st.sampled_from([8, 16, 24, 40, 64, 80, 96, 128])
    every = list(every_choice(Knobs))

    @st.composite
    def problems(draw: Callable[[Any], Any]) -> Problem:
        heads_kv = draw(st.sampled_from([1, 2]))
        return backward(
            draw(sizes),
            draw(dims),
            draw(st.sampled_from(CAUSAL)),
            batch=draw(st.sampled_from([1, 1, 2])),
            heads=heads_kv * draw(st.sampled_from([1, 3])),
            kv_heads=heads_kv,
            seq_kv=draw(sizes),
            head_dim_v=draw(dims),
            dtype=draw(st.sampled_from(["fp16", "bf16"])),
        )

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        problem=problems(),
        start=st.integers(0, 1 << 20),
        scale=st.sampled_from([0.15, 1.0, -0.3, 0.0]),
    )
    def check(problem: Problem, start: int, scale: float) -> None:
        walk = (every[(start + 77 * step) % len(every)] for step in range(len(every)))
        knobs = next((k for k in walk if why_broken(problem, k) is None), None)
        assume(knobs is not None)
        assert knobs is not None
        assert why_wrong(program_of(problem, knobs), scale, seed=start) is None

    check()


def test_both_dialects_do_the_same() -> None:
    problem = backward(200, 128, "bottom_right", seq_kv=330, heads=2)
    inputs = inputs_of(problem, 0.2)
    for knobs in (ADDED, APART):
        old, new = (
            launched(program_of(problem, knobs, minor), inputs, 0.2) for minor in ((3, 6), (3, 9))
        )
        assert all(map(torch.equal, old, new))


@pytest.mark.parametrize(("knobs", "causal"), [(APART, "top_left"), (ORDERED, "none")])
def test_heads_in_several_lots_are_exact(
    knobs: Knobs, causal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_bwd_ws, "scalars", lambda *_: {"abreast": 2})
    problem = backward(140, 64, causal, seq_kv=300, batch=1, heads=5)
    assert why_wrong(program_of(problem, replace(knobs, kv_block_m=128))) is None


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 100])
@pytest.mark.parametrize("causal", CAUSAL)
def test_blocks_that_walk_take_every_tile(causal: str, multiprocessors: int) -> None:
    problem = backward(200, 64, causal, seq_kv=700, batch=2, heads=3)
    program = program_of(problem, replace(WALKING, kv_block_m=128))
    inputs = inputs_of(problem, 0.2)
    outputs = [torch.full_like(x, torch.nan) for x in inputs[:3]]
    stepper = Stepper(program, sm_count=multiprocessors)
    stepper.launch(*inputs, *outputs, 0.2)
    right = launched(program_of(problem, TALL), inputs, 0.2)
    assert all(torch.allclose(x, y, atol=2e-3) for x, y in zip(outputs, right, strict=True))


def test_blocks_that_wait_for_turns_are_launched_in_order() -> None:
    assert why_broken(backward(200, 128), replace(ORDERED, persistent=True)) is not None


@pytest.mark.parametrize("knobs", [APART, ORDERED])
def test_kernels_of_their_own_and_turns_repeat_bit_for_bit(knobs: Knobs) -> None:
    problem = backward(200, 128, seq_kv=330, heads=2)
    inputs = inputs_of(problem, 0.2)
    assert flash_bwd_ws.repeats(knobs) and not flash_bwd_ws.repeats(ADDED)
    first, *others = (launched(program_of(problem, knobs), inputs, 0.2, seed) for seed in range(3))
    for found in others:
        assert all(map(torch.equal, first, found))


@pytest.mark.parametrize(
    "fault",
    [
        (r"wait_turn\(turn, key // .*", "wait_turn(turn, key // (GROUPS * KEYS) + 1)"),
        (r"pass_turn\(turn\)\n\n", "pass\n\n"),
        (r"gl.store\(TURN.*", "pass"),
        (r"key = tile \*", "key = (gl.cdiv(seq_kv, GROUPS * KEYS) - 1 - tile) *"),
    ],
)
def test_a_block_out_of_turn_waits_for_good(fault: tuple[str, str]) -> None:
    problem = backward(300, 128, "bottom_right", seq_kv=400, heads=2)
    program = program_of(problem, ORDERED)
    assert why_wrong(program) is None
    with pytest.raises(Deadlock, match="turn of block"):
        why_wrong(edited(program, "out of turn", *fault))


# Seeds


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim", range(8, 129, 8))
def test_every_head_dim_has_a_seed_of_either_kind(dim: int, causal: str) -> None:
    for dim_v in range(8, 129, 8):
        problem = backward(4096, dim, causal, head_dim_v=dim_v)
        valid = [k for k in flash_bwd_ws.seeds(problem, H200) if why_broken(problem, k) is None]
        assert any(flash_bwd_ws.repeats(k) for k in valid), problem


# The gate, and planted faults


@pytest.fixture(scope="module")
def gates() -> dict[str, Gate]:
    return {}


def judged(gates: dict[str, Gate], program: Program) -> Verdict:
    problem = program.problem
    gate = gates.setdefault(problem.key, Gate(problem, CPU))
    tile = flash_bwd_ws.tile(program.config.knobs)
    return gate.check(Stepper(program).launch, tile, program.limits, level="quick")


CORNER = backward(300, 128, "bottom_right", seq_kv=400, heads=4, kv_heads=2)
GROUPED = backward(300, 64, "top_left", seq_kv=250, heads=4, kv_heads=2)
FULL = backward(300, 96, head_dim_v=64, heads=2)
CUT = backward(300, 80, "top_left", heads=2, head_dim_v=96)


@pytest.mark.parametrize(
    ("problem", "knobs"),
    [(CORNER, ADDED), (CORNER, APART), (GROUPED, TALL), (FULL, ADDED), (CUT, ADDED), (CUT, APART)],
    ids=["corner", "apart", "grouped", "full", "cut", "cut, apart"],
)
def test_the_gate_lets_it_through(gates: dict[str, Gate], problem: Problem, knobs: Knobs) -> None:
    verdict = judged(gates, program_of(problem, knobs))
    assert [check for check in verdict.checks if not check.passed] == []


# Each an edit of the program that adds dQ up in memory.


@pytest.mark.parametrize("fault", MUTATIONS[flash_bwd_ws.NAME], ids=lambda fault: fault.name)
def test_the_gate_catches_a_planted_fault(gates: dict[str, Gate], fault: Mutation) -> None:
    program = mutated(fault)
    assert not judged(gates, program).passed


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_keys_past_the_end_must_be_hidden_from_dq(causal: str) -> None:
    """With LSE far below zero their p is inf."""
    problem = backward(240, 128, causal, seq_kv=200, heads=1, dtype="bf16")
    program = program_of(problem, ADDED)
    assert why_wrong(program, 0.25, -300.0) is None
    blind = edited(program, "keys past the end", r"room = seq_kv - key", "room = 2 * BLOCK_M")
    assert why_wrong(blind, 0.25, -300.0) is not None


# Faults of order, which a device shows only now and then

ORDER = {
    "Q read before it landed": (r"\n +mbarrier.wait\(q.full.*", ""),
    "dO read before it landed": (r"\n +mbarrier.wait\(g.full.*", ""),
    "dS of the other group read too early": (r"\n +mbarrier.wait\(ds.full.*", ""),
    "dS overwritten": (r"\n +mbarrier.wait\(ds.empty.*", ""),
    "dQ sent before it was there": (r"mbarrier.wait\(dq.full.*", "pass"),
    "dQ overwritten": (r"\n +mbarrier.wait\(dq.empty.*", ""),
    "dQ overwritten while it is sent": (r"tma.store_wait\(0\)\n +(mbarrier.arrive\(dq)", r"\1"),
    "dK where K is still read": (r"\n +mbarrier.wait\(k.empty.*", ""),
    "Q overwritten while dK reads it": (
        r"(    dk = warpgroup_mma_wait\(1, .*\n)(    mbarrier.expect\(q.empty.*\n)",
        r"\2\1",
    ),
    "dO overwritten while dV reads it": (
        r"( +)(dv = warpgroup_mma\(operand, g_rows.*)",
        r"\1\2\n\1mbarrier.expect(g.empty.index(slot), 0)",
    ),
    "the wrong phase": (r"\(before & 1\) \^ 1", "before & 1"),
    "a slot that is kept": (r"mbarrier.expect\(q.empty.*", "pass"),
}
# Of blocks that take one tile after another.
WALKING_ORDER = {
    "K overwritten while the tile before is written": (r"\n +mbarrier.wait\(free.*", ""),
    "K handed over while it is written": (
        r"tma.store_wait\(0\)\n +mbarrier.arrive\(free.*",
        "mbarrier.arrive(free.index(0))",
    ),
    "dS of the last step is kept": (r"mbarrier.expect\(ds.empty.index\(last.*", "pass"),
    "counts begin anew": (r"start \+= steps", "start += 0"),
    "K of the tile before": (r"k.full.index\(0\), round & 1", "k.full.index(0), 0"),
}


@pytest.mark.parametrize(
    ("fault", "knobs"),
    [*((fault, ADDED) for fault in ORDER), *((fault, WALKING) for fault in WALKING_ORDER)],
)
def test_a_fault_of_order_shows(fault: str, knobs: Knobs) -> None:
    walks = knobs.persistent
    seq, seq_kv = (300, 1000) if walks else (500, 200)
    problem = backward(seq, 128, seq_kv=seq_kv, heads=1)
    inputs = inputs_of(problem, 0.2)
    program = program_of(problem, knobs)
    right = launched(program, inputs, 0.2)
    broken = edited(program, fault, *(WALKING_ORDER if walks else ORDER)[fault])

    def shows(seed: int) -> bool:
        # A partition may also run so far ahead that the phase of a barrier comes round again.
        try:
            found = launched(broken, inputs, 0.2, seed)
        except (Deadlock, AssertionError):
            return True
        pairs = zip(right, found, strict=True)
        return not all(torch.allclose(x, y, rtol=1e-2, atol=1e-2) for x, y in pairs)

    assert any(shows(seed) for seed in range(4))
