"""Who can run a problem here: every backend tried once and held against the truth."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fagen.errors import BadSetting
from fagen.judge.peers import flex, packages, sdpa
from fagen.judge.peers.base import Backend, Peer
from fagen.judge.reference import truth_gradients, truth_patch
from fagen.judge.trial import TORCH_DTYPE
from fagen.problem import Problem

SCORE_BYTES = 8 << 30  # what math and eager may hold as score matrices
# The forward pass leaves P, and its gradient is made of that of dP, dS and its scaled copy.
MATRICES = {"backward": 4}
# Far above any rounding (bf16 eager: 1e-2), far below another mask or another scale.
WRONG_L2 = 0.1
PROBED_ROWS = 64

BACKENDS: dict[str, Backend] = {
    backend.key: backend for backend in (*sdpa.BACKENDS, *packages.BACKENDS, *flex.BACKENDS)
}
# What a user would run instead, and what the tuner races. math and eager keep the score matrix in
# memory and take 6 to 50 times as long (H200, bf16 D128 N8192); flex and fa4 compile for seconds.
FUSED = ("cudnn", "flash", "efficient", "fa3")
STANDARD = tuple(key for key in BACKENDS if key != "fa4")

Inputs = tuple[Tensor, ...]  # q, k, v; for a backward pass and g, the gradient of O
Off = Callable[[Peer], float]  # runs a peer: its largest relative L2 error


class Peers(NamedTuple):
    """`found` run the problem and are right; `missing` maps the others' names to the reason."""

    found: dict[str, Peer]
    missing: dict[str, str]


def backends_named(words: Iterable[str]) -> tuple[str, ...]:
    """The same words, each once. Raises BadSetting for one that is no backend."""
    named = tuple(dict.fromkeys(words))
    for word in named:
        if word not in BACKENDS:
            raise BadSetting(f"Peer {word!r} is unknown.", f"Use {', '.join(BACKENDS)}.")
    return named


def peers(
    problem: Problem,
    device: torch.device | str,
    backends: Sequence[str] = STANDARD,
    inputs: Inputs | None = None,
) -> Peers:
    """Each peer tried once on the problem's own shape, its output or gradients held against the
    truth.

    inputs: of the problem, on the device; made here by default.
    """
    inputs = draw_inputs(problem, torch.device(device), 0) if inputs is None else inputs
    scale = problem.shape.head_dim**-0.5
    judge = _gradients_off if problem.direction == "backward" else _output_off
    off = judge(problem, inputs, scale)
    peers = Peers({}, {})
    for backend in (BACKENDS[key] for key in backends):
        name = backend.name()
        tried = _tried(backend, name, problem, off)
        if isinstance(tried, Peer):
            peers.found[name] = tried
        else:
            peers.missing[name] = tried
    return peers


def draw_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Contiguous q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), normal; for a backward
    pass and g (B, Hq, Sq, Dv)."""
    s, dtype = problem.shape, TORCH_DTYPE[problem.shape.dtype]
    dice = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, rows: int, columns: int) -> Tensor:
        size = (s.batch, heads, rows, columns)
        return torch.randn(size, generator=dice, device=device, dtype=dtype)

    made = (
        draw(s.heads_q, s.seq_q, s.head_dim),
        draw(s.heads_kv, s.seq_kv, s.head_dim),
        draw(s.heads_kv, s.seq_kv, s.head_dim_v),
    )
    if problem.direction != "backward":
        return made
    return (*made, draw(s.heads_q, s.seq_q, s.head_dim_v))


def _tried(backend: Backend, name: str, problem: Problem, off: Off) -> Peer | str:
    """The peer, or the reason why it is none: absent, too large, refused, or how far off."""
    reason = _unable(backend, problem)
    if reason is not None:
        return reason
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        try:
            peer = Peer(backend.key, name, backend.attention(problem), backend.pin)
            error = off(peer)
        except Exception as raised:  # other people's code: torch, its compiler, two packages
            return _reason(raised, [str(one.message) for one in said])
    what = "gradients" if problem.direction == "backward" else "result"
    return peer if error <= WRONG_L2 else f"wrong {what}: relative L2 error {error:.2g}"


def _unable(backend: Backend, problem: Problem) -> str | None:
    """Why it is not even tried."""
    if problem.direction == "backward" and backend.no_backward is not None:
        return backend.no_backward
    return backend.absent() or (_too_much_memory(problem) if backend.keeps_scores else None)


def _too_much_memory(problem: Problem) -> str | None:
    s, count = problem.shape, MATRICES.get(problem.direction, 1)
    size = count * s.batch * s.heads_q * s.seq_q * s.seq_kv * TORCH_DTYPE[s.dtype].itemsize
    if size <= SCORE_BYTES:
        return None
    what = "score matrix takes" if count == 1 else f"{count} score matrices take"
    return f"its {what} {size / 2**30:.1f} GiB, more than {SCORE_BYTES >> 30} GiB"


def _output_off(problem: Problem, inputs: Inputs, scale: float) -> Off:
    """Of the last head's first and last rows, where masks differ."""
    q, k, v, *_ = inputs
    firsts = {0, max(q.shape[2] - PROBED_ROWS, 0)}
    patches = [slice(first, first + PROBED_ROWS) for first in sorted(firsts)]
    head = q[-1:, -1:], k[-1:, -1:], v[-1:, -1:]
    right = [truth_patch(*head, problem.features, scale, rows)[0] for rows in patches]

    def off(peer: Peer) -> float:
        out = peer(q, k, v, scale)[-1:, -1:]
        pairs = zip(patches, right, strict=True)
        return _largest(_relative(out[:, :, rows], wanted) for rows, wanted in pairs)

    return off


def _gradients_off(problem: Problem, inputs: Inputs, scale: float) -> Off:
    """Of the last key head and the query heads that share it: all rows, and the first and the
    last ones alone, where masks differ."""
    q, k, v, g = inputs
    ratio = problem.shape.heads_q // problem.shape.heads_kv
    head = q[-1:, -ratio:], k[-1:, -1:], v[-1:, -1:], g[-1:, -ratio:]
    right = truth_gradients(*head, problem.features, scale)
    parts = slice(None), slice(PROBED_ROWS), slice(-PROBED_ROWS, None)

    def off(peer: Peer) -> float:
        dq, dk, dv = peer.ready(q, k, v, g, scale)()
        found = dq[-1:, -ratio:], dk[-1:, -1:], dv[-1:, -1:]
        pairs = list(zip(found, right, strict=True))
        return _largest(_relative(a[:, :, at], b[:, :, at]) for a, b in pairs for at in parts)

    return off


def _relative(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 error. What nobody sees is right at 0; there it is absolute."""
    off, size = (found.double() - wanted).norm(), wanted.norm()
    return float(off / size) if size > 0 else float(off)


def _largest(errors: Iterable[float]) -> float:
    """Which is NaN where one of them is."""
    found = list(errors)
    return max(found) if all(error == error for error in found) else float("nan")


def _reason(error: Exception, warned: list[str]) -> str:
    """torch raises "No available kernel" and says why in warnings, one a backend."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = [" ".join(w.split("(Triggered internally")[0].split()) for w in warned]
    useful = [
        warning
        for warning in dict.fromkeys(told)
        if "runtime disabled" not in warning and "not been runtime" not in warning
    ]
    return "; ".join([lines[0], *useful])
