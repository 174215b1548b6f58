"""The kernel for dQ that the backward families for Hopper share (templates/parts/bwd_q.j2).

Two groups of four warps own 64 query rows each; a producer warp streams K and V past them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fagen.generate.families import bwd_order
from fagen.generate.families.base import Constraint, Pass, knob
from fagen.generate.families.parts import parts, width
from fagen.generate.families.tiling import ALIGN_BYTES, cdiv, descriptor, padded, size_args
from fagen.generate.program import Arg, Entry, Sizes
from fagen.problem import ITEM_BYTES, Problem

ROWS = 64  # of a group: the rows of one wgmma
GROUPS = 2
TILE = ROWS * GROUPS  # query rows of a block; LSE2 and DELTA hold whole tiles of them
# Registers at launch and of a consumer. The producer keeps 24: together the 65536 of a
# multiprocessor, for 12 warps.
LAUNCH_REGISTERS, REGISTERS = 168, 240
# Beside accumulators, which at D128 with 128 keys, or at D256 with 64, take 192.
OTHER_REGISTERS = 48
BARRIER_BYTES = 1024


@dataclass(frozen=True)
class Knobs:
    """The dQ kernel's; a family's own come after them."""

    q_block_n: int = knob(128, (32, 64, 128), "keys of a step towards dQ")
    q_slots: int = knob(2, (2, 3), "blocks of K and of V in flight towards dQ")
    q_early: bool = knob(False, (False, True), "queue QK^T of the next block behind dQ")


def _registers(problem: Problem, knobs: Knobs) -> float:
    """Of a consumer thread: dQ, S and dP."""
    return (width(problem.shape.head_dim) + 2 * knobs.q_block_n) / 2 + OTHER_REGISTERS


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "tma_needs_alignment",
        "Tensor descriptors need 16-byte aligned pointers and strides.",
        lambda p, t, k: p.layout == "aligned16",
    ),
    Constraint(
        "tma_gradients_need_alignment",
        "Rows of the gradients are no multiple of 16 bytes, so TMA can't store them.",
        lambda p, t, k: (
            p.shape.head_dim * ITEM_BYTES[p.shape.dtype] % 16 == 0
            and p.shape.head_dim_v * ITEM_BYTES[p.shape.dtype] % 16 == 0
        ),
    ),
    Constraint(
        "q_registers",
        "dQ, and S and dP of {q_block_n} keys, don't fit the registers of a group.",
        lambda p, t, k: _registers(p, k) <= REGISTERS,
    ),
    Constraint(
        "q_shared_memory",
        "{q_slots} slots of {q_block_n} keys need more shared memory than a block has.",
        lambda p, t, k: shared_bytes(p, k) <= t.shared_bytes,
    ),
)


def words(problem: Problem) -> dict[str, Any]:
    """What the macro needs to know besides the knobs."""
    causal = problem.features.causal
    return {
        "groups": GROUPS,
        "rows": ROWS,
        "tile": TILE,
        "registers": REGISTERS,
        "pad_dim": padded(problem.shape.head_dim),
        "pad_dim_v": padded(problem.shape.head_dim_v),
        "parts": parts(problem.shape.head_dim),
        "parts_v": parts(problem.shape.head_dim_v),
        "causal": causal != "none",
        "shift": " + seq_kv - seq_q" if causal == "bottom_right" else "",
    }


def entry(problem: Problem, knobs: Knobs, name: str) -> Entry:
    dim, dim_v = problem.shape.head_dim, problem.shape.head_dim_v
    args = (
        descriptor("q_desc", problem, ROWS, dim),
        descriptor("k_desc", problem, knobs.q_block_n, dim),
        descriptor("v_desc", problem, knobs.q_block_n, dim_v),
        descriptor("g_desc", problem, ROWS, dim_v),
        descriptor("dq_desc", problem, ROWS, dim),
        Arg("LSE2", "*fp32", ALIGN_BYTES),
        Arg("DELTA", "*fp32", ALIGN_BYTES),
        Arg("scale_log2", "fp32"),
        *size_args(),
        bwd_order.ARG,
    )
    return Entry(f"{name}_q", args, 4, 1, LAUNCH_REGISTERS, "gluon", ("DQ",))


def main_pass(problem: Problem, knobs: Knobs) -> Pass:
    columns = 2 * width(problem.shape.head_dim) + width(problem.shape.head_dim_v)
    return Pass(TILE, knobs.q_block_n, False, columns, 0.0, GROUPS, knobs.q_slots)


def grid(sizes: Sizes) -> tuple[int, int, int]:
    return cdiv(sizes.seq_q, TILE) * sizes.batch * sizes.heads_q, 1, 1


def shared_bytes(problem: Problem, knobs: Knobs) -> int:
    columns = padded(problem.shape.head_dim) + padded(problem.shape.head_dim_v)
    rows = TILE + knobs.q_slots * knobs.q_block_n
    return ITEM_BYTES[problem.shape.dtype] * columns * rows + BARRIER_BYTES
