"""Tensor descriptors by their type word, "tensordesc<bf16[1,1,64,128]>"."""

from __future__ import annotations

from typing import Any

_GLUON_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def block_shape(word: str) -> list[int]:
    """The tile that a descriptor of this type moves."""
    return [int(n) for n in word[word.index("[") + 1 : word.index("]")].split(",")]


def shared_layout(word: str) -> Any:
    """Gluon's layout of such a tile in shared memory: the widest swizzle its columns allow."""
    from triton.experimental.gluon import language as gl

    dtype = getattr(gl, _GLUON_DTYPE[word[word.index("<") + 1 : word.index("[")]])
    return gl.NVMMASharedLayout.get_default_for(block_shape(word), dtype)
