"""torch's scaled_dot_product_attention, one backend at a time, and attention in plain torch.

Left alone it picks its backend by itself, and not the same one on each version: `auto` is that.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.judge.peers.base import Attention, Backend
from fagen.problem import Problem

PINNED: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def sdpa(problem: Problem) -> Attention:
    shape, causal = problem.shape, problem.features.causal
    grouped = shape.heads_q != shape.heads_kv
    square = shape.seq_q == shape.seq_kv
    corner = causal == "top_left" or (causal == "bottom_right" and square)
    mask = _lower_right(problem) if causal == "bottom_right" and not square else None

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=corner, scale=scale, enable_gqa=grouped
        )

    return attend


def eager(problem: Problem) -> Attention:
    """softmax(q k^T) v, every step in the inputs' dtype."""
    s, causal = problem.shape, problem.features.causal
    ratio = s.heads_q // s.heads_kv
    shift = s.seq_kv - s.seq_q if causal == "bottom_right" else 0
    hidden: dict[torch.device, Tensor] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if ratio > 1:
            k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
        scores = (q @ k.transpose(-1, -2)) * scale
        if causal != "none":
            if q.device not in hidden:
                seen = torch.ones(s.seq_q, s.seq_kv, dtype=torch.bool, device=q.device)
                hidden[q.device] = ~seen.tril(shift)
            scores = scores.masked_fill(hidden[q.device], -torch.inf)
        return scores.softmax(-1) @ v

    return attend


def _lower_right(problem: Problem) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "is a prototype feature"
        bias: Tensor = causal_lower_right(problem.shape.seq_q, problem.shape.seq_kv)
    return bias


def _name(word: str) -> str:
    return f"{word} (torch {torch.__version__})"


def _cudnn_name() -> str:
    cudnn = torch.backends.cudnn
    number = cudnn.version() if cudnn.is_available() else None  # type: ignore[no-untyped-call]
    return _name(f"sdpa-cudnn {_dotted(number)}")


def _dotted(number: int | None) -> str:
    """cuDNN counts 91002 for 9.10.2."""
    if number is None:
        return "none"
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _pinned(key: str) -> Backend:
    return Backend(
        key,
        _cudnn_name if key == "cudnn" else partial(_name, f"sdpa-{key}"),
        sdpa,
        pin=partial(sdpa_kernel, PINNED[key]),
        keeps_scores=key == "math",
    )


BACKENDS = (
    Backend("auto", partial(_name, "sdpa-auto"), sdpa),
    *map(_pinned, PINNED),
    Backend("eager", partial(_name, "eager"), eager, keeps_scores=True),
)
