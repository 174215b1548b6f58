"""flash_ws without a GPU: its arithmetic for any sizes, and its kernels step by step in numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attention import assert_exact, make_inputs, make_outputs, plain_attention
from fagen.config import Config
from fagen.generate.families import flash_ws, order
from fagen.generate.families.base import every_choice
from fagen.generate.families.parts import parts, width
from fagen.generate.program import Program, Sizes
from fagen.generate.render import render
from fagen.generate.space import seeds_of, why_invalid
from fagen.judge.verify import Gate
from fagen.outcome import Verdict
from fagen.problem import ITEM_BYTES, Problem, make_problem
from fagen.target import preset
from gluon_steps import Deadlock, OutOfBounds, Stepper
from mutations import MUTATIONS, Mutation, mutated

H200 = preset("h200")
ROWS = flash_ws.ROWS
LENGTHS = st.integers(1, 1100)
TILES = [(64, 64), (64, 128), (128, 64), (128, 128), (192, 64), (192, 128), (256, 64)]
CAUSAL = st.sampled_from(["none", "top_left", "bottom_right"])
SM_COUNT = H200.sm_count
EVERY = list(every_choice(flash_ws.Knobs))


def problem_of(seq_q: int, seq_kv: int, causal: str, head_dim: int = 64, **words: Any) -> Problem:
    return make_problem(
        seq_q,
        head_dim,
        seq_kv=seq_kv,
        causal=causal != "none",
        causal_align=causal if causal != "none" else "top_left",
        **words,
    )


# Head dims in parts


def test_a_head_dim_is_cut_where_that_wastes_less():
    cut = {dim: [part.width for part in parts(dim)] for dim in range(1, 257)}
    assert [cut[dim] for dim in (64, 96, 80, 112, 128, 192, 160, 256)] == [
        *([64], [64, 32], [64, 16], [128], [128], [128, 64], [128, 32], [256]),
    ]
    assert all(len(widths) <= 2 for widths in cut.values())
    assert all(width >= 16 and width & (width - 1) == 0 for w in cut.values() for width in w)


@pytest.mark.parametrize("dim", range(1, 257))
def test_parts_of_a_head_dim_cover_it_and_do_not_overlap(dim: int):
    cut = parts(dim)
    starts = [sum(part.width for part in cut[:i]) for i in range(len(cut))]
    assert [part.start for part in cut] == starts
    assert cut[-1].start < dim <= width(dim) == sum(part.width for part in cut)
    assert len({part.suffix for part in cut}) == len(cut)
    for part in cut:
        if part.width < 32:
            continue
        # Registers, lanes and warps: every row and column of the tile has one place.
        lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
        bases = [*part.registers, *lanes, [16, 0], [32, 0]]
        rows = [[1 << bit, 0] for bit in range(6)]
        columns = [[0, 1 << bit] for bit in range(part.width.bit_length() - 1)]
        assert sorted(bases) == sorted(rows + columns)


@given(dim=st.integers(1, 256))
def test_a_rescale_takes_no_more_registers_than_a_thread_has(dim: int):
    for part in parts(dim):
        held = part.width * ROWS // 128
        assert held % part.packed == 0


def test_shared_memory_of_three_groups_that_store_row_by_row_is_not_underestimated():
    """Compiled for sm_90 with Triton 3.6: 233812 bytes, more than a block has."""
    problem = make_problem(4096, 144, head_dim_v=160)
    knobs = flash_ws.Knobs(192, 64, 3, output="stores")
    assert flash_ws.shared_bytes(problem, knobs) >= 233812
    assert "shared memory" in str(why_invalid(problem, H200, Config("flash_ws", knobs)))


# Grid and numbers of a launch


@given(
    batch=st.integers(1, 8),
    heads_kv=st.sampled_from([1, 2, 3, 8, 40]),
    ratio=st.sampled_from([1, 2, 7]),
    seq=st.integers(1, 200_000),
    dim=st.sampled_from([64, 96, 128, 256]),
    megabytes=st.sampled_from([8, 32, 64]),
)
def test_a_section_fits_what_it_may_hold_and_the_last_ends_together(
    batch: int, heads_kv: int, ratio: int, seq: int, dim: int, megabytes: int
):
    heads = heads_kv * ratio * batch
    problem = make_problem(
        seq, dim, batch=batch, heads=heads_kv * ratio, kv_heads=heads_kv, causal=True
    )
    knobs = flash_ws.Knobs(section_mb=megabytes)
    numbers = flash_ws.scalars(problem, knobs, Sizes.of(problem), SM_COUNT)
    section, sections = numbers["section"], numbers["sections"]
    size = section / ratio * seq * 2 * dim * ITEM_BYTES[problem.shape.dtype]
    assert section >= 1 and (section == 1 or size <= megabytes * 1e6)
    last = heads - section * sections
    assert last > 0
    waves = last * numbers["tiles_m"] / SM_COUNT
    assert waves >= order.LAST_WAVES or sections == 0
    # Not a section more than it takes.
    assert sections == 0 or (last - sections + 1) * numbers["tiles_m"] <= (
        order.LAST_WAVES * SM_COUNT + numbers["tiles_m"]
    )


def test_tiles_nearly_alike_are_worked_on_a_section_at_a_time():
    """1024 queries at the end of 8192 keys: all 64 heads in one section were 8 % slower."""
    words = {"seq_kv": 8192, "batch": 4, "causal": True}
    problem = make_problem(1024, 128, causal_align="bottom_right", **words)
    for megabytes in (16, 32, 64):
        numbers = flash_ws.scalars(
            problem, flash_ws.Knobs(section_mb=megabytes), Sizes.of(problem), SM_COUNT
        )
        fit = megabytes * 10**6 // (8192 * 256 * ITEM_BYTES["bf16"])
        last = 64 - numbers["section"] * numbers["sections"]
        # Its 512 tiles differ by an eighth at most: so does the last section from four waves.
        least = order.LAST_WAVES * SM_COUNT / 8 / numbers["tiles_m"]
        assert numbers["section"] <= fit and least <= last <= least + numbers["sections"] + 1
    assert order.last_heads(0, 1.0, SM_COUNT) > 0  # no queries, no tiles


@given(seq_q=LENGTHS, seq_kv=LENGTHS, causal=CAUSAL, block_m=st.sampled_from([64, 128, 192, 256]))
def test_the_grid_has_a_block_for_each_place_or_tile(
    seq_q: int, seq_kv: int, causal: str, block_m: int
):
    problem = problem_of(seq_q, seq_kv, causal, batch=2, heads=3, kv_heads=3)
    knobs = flash_ws.Knobs(block_m, 64, 4)
    sizes = Sizes.of(problem)
    numbers = flash_ws.scalars(problem, knobs, sizes, SM_COUNT)
    assert numbers["tiles"] == 6 * numbers["tiles_m"]
    places = 132 * (2 if block_m == ROWS else 1)
    assert flash_ws.grid(problem, knobs, 0, sizes, 132) == (min(places, numbers["tiles"]), 1, 1)
    # Tiles reach from the end down to row 0, and no whole tile lies above the first row.
    first = numbers["end_row"] - numbers["tiles_m"] * block_m if causal != "none" else 0
    assert -block_m < first <= 0
    assert causal == "none" or numbers["end_row"] >= seq_q


def test_a_slot_of_the_next_tiles_is_read_before_it_is_written_again():
    """Writing one waits for Q of the tile before, so for Q of one or two before that."""
    for knobs in EVERY:
        tiles_ahead = flash_ws._q_slots(knobs) // flash_ws._groups(knobs)
        assert tiles_ahead + 1 <= flash_ws.TILE_SLOTS


@given(
    seq=st.integers(1, 40_000),
    heads=st.sampled_from([1, 4, 16, 100, 1024]),
    block_m=st.sampled_from([64, 128, 192, 256]),
    sm_count=st.sampled_from([1, 66, 132]),
)
def test_short_tiles_end_a_launch_sooner(seq: int, heads: int, block_m: int, sm_count: int):
    problem = make_problem(seq, 64, heads=heads)
    numbers = flash_ws.scalars(problem, flash_ws.Knobs(block_m, 64), Sizes.of(problem), sm_count)
    tall, short = numbers["tall"], numbers["short"]
    assert (numbers["talls"], numbers["tiles"]) == (tall * heads, (tall + short) * heads)
    rows = tall * block_m + short * (block_m - ROWS)
    assert seq <= rows < seq + block_m
    whole = -(-seq // block_m)
    if short:
        ends = order.ends(tall * heads, short * heads, sm_count)
        assert ends < order.ends(whole * heads, 0, sm_count)
    else:
        assert tall == whole


def test_what_a_launch_ends_with():
    """16384 rows of 16 heads on 132 multiprocessors: 10.34 tiles of 192 rows each."""
    assert order.ends(86 * 16, 0, 132) == 11
    assert order.ends(132, 132, 132) == 1 + order.SHORT_TILE
    assert order.ends(131, 1, 132) == 1
    problem = make_problem(16384, 128)
    numbers = flash_ws.scalars(problem, flash_ws.Knobs(192, 64, 3), Sizes.of(problem), 132)
    assert 10.34 < order.ends(numbers["talls"], numbers["short"] * 16, 132) < 10.95


# Which keys a row meets, by the functions of the generated module itself


def module_of(problem: Problem, knobs: flash_ws.Knobs) -> Stepper:
    return Stepper(render(problem, Config("flash_ws", knobs)))


def functions(problem: Problem, knobs: flash_ws.Knobs) -> tuple[Callable[..., Any], ...]:
    stepper = module_of(problem, knobs)
    return tuple(stepper.function(name) for name in ("locate", "key_blocks", "group_row"))


@settings(deadline=None, max_examples=200)
@given(
    seq_q=LENGTHS,
    seq_kv=LENGTHS,
    causal=CAUSAL,
    tiles=st.sampled_from(TILES),
    half=st.booleans(),
    sm_count=st.sampled_from([1, 2, 5, 132]),
)
def test_every_visible_pair_is_computed_once(
    seq_q: int, seq_kv: int, causal: str, tiles: tuple[int, int], half: bool, sm_count: int
):
    block_m, block_n = tiles
    slots = next(
        k.slots
        for k in EVERY
        if (k.block_m, k.block_n) == tiles and (causal == "none" or _rings_fit(k))
    )
    if half:
        assume(causal != "none" and tiles == (128, 128) and seq_q <= seq_kv)
    problem = problem_of(seq_q, seq_kv, causal, batch=2, heads=2, kv_heads=2)
    knobs = flash_ws.Knobs(block_m, block_n, slots, half_diagonal=half)
    locate, key_blocks, group_row = functions(problem, knobs)
    numbers = flash_ws.scalars(problem, knobs, Sizes.of(problem), sm_count)
    launch = SimpleNamespace(**{"seq_q": seq_q, "seq_kv": seq_kv, **numbers})
    shift = seq_kv - seq_q if causal == "bottom_right" else 0
    met: Counter[tuple[int, int, int]] = Counter()
    for i in range(numbers["tiles"]):
        row, batch, head = (int(x) for x in locate(i, launch))
        whole = key_blocks(row + block_m, launch) if causal != "none" else None
        for group in range(block_m // ROWS):
            end = int(group_row(row, launch, group)) + ROWS
            blocks = int(key_blocks(end, launch))
            if whole is not None:  # what the group skips is in the ring, all of it
                assert 0 <= whole - blocks < slots
            # Keys that the first block is computed for: half of them under half_diagonal.
            width = block_n // 2 if half and group * ROWS % block_n == 0 else block_n
            unmasked, most = (blocks - 1) * block_n, (blocks - 1) * block_n + width
            for r in range(max(end - ROWS, 0), min(end, seq_q)):
                met[batch, head, r] += 1
                seen = seq_kv if causal == "none" else max(0, min(r + shift + 1, seq_kv))
                # Blocks after the first are summed without a mask: all of their keys are seen.
                assert seen >= unmasked
                assert seen <= most
    assert met == {(b, h, r): 1 for b in range(2) for h in range(2) for r in range(seq_q)}
    assert int(locate(numbers["tiles"], launch)[1]) == -1


def test_packed_heads_are_refused_in_another_number():
    """The rows of a tile are those of four heads: of any other number it would read wrong ones."""
    problem = make_problem(40, 64, seq_kv=300, heads=8, kv_heads=2)
    program = render(problem, Config("flash_ws", flash_ws.Knobs(pack_heads=True)))
    assert program.why_unfit(Sizes.of(problem)) is None
    for heads in (2, 4, 16):
        other = make_problem(40, 64, seq_kv=300, heads=heads, kv_heads=2)
        said = program.why_unfit(Sizes.of(other))
        assert said == f"{program.name} is made for group 4, not {heads // 2}."


def _rings_fit(knobs: flash_ws.Knobs) -> bool:
    return knobs.slots > (knobs.block_m - 1) // knobs.block_n


def test_half_a_block_is_not_enough_with_more_rows_than_keys():
    # Rows 128 to 191 see all 128 keys: the first block of their group has no half to leave out.
    problem = problem_of(256, 128, "top_left", heads=1)
    program = render(problem, Config("flash_ws", flash_ws.Knobs(half_diagonal=True)))
    assert program.why_unfit(Sizes.of(problem)) is not None
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
    o, lse = make_outputs(problem)
    Stepper(program).launch(q, k, v, o, lse, 0.1)
    _, right = plain_attention(q, k, v, 0.1, "top_left")
    wrong = ((lse - right).abs() > 0.1)[0, 0]
    assert wrong[128:192].all()
    assert not wrong[:128].any() and not wrong[192:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_the_default_on_hopper_is_warp_specialised_for_every_head_size(dim: int, causal: bool):
    """Portable kernels take twice as long: at D192/128 the default was one."""
    for dim_v in range(8, 257, 8):
        problem = make_problem(4096, dim, head_dim_v=dim_v, causal=causal)
        default = seeds_of(problem, H200)[0]
        assert default.family == "flash_ws", problem
        assert why_invalid(problem, H200, default) is None


# Whole kernels

VALID_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (24, 40), (256, 256), (80, 120)]


@st.composite
def calls(draw: Any) -> tuple[Problem, Config, int]:
    dim, dim_v = draw(st.sampled_from(VALID_DIMS))
    ends = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 260, 330])
    heads_kv = draw(st.sampled_from([1, 2]))
    problem = problem_of(
        draw(ends),
        draw(ends),
        draw(CAUSAL),
        dim,
        batch=draw(st.sampled_from([1, 1, 2])),
        heads=heads_kv * draw(st.sampled_from([1, 2, 4])),
        kv_heads=heads_kv,
        head_dim_v=dim_v,
        dtype=draw(st.sampled_from(["bf16", "fp16"])),
        layout="aligned16",
        scale_sign=draw(st.sampled_from(["positive", "any"])),
    )
    seed = draw(st.integers(0, 1 << 20))
    config = next(_fitting(problem, seed), None)
    assume(config is not None)  # none has room for D256 in a single group
    return problem, config, seed


def _fitting(problem: Problem, start: int) -> Iterator[Config]:
    """Every valid config that takes these sizes, in the order of a walk that mixes all knobs."""
    for step in range(len(EVERY)):
        knobs = EVERY[(start + 977 * step) % len(EVERY)]
        config = Config("flash_ws", knobs)
        sizes = Sizes.of(problem)
        limits = flash_ws.limits(problem, knobs)
        if (
            all(getattr(sizes, n) in right for n, right in limits.items())
            and why_invalid(problem, H200, config) is None
        ):
            yield config


# N01, N02, N03, N04, N05
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(call=calls())
def test_any_legal_problem_is_exact_and_ends(call: tuple[Problem, Config, int]):
    problem, config, seed = call
    scale = -0.3 if problem.features.scale == "any" and seed % 2 else 0.2
    stepper = Stepper(render(problem, config), seed=seed)
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(seed))
    o, lse = make_outputs(problem)
    for _ in range(2):  # the second launch finds the counter as the first left it
        o.fill_(torch.nan)
        stepper.launch(q, k, v, o, lse, scale)
        assert_exact(o, lse, plain_attention(q, k, v, scale, problem.features.causal), v)
        assert stepper.counter[0] == 0


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("boundary", ["finish", "overlap"])
def test_four_groups_are_exact(causal: str, boundary: str):
    problem = problem_of(330, 350, causal, heads=3, kv_heads=3, layout="aligned16")
    output = "queries" if boundary == "overlap" else "tma"
    knobs = flash_ws.Knobs(256, 64, 6, boundary, output=output)
    assert why_invalid(problem, H200, Config("flash_ws", knobs)) is None
    stepper = Stepper(render(problem, Config("flash_ws", knobs)), seed=7)
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(7))
    o, lse = make_outputs(problem)
    stepper.launch(q, k, v, o, lse, 0.2)
    assert_exact(o, lse, plain_attention(q, k, v, 0.2, causal), v)


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("tau", [0.0, 8.0])
def test_one_product_at_a_time_is_exact(causal: str, tau: float):
    problem = problem_of(330, 600, causal, 96, heads=3, kv_heads=3, layout="aligned16")
    knobs = flash_ws.Knobs(192, 128, 2, "finish", rescale_tau=tau, in_flight=1)
    assert why_invalid(problem, H200, Config("flash_ws", knobs)) is None
    stepper = Stepper(render(problem, Config("flash_ws", knobs)), seed=7)
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(7))
    k *= torch.linspace(8, 0.1, k.shape[2])[:, None]  # maxima rise to the left, where it walks
    o, lse = make_outputs(problem)
    stepper.launch(q, k, v, o, lse, 0.2)
    assert_exact(o, lse, plain_attention(q, k, v, 0.2, causal), v)


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_blocks_whose_scores_are_all_minus_infinity_count_for_nothing(causal: str):
    problem = problem_of(192, 192, causal, heads=1, layout="aligned16")
    program = render(problem, Config("flash_ws", flash_ws.Knobs(64, 64, 2, "finish")))
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
    q.abs_()
    k[..., 64:, :] = -torch.inf
    o, lse = make_outputs(problem)
    Stepper(program).launch(q, k, v, o, lse, 0.1)
    assert_exact(o, lse, plain_attention(q, k, v, 0.1, causal), v)


def test_both_dialects_of_a_kernel_do_the_same():
    problem = problem_of(200, 330, "bottom_right", 96)
    config = Config("flash_ws", flash_ws.Knobs(half_diagonal=True))
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
    results = []
    for minor in ((3, 6), (3, 9)):
        o, lse = make_outputs(problem)
        Stepper(render(problem, config, minor)).launch(q, k, v, o, lse, 0.1)
        results.append((o, lse))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


# Planted faults, and faults of order, which a device shows only now and then


@pytest.fixture(scope="module")
def gates() -> dict[str, Gate]:
    return {}


def judged(gates: dict[str, Gate], program: Program) -> Verdict:
    problem = program.problem
    gate = gates.setdefault(problem.key, Gate(problem, torch.device("cpu")))
    tile = flash_ws.tile(program.config.knobs)
    return gate.check(Stepper(program).launch, tile, program.limits, level="quick")


CASES = {str(m.case): m.case for m in MUTATIONS["flash_ws"]}


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: str(case[1]))
def test_the_kernel_that_faults_are_planted_in_passes_the_gate(
    gates: dict[str, Gate], case: tuple[Problem, Config]
):
    problem, config = case
    assert why_invalid(problem, H200, config) is None
    verdict = judged(gates, render(problem, config))
    assert [check for check in verdict.checks if not check.passed] == []


# T01
@pytest.mark.parametrize("mutation", MUTATIONS["flash_ws"], ids=lambda mutation: mutation.name)
def test_planted_fault_ends_and_is_caught(gates: dict[str, Gate], mutation: Mutation):
    try:
        verdict = judged(gates, mutated(mutation))
    except OutOfBounds:  # on a device it lands in the guard around the output
        assert "past its end" in mutation.name
    else:
        assert not verdict.passed


PAIR = (make_problem(300, 64, dtype="fp16"), Config("flash_ws", flash_ws.Knobs(128, 64, 2)))
ALONE = (
    make_problem(300, 96, dtype="fp16"),
    Config("flash_ws", flash_ws.Knobs(192, 128, 2, "finish", in_flight=1)),
)
RELEASE_V = (
    r"(    o, o_2 = warpgroup_mma_wait\(0, [^\n]*\n)(    mbarrier.expect\(v.empty[^\n]*\n)"
    r"(?=    mbarrier.wait\(k)"
)
V_LANDED = r"    mbarrier.wait\(v.full.index\(v_slot\)[^\n]*\n(?=    o = start_values\(p,)"
RELEASE_K = r"(    s = warpgroup_mma_wait\(1, [^\n]*\n)(    mbarrier.expect\(k.empty[^\n]*\n)"


@pytest.mark.parametrize(
    "mutation",
    [
        Mutation("values read before they landed", PAIR, V_LANDED, ""),
        Mutation("keys given back before they were read", PAIR, RELEASE_K, r"\2\1"),
        Mutation("values given back before they were read", ALONE, RELEASE_V, r"\2\1"),
        Mutation("output tile overwritten", PAIR, r"tma.store_wait\(0\)\n( +o_out)", r"pass\n\1"),
    ],
    ids=lambda mutation: mutation.name,
)
def test_a_missing_wait_shows(mutation: Mutation):
    problem, _ = mutation.case
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
    o, lse = make_outputs(problem)

    def results(program: Program) -> list[torch.Tensor]:
        found = []
        for seed in range(4):
            Stepper(program, seed=seed).launch(q, k, v, o, lse, 0.1)
            found.append(o.clone())
        return found

    right, *others = results(render(*mutation.case))
    assert all(torch.equal(right, other) for other in others)
    # A partition may also run so far ahead that the phase of a barrier comes round again.
    with suppress(Deadlock):
        assert not all(torch.equal(right, other) for other in results(mutated(mutation)))


def test_a_slot_that_is_not_given_back_stops_the_kernel():
    mutation = Mutation("kept slot", PAIR, r"mbarrier.expect\(v.empty[^\n]*", "pass")
    problem, _ = mutation.case
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
    with pytest.raises(Deadlock):
        Stepper(mutated(mutation)).launch(q, k, v, *make_outputs(problem), 0.1)
