"""torch's own attention, one backend at a time: pinned, named with its version, never silent.

scaled_dot_product_attention picks its backend by itself, and not the same one on each version.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fagen.judge.reference import truth_patch
from fagen.judge.trial import TORCH_DTYPE
from fagen.problem import Problem

SCORE_BYTES = 8 << 30  # what math and eager may hold as a score matrix
# Far above any rounding (bf16 eager: 1e-2), far below another mask or another scale.
WRONG_L2 = 0.1
PROBED_ROWS = 64

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v, scale -> O


@dataclass(frozen=True)
class Peer:
    """backend: cudnn, flash, efficient, math or eager; `name` adds the version."""

    backend: str
    name: str
    attend: Attention = field(compare=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.attend(q, k, v, scale)


class Peers(NamedTuple):
    """`found` run the problem and are right; `missing` maps the others' names to the reason."""

    found: dict[str, Peer]
    missing: dict[str, str]


BACKENDS: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


# What a user would run instead. The others keep the score matrix in memory and take 6 to 50 times
# as long (H200, bf16 D128 N8192): `fagen bench` times them, a tuning run has better use for that.
FUSED = ("cudnn", "flash", "efficient")


def peers(
    problem: Problem,
    device: torch.device | str,
    backends: Sequence[str] = (*BACKENDS, "eager"),
) -> Peers:
    """Each peer tried once on the problem's own shape, its output held against the truth."""
    where = torch.device(device)
    peers = Peers({}, {})
    inputs = _inputs(problem, where)
    for backend in backends:
        name = _name(backend)
        reason = _too_much_memory(problem) if backend in ("math", "eager") else None
        peer = Peer(backend, name, _attention(problem, backend))
        reason = reason or _why_not(peer, problem, inputs)
        if reason is None:
            peers.found[name] = peer
        else:
            peers.missing[name] = reason
    return peers


def _name(backend: str) -> str:
    torch_version = torch.__version__
    if backend == "eager":
        return f"eager (torch {torch_version})"
    if backend == "cudnn":
        cudnn = torch.backends.cudnn
        number = cudnn.version() if cudnn.is_available() else None  # type: ignore[no-untyped-call]
        return f"sdpa-cudnn {_dotted(number)} (torch {torch_version})"
    return f"sdpa-{backend} (torch {torch_version})"


def _dotted(number: int | None) -> str:
    """cuDNN counts 91002 for 9.10.2."""
    if number is None:
        return "none"
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _attention(problem: Problem, backend: str) -> Attention:
    if backend == "eager":
        return _eager(problem)
    shape, causal = problem.shape, problem.features.causal
    grouped = shape.heads_q != shape.heads_kv
    square = shape.seq_q == shape.seq_kv
    corner = causal == "top_left" or (causal == "bottom_right" and square)
    mask = _lower_right(problem) if causal == "bottom_right" and not square else None

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=corner, scale=scale, enable_gqa=grouped
            )

    return attend


def _lower_right(problem: Problem) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "is a prototype feature"
        bias: Tensor = causal_lower_right(problem.shape.seq_q, problem.shape.seq_kv)
    return bias


def _eager(problem: Problem) -> Attention:
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


def _too_much_memory(problem: Problem) -> str | None:
    s = problem.shape
    size = s.batch * s.heads_q * s.seq_q * s.seq_kv * TORCH_DTYPE[s.dtype].itemsize
    if size <= SCORE_BYTES:
        return None
    return f"its score matrix takes {size / 2**30:.1f} GiB, more than {SCORE_BYTES >> 30} GiB"


def _inputs(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    s, dtype = problem.shape, TORCH_DTYPE[problem.shape.dtype]
    dice = torch.Generator(device).manual_seed(0)

    def draw(heads: int, rows: int, columns: int) -> Tensor:
        size = (s.batch, heads, rows, columns)
        return torch.randn(size, generator=dice, device=device, dtype=dtype)

    return (
        draw(s.heads_q, s.seq_q, s.head_dim),
        draw(s.heads_kv, s.seq_kv, s.head_dim),
        draw(s.heads_kv, s.seq_kv, s.head_dim_v),
    )


def _why_not(peer: Peer, problem: Problem, inputs: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """torch's reason for not running the problem, or how far off its result is, or None."""
    scale = problem.shape.head_dim**-0.5
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        try:
            out = peer(*inputs, scale)
            off = _relative_error(out, problem, inputs, scale)
        except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
            return _reason(error, [str(one.message) for one in said])
    if not off <= WRONG_L2:
        return f"wrong result: relative L2 error {off:.2g} "
    return None


def _relative_error(
    out: Tensor, problem: Problem, inputs: tuple[Tensor, Tensor, Tensor], scale: float
) -> float:
    """Of the first and the last rows of the last head of the last batch, the larger one.

    Rows that see no key are right at 0; there the error is absolute.
    """
    q, k, v = (one[-1:, -1:] for one in inputs)
    errors = []
    for first in {0, max(q.shape[2] - PROBED_ROWS, 0)}:
        rows = slice(first, first + PROBED_ROWS)
        right, _ = truth_patch(q, k, v, problem.features, scale, rows)
        off, size = (out[-1:, -1:, rows].double() - right).norm(), right.norm()
        errors.append(float(off / size) if size > 0 else float(off))
    return max(errors) if all(e == e for e in errors) else float("nan")


def _reason(error: Exception, warned: list[str]) -> str:
    """torch raises "No available kernel" and says why in warnings, one a backend."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = [" ".join(w.split("(Triggered internally")[0].split()) for w in warned]
    useful = [w for w in told if "runtime disabled" not in w and "not been runtime" not in w]
    return "; ".join([lines[0], *useful])
