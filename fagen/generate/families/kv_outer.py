"""kv_outer: key/value tiles outside, running state in global memory (FlashAttention-1 order).

Here to be compared: every key tile reads and writes the running output of all its query rows, and
that traffic shows in the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fagen.generate.families.base import Constraint, knob
from fagen.generate.families.tiling import cdiv, dim_words, forward_args, padded, tensor_bytes
from fagen.generate.program import Arg, Entry, Sizes, Workspace
from fagen.problem import Problem, size_bucket
from fagen.target import Target

NAME = "kv_outer"
DIRECTION = "forward"
TEMPLATE = "kv_outer.py.j2"

MAX_TILE_REGISTERS = 224  # as in flash


@dataclass(frozen=True)
class Knobs:
    """One FlashAttention-1 kernel."""

    block_m: int = knob(64, (64, 128), "query rows of a tile")
    block_n: int = knob(64, (32, 64, 128), "keys of a tile: fewer passes over the running state")
    num_warps: int = knob(4, (4, 8), "warps that share a tile")
    num_stages: int = knob(1, (1, 2), "query tiles in flight")
    q_tiles: int = knob(
        16, (4, 16, 64), "query tiles a program walks over: more reuse of K and V, fewer programs"
    )


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "warps_cover_rows",
        "{num_warps} warps don't suit {block_m} query rows.",
        lambda p, t, k: (k.block_m, k.num_warps) in ((64, 4), (64, 8), (128, 8)),
    ),
    Constraint(
        "keys_fit_tile",
        "A tile of {block_n} keys would be mostly empty.",
        lambda p, t, k: k.block_n <= max(32, size_bucket(p.shape.seq_kv)),
    ),
    Constraint(
        "rows_fit_section",
        "A section of {q_tiles} tiles of {block_m} query rows would be mostly empty.",
        lambda p, t, k: k.block_m * k.q_tiles <= max(256, size_bucket(p.shape.seq_q)),
    ),
    Constraint(
        "fp32_needs_small_tiles",
        "fp32 operands of {block_m}x{block_n} don't fit {num_warps} warps' registers.",
        lambda p, t, k: (
            p.shape.dtype != "fp32" or (k.block_m, k.block_n, k.num_warps) == (64, 32, 8)
        ),
    ),
    Constraint(
        "registers",
        "The accumulators of {block_m}x{block_n} don't fit {num_warps} warps' registers.",
        lambda p, t, k: (
            k.block_m * (padded(p.shape.head_dim_v) + 1.5 * k.block_n) / (32 * k.num_warps)
            <= MAX_TILE_REGISTERS
        ),
    ),
    Constraint(
        "shared_memory",
        "{block_m}x{block_n} in {num_stages} stages needs more shared memory than a block has.",
        lambda p, t, k: shared_bytes(p, k) <= t.shared_bytes,
    ),
)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    return None


def seeds(problem: Problem, target: Target) -> list[Knobs]:
    """One, and its shapes for less room: it is there to be compared."""
    return [
        Knobs(q_tiles=4),
        Knobs(block_n=32, q_tiles=4),
        Knobs(block_n=32, num_warps=8, q_tiles=4),
    ]


def context(problem: Problem, knobs: Knobs) -> dict[str, Any]:
    words = dim_words(problem)
    words["fold_args"] = "" if problem.features.scale == "any" else ", scale_log2"
    bottom_right = problem.features.causal == "bottom_right"
    words["shift"] = " + seq_kv - seq_q" if bottom_right else ""
    words["unshift"] = " - seq_kv + seq_q" if bottom_right else ""
    return words


def entries(problem: Problem, knobs: Knobs, name: str) -> tuple[Entry, ...]:
    state = tuple(Arg(x, "*fp32", 16) for x in ("ACC", "M", "L"))
    args = (*forward_args(problem, False, knobs.block_m, knobs.block_n), *state)
    return (Entry(name, args, knobs.num_warps, knobs.num_stages),)


def grid(
    problem: Problem, knobs: Knobs, entry: int, sizes: Sizes, sm_count: int
) -> tuple[int, int, int]:
    sections = cdiv(sizes.seq_q, knobs.block_m * knobs.q_tiles)
    return sections * sizes.batch * sizes.heads_q, 1, 1


def scalars(problem: Problem, knobs: Knobs, sizes: Sizes, sm_count: int) -> dict[str, int]:
    return {}


def workspaces(knobs: Knobs, sizes: Sizes) -> tuple[Workspace, ...]:
    rows = sizes.batch * sizes.heads_q * sizes.seq_q
    return (
        Workspace("ACC", "fp32", (rows * padded(sizes.head_dim_v),)),
        Workspace("M", "fp32", (rows,)),
        Workspace("L", "fp32", (rows,)),
    )


def repeats(knobs: Knobs) -> bool:
    return True


def limits(problem: Problem, knobs: Knobs) -> dict[str, range]:
    return {}


def tile(knobs: Knobs) -> tuple[int, int]:
    return knobs.block_m, knobs.block_n


def shared_bytes(problem: Problem, knobs: Knobs) -> int:
    """K and V, Q twice (once as it arrives), the fp32 state for each further stage: 64, 128 and
    96 KB at 64x64, 128x128 and 64x64 in two stages (D128, sm_90, Triton 3.7)."""
    q, k, v = tensor_bytes(problem, knobs.block_m, knobs.block_n)
    state = 4 * knobs.block_m * padded(problem.shape.head_dim_v)
    return 2 * q + k + v + (knobs.num_stages - 1) * state
