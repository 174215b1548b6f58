"""One case of a backward pass made ready: the forward pass's inputs, what it left, a gradient.

O and LSE are the baseline's, as a right forward kernel leaves them; the truth knows neither.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fagen.judge import reference
from fagen.judge.arena import Guarded, make_dense, make_far, make_input, make_output, sealed
from fagen.judge.cases import Case, fill
from fagen.judge.trial import (
    COMMON,
    FAR_APART,
    TRUTH_FLOPS,
    Prepared,
    finite,
    largest,
    make_inputs,
)
from fagen.problem import Problem

KINDS = ("dq_max", "dq_l2", "dk_max", "dk_l2", "dv_max", "dv_l2", *COMMON)
# As FlashAttention's own tests judge gradients: three times the baseline's error.
FACTOR, SLACK = 3.0, 1e-4
MOST_HEADS = 16
ROUNDING = 1e-9  # far above float64's of values up to hundreds, far below any gradient that counts

Head = tuple[int, int]  # batch, key head


@dataclass(frozen=True)
class RightGradients:
    """The true (dQ, dK, dV): of all heads, or of those of `heads`, stacked."""

    gradients: tuple[Tensor, Tensor, Tensor]
    heads: tuple[Head, ...] | None

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS

    @property
    def sample(self) -> str:
        return "" if self.heads is None else f"truth of {len(self.heads)} key heads"

    def judged(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for whole, right in zip(outputs, self.gradients, strict=True):
            off = finite((_picked(whole, outputs[1], self.heads).double() - right).abs())
            found += [largest(off), off.norm() / _size(right)]
        return found


def _size(right: Tensor) -> Tensor:
    """What an L2 error is relative to. A truth of nothing but float64's own rounding, as where all
    values are equal, has no size: there the error is a root mean square."""
    size, elements = right.norm(), max(right.numel(), 1) ** 0.5
    return torch.where(size > ROUNDING * elements, size, elements)


def prepare(
    case: Case, problem: Problem, device: torch.device, gap: int, far_home: Callable[[], Tensor]
) -> Prepared:
    """Draws the inputs and a gradient of O, and computes truth, baseline and budgets."""
    made = make_inputs(case, problem, device, gap, far_home)
    q, k, v = (one.view for one in made)
    seed = zlib.crc32(case.name.encode())
    fill(case, q, k, v, seed)
    g = _gradient(case, q, device, gap, far_home, seed + 1)
    features, scale = problem.features, case.scale
    o, lse = reference.baseline(q, k, v, features, scale)
    heads = _heads(case, device)
    qs, ks, vs, gs = (_picked(one, k, heads) for one in (q, k, v, g.view))
    right = RightGradients(reference.truth_gradients(qs, ks, vs, gs, features, scale), heads)
    base = reference.baseline_gradients(qs, ks, vs, gs, features, scale)
    errors = RightGradients(right.gradients, None).judged(base)
    budgets = (*(FACTOR * float(error) + SLACK for error in errors), *(0.0 for _ in COMMON))
    outputs = tuple(make_output(tuple(one.shape), q.dtype, device) for one in (q, k, v))
    kept = make_dense(o), make_dense(lse)
    return Prepared(case, (*map(sealed, made), *kept, sealed(g)), outputs, right, budgets)


def _gradient(
    case: Case,
    q: Tensor,
    device: torch.device,
    gap: int,
    far_home: Callable[[], Tensor],
    seed: int,
) -> Guarded:
    s = case.sizes
    dims = s.batch, s.heads_q, s.seq_q, s.head_dim_v
    if case.far:
        g = make_far(dims, far_home(), 3 * FAR_APART)
    else:  # a layout that no two of its elements share, as that of q
        layout = "gapped" if case.layout == "expanded" else case.layout
        g = make_input(layout, dims, q.dtype, device, gap)
    dice = torch.Generator(device).manual_seed(seed)
    g.view.copy_(torch.rand(dims, generator=dice, device=device).mul_(2).sub_(1))
    return g


def _heads(case: Case, device: torch.device) -> tuple[Head, ...] | None:
    """None when the whole truth is affordable."""
    s = case.sizes
    group = s.heads_q // max(1, s.heads_kv)
    one = 2.0 * group * s.seq_q * s.seq_kv * (3 * s.head_dim + 2 * s.head_dim_v)
    limit = TRUTH_FLOPS["cpu" if device.type == "cpu" else "cuda"]
    if one * s.batch * s.heads_kv <= limit:
        return None
    count = max(2, min(MOST_HEADS, int(limit / one)))
    dice = random.Random(0)
    inner = [(dice.randrange(s.batch), dice.randrange(s.heads_kv)) for _ in range(count - 2)]
    return tuple(dict.fromkeys([(0, 0), (s.batch - 1, s.heads_kv - 1), *inner]))


def _picked(whole: Tensor, k: Tensor, heads: tuple[Head, ...] | None) -> Tensor:
    """(heads, query heads that share a key head, or 1, rows, columns); k: tells how many."""
    if heads is None:
        return whole
    ratio = whole.shape[1] // k.shape[1]
    return torch.stack([whole[b, h * ratio : (h + 1) * ratio] for b, h in heads])
