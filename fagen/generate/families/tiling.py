"""What the families share: padded sizes and the arguments of their kernels."""

from __future__ import annotations

from typing import Any

from fagen.generate.program import Arg
from fagen.problem import ITEM_BYTES, Problem

ALIGN_BYTES = 16  # what layout class aligned16 promises of bases and strides


def cdiv(size: int, by: int) -> int:
    return -(-size // by)


def padded(dim: int) -> int:
    """The next power of two a tile can have: at least 16, the least depth of a matrix product."""
    return max(16, 1 << (dim - 1).bit_length())


def descriptor(name: str, problem: Problem, rows: int, dim: int) -> Arg:
    """A descriptor over (batch, heads, seq, dim) that loads `rows` rows of one head."""
    return Arg(name, f"tensordesc<{problem.shape.dtype}[1,1,{rows},{padded(dim)}]>")


def _output_args(problem: Problem) -> tuple[Arg, ...]:
    """The outputs, which fagen allocates itself, and the scale."""
    return (
        Arg("O", f"*{problem.shape.dtype}", ALIGN_BYTES),
        Arg("LSE", "*fp32", ALIGN_BYTES),
        Arg("scale_log2", "fp32"),
    )


def size_args() -> tuple[Arg, ...]:
    return tuple(Arg(name, "i32") for name in ("heads_q", "group", "seq_q", "seq_kv"))


def stride_args(problem: Problem, letters: str) -> tuple[Arg, ...]:
    """Strides in elements; those of rows are below 2**22 in aligned16: a tile's fit i32."""
    if problem.layout == "any":
        return tuple(Arg(f"stride_{x}{d}", "i64") for x in letters for d in "bhsd")
    steps = ALIGN_BYTES // ITEM_BYTES[problem.shape.dtype]
    types = {"b": "i64", "h": "i64", "s": "i32"}
    return tuple(Arg(f"stride_{x}{d}", kind, steps) for x in letters for d, kind in types.items())


def forward_args(problem: Problem, tma: bool, block_m: int, block_n: int) -> tuple[Arg, ...]:
    """The arguments of a forward kernel, in the order of `tiles.arguments` in the templates."""
    shape = problem.shape
    if tma:
        tensors: tuple[Arg, ...] = (
            descriptor("q_desc", problem, block_m, shape.head_dim),
            descriptor("k_desc", problem, block_n, shape.head_dim),
            descriptor("v_desc", problem, block_n, shape.head_dim_v),
        )
        return (*tensors, *_output_args(problem), *size_args())
    strides = stride_args(problem, "qkv")
    return (*pointer_args(problem, "QKV"), *_output_args(problem), *size_args(), *strides)


def pointer_args(problem: Problem, letters: str) -> tuple[Arg, ...]:
    """Tensors that the caller brings, as far as its layout class promises."""
    aligned = problem.layout == "aligned16"
    alignment = ALIGN_BYTES if aligned else ITEM_BYTES[problem.shape.dtype]
    return tuple(Arg(x, f"*{problem.shape.dtype}", alignment) for x in letters)


def dim_words(problem: Problem) -> dict[str, Any]:
    """What the templates need to know of head_dim, head_dim_v and the layout class."""
    dim, dim_v = problem.shape.head_dim, problem.shape.head_dim_v
    return {
        "strided": problem.layout == "any",
        "pad_dim": padded(dim),
        "pad_dim_v": padded(dim_v),
        "padded": padded(dim) != dim,
        "padded_v": padded(dim_v) != dim_v,
    }


def tensor_bytes(problem: Problem, rows: int, keys: int) -> tuple[int, int, int]:
    """Bytes of a query tile, a key tile and a value tile."""
    item = ITEM_BYTES[problem.shape.dtype]
    dim, dim_v = padded(problem.shape.head_dim), padded(problem.shape.head_dim_v)
    return item * rows * dim, item * keys * dim, item * keys * dim_v
