"""FlashAttention-3 and -4, from packages of their own.

Both want (B, S, H, D) and take any strides with a last one of 1: they get transposed views of
fagen's (B, H, S, D), and no copy is timed. Both line a causal mask up with the bottom right.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import partial

import torch
from torch import Tensor

from fagen.judge.peers.base import Attention, Backend
from fagen.problem import Problem


def fa3(problem: Problem) -> Attention:
    """`flash_attn_func` of fa3-fwd 0.0.3, which returns the output alone."""
    from fa3_fwd_interface import flash_attn_func

    causal = _bottom_right(problem)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out: Tensor = flash_attn_func(*rows, softmax_scale=scale, causal=causal)
        return out.transpose(1, 2)

    return attend


def fa4(problem: Problem) -> Attention:
    """`flash_attn_func` of flash-attn-4 4.0.0b36, which returns the output and an LSE or None.

    Compiled at the first call, which takes many seconds.
    """
    from flash_attn.cute import flash_attn_func

    causal = _bottom_right(problem)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        found = flash_attn_func(*rows, softmax_scale=scale, causal=causal)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return attend


def _bottom_right(problem: Problem) -> bool:
    """Whether the mask is causal. Raises NotImplementedError for a corner that both lack."""
    shape, causal = problem.shape, problem.features.causal
    if causal == "top_left" and shape.seq_q != shape.seq_kv:
        raise NotImplementedError("its causal mask is bottom-right, this one is top-left")
    return causal != "none"


def _absent(module: str, install: str) -> str | None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        found = False
    return None if found else f"not installed; run: {install}"


def _fa4_absent() -> str | None:
    # Its CUDA 13 part is an extra.
    extra = "[cu13]" if (torch.version.cuda or "").startswith("13") else ""
    return _absent("flash_attn.cute", f"pip install 'flash-attn-4{extra}'")


def _name(word: str, package: str) -> str:
    try:
        return f"{word} ({package} {importlib.metadata.version(package)})"
    except importlib.metadata.PackageNotFoundError:
        return f"{word} ({package})"


BACKENDS = (
    Backend(
        "fa3",
        partial(_name, "fa3", "fa3-fwd"),
        fa3,
        partial(_absent, "fa3_fwd_interface", "pip install fa3-fwd"),
        no_backward="its package, fa3-fwd, is built without the backward pass",
    ),
    Backend("fa4", partial(_name, "fa4", "flash-attn-4"), fa4, _fa4_absent),
)
