"""The kernels before and after the products of a backward pass (templates/parts/bwd_side.j2).

They only stream: the first brings LSE and the sum of O * G of each row into the form that the
others read, the last makes dQ of its fp32 sum where that was added up in memory.
"""

from __future__ import annotations

from typing import Any

from fagen.generate.families.tiling import (
    ALIGN_BYTES,
    cdiv,
    padded,
    pointer_args,
    size_args,
    stride_args,
)
from fagen.generate.program import ROWS_OF_A_TILE, Arg, Entry, Sizes, Workspace
from fagen.problem import Problem

ROWS = ROWS_OF_A_TILE  # of a block; LSE2 and DELTA hold a multiple of them for each head
# They are read at 32-bit places.
LIMITS = {"rows_in_tiles": range(1 << 31)}
TURNS = 2  # of a block, as many as it has tiles of 64 rows
DELTA_WARPS = 8
CONVERTED, CONVERT_WARPS = 4096, 4  # elements of a block


def words(problem: Problem) -> dict[str, Any]:
    """What the macros need to know."""
    dim, dim_v = problem.shape.head_dim, problem.shape.head_dim_v
    return {
        "rows": ROWS,
        "warps": DELTA_WARPS,
        "dim": dim,
        "dim_v": dim_v,
        "pad_dim": padded(dim),
        "pad_dim_v": padded(dim_v),
        # Lanes side by side, of 16 bytes each.
        "lanes": min(32, padded(dim) // 4),
        "lanes_v": min(32, padded(dim_v) // 8),
        "turns": TURNS,
        "converted": CONVERTED,
        "convert_warps": CONVERT_WARPS,
    }


def entry(problem: Problem, name: str, *, clears: bool = False, ordered: bool = False) -> Entry:
    """clears: dQ is added up in ACC. ordered: by each block in its turn."""
    (g,) = pointer_args(problem, "G")
    sizes = {arg.name: arg for arg in size_args()}
    terms = [Arg(x, "*fp32", ALIGN_BYTES) for x in ("LSE", "LSE2", "DELTA")]
    args = (
        Arg("O", f"*{problem.shape.dtype}", ALIGN_BYTES),
        g,
        *terms,
        *([Arg("ACC", "*fp32", ALIGN_BYTES)] if clears else []),
        *([Arg("TURN", "*i32", ALIGN_BYTES)] if ordered else []),
        sizes["heads_q"],
        sizes["seq_q"],
        *stride_args(problem, "g"),
    )
    return Entry(f"{name}_delta", args, DELTA_WARPS, 1, dialect="gluon")


def convert_entry(problem: Problem, name: str) -> Entry:
    args = (
        Arg("ACC", "*fp32", ALIGN_BYTES),
        Arg("DQ", f"*{problem.shape.dtype}", ALIGN_BYTES),
        Arg("scale_log2", "fp32"),
        *(Arg(size, "i32") for size in ("batch", "heads_q", "seq_q")),
    )
    return Entry(f"{name}_convert", args, CONVERT_WARPS, 1, dialect="gluon", gives=("DQ",))


def grid(sizes: Sizes) -> tuple[int, int, int]:
    return cdiv(sizes.seq_q, ROWS) * sizes.batch * sizes.heads_q, 1, 1


def convert_grid(sizes: Sizes) -> tuple[int, int, int]:
    elements = sizes.batch * sizes.heads_q * sizes.seq_q * sizes.head_dim
    return cdiv(elements, CONVERTED), 1, 1


def workspaces(
    sizes: Sizes, *, clears: bool = False, ordered: bool = False
) -> tuple[Workspace, ...]:
    """LSE2 and DELTA, with `clears` ACC, which has the shape of Q, and with `ordered` TURN."""
    rows = cdiv(sizes.seq_q, ROWS) * ROWS * sizes.batch * sizes.heads_q
    acc = (sizes.batch, sizes.heads_q, sizes.seq_q, sizes.head_dim)
    return (
        Workspace("LSE2", "fp32", (rows,)),
        Workspace("DELTA", "fp32", (rows,)),
        *([Workspace("ACC", "fp32", acc)] if clears else []),
        *([Workspace("TURN", "i32", (rows // ROWS * TURNS,))] if ordered else []),
    )
