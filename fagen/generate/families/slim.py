"""slim: one query tile against the whole key row, two plain softmax passes, no running state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fagen.generate.families.base import Constraint, knob
from fagen.generate.families.tiling import (
    cdiv,
    dim_words,
    forward_args,
    padded,
    tensor_bytes,
)
from fagen.generate.program import Entry, Sizes, Workspace
from fagen.problem import Problem, size_bucket
from fagen.target import Target

NAME = "slim"
DIRECTION = "forward"
TEMPLATE = "slim.py.j2"

LONGEST_ROW = 1024
# Scores, output and one piece of probabilities, a thread, of 255: the scores of the whole row are
# live while keys and values are addressed and converted.
MAX_TILE_REGISTERS = 168


@dataclass(frozen=True)
class Knobs:
    """One kernel that holds a whole score row."""

    block_m: int = knob(64, (16, 32, 64, 128), "query rows of a tile")
    block_n: int = knob(64, (32, 64, 128), "keys of a piece of the row")
    row: int = knob(256, (32, 64, 128, 256, 512, LONGEST_ROW), "keys the tile has room for")
    num_warps: int = knob(4, (4, 8), "warps that share a tile")
    loads: str = knob("pointer", ("pointer", "tma"), "how tiles reach shared memory")


# (block_m, block_n, num_warps)
_FIRST = ((64, 64, 4), (64, 128, 8), (32, 64, 8), (16, 64, 4), (16, 32, 4))


def _registers(problem: Problem, knobs: Knobs) -> float:
    columns = knobs.row + padded(problem.shape.head_dim_v) + knobs.block_n / 2
    return knobs.block_m * columns / (32 * knobs.num_warps)


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "row_holds_keys",
        "A row of {row} keys is not the smallest that holds them all.",
        lambda p, t, k: k.row == max(32, size_bucket(p.shape.seq_kv)),
    ),
    Constraint(
        "pieces_fit_row",
        "Pieces of {block_n} keys are longer than the row of {row}.",
        lambda p, t, k: k.block_n <= k.row,
    ),
    Constraint(
        "tma_needs_hopper",
        "Tensor descriptors need compute capability 9.0.",
        lambda p, t, k: k.loads != "tma" or t.arch >= 90,
    ),
    Constraint(
        "tma_needs_alignment",
        "Tensor descriptors need 16-byte aligned pointers and strides.",
        lambda p, t, k: k.loads != "tma" or p.layout == "aligned16",
    ),
    Constraint(
        "rows_fit_tile",
        "A tile of {block_m} query rows would be mostly empty.",
        lambda p, t, k: k.block_m <= max(16, size_bucket(p.shape.seq_q)),
    ),
    Constraint(
        "warps_cover_rows",
        "{num_warps} warps don't suit {block_m} query rows.",
        lambda p, t, k: k.block_m < 128 or k.num_warps == 8,
    ),
    Constraint(
        "fp32_needs_small_tiles",
        "fp32 operands of {block_m}x{block_n} don't fit {num_warps} warps' registers.",
        lambda p, t, k: p.shape.dtype != "fp32" or (k.block_n == 32 and k.block_m <= 32),
    ),
    Constraint(
        "registers",
        "The scores of {block_m} rows by {row} keys don't fit {num_warps} warps' registers.",
        lambda p, t, k: _registers(p, k) <= MAX_TILE_REGISTERS,
    ),
    Constraint(
        "shared_memory",
        "The tiles need more shared memory than a block has.",
        lambda p, t, k: shared_bytes(p, k) <= t.shared_bytes,
    ),
)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if problem.shape.seq_kv > LONGEST_ROW:
        return f"slim holds a whole score row on chip: seq_kv is at most {LONGEST_ROW}."
    return None


def seeds(problem: Problem, target: Target) -> list[Knobs]:
    row = max(32, size_bucket(problem.shape.seq_kv))
    return [Knobs(rows, min(piece, row), row, warps) for rows, piece, warps in _FIRST]


def context(problem: Problem, knobs: Knobs) -> dict[str, Any]:
    return {**dim_words(problem), "tma": knobs.loads == "tma"}


def entries(problem: Problem, knobs: Knobs, name: str) -> tuple[Entry, ...]:
    args = forward_args(problem, knobs.loads == "tma", knobs.block_m, knobs.block_n)
    return (Entry(name, args, knobs.num_warps, 1),)


def grid(
    problem: Problem, knobs: Knobs, entry: int, sizes: Sizes, sm_count: int
) -> tuple[int, int, int]:
    return cdiv(sizes.seq_q, knobs.block_m) * sizes.batch * sizes.heads_q, 1, 1


def scalars(problem: Problem, knobs: Knobs, sizes: Sizes, sm_count: int) -> dict[str, int]:
    return {}


def workspaces(knobs: Knobs, sizes: Sizes) -> tuple[Workspace, ...]:
    return ()


def repeats(knobs: Knobs) -> bool:
    return True


def limits(problem: Problem, knobs: Knobs) -> dict[str, range]:
    return {"seq_kv": range(knobs.row + 1)}


def tile(knobs: Knobs) -> tuple[int, int]:
    return knobs.block_m, knobs.block_n


def shared_bytes(problem: Problem, knobs: Knobs) -> int:
    """Q and a piece of K, then a piece of V and the probabilities on their way to the second
    product: 48 KB at 64x128, D128 (sm_90, Triton 3.7)."""
    q, k, v = tensor_bytes(problem, knobs.block_m, knobs.block_n)
    p = q * knobs.block_n // padded(problem.shape.head_dim)
    return max(q + k, v + p)
