"""The analytic model: directions that the hardware fixes, and ranks seen on one H200."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from fagen.config import Config
from fagen.generate.families import FAMILIES, families_of
from fagen.generate.model import LAUNCH_US, predict_us
from fagen.generate.space import SearchSpace, seeds_of
from fagen.outcome import Built, KernelFacts
from fagen.problem import Problem, make_problem
from fagen.target import Target, preset

H200 = preset("h200")
FULL = make_problem(8192, 128)
CAUSAL = make_problem(8192, 128, causal=True)
BEST = {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 2, "loads": "tma"}

LONE = {"block_m": 64, "num_warps": 4, "num_stages": 3}
THREE = {**LONE, "block_n": 128, "num_stages": 1}  # blocks of it fit a multiprocessor
BRANCH = {"rescale_tau": 4.0, "rescale_skip": "branch"}
# Microseconds on one H200, bf16 B1 H16 N8192 D128 full, 2026-11-29, single passes but for the
# first, which was raced. The model's constants were fitted to these among others.
MEASURED: list[tuple[int, dict[str, Any]]] = [
    (922, THREE),
    (1051, {**BRANCH, "num_stages": 3}),
    (1081, {"num_stages": 3}),
    (1120, {**LONE, "block_n": 64, "num_stages": 1}),
    (1132, {"num_stages": 3, "mask": "every_tile"}),
    (1128, {**LONE, "block_n": 64}),
    (1148, {"block_n": 64, "num_stages": 3, "loop": "rotate_s"}),
    (1153, {"num_stages": 3, "loads": "pointer"}),
    (1155, {"num_stages": 3, "order": "heads_first"}),
    (1170, {"block_n": 64, "num_stages": 3}),
    (1177, {"loop": "rotate_p"}),
    (1208, {**LONE, "block_n": 128}),
    (1209, {}),
    (1237, {"block_n": 32, "num_stages": 3}),
    (1305, {**LONE, "num_stages": 2, "loop": "rotate_s"}),
    (1307, {"block_n": 64, "num_stages": 3, "loads": "pointer"}),
    (1385, {"block_n": 64, "num_stages": 3, "loop": "rotate_p"}),
    (1395, {"block_n": 64}),
    (1443, {**LONE, "block_n": 32, "loop": "rotate_p"}),
    (1475, {**LONE, "block_n": 64, "num_stages": 2, "loads": "pointer"}),
    (1551, {"num_stages": 1}),
    (1614, {"block_n": 64, "loads": "pointer"}),
    (1719, {**BRANCH, "num_stages": 1}),
    (1775, {**LONE, **BRANCH, "block_n": 128}),
    (1819, {"block_m": 64, "num_stages": 3}),
    (2274, {**BRANCH, "block_m": 64, "num_stages": 3}),
    (2921, {"block_m": 64, "block_n": 32, "loads": "pointer"}),
    (3169, {"block_m": 64, "block_n": 32, "num_stages": 1, "loads": "pointer"}),
]
BESIDE = {"mask": "longest_first", "order": "head_groups"}
# The same under a causal mask.
MEASURED_CAUSAL: list[tuple[int, dict[str, Any]]] = [
    (545, {**BRANCH, "num_stages": 3, "mask": "longest_first", "order": "heads_first"}),
    (557, {**BRANCH, **BESIDE, "num_stages": 3}),
    (570, {**BESIDE, "num_stages": 3}),
    (590, {**BESIDE, "block_n": 64, "num_stages": 1}),
    (606, {**LONE, "block_n": 64, "mask": "longest_first"}),
    (615, {**BRANCH, "num_stages": 3}),
    (619, {"num_stages": 3, "mask": "longest_first"}),
    (639, BESIDE),
    (684, {**LONE, "block_n": 128, "mask": "longest_first", "order": "heads_first"}),
    (719, {**THREE, **BRANCH, **BESIDE}),
    (747, {**BESIDE, "num_stages": 1}),
    (813, {**LONE, **BESIDE, "block_n": 32, "num_stages": 2, "loads": "pointer"}),
    (896, {**BRANCH, **BESIDE, "num_stages": 1}),
    (909, {**LONE, **BRANCH, **BESIDE, "block_n": 128}),
    (948, {**BESIDE, "block_m": 64, "num_stages": 3}),
    (1148, {**BRANCH, **BESIDE, "block_m": 64, "num_stages": 3}),
    (1831, {"block_m": 64, "block_n": 32, "num_stages": 1, "loads": "pointer"}),
]


def flash(**knobs: Any) -> Config:
    return Config("flash", FAMILIES["flash"].Knobs(**{**BEST, **knobs}))


def outer(**knobs: Any) -> Config:
    return Config("kv_outer", FAMILIES["kv_outer"].Knobs(**knobs))


def us(config: Config, problem: Problem = FULL, target: Target = H200, **facts: int) -> float:
    return predict_us(problem, target, config, built(**facts) if facts else None)


def built(shared_bytes: int = 164864, registers: int = 187, spill_bytes: int = 0) -> Built:
    return Built("m.py", (KernelFacts("k", shared_bytes, registers, spill_bytes),))


def test_the_best_plain_kernel_lands_near_its_measured_rate() -> None:
    # Plain Triton with TMA, 128x128, 8 warps, D128 N16384 on one H200: 500 TFLOP/s.
    tflops = FULL.flops / us(flash()) / 1e6
    assert 350 < tflops < 600


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (flash(), flash(loads="pointer")),  # 1.1 to 1.3 times on sm_90
        (flash(), flash(num_warps=4)),  # serialised wgmma
        (flash(num_stages=2), flash(num_stages=1)),  # nothing is loaded ahead
        (flash(num_stages=3), flash(num_stages=2)),  # loads of two stages are issued too late
        (flash(num_stages=3), flash(loop="rotate_p")),
        (flash(num_stages=3), flash(loop="rotate_s")),
        (flash(**LONE, block_n=64), flash(block_n=64, num_stages=2)),  # two blocks at a time
        (flash(**LONE, block_n=128), flash(**{**LONE, "num_warps": 8}, block_n=128)),
        (outer(q_tiles=4), outer(q_tiles=16)),  # 128 programs leave no second block to an SM
        (flash(), flash(block_m=64, num_warps=4)),  # twice the key traffic, nothing overlaps
        (flash(mask="split"), flash(mask="every_tile")),
        (flash(), flash(order="heads_first")),  # 16 heads' keys don't fit in L2
        (flash(block_n=64, num_stages=3), flash(block_n=32, num_stages=3)),
        (flash(), outer()),
        (flash(**THREE), flash(num_stages=3)),  # three blocks hide each other
        (flash(**THREE), flash(**{**THREE, "block_n": 64})),
        (flash(**LONE, block_n=128), flash(**LONE, **BRANCH, block_n=128)),  # products wait
        (flash(num_stages=3, **BRANCH), flash(num_stages=3)),  # two groups: they don't
        (flash(num_stages=1), flash(num_stages=1, **BRANCH)),
    ],
)
def test_what_was_faster_on_the_device_is_predicted_faster(better: Config, worse: Config) -> None:
    assert us(better) < us(worse)


def test_causal_takes_about_half_and_longest_first_less_than_that_order_reversed() -> None:
    first = us(flash(mask="longest_first"), CAUSAL)
    assert 0.45 < first / us(flash()) < 0.65
    assert first < us(flash(mask="split"), CAUSAL)


def test_spills_and_lower_occupancy_cost_time() -> None:
    clean = us(flash(), shared_bytes=164864, registers=187, spill_bytes=0)
    assert us(flash(), shared_bytes=164864, registers=187, spill_bytes=800) > 1.02 * clean
    small = {"block_m": 64, "block_n": 64, "num_warps": 4}
    two = us(flash(**small), shared_bytes=80000, registers=128, spill_bytes=0)
    assert us(flash(**small), shared_bytes=160000, registers=128, spill_bytes=0) > two


def test_a_branch_pays_at_a_wide_head_and_not_at_a_narrow_one() -> None:
    wide, narrow = make_problem(8192, 256, heads=8), make_problem(8192, 64, heads=32)
    skip = {"rescale_tau": 8.0, "rescale_skip": "branch", "block_n": 64}
    assert us(flash(**skip), wide) < us(flash(block_n=64), wide)
    assert us(flash(**skip), narrow) > us(flash(block_n=64), narrow)


def test_time_grows_with_the_work_and_falls_with_a_larger_card() -> None:
    sizes = [us(flash(), make_problem(n, 128)) for n in (1024, 2048, 4096, 8192, 16384)]
    assert sizes == sorted(sizes)
    assert 3.5 < sizes[-1] / sizes[-2] < 4.5
    half = replace(H200, sm_count=66, tensor_tflops=H200.tensor_tflops / 2)
    assert 1.8 < us(flash(), target=half) / us(flash()) < 2.2
    assert us(flash(loads="pointer"), target=preset("a100")) > us(flash(loads="pointer"))


def test_kv_outer_pays_for_its_state_in_memory_traffic() -> None:
    assert us(outer()) > 3 * us(flash())


@pytest.mark.parametrize(
    ("problem", "measured", "least"), [(FULL, MEASURED, 180), (CAUSAL, MEASURED_CAUSAL, 80)]
)
def test_times_over_a_seventh_apart_are_predicted_in_their_order(
    problem: Problem, measured: list[tuple[int, dict[str, Any]]], least: int
) -> None:
    rows = [(flash(**knobs), measured_us) for measured_us, knobs in measured]
    apart = [(a, b) for a, slow in rows for b, fast in rows if slow > fast * 8 / 7]
    assert len(apart) > least
    wrong = [(str(a), str(b)) for a, b in apart if us(a, problem) <= us(b, problem)]
    assert len(wrong) <= 0.05 * len(apart), wrong


@pytest.mark.parametrize(("problem", "measured"), [(FULL, MEASURED), (CAUSAL, MEASURED_CAUSAL)])
def test_the_fastest_seen_is_predicted_within_an_eighth(
    problem: Problem, measured: list[tuple[int, dict[str, Any]]]
) -> None:
    measured_us, knobs = measured[0]
    assert 7 / 8 < us(flash(**knobs), problem) / measured_us < 9 / 8


def test_a_cap_on_registers_lets_a_third_block_in_under_a_causal_mask_alone() -> None:
    longest = {**THREE, "mask": "longest_first"}
    capped = us(flash(**longest, max_registers=168), CAUSAL)
    assert capped < 0.95 * us(flash(**longest), CAUSAL)
    assert us(flash(**THREE, max_registers=168)) == us(flash(**THREE))
    # As compiled: registers are handed out in eights, so 170 are no better than 176.
    two = us(flash(**THREE), shared_bytes=50000, registers=170)
    assert two == us(flash(**THREE), shared_bytes=50000, registers=176)
    assert us(flash(**THREE), shared_bytes=50000, registers=168) < 0.95 * two


def test_more_stages_than_cover_the_loads_gain_nothing() -> None:
    deep = {"block_n": 32, "num_warps": 8}
    assert us(flash(**deep, num_stages=4)) == us(flash(**deep, num_stages=3))


@pytest.mark.parametrize("target", ["h200", "a100", "rtx4090", "b200"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_the_best_prediction_is_one_to_three_times_the_roof(
    target: str, dim: int, causal: bool
) -> None:
    problem, card = make_problem(8192, dim, causal=causal), preset(target)
    exponentials = problem.visible_pairs * problem.shape.heads_q
    rate = card.exp2_per_clock_sm * card.sm_count * card.clock_ghz * 1e3
    roof = max(problem.flops / card.tensor_tflops / 1e6, exponentials / rate)
    best = min(us(config, problem, card) for config in SearchSpace.of(problem, card).configs)
    assert 1.2 < best / roof < 3.0


@pytest.mark.parametrize("sizes", [(0, 128), (128, 0), (1, 1), (1, 300), (300, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_any_size_has_a_positive_finite_time(sizes: tuple[int, int], causal: bool) -> None:
    problem = make_problem(
        sizes[0],
        64,
        seq_kv=sizes[1],
        causal=causal,
        causal_align="bottom_right" if causal else "top_left",
    )
    for family in families_of(problem.direction):
        for knobs in family.seeds(make_problem(512, 64), H200):
            time_us = predict_us(problem, H200, Config(family.NAME, knobs), None)
            assert LAUNCH_US <= time_us < 1e4


@pytest.mark.parametrize("target", ["h100", "h200", "a100", "l40s", "rtx4090", "b200"])
def test_every_family_is_ranked_on_every_target(target: str) -> None:
    problem = make_problem(512, 80, dtype="fp32" if target == "a100" else "fp16")
    space = SearchSpace.of(problem, preset(target))
    assert space.configs
    for config in space.configs[::97]:
        assert 0 < predict_us(problem, preset(target), config, None) < 1e6


def test_ranking_a_whole_space_takes_under_a_second() -> None:
    configs = SearchSpace.of(CAUSAL, H200).configs
    begun = time.perf_counter()
    ranked = sorted(configs, key=lambda config: us(config, CAUSAL))
    assert time.perf_counter() - begun < 3.0  # 0.1 s on an idle core
    assert ranked[0].family == "flash_ws"


@pytest.mark.parametrize("family", ["flash", "flash_ws"])
def test_a_prediction_takes_no_longer_for_a_long_sequence(family: str):
    problem = make_problem(2**31 - 2**12, 128, causal=True)
    config = Config(family, FAMILIES[family].Knobs())
    started = time.perf_counter()
    long = predict_us(problem, preset("h200"), config, None)
    assert time.perf_counter() - started < 1.0
    half = predict_us(make_problem(2**30, 128, causal=True), preset("h200"), config, None)
    assert long == pytest.approx(4 * half, rel=0.02)


@pytest.mark.parametrize("target", ["h200", "a100", "l40s", "b200"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_default_in_fp32_is_one_that_spills_least_there(target: str, head_dim: int) -> None:
    problem = make_problem(2048, head_dim, dtype="fp32")
    first = seeds_of(problem, preset(target))[0].knobs
    assert first.loads == "pointer"  # what TMA brings is held in registers, all of it
    if target == "h200":
        assert (first.block_m, first.num_warps, first.rescale_skip) == (64, 8, "branch")
    elif head_dim <= 128:
        assert (first.block_m, first.num_warps, first.num_stages) == (16, 4, 1)


@pytest.mark.parametrize(
    ("words", "packed"),
    [
        ({"seq": 1, "heads": 32, "kv_heads": 8}, True),
        ({"seq": 16, "heads": 32, "kv_heads": 8}, True),
        ({"seq": 1, "heads": 24, "kv_heads": 8}, False),  # of three heads none are packed
        ({"seq": 64, "heads": 8}, False),
    ],
)
def test_few_queries_start_in_tiles_of_one_group(words: dict[str, int], packed: bool) -> None:
    problem = make_problem(head_dim=128, seq_kv=8192, **words)
    first = seeds_of(problem, preset("h200"))[0]
    assert (first.family, first.knobs.block_m, first.knobs.pack_heads) == ("flash_ws", 64, packed)


def test_queries_that_fill_more_than_one_group_are_packed_in_taller_tiles() -> None:
    problem = make_problem(16, 128, seq_kv=8192, batch=16, heads=64, kv_heads=4)
    first = seeds_of(problem, preset("h200"))[0]
    assert first.knobs.pack_heads and first.knobs.block_m > 64
