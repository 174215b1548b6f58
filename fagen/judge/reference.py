"""The truth: attention and its gradients in float64, by hand; and the baseline that a kernel must
be as good as.

torch's fused paths are not the truth (they give NaN for a causal mask with scale <= 0), and plain
eager attention with low-precision scores is 10 to 80 times too loose a baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fagen.problem import Features

# Scores held at once. 2**25 in float64 are 256 MB; the row statistics and the upcast inputs come
# on top, so B1 H16 N8192 D128 stays below 1 GB.
CHUNK_SCORES = 1 << 25


@dataclass(frozen=True)
class _Numbers:
    """work: dtype of scores and sums. p_dtype: what P is rounded to, once, before P V."""

    work: torch.dtype
    p_dtype: torch.dtype


def truth(
    q: Tensor, k: Tensor, v: Tensor, features: Features, scale: float
) -> tuple[Tensor, Tensor]:
    """(O, LSE) in float64. A row that sees no key: O = 0, LSE = -inf. Any sizes, any scale."""
    return _attend(q, k, v, features, scale, _Numbers(torch.float64, torch.float64))


def baseline(
    q: Tensor, k: Tensor, v: Tensor, features: Features, scale: float
) -> tuple[Tensor, Tensor]:
    """(O in the inputs' dtype, LSE in fp32): S and softmax in fp32, P rounded once, fp32 sums."""
    o, lse = _attend(q, k, v, features, scale, _Numbers(torch.float32, q.dtype))
    return o.to(q.dtype), lse


def truth_patch(
    q: Tensor, k: Tensor, v: Tensor, features: Features, scale: float, rows: slice
) -> tuple[Tensor, Tensor]:
    """`truth` of some query rows of inputs of one batch; the mask counts from row 0 of `q`."""
    return _attend(q, k, v, features, scale, _Numbers(torch.float64, torch.float64), rows)


def baseline_patch(
    q: Tensor, k: Tensor, v: Tensor, features: Features, scale: float, rows: slice
) -> tuple[Tensor, Tensor]:
    """`baseline` of some query rows."""
    o, lse = _attend(q, k, v, features, scale, _Numbers(torch.float32, q.dtype), rows)
    return o.to(q.dtype), lse


def truth_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, features: Features, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) in float64 for a gradient g of O. With dP = g V^T and delta = rowsum(g O):
    dS = P (dP - delta), dQ = scale dS K, dK = scale dS^T Q, dV = P^T g; those of a key head are
    summed over the query heads that share it. (FlashAttention-2, arXiv 2307.08691, section 2.3.)

    A row that sees no key has no part in them. (A kernel may have its g times 0 in them: NaN where
    g is not finite.)
    """
    return _differentiate(q, k, v, g, features, scale, _Numbers(torch.float64, torch.float64))


def baseline_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, features: Features, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """In the inputs' dtype: S, LSE, P = exp(S - LSE) and sums in fp32; P, dS and O rounded once
    each for the products."""
    found = _differentiate(q, k, v, g, features, scale, _Numbers(torch.float32, q.dtype))
    dq, dk, dv = (one.to(q.dtype) for one in found)
    return dq, dk, dv


@contextmanager
def exact_matmul() -> Iterator[None]:
    """fp32 products are IEEE on every device while this is open: no TF32, no bf16, no autocast.

    Only the fp32_precision flags of torch >= 2.9 are touched: mixing them with allow_tf32 raises
    on some releases. fp16/bf16 reductions need no flag, since no product here has such inputs.
    """
    mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    flags = (torch.backends.cuda.matmul, mkldnn)
    before = [flag.fp32_precision for flag in flags]
    for flag in flags:
        flag.fp32_precision = "ieee"
    try:
        with torch.no_grad(), _no_autocast():
            yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.fp32_precision = value


@contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    scale: float,
    numbers: _Numbers,
    rows: slice = slice(None),
) -> tuple[Tensor, Tensor]:
    batch, heads_q, seq_q, _ = q.shape
    first, stop, _ = rows.indices(seq_q)
    o = q.new_zeros(batch, heads_q, stop - first, v.shape[-1], dtype=numbers.work)
    lse = q.new_full((batch, heads_q, stop - first), -torch.inf, dtype=numbers.work)
    if o.shape[:3].numel() == 0 or k.shape[2] == 0:
        return o, lse
    ratio = heads_q // k.shape[1]
    with exact_matmul():
        for b, kv, at in _chunks(batch, k.shape[1], ratio, range(first, stop), k.shape[2]):
            heads = slice(kv.start * ratio, kv.stop * ratio)
            hidden = _hidden(features, at, seq_q, k.shape[2], q.device)
            part = _rows(q[b, heads, at], k[b, kv], v[b, kv], hidden, scale, numbers)
            out = slice(at.start - first, at.stop - first)
            o[b, heads, out], lse[b, heads, out] = part
    return o, lse


def _chunks(
    batch: int, heads_kv: int, ratio: int, rows: range, seq_kv: int
) -> Iterator[tuple[int, slice, slice]]:
    """(batch, key/value heads, query rows) pieces of at most CHUNK_SCORES scores, or one row."""
    row_scores = ratio * seq_kv
    step = max(1, min(len(rows), CHUNK_SCORES // row_scores))
    heads = max(1, min(heads_kv, CHUNK_SCORES // (row_scores * step)))
    for b in range(batch):
        for h in range(0, heads_kv, heads):
            for r in range(rows.start, rows.stop, step):
                kv = slice(h, min(h + heads, heads_kv))
                yield b, kv, slice(r, min(r + step, rows.stop))


def _hidden(
    features: Features, rows: slice, seq_q: int, seq_kv: int, device: torch.device
) -> Tensor | None:
    """True where a query row may not see a key, [rows, keys]; None without a mask."""
    if features.causal == "none":
        return None
    shift = seq_kv - seq_q if features.causal == "bottom_right" else 0
    row = torch.arange(rows.start, rows.stop, device=device)
    key = torch.arange(seq_kv, device=device)
    return key[None, :] > row[:, None] + shift


def _rows(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, numbers: _Numbers
) -> tuple[Tensor, Tensor]:
    """q [Hkv * ratio, R, D] against k, v [Hkv, Sk, D]; a group's heads are rows of one product."""
    heads, count, _ = q.shape
    groups, seq_kv, _ = k.shape
    k, v = k.to(numbers.work), v.to(numbers.work)
    grouped = q.to(numbers.work).reshape(groups, -1, q.shape[-1])
    s = _scores(grouped, k, hidden, scale, (heads, count, seq_kv))
    top = s.amax(-1, keepdim=True)
    unseen = top == -torch.inf
    top.masked_fill_(unseen, 0.0)  # -inf - -inf would be NaN
    p = s.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    lse = total.log().add_(top).squeeze(-1)
    p = _rounded(p.div_(total.masked_fill(unseen, 1.0)), numbers)
    o = torch.bmm(p.view(groups, -1, seq_kv), v)
    return o.view(heads, count, v.shape[-1]), lse


def _scores(
    grouped: Tensor, k: Tensor, hidden: Tensor | None, scale: float, dims: tuple[int, int, int]
) -> Tensor:
    """Scaled and masked, [heads, rows, keys], of grouped q [Hkv, ratio * R, D]."""
    s = torch.bmm(grouped, k.transpose(1, 2)).mul_(scale).view(dims)
    return s if hidden is None else s.masked_fill_(hidden, -torch.inf)


def _rounded(values: Tensor, numbers: _Numbers) -> Tensor:
    """What a product takes: in the inputs' dtype, and back."""
    if numbers.p_dtype == numbers.work:
        return values
    return values.to(numbers.p_dtype).to(numbers.work)


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    features: Features,
    scale: float,
    numbers: _Numbers,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads_q, seq_q, _ = q.shape
    dq, dk, dv = (torch.zeros_like(one, dtype=numbers.work) for one in (q, k, v))
    if q.shape[:3].numel() == 0 or k.shape[2] == 0:
        return dq, dk, dv
    ratio = heads_q // k.shape[1]
    with exact_matmul():
        for b, kv, at in _chunks(batch, k.shape[1], ratio, range(seq_q), k.shape[2]):
            heads = slice(kv.start * ratio, kv.stop * ratio)
            hidden = _hidden(features, at, seq_q, k.shape[2], q.device)
            taken = q[b, heads, at], k[b, kv], v[b, kv], g[b, heads, at]
            part = _gradients(*taken, hidden, scale, numbers)
            dq[b, heads, at] = part[0]
            dk[b, kv] += part[1]
            dv[b, kv] += part[2]
    return dq, dk, dv


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    hidden: Tensor | None,
    scale: float,
    numbers: _Numbers,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows q, g [Hkv * ratio, R, D or Dv] against k, v [Hkv, Sk, D or Dv]."""
    heads, count, dim = q.shape
    groups, seq_kv, _ = k.shape
    q, k, v, g = (one.to(numbers.work) for one in (q, k, v, g))
    grouped, grouped_g = (one.reshape(groups, heads // groups * count, -1) for one in (q, g))
    s = _scores(grouped, k, hidden, scale, (heads, count, seq_kv)).view(groups, -1, seq_kv)
    # From LSE, as a backward pass has it from the forward one; a row that sees no key gets zeros.
    lse = s.logsumexp(-1, keepdim=True)
    unseen = lse == -torch.inf
    p = s.sub_(lse.masked_fill_(unseen, torch.inf)).exp_()
    grouped_g = grouped_g.masked_fill(unseen, 0.0)  # 0 times a NaN of theirs would be NaN
    p_taken = _rounded(p, numbers)
    o = _rounded(torch.bmm(p_taken, v), numbers)
    delta = (grouped_g * o).sum(-1, keepdim=True)
    ds = torch.bmm(grouped_g, v.transpose(1, 2)).sub_(delta).mul_(p)
    ds = _rounded(ds, numbers)
    dv = torch.bmm(p_taken.transpose(1, 2), grouped_g)
    dk = torch.bmm(ds.transpose(1, 2), grouped).mul_(scale)
    return torch.bmm(ds, k).mul_(scale).view(heads, count, dim), dk, dv
