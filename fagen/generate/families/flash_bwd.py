"""flash_bwd: the backward pass in three portable kernels, the same bits in every run.

One kernel sums dK and dV over the query rows, another dQ over the keys: scores are computed twice,
seven products instead of five, and no sum needs atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fagen.generate.families.base import Constraint, Pass, knob
from fagen.generate.families.tiling import (
    ALIGN_BYTES,
    cdiv,
    dim_words,
    padded,
    pointer_args,
    size_args,
    stride_args,
)
from fagen.generate.program import Arg, Entry, Sizes, Workspace
from fagen.problem import ITEM_BYTES, Problem, size_bucket
from fagen.target import Target

NAME = "flash_bwd"
DIRECTION = "backward"
TEMPLATE = "flash_bwd.py.j2"

DELTA_ROWS, DELTA_WARPS = 64, 4  # it only streams O and G
MAX_TILE_REGISTERS = 224  # as in flash


@dataclass(frozen=True)
class Knobs:
    """Two kernels, each with its own tile."""

    kv_block_m: int = knob(64, (32, 64, 128), "query rows of a step towards dK and dV")
    kv_block_n: int = knob(64, (32, 64, 128), "keys whose dK and dV a block owns")
    kv_warps: int = knob(4, (4, 8), "its warps: two blocks of four overlap each other")
    kv_stages: int = knob(2, (1, 2, 3), "query tiles in flight")
    q_block_m: int = knob(128, (32, 64, 128), "query rows whose dQ a block owns")
    q_block_n: int = knob(64, (32, 64, 128), "keys of a step towards dQ")
    q_warps: int = knob(8, (4, 8), "its warps")
    q_stages: int = knob(3, (1, 2, 3), "key tiles in flight")


def _kv_registers(problem: Problem, knobs: Knobs) -> float:
    """Accumulators of dK and dV, and S and dP of a step."""
    columns = padded(problem.shape.head_dim) + padded(problem.shape.head_dim_v)
    return knobs.kv_block_n * (columns + 2 * knobs.kv_block_m) / (32 * knobs.kv_warps)


def _q_registers(problem: Problem, knobs: Knobs) -> float:
    columns = padded(problem.shape.head_dim) + 2 * knobs.q_block_n
    return knobs.q_block_m * columns / (32 * knobs.q_warps)


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "rows_fit_tile",
        "A tile of {q_block_m} or {kv_block_m} query rows would be mostly empty.",
        lambda p, t, k: max(k.q_block_m, k.kv_block_m) <= max(32, size_bucket(p.shape.seq_q)),
    ),
    Constraint(
        "keys_fit_tile",
        "A tile of {q_block_n} or {kv_block_n} keys would be mostly empty.",
        lambda p, t, k: max(k.q_block_n, k.kv_block_n) <= max(32, size_bucket(p.shape.seq_kv)),
    ),
    Constraint(
        "warps_cover_rows",
        "{kv_warps} warps for {kv_block_n} keys, or {q_warps} for {q_block_m} rows, don't suit.",
        lambda p, t, k: (
            (k.kv_block_n, k.kv_warps) != (32, 8) and (k.q_block_m, k.q_warps) != (32, 8)
        ),
    ),
    Constraint(
        "registers",
        "The accumulators of these tiles don't fit the warps' registers.",
        lambda p, t, k: max(_kv_registers(p, k), _q_registers(p, k)) <= MAX_TILE_REGISTERS,
    ),
    Constraint(
        "fp32_needs_small_tiles",
        "fp32 operands don't fit the registers of tiles this large.",
        lambda p, t, k: (
            p.shape.dtype != "fp32"
            or max(k.kv_block_m, k.kv_block_n, k.q_block_m, k.q_block_n) <= 32
        ),
    ),
    Constraint(
        "shared_memory",
        "These tiles and stages need more shared memory than a block has.",
        lambda p, t, k: shared_bytes(p, k) <= t.shared_bytes,
    ),
)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    return None


def seeds(problem: Problem, target: Target) -> list[Knobs]:
    """The first, best on one H200 at D128; below it what fits where that does not."""
    return [
        Knobs(),
        Knobs(kv_block_m=128),
        Knobs(q_block_m=64, q_warps=4),
        Knobs(64, 64, 8, 1, 64, 64, 4, 1),
        Knobs(64, 64, 4, 1, 64, 64, 4, 1),
        Knobs(32, 64, 4, 1, 64, 32, 4, 1),
        Knobs(32, 32, 4, 1, 32, 32, 4, 1),
    ]


def context(problem: Problem, knobs: Knobs) -> dict[str, Any]:
    bottom_right = problem.features.causal == "bottom_right"
    return dim_words(problem) | {
        "delta_rows": DELTA_ROWS,
        "shift": " + seq_kv - seq_q" if bottom_right else "",
        "unshift": " - seq_kv + seq_q" if bottom_right else "",
    }


def entries(problem: Problem, knobs: Knobs, name: str) -> tuple[Entry, ...]:
    dtype = problem.shape.dtype
    o, dq, dk, dv = (Arg(x, f"*{dtype}", ALIGN_BYTES) for x in ("O", "DQ", "DK", "DV"))
    lse, delta = (Arg(x, "*fp32", ALIGN_BYTES) for x in ("LSE", "DELTA"))
    (g,) = pointer_args(problem, "G")
    sizes = {arg.name: arg for arg in size_args()}
    scale = Arg("scale_log2", "fp32")
    rows = sizes["heads_q"], sizes["seq_q"]
    shared = (*pointer_args(problem, "QKV"), g, lse, delta)
    rest = (scale, *sizes.values(), *stride_args(problem, "qkvg"))
    delta_args = (o, g, delta, *rows, *stride_args(problem, "g"))
    return (
        Entry(f"{name}_delta", delta_args, DELTA_WARPS, 1),
        Entry(
            f"{name}_kv",
            (*shared, dk, dv, *rest),
            knobs.kv_warps,
            knobs.kv_stages,
            gives=("DK", "DV"),
        ),
        Entry(f"{name}_q", (*shared, dq, *rest), knobs.q_warps, knobs.q_stages, gives=("DQ",)),
    )


def grid(
    problem: Problem, knobs: Knobs, entry: int, sizes: Sizes, sm_count: int
) -> tuple[int, int, int]:
    rows = sizes.batch * sizes.heads_q
    return (
        (cdiv(sizes.seq_q, DELTA_ROWS) * rows, 1, 1),
        (cdiv(sizes.seq_kv, knobs.kv_block_n) * sizes.batch * sizes.heads_kv, 1, 1),
        (cdiv(sizes.seq_q, knobs.q_block_m) * rows, 1, 1),
    )[entry]


def scalars(problem: Problem, knobs: Knobs, sizes: Sizes, sm_count: int) -> dict[str, int]:
    return {}


def workspaces(knobs: Knobs, sizes: Sizes) -> tuple[Workspace, ...]:
    return (Workspace("DELTA", "fp32", (sizes.batch * sizes.heads_q * sizes.seq_q,)),)


def repeats(knobs: Knobs) -> bool:
    return True


def adds(knobs: Knobs) -> bool:
    return False


def passes(problem: Problem, knobs: Knobs) -> tuple[Pass, ...]:
    dim, dim_v = padded(problem.shape.head_dim), padded(problem.shape.head_dim_v)
    kv = Pass(
        knobs.kv_block_m,
        knobs.kv_block_n,
        True,
        2 * (dim + dim_v),
        _kv_registers(problem, knobs),
        8 // knobs.kv_warps,
        knobs.kv_stages,
    )
    q = Pass(
        knobs.q_block_m,
        knobs.q_block_n,
        False,
        2 * dim + dim_v,
        _q_registers(problem, knobs),
        8 // knobs.q_warps,
        knobs.q_stages,
    )
    return kv, q


def limits(problem: Problem, knobs: Knobs) -> dict[str, range]:
    return {}


def tile(knobs: Knobs) -> tuple[int, int]:
    return max(knobs.kv_block_m, knobs.q_block_m), max(knobs.kv_block_n, knobs.q_block_n)


def shared_bytes(problem: Problem, knobs: Knobs) -> int:
    """What a block owns, what streams past it in each stage, and P or dS of a step."""
    item = ITEM_BYTES[problem.shape.dtype]
    columns = padded(problem.shape.head_dim) + padded(problem.shape.head_dim_v)
    kv = columns * (knobs.kv_block_n + knobs.kv_stages * knobs.kv_block_m)
    q = columns * (knobs.q_block_m + knobs.q_stages * knobs.q_block_n)
    steps = knobs.kv_block_m * knobs.kv_block_n, knobs.q_block_m * knobs.q_block_n
    return item * max(kv + steps[0], q + steps[1])
