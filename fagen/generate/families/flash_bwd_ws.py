"""flash_bwd_ws: the backward pass for Hopper at head dims up to 128, warp-specialised."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fagen.generate.families import bwd_order, bwd_q, bwd_side
from fagen.generate.families.base import Constraint, Pass, knob
from fagen.generate.families.parts import width
from fagen.generate.families.tiling import ALIGN_BYTES, cdiv, descriptor, padded, size_args
from fagen.generate.program import Arg, Entry, Sizes, Workspace
from fagen.problem import ITEM_BYTES, Problem
from fagen.target import Target

NAME = "flash_bwd_ws"
DIRECTION = "backward"
TEMPLATE = "flash_bwd_ws.py.j2"

GROUPS = 2
KEYS = 64  # of a group: the rows of one wgmma
MOST_DIM = 128  # padded: dK and dV of 64 keys fill a group's registers
# Of a consumer thread: accumulators take at most 192, what there is at D128 with 64 rows and at
# D64 with 128 (compiled with 240: next to no spills).
MOST_ACCUMULATORS = 192


@dataclass(frozen=True)
class Knobs(bwd_q.Knobs):
    """The kernel for dK and dV; that for dQ, where it is one."""

    kv_block_m: int = knob(64, (64, 128), "query rows of a step towards dK and dV")
    kv_slots: int = knob(2, (2, 3), "tiles of Q and of dO in flight towards dK and dV")
    early_scores: bool = knob(
        True, (True, False), "queue QK^T of the next step behind dK of this one"
    )
    dq: str = knob(
        "reduce",
        ("reduce", "ordered", "kernel"),
        "where dQ is summed: in memory by the kernel for dK and dV, in no order or by each block "
        "in its turn, or in a kernel of its own; all but the first give the same bits every time",
    )
    persistent: bool = knob(
        False, (False, True), "blocks that take one tile of keys after another towards dK and dV"
    )


NO_KERNEL = {name: getattr(Knobs(), name) for name in ("q_block_n", "q_slots", "q_early")}


def _split(knobs: Knobs) -> str:
    """How two groups share dQ of a step: they have 64 rows of it each, or half of its columns."""
    return "rows" if knobs.kv_block_m == GROUPS * bwd_q.ROWS else "columns"


def _share(problem: Problem, knobs: Knobs) -> int:
    """Columns of dQ that a group computes."""
    dim = padded(problem.shape.head_dim)
    return dim if _split(knobs) == "rows" else dim // GROUPS


def _accumulators(problem: Problem, knobs: Knobs) -> int:
    """S, dP, dK and dV in registers of a thread."""
    columns = width(problem.shape.head_dim) + width(problem.shape.head_dim_v)
    return (2 * knobs.kv_block_m + columns) // 2


CONSTRAINTS: tuple[Constraint, ...] = (
    *bwd_q.CONSTRAINTS,
    Constraint(
        "kv_registers",
        "S and dP of {kv_block_m} rows, dK and dV don't fit the registers of a group.",
        lambda p, t, k: _accumulators(p, k) <= MOST_ACCUMULATORS,
    ),
    Constraint(
        "half_of_dq_is_multiplied",
        # 64 columns of K are what one row of its tile in shared memory holds side by side.
        "Half of dQ's columns are fewer than the 64 that a product takes of K.",
        lambda p, t, k: (
            k.dq == "kernel" or _split(k) == "rows" or padded(p.shape.head_dim) == MOST_DIM
        ),
    ),
    Constraint(
        "no_kernel_for_dq",
        "Without a kernel for dQ there is nothing to choose about it.",
        lambda p, t, k: (
            k.dq == "kernel" or all(getattr(k, x) == kept for x, kept in NO_KERNEL.items())
        ),
    ),
    Constraint(
        "turns_are_launched",
        "Blocks that wait for others rely on the order in which all are launched.",
        lambda p, t, k: not (k.persistent and k.dq == "ordered"),
    ),
    Constraint(
        "kv_shared_memory",
        "{kv_slots} slots of {kv_block_m} rows need more shared memory than a block has.",
        lambda p, t, k: _kv_shared_bytes(p, k) <= t.shared_bytes,
    ),
)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if target.arch != 90:
        return "flash_bwd_ws is for Hopper: it needs compute capability 9.0."
    if problem.shape.dtype == "fp32":
        return "flash_bwd_ws multiplies 16-bit operands."
    if max(problem.shape.head_dim, problem.shape.head_dim_v) > MOST_DIM:
        return f"flash_bwd_ws takes head dims up to {MOST_DIM}."
    return None


def seeds(problem: Problem, target: Target) -> list[Knobs]:
    """What was best on one H200, bf16 at N1024 to N16384, and neighbours; first those that add dQ
    up in memory, then those of the same bits in every run."""
    if padded(problem.shape.head_dim) == MOST_DIM or padded(problem.shape.head_dim_v) == MOST_DIM:
        fused = Knobs(kv_block_m=64)
        apart = replace(fused, dq="kernel")
        narrow = replace(apart, q_block_n=64, q_slots=3)
        both = [narrow, apart] if problem.features.causal != "none" else [apart, narrow]
    else:
        fused = Knobs(kv_block_m=128)
        apart = replace(fused, dq="kernel", q_early=True)
        both = [apart, replace(apart, q_block_n=64, q_slots=3)]
    late = replace(fused, early_scores=False)
    return [fused, replace(fused, dq="ordered"), late, *both, replace(late, dq="ordered")]


def repeats(knobs: Knobs) -> bool:
    return knobs.dq != "reduce"


def context(problem: Problem, knobs: Knobs) -> dict[str, Any]:
    causal = problem.features.causal
    bottom_right = causal == "bottom_right"
    return {
        "words": bwd_q.words(problem),
        "side": bwd_side.words(problem),
        "registers": bwd_q.REGISTERS,
        "split": _split(knobs),
        "share": _share(problem, knobs),
        "shift": " + seq_kv - seq_q" if bottom_right else "",
        "unshift": " - seq_kv + seq_q" if bottom_right else "",
        "gl_dtype": {"bf16": "gl.bfloat16", "fp16": "gl.float16"}[problem.shape.dtype],
    }


def entries(problem: Problem, knobs: Knobs, name: str) -> tuple[Entry, ...]:
    dim, dim_v, block_m = problem.shape.head_dim, problem.shape.head_dim_v, knobs.kv_block_m
    reduces, ordered = adds(knobs), knobs.dq == "ordered"
    gives = ("DK", "DV", *(["DQ"] if reduces else []))
    share = f"tensordesc<fp32[1,1,{bwd_q.ROWS},{_share(problem, knobs)}]>"
    args = (
        descriptor("q_desc", problem, block_m, dim),
        descriptor("k_desc", problem, KEYS, dim),
        descriptor("v_desc", problem, KEYS, dim_v),
        descriptor("g_desc", problem, block_m, dim_v),
        descriptor("dk_desc", problem, KEYS, dim),
        descriptor("dv_desc", problem, KEYS, dim_v),
        Arg("lse2_desc", f"tensordesc<fp32[{block_m}]>"),
        Arg("delta_desc", f"tensordesc<fp32[{block_m}]>"),
        *([Arg("acc_desc", share)] if reduces else []),
        *([Arg("TURN", "*i32", ALIGN_BYTES)] if ordered else []),
        Arg("scale_log2", "fp32"),
        *size_args(),
        bwd_order.ARG,
        *([bwd_order.BLOCKS] if knobs.persistent else []),
    )
    return (
        bwd_side.entry(problem, name, clears=reduces, ordered=ordered),
        Entry(f"{name}_kv", args, 4, 1, bwd_q.LAUNCH_REGISTERS, "gluon", gives),
        bwd_side.convert_entry(problem, name) if reduces else bwd_q.entry(problem, knobs, name),
    )


def grid(
    problem: Problem, knobs: Knobs, entry: int, sizes: Sizes, sm_count: int
) -> tuple[int, int, int]:
    blocks = _blocks(sizes)
    return (
        bwd_side.grid(sizes),
        (min(blocks, sm_count) if knobs.persistent else blocks, 1, 1),
        bwd_side.convert_grid(sizes) if adds(knobs) else bwd_q.grid(sizes),
    )[entry]


def scalars(problem: Problem, knobs: Knobs, sizes: Sizes, sm_count: int) -> dict[str, int]:
    order = bwd_order.scalars(problem, sizes, knobs.kv_block_m, turns=knobs.dq == "ordered")
    return order | ({bwd_order.BLOCKS.name: _blocks(sizes)} if knobs.persistent else {})


def _blocks(sizes: Sizes) -> int:
    """Tiles of keys, of all heads."""
    return cdiv(sizes.seq_kv, GROUPS * KEYS) * sizes.batch * sizes.heads_kv


def workspaces(knobs: Knobs, sizes: Sizes) -> tuple[Workspace, ...]:
    return bwd_side.workspaces(sizes, clears=adds(knobs), ordered=knobs.dq == "ordered")


def adds(knobs: Knobs) -> bool:
    return knobs.dq != "kernel"


def passes(problem: Problem, knobs: Knobs) -> tuple[Pass, ...]:
    dim, dim_v = width(problem.shape.head_dim), width(problem.shape.head_dim_v)
    columns = 2 * (dim + dim_v) + (padded(problem.shape.head_dim) if adds(knobs) else 0)
    kv = Pass(knobs.kv_block_m, GROUPS * KEYS, True, columns, 0.0, GROUPS, knobs.kv_slots)
    return (kv,) if adds(knobs) else (kv, bwd_q.main_pass(problem, knobs))


def limits(problem: Problem, knobs: Knobs) -> dict[str, range]:
    return bwd_side.LIMITS


def tile(knobs: Knobs) -> tuple[int, int]:
    return bwd_q.TILE, max(GROUPS * KEYS, knobs.q_block_n)


def shared_bytes(problem: Problem, knobs: Knobs) -> int:
    if adds(knobs):
        return _kv_shared_bytes(problem, knobs)
    return max(_kv_shared_bytes(problem, knobs), bwd_q.shared_bytes(problem, knobs))


def _kv_shared_bytes(problem: Problem, knobs: Knobs) -> int:
    """K and V, the slots of Q and dO with two numbers a row, and dS and dQ where they are handed
    on."""
    item = ITEM_BYTES[problem.shape.dtype]
    columns = padded(problem.shape.head_dim) + padded(problem.shape.head_dim_v)
    rows = knobs.kv_slots * knobs.kv_block_m
    tiles = item * columns * (GROUPS * KEYS + rows) + 2 * 4 * rows
    if adds(knobs):
        tiles += item * 2 * GROUPS * KEYS * knobs.kv_block_m
        tiles += 4 * GROUPS * bwd_q.ROWS * _share(problem, knobs)
    return tiles + bwd_q.BARRIER_BYTES
