"""Who can run a problem here: every backend tried once and held against the truth."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fagen.errors import BadSetting
from fagen.judge.peers import flex, packages, sdpa
from fagen.judge.peers.base import Backend, Peer
from fagen.judge.reference import truth_patch
from fagen.judge.trial import TORCH_DTYPE
from fagen.problem import Problem

SCORE_BYTES = 8 << 30  # what math and eager may hold as a score matrix
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

Inputs = tuple[Tensor, Tensor, Tensor]
Patch = tuple[slice, Tensor]  # rows of the last head of the last batch, and what is right there


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
    """Each peer tried once on the problem's own shape, its output held against the truth.

    inputs: of the problem, on the device; made here by default.
    """
    inputs = draw_inputs(problem, torch.device(device), 0) if inputs is None else inputs
    scale = problem.shape.head_dim**-0.5
    right = _right(problem, inputs, scale)
    peers = Peers({}, {})
    for backend in (BACKENDS[key] for key in backends):
        name = backend.name()
        tried = _tried(backend, name, problem, inputs, right)
        if isinstance(tried, Peer):
            peers.found[name] = tried
        else:
            peers.missing[name] = tried
    return peers


def draw_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Contiguous q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), normal."""
    s, dtype = problem.shape, TORCH_DTYPE[problem.shape.dtype]
    dice = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, rows: int, columns: int) -> Tensor:
        size = (s.batch, heads, rows, columns)
        return torch.randn(size, generator=dice, device=device, dtype=dtype)

    return (
        draw(s.heads_q, s.seq_q, s.head_dim),
        draw(s.heads_kv, s.seq_kv, s.head_dim),
        draw(s.heads_kv, s.seq_kv, s.head_dim_v),
    )


def _tried(
    backend: Backend, name: str, problem: Problem, inputs: Inputs, right: list[Patch]
) -> Peer | str:
    """The peer, or the reason why it is none: absent, too large, refused, or how far off."""
    reason = backend.absent() or (_too_much_memory(problem) if backend.keeps_scores else None)
    if reason is not None:
        return reason
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        try:
            peer = Peer(backend.key, name, backend.attention(problem), backend.pin)
            off = _relative_error(peer(*inputs, problem.shape.head_dim**-0.5), right)
        except Exception as error:  # other people's code: torch, its compiler, two packages
            return _reason(error, [str(one.message) for one in said])
    return peer if off <= WRONG_L2 else f"wrong result: relative L2 error {off:.2g}"


def _too_much_memory(problem: Problem) -> str | None:
    s = problem.shape
    size = s.batch * s.heads_q * s.seq_q * s.seq_kv * TORCH_DTYPE[s.dtype].itemsize
    if size <= SCORE_BYTES:
        return None
    return f"its score matrix takes {size / 2**30:.1f} GiB, more than {SCORE_BYTES >> 30} GiB"


def _right(problem: Problem, inputs: Inputs, scale: float) -> list[Patch]:
    """The first and the last rows, where masks differ."""
    q, k, v = (one[-1:, -1:] for one in inputs)
    firsts = {0, max(q.shape[2] - PROBED_ROWS, 0)}
    patches = [slice(first, first + PROBED_ROWS) for first in sorted(firsts)]
    return [(rows, truth_patch(q, k, v, problem.features, scale, rows)[0]) for rows in patches]


def _relative_error(out: Tensor, right: list[Patch]) -> float:
    """Of the patches, the largest. Rows that see no key are right at 0; there it is absolute."""
    errors = []
    for rows, wanted in right:
        off, size = (out[-1:, -1:, rows].double() - wanted).norm(), wanted.norm()
        errors.append(float(off / size) if size > 0 else float(off))
    return max(errors) if all(e == e for e in errors) else float("nan")


def _reason(error: Exception, warned: list[str]) -> str:
    """torch raises "No available kernel" and says why in warnings, one a backend."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = [" ".join(w.split("(Triggered internally")[0].split()) for w in warned]
    useful = [w for w in told if "runtime disabled" not in w and "not been runtime" not in w]
    return "; ".join([lines[0], *useful])
