"""What attention costs on paper, and how values are shown."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch

from fagen import analysis
from fagen.problem import Problem, make_problem
from fagen.report import plain
from fagen.serve.inputs import get_call, options_of, words_of
from fagen.target import preset

H200 = preset("h200")
SMALL_L2 = replace(H200, l2_bytes=0)
PROBLEMS = [
    make_problem(100, 16),
    make_problem(100, 16, causal=True),
    make_problem(
        70, 16, seq_kv=130, causal=True, causal_align="bottom_right", heads=4, kv_heads=2
    ),
    make_problem(130, 16, seq_kv=70, causal=True, causal_align="bottom_right"),
    make_problem(130, 16, seq_kv=70, causal=True, head_dim_v=24, batch=3),
    make_problem(0, 16),
    make_problem(5, 16, seq_kv=0),
]


def mask(problem: Problem) -> torch.Tensor:
    """Which keys each query sees, written out."""
    s = problem.shape
    rows, keys = torch.arange(s.seq_q)[:, None], torch.arange(s.seq_kv)[None]
    shift = {"none": 10**9, "top_left": 0, "bottom_right": s.seq_kv - s.seq_q}
    return keys <= rows + shift[problem.features.causal]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_flops_count_two_a_visible_pair_and_channel(problem: Problem):
    s = problem.shape
    pairs = int(mask(problem).sum()) * s.batch * s.heads_q
    assert analysis.standard(problem, H200).flops == 2 * pairs * (s.head_dim + s.head_dim_v)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("block", [16, 48])
def test_asked_bytes_equal_a_walk_over_the_tiles(problem: Problem, block: int):
    s, seen, item = problem.shape, mask(problem), 2
    heads, row = s.batch * s.heads_q, (s.head_dim + s.head_dim_v) * item
    by_query = heads * s.seq_q * (row + 4)
    for first in range(0, s.seq_q, block):
        columns = seen[first : first + block].any(0).nonzero()
        by_query += heads * row * (int(columns.max()) + 1 if len(columns) else 0)
    assert analysis.query_outside(problem, SMALL_L2, block).asked_bytes == by_query

    state = (s.head_dim_v + 2) * 4
    by_key = heads * (s.seq_kv * row + s.seq_q * (state + s.head_dim_v * item + 4))
    for first in range(0, s.seq_kv, block):
        queries = seen[:, first].nonzero()  # the first key of a tile is seen by most
        count = s.seq_q - int(queries.min()) if len(queries) else 0
        by_key += heads * count * (s.head_dim * item + 2 * state)
    cost = analysis.keys_outside(problem, SMALL_L2, block)
    assert (cost.asked_bytes, cost.extra_bytes) == (by_key, heads * s.seq_q * state)


def test_standard_attention_stores_and_moves_its_square_matrices():
    cost = analysis.standard(make_problem(8192, 128), H200)
    matrix = 16 * 8192 * 8192 * 2
    assert cost.extra_bytes == 2 * matrix == 4 << 30
    assert cost.hbm_bytes == 4 * matrix + 4 * 16 * 8192 * 128 * 2


def test_what_fits_in_the_l2_cache_is_read_from_memory_once():
    problem = make_problem(8192, 128)
    fits = analysis.query_outside(problem, H200, 128)
    assert (fits.hbm_bytes, fits.asked_bytes > 30 * fits.hbm_bytes) == (problem.io_bytes, True)
    assert analysis.query_outside(problem, SMALL_L2, 128).hbm_bytes == fits.asked_bytes


def test_keys_outside_move_more_than_queries_outside_on_long_rows():
    _, queries, keys = analysis.costs(make_problem(8192, 128), H200)
    assert keys.hbm_bytes > 10 * queries.hbm_bytes
    assert keys.flops_per_byte < queries.flops_per_byte


def test_the_least_time_is_the_larger_of_memory_and_tensor_time():
    cost = analysis.Cost(
        "x", flops=989 * 10**9, extra_bytes=0, asked_bytes=0, hbm_bytes=48 * 10**5
    )
    assert cost.least_us(H200) == pytest.approx(1000.0)
    assert replace(cost, flops=1).least_us(H200) == pytest.approx(1.0)


def test_the_roofline_is_memory_then_compute():
    short, long = make_problem(128, 128), make_problem(8192, 128)
    assert analysis.roofline_us(short, H200) == pytest.approx(short.io_bytes / 4.8e6)
    assert analysis.roofline_us(long, H200) == pytest.approx(long.flops / 989e6)
    fp32 = make_problem(8192, 128, dtype="fp32")  # TF32 has half the rate
    assert analysis.roofline_us(fp32, H200) == pytest.approx(2 * long.flops / 989e6)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_words_of_a_problem_give_it_back(problem: Problem):
    assert make_problem(**words_of(problem)) == problem


def test_a_problem_as_options_and_as_a_call():
    problem = make_problem(64, 16, kv_heads=4, causal=True, causal_align="bottom_right")
    assert options_of(problem) == (
        "--seq 64 --head-dim 16 --kv-heads 4 --causal --causal-align bottom_right"
    )
    assert get_call(make_problem(64, 16, dtype="fp16")) == (
        "fagen.get(seq=64, head_dim=16, dtype='fp16')"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1234.567, "1235"), (0.000123456, "0.0001235"), (12345678.9, "12345679"),
     (7, "7"), ("a\n b", "a b"), (True, "True")],
)  # fmt: skip
def test_cells_are_short(value: object, text: str):
    assert plain.cell(value) == text


def test_times_are_iso_with_offset_for_programs():
    assert plain.iso(datetime(2026, 11, 1, 5, 30, tzinfo=UTC)) == "2026-11-01T05:30:00+00:00"
    assert (plain.iso(None), plain.local(None)) == (None, "-")


def test_long_reasons_become_one_line():
    assert plain.shortened("a\nb " * 100) == ("a b " * 100)[:157] + "..."
