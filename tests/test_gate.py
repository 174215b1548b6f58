"""The gate lets exact launches through and catches every planted fault, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.judge import trial
from fagen.judge.arena import LAYOUTS, make_input, sealed
from fagen.judge.cases import Case, cases, target_cases
from fagen.judge.trial import FAR_OFF, KINDS, Prepared
from fagen.judge.verify import Gate, why_inexact
from fagen.outcome import Check, Verdict
from fagen.problem import Problem, make_problem
from judge_fixtures import ALWAYS_WRONG, TILE, Jittery, Tiled

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Tensors of a tile are too small to share: two threads make these tests ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_problem(causal: str = "none", dtype: str = "fp16", **other: object) -> Problem:
    words = {"heads": 4, "kv_heads": 2, "scale_sign": "any", **other}
    align = "top_left" if causal == "none" else causal
    return make_problem(
        96,
        words.pop("head_dim", 40),
        dtype=dtype,
        causal=causal != "none",
        causal_align=align,
        **words,
    )


def failed(verdict: Verdict) -> set[str]:
    return {check.name.partition("[")[0] for check in verdict.checks if not check.passed}


def judged(problem: Problem, fault: str) -> set[str]:
    return failed(Gate(problem, CPU).check(Tiled(problem, fault), TILE, {}, level="quick"))


@pytest.mark.parametrize("layout", ["aligned16", "any"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_exact_launches_pass(causal: str, dtype: str, layout: str) -> None:
    problem = small_problem(causal, dtype, layout=layout)
    gate = Gate(problem, CPU)
    for tau in (0.0, 8.0):
        verdict = gate.check(Tiled(problem, tau=tau), TILE, {}, level="quick")
        assert verdict.passed, failed(verdict)
        assert verdict.where == "interpreter"


@pytest.mark.parametrize("tile", [(16, 16), (64, 64), (128, 32), (32, 128)])
@pytest.mark.parametrize("head_dim", [1, 8, 72])
def test_exact_launches_of_other_tiles_pass(tile: tuple[int, int], head_dim: int) -> None:
    problem = small_problem("top_left", "bf16", head_dim=head_dim, head_dim_v=24)
    verdict = Gate(problem, CPU).check(Tiled(problem, tile=tile), tile, {}, level="quick")
    assert verdict.passed, failed(verdict)


def test_what_was_made_ready_has_guards_as_wide_as_the_largest_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, int]] = []
    plain = trial.prepare

    def prepare(case: Case, problem: Problem, device: Any, gap: int, home: Any) -> Prepared:
        made.append((case.name, gap))
        return plain(case, problem, device, gap, home)

    monkeypatch.setattr(trial, "prepare", prepare)
    problem = small_problem()
    gate = Gate(problem, CPU)
    gate.make_ready((16, 32))
    targets = [case.name for case in target_cases(problem)]
    assert made == [(name, 32) for name in targets]
    for tile, gap in (((32, 16), 32), ((16, 64), 64), ((32, 32), 64)):
        assert gate.check(Tiled(problem, tile=tile), tile, {}, level="full").passed
        latest = dict(made)
        assert {latest[name] for name in targets} == {gap}


# T01
@pytest.mark.parametrize("fault", ALWAYS_WRONG)
@pytest.mark.parametrize(("causal", "dtype"), [("none", "bf16"), ("bottom_right", "fp16")])
def test_planted_faults_are_caught(fault: str, causal: str, dtype: str) -> None:
    assert judged(small_problem(causal, dtype), fault)


@pytest.mark.parametrize(
    ("fault", "causal", "dtype", "kinds"),
    [
        ("mask_off_by_one", "top_left", "bf16", {"o_max", "lse"}),
        ("mask_off_by_one", "bottom_right", "fp32", {"o_max", "lse"}),
        ("top_left", "bottom_right", "bf16", {"o_max", "hidden"}),
        ("wrong_kv_head", "none", "bf16", {"o_max"}),
        ("padded_scale", "none", "fp16", {"o_max", "lse"}),
        ("fp16_scores", "none", "fp16", {"o_max"}),
        ("seven_bit_p", "none", "bf16", {"o_l2"}),
        ("lse_of_rounded_p", "none", "bf16", {"lse"}),
        ("lse_base_2", "none", "fp32", {"lse"}),
        ("unwritten_row", "none", "bf16", {"unwritten", "o_max"}),
        ("unwritten_lse", "none", "bf16", {"unwritten", "lse"}),
        ("row_past_the_end", "none", "bf16", {"guards"}),
        ("writes_k", "none", "bf16", {"inputs"}),
        ("writes_beside_q", "none", "bf16", {"inputs"}),
        ("reads_past_keys", "none", "fp16", {"o_max"}),
        ("nan_for_hidden", "bottom_right", "fp32", {"hidden"}),
        ("finite_lse_for_hidden", "bottom_right", "fp32", {"hidden"}),
        ("nan_swallowed", "none", "fp32", {"nan_kept"}),
    ],
)
def test_a_fault_shows_in_the_check_that_is_for_it(
    fault: str, causal: str, dtype: str, kinds: set[str]
) -> None:
    assert kinds <= judged(small_problem(causal, dtype), fault)


def test_a_race_shows_in_the_repeats_of_a_finalist_only() -> None:
    problem = small_problem("none", "fp32", seq_kv=100)
    gate = Gate(problem, CPU)
    assert gate.check(Jittery(problem), TILE, {}, level="full").passed
    assert failed(gate.check(Jittery(problem), TILE, {}, level="finalist")) == {"repeat"}
    steady = gate.check(Tiled(problem), TILE, {}, level="finalist")
    assert steady.passed
    assert {c.name for c in steady.checks} >= {"repeat[ragged]"}


def test_a_fault_of_the_target_shape_alone_needs_level_full() -> None:
    problem = make_problem(200, 16, heads=3, dtype="fp32")
    right = Tiled(problem)

    def wrong(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> None:
        right(q, k, v, o, lse, scale)
        if q.shape[1:3] == (3, 200):
            o[:, 2, 150, 3] += 1e-3

    gate = Gate(problem, CPU)
    assert gate.check(wrong, TILE, {}, level="quick").passed
    checks = gate.check(wrong, TILE, {}, level="full").checks
    assert "o_max[target]" in {c.name for c in checks if not c.passed}


def test_the_gate_stays_usable_after_a_launch_that_raises() -> None:
    problem = small_problem()
    gate = Gate(problem, CPU)

    def raises(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> None:
        k.zero_()
        o.zero_()
        raise RuntimeError("illegal access")

    with pytest.raises(RuntimeError, match="illegal access"):
        gate.check(raises, TILE, {}, level="quick")
    assert gate.check(Tiled(problem), TILE, {}, level="quick").passed


# T01
def test_a_candidate_is_not_helped_by_the_one_before_it() -> None:
    problem = small_problem()
    gate = Gate(problem, CPU)
    assert gate.check(Tiled(problem), TILE, {}, level="quick").passed
    silent = gate.check(lambda q, k, v, o, lse, scale: None, TILE, {}, level="quick")
    assert {"unwritten", "o_max", "lse"} <= failed(silent)


def test_a_verdict_holds_the_worst_of_each_kind_and_only_plain_finite_numbers() -> None:
    problem = small_problem()
    passed = Gate(problem, CPU).check(Tiled(problem), TILE, {}, level="quick")
    assert [c.name.partition("[")[0] for c in passed.checks] == list(KINDS)
    assert all("N" in c.detail and "D40" in c.detail for c in passed.checks)
    wrong = Gate(problem, CPU).check(Tiled(problem, "unwritten_row"), TILE, {}, level="quick")
    assert all(0 <= c.error <= FAR_OFF * 1e3 for c in wrong.checks)


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("tile", [(16, 16), (64, 64), (128, 32), (64, 128), (128, 128)])
@pytest.mark.parametrize("thorough", [False, True])
def test_shrunken_shapes_hold_every_class_of_tile(
    tile: tuple[int, int], causal: str, thorough: bool
) -> None:
    problem = small_problem(causal)
    found: set[str] = set()
    for case in cases(problem, tile, {}, thorough=thorough):
        found |= tile_classes(problem, case.sizes.seq_q, case.sizes.seq_kv, tile)
        assert case.sizes.heads_q == 2 * case.sizes.heads_kv
    due = {"full", "ragged_q", "ragged_k", "three_key_tiles", "two_query_tiles", "multiple"}
    if causal != "none":
        due |= {"skipped", "diagonal"}
    if causal == "bottom_right":
        due |= {"hidden_tile", "hidden_beside_live"}
    assert due <= found


def tile_classes(problem: Problem, seq_q: int, seq_kv: int, tile: tuple[int, int]) -> set[str]:
    causal = problem.features.causal
    found = set()
    shift = seq_kv - seq_q if causal == "bottom_right" else 0
    for top in range(0, seq_q, tile[0]):
        last = min(top + tile[0], seq_q) - 1
        if causal == "bottom_right" and last + shift < 0:
            found.add("hidden_tile")
        elif causal == "bottom_right" and top + shift < 0:
            found.add("hidden_beside_live")
        for left in range(0, seq_kv, tile[1]):
            right = min(left + tile[1], seq_kv) - 1
            if causal == "none" or right <= top + shift:
                found.add("full")
            else:
                found.add("skipped" if left > last + shift else "diagonal")
    if seq_q and seq_kv:
        found |= {"ragged_q"} if seq_q % tile[0] else set()
        found |= {"ragged_k"} if seq_kv % tile[1] else set()
        found |= {"multiple"} if not (seq_q % tile[0] or seq_kv % tile[1]) else set()
        found |= {"three_key_tiles"} if seq_kv > 2 * tile[1] else set()
        found |= {"two_query_tiles"} if seq_q > tile[0] else set()
    return found


def test_limits_are_kept() -> None:
    found = cases(
        small_problem(), (64, 64), {"seq_kv": range(129), "batch": range(2)}, thorough=True
    )
    assert max(case.sizes.seq_kv for case in found) == 128
    assert max(case.sizes.batch for case in found) == 1


@pytest.mark.parametrize("sm_count", [132, 20])
@pytest.mark.parametrize("heads", [(2, 2), (64, 1), (8, 2)])
def test_a_gpu_gets_a_case_of_several_tiles_for_every_place(
    heads: tuple[int, int], sm_count: int
) -> None:
    """flash_ws with O through the slots of Q was right in a block's first two tiles alone."""
    heads_q, heads_kv = heads
    problem = make_problem(1000, 64, heads=heads_q, kv_heads=heads_kv)
    (crowd,) = [
        c for c in cases(problem, TILE, {}, thorough=True, sm_count=sm_count) if c.name == "crowd"
    ]
    sizes = crowd.sizes
    tiles = sizes.batch * sizes.heads_q * -(-sizes.seq_q // TILE[0])
    assert 6 * sm_count <= tiles <= 6 * sm_count + 2 * heads_q
    assert sizes.heads_q // sizes.heads_kv == heads_q // heads_kv


def test_a_scale_below_or_at_zero_comes_only_where_the_problem_allows_it() -> None:
    plain = cases(small_problem(scale_sign="positive"), TILE, {}, thorough=True)
    signed = cases(small_problem(scale_sign="any"), TILE, {}, thorough=True)
    assert min(case.scale for case in plain) > 0
    assert {case.scale > 0 for case in signed if case.scale} == {True, False}
    assert 0.0 in {case.scale for case in signed}


@pytest.mark.parametrize("dims", [(1, 2, 5, 1), (2, 3, 17, 40), (1, 4, 8, 64), (2, 2, 0, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS["aligned16"])
def test_aligned_layouts_keep_what_the_problem_promises(
    layout: str, dims: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    view = make_input(layout, dims, dtype, CPU, gap=64).view
    assert view.shape == dims
    assert view.stride(-1) == 1
    assert view.data_ptr() % 16 == 0
    assert all(stride * dtype.itemsize % 16 == 0 for stride in view.stride()[:3])
    assert all(view.stride()[:3])


def test_the_any_class_has_every_kind_of_stride() -> None:
    views = [make_input(x, (2, 4, 8, 16), torch.float16, CPU, 8).view for x in LAYOUTS["any"]]
    assert {view.stride(-1) for view in views} == {1, 2}
    assert 0 in {view.stride(1) for view in views}
    assert any(view.data_ptr() % 16 for view in views)
    assert any(view.stride(2) % 2 for view in views)


def test_inputs_lie_in_nan() -> None:
    made = make_input("gapped", (1, 2, 5, 8), torch.float32, CPU, gap=16)
    made.view.fill_(1.0)
    made = sealed(made)
    floats = made.buffer.view(torch.float32)
    assert int(torch.isfinite(floats).sum()) == made.view.numel()
    after_last_row = made.view.storage_offset() + made.view.stride(2) * 5
    assert torch.isnan(floats[after_last_row : after_last_row + 16 * 8]).all()


# N10
@pytest.mark.parametrize("axis", [0, 1])
def test_far_inputs_reach_past_2_to_the_31_with_strides_below(axis: int) -> None:
    far = [c for c in cases(small_problem(), (16, 16), {}, thorough=True) if c.far][axis]
    dims = (far.sizes.batch, far.sizes.heads_kv, far.sizes.seq_kv, far.sizes.head_dim)
    from fagen.judge.arena import FAR_ELEMENTS, make_far

    home = torch.empty(FAR_ELEMENTS, dtype=torch.float16, device="meta")
    view = make_far(dims, home, 1 << 18).view
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    assert last >= 2**31
    assert max(view.stride()) < 2**31


def test_a_truth_too_dear_is_taken_of_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trial.TRUTH_FLOPS, "cpu", 3e7)
    problem = make_problem(400, 16, heads=4, kv_heads=2, dtype="fp32", causal=True)
    gate = Gate(problem, CPU)
    right = Tiled(problem)
    verdict = gate.check(right, TILE, {}, level="full")
    assert verdict.passed, failed(verdict)
    _, ready = gate._kept[target_cases(problem)[0]]
    kept = ready.right
    assert kept.patches is not None
    assert kept.o.shape == (len(kept.patches), trial.PATCH_ROWS, 16)

    def wrong(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> None:
        right(q, k, v, o, lse, scale)
        if q.shape[2] == 400:
            o[-1, 3, 399] = 0.5

    assert "o_max" in failed(gate.check(wrong, TILE, {}, level="full"))


@pytest.mark.parametrize(
    ("dtype", "tau", "refused"),
    [
        ("fp16", 8.0, False),
        ("fp16", 15.9, False),
        ("fp16", 16.0, True),
        ("bf16", 16.0, False),
        ("bf16", 120.0, True),
        ("fp32", -1.0, True),
        ("fp32", float("nan"), True),
    ],
)
def test_thresholds_that_p_cannot_hold_are_refused(dtype: str, tau: float, refused: bool) -> None:
    reason = why_inexact(make_problem(8192, 128, dtype=dtype), tau)
    assert (reason is not None) == refused


def test_nan_errors_never_pass() -> None:
    assert not Verdict((Check("o_max", float("nan"), 1.0),)).passed
    assert not Verdict(()).passed
    assert replace(Verdict((Check("o_max", 0.5, 1.0),)), where="x").passed
