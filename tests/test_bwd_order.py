"""The order in which backward kernels launch their blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fagen
from fagen.config import Config
from fagen.generate.families import bwd_order, flash_bwd_roles, flash_bwd_ws
from fagen.generate.program import Sizes
from fagen.generate.render import render
from fagen.problem import make_problem
from gluon_steps import Block, Stepper

CAUSAL = make_problem(4096, 128, batch=4, heads=16, causal=True, direction="backward")
FULL = make_problem(4096, 128, batch=4, heads=16, direction="backward")


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(tiles=st.integers(1, 9), heads=st.integers(1, 13), abreast=st.integers(1, 32))
def test_each_tile_of_each_head_has_one_block_and_earlier_tiles_come_first(
    tiles: int, heads: int, abreast: int
) -> None:
    stepper = Stepper(render(CAUSAL, Config(flash_bwd_ws.NAME, flash_bwd_ws.Knobs()), (3, 6)))
    blocks = tiles * heads
    places = [
        stepper.function("place_of", Block(number, blocks, random.Random(0)))(tiles, abreast)
        for number in range(blocks)
    ]
    assert sorted(places) == [(head, tile) for head in range(heads) for tile in range(tiles)]
    for head in range(heads):
        assert [tile for which, tile in places if which == head] == list(range(tiles))
    first = [head for head, tile in places[: min(abreast, heads)]]
    assert first == list(range(len(first)))


def heads_abreast(seq: int, dim: int, *, causal: bool, turns: bool, group: int = 1) -> int:
    problem = make_problem(
        seq, dim, heads=16 * group, kv_heads=16, causal=causal, direction="backward"
    )
    return bwd_order.scalars(problem, Sizes.of(problem), 64, turns=turns)["abreast"]


@pytest.mark.parametrize("dim", [64, 128])
def test_longer_blocks_need_fewer_heads_abreast(dim: int) -> None:
    for turns in (False, True):
        found = [
            heads_abreast(seq, dim, causal=True, turns=turns) for seq in (512, 2048, 8192, 1 << 20)
        ]
        assert found == sorted(found, reverse=True) and found[0] > found[-1] >= 4
    assert heads_abreast(4096, dim, causal=True, turns=True, group=8) < heads_abreast(
        4096, dim, causal=True, turns=True
    )


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    batch=st.integers(1, 1 << 12),
    group=st.integers(1, 64),
    seq_q=st.integers(1, 1 << 28),
    seq_kv=st.integers(1, 1 << 28),
    dim=st.sampled_from([16, 64, 128, 256]),
    turns=st.booleans(),
)
def test_what_a_block_divides_by_is_at_most_the_blocks_there_are(
    batch: int, group: int, seq_q: int, seq_kv: int, dim: int, turns: bool
) -> None:
    words: dict[str, Any] = {"batch": batch, "heads": 2 * group, "kv_heads": 2, "causal": True}
    problem = make_problem(seq_q, dim, seq_kv=seq_kv, direction="backward", **words)
    sizes = Sizes.of(problem)
    abreast = bwd_order.scalars(problem, sizes, 64, turns=turns)["abreast"]
    assert 1 <= abreast <= sizes.batch * sizes.heads_kv


def test_rows_at_32_bit_places_are_limited() -> None:
    for batch, family in ((1 << 19, "flash_bwd_ws"), (1 << 20, "flash_bwd")):
        problem = make_problem(1, 64, batch=batch, heads=16, seq_kv=1, direction="backward")
        assert fagen.get(problem, target="h200").config.family == family
    sizes = Sizes(batch=3, heads_q=4, heads_kv=2, seq_q=129, seq_kv=1, head_dim=1, head_dim_v=1)
    assert sizes.rows_in_tiles == 3 * 4 * 256


def test_heads_follow_each_other_where_all_blocks_are_as_long() -> None:
    assert heads_abreast(4096, 128, causal=False, turns=False) == 1
    assert heads_abreast(4096, 128, causal=False, turns=True) > 1


def test_every_kernel_over_tiles_takes_it_and_every_launch_gives_it() -> None:
    roles = make_problem(4096, 256, heads=16, causal=True, direction="backward")
    for family, problem, knobs in (
        (flash_bwd_ws, CAUSAL, flash_bwd_ws.Knobs()),
        (flash_bwd_ws, FULL, replace(flash_bwd_ws.Knobs(), dq="kernel")),
        (flash_bwd_roles, roles, flash_bwd_roles.Knobs()),
    ):
        program = render(problem, Config(family.NAME, knobs), (3, 6))
        given = family.scalars(problem, knobs, Sizes.of(problem), 132)
        for entry in program.entries:
            if entry.function.endswith(("_kv", "_q")):
                assert bwd_order.ARG in entry.args and bwd_order.ARG.name in given
