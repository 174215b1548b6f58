"""Launches in plain torch, tiled as a kernel is: exact ones, and ones with a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from fagen.problem import Problem

TILE = (64, 32)
LOG2E = 1.4426950408889634
Launch = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], None]


@dataclass(frozen=True)
class Tiled:
    """An online softmax over key tiles, with conditional rescaling by `tau` (log2 units).

    `fault` names the one thing that is done wrong; empty: nothing is.
    """

    problem: Problem
    fault: str = ""
    tau: float = 8.0
    tile: tuple[int, int] = TILE

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> None:
        batch, heads, seq_q, _ = q.shape
        ratio = heads // k.shape[1]
        if self.fault == "padded_scale":
            scale *= (q.shape[-1] / (1 << (q.shape[-1] - 1).bit_length())) ** 0.5
        if self.fault == "default_scale":
            scale = q.shape[-1] ** -0.5
        for b in range(batch):
            for h in range(heads):
                kv = h % k.shape[1] if self.fault == "wrong_kv_head" else h // ratio
                for first in range(0, seq_q, self.tile[0]):
                    rows = slice(first, min(first + self.tile[0], seq_q))
                    self._tile(q[b, h, rows], k[b, kv], v[b, kv], o[b, h], lse[b, h], rows, scale)
        self._after(q, k, v, o, lse)

    def _tile(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rows: slice, scale: float
    ) -> None:
        seq_kv, block_n, count = k.shape[0], self.tile[1], q.shape[0]
        shift = seq_kv - o.shape[0] if self._causal == "bottom_right" else 0
        row = torch.arange(rows.start, rows.stop) + shift
        stop = seq_kv if self._causal == "none" else min(seq_kv, int(row[-1]) + 1)
        if self.fault == "skip_last_tile" and stop > block_n:
            stop = (stop - 1) // block_n * block_n
        m, l = torch.full((count, 1), -inf), torch.zeros(count, 1)
        acc = torch.zeros(count, v.shape[1])
        for start in range(0, max(stop, 0), block_n):
            s, v_tile = self._scores(q, k, v, row, start, scale)
            m, l, acc = self._step(s, v_tile, m, l, acc, q.dtype)
        self._store(o, lse, rows, m, l, acc)

    @property
    def _causal(self) -> str:
        causal = self.problem.features.causal
        return "top_left" if self.fault == "top_left" and causal == "bottom_right" else causal

    def _scores(
        self, q: Tensor, k: Tensor, v: Tensor, row: Tensor, start: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Scores of a whole tile in log2 units, pad columns included, and its V rows."""
        end = start + self.tile[1]
        if self.fault == "reads_past_keys":  # the memory after the last key, multiplied by P = 0
            k_tile, v_tile = (self._past_the_end(t, start) for t in (k, v))
        else:
            pad = max(end - k.shape[0], 0)
            k_tile, v_tile = (
                torch.nn.functional.pad(t[start:end], (0, 0, 0, pad)) for t in (k, v)
            )
        raw = q.float() @ k_tile.float().T
        if self.fault == "fp16_scores":
            raw = raw.to(q.dtype).float()
        s = raw * (scale * LOG2E)
        key = torch.arange(start, end)
        hidden = (key >= k.shape[0]).expand(s.shape)
        if self._causal != "none":
            late = 1 if self.fault == "mask_off_by_one" else 0
            hidden = hidden | (key > row[:, None] + late)
        masked = 0.0 if self.fault == "pad_scored_zero" else -inf
        s = torch.where(hidden, torch.where(key >= k.shape[0], masked, -inf), s)
        return s, v_tile.float()

    def _past_the_end(self, rows: Tensor, start: int) -> Tensor:
        size, first = (self.tile[1], rows.shape[1]), rows.storage_offset()
        return rows.as_strided(size, rows.stride(), first + start * rows.stride(0))

    def _step(
        self, s: Tensor, v: Tensor, m: Tensor, l: Tensor, acc: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        top = s.amax(1, keepdim=True)
        grown = torch.maximum(m, top)
        moved = ~(grown - m <= self.tau)  # also true at the first tile, where m is -inf
        new = torch.where(moved, grown, m)
        if self.fault == "new_max_without_multiply":
            new = grown
        if self.fault == "max_clamped_to_zero":
            new = new.clamp_min(0.0)
        safe = new if self.fault == "nan_for_hidden" else new.masked_fill(new == -inf, 0.0)
        p = torch.exp2(s - safe)
        alpha = torch.exp2(m - safe)
        if self.fault == "rescale_forgotten":
            alpha = torch.where(m == -inf, 0.0, 1.0)
        elif self.fault == "new_max_without_multiply":
            alpha = torch.where(moved, alpha, 1.0)
        rounded = p.to(dtype).float()
        if self.fault == "seven_bit_p":
            rounded = (p * 64).round() / 64
        l = l * alpha + (rounded if self.fault == "lse_of_rounded_p" else p).sum(1, keepdim=True)
        return new, l, acc * alpha + rounded @ v

    def _store(
        self, o: Tensor, lse: Tensor, rows: slice, m: Tensor, l: Tensor, acc: Tensor
    ) -> None:
        seen = l.masked_fill(l == 0, 1.0)
        o[rows] = acc / (l if self.fault == "nan_for_hidden" else seen)
        base = 1.0 if self.fault == "lse_base_2" else log(2.0)
        start = m if self.fault != "finite_lse_for_hidden" else m.clamp_min(-1e6)
        lse[rows] = ((start + seen.log2()) * base).squeeze(1)
        if self.fault == "nan_swallowed":
            o[rows] = o[rows].nan_to_num()

    def _after(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
        """Faults of a whole launch, not of a tile."""
        if self.fault == "unwritten_row" and o.shape[2] > self.tile[0]:
            o[:, :, -1] = poison_like(o)
        if self.fault == "unwritten_lse" and lse.numel():
            lse[..., -1] = poison_like(lse)
        if self.fault == "row_past_the_end" and o.numel():
            o.as_strided((o.shape[-1],), (1,), o.storage_offset() + o.numel()).zero_()
        if self.fault == "writes_k" and k.numel():
            k[0, 0, -1, 0] += 1
        if self.fault == "writes_beside_q" and q.numel():
            q.as_strided((1,), (1,), q.storage_offset() - 1).zero_()
        if self.fault == "stale_output" and o.numel():
            o[0, 0, 0] = 777.0


def poison_like(values: Tensor) -> Tensor:
    """What a row that was never written still holds."""
    from fagen.judge.arena import BITS, POISON

    dtype = values.dtype
    return torch.tensor([POISON[dtype]], dtype=BITS[dtype]).view(dtype)


class Jittery:
    """Right within rounding, but its bits change from run to run: a race, seen from outside."""

    def __init__(self, problem: Problem) -> None:
        self.orders = (Tiled(problem), Tiled(problem, tile=(64, 64)))
        self.runs = 0

    def __call__(self, *arguments: object) -> None:
        self.runs += 1
        self.orders[self.runs % 2](*arguments)  # type: ignore[arg-type]


# Faults that every problem shows, whatever its mask, dtype and layout.
ALWAYS_WRONG = (
    "skip_last_tile",
    "rescale_forgotten",
    "new_max_without_multiply",
    "max_clamped_to_zero",
    "unwritten_row",
    "unwritten_lse",
    "default_scale",
    "lse_base_2",
    "row_past_the_end",
    "writes_k",
    "writes_beside_q",
    "stale_output",
    "pad_scored_zero",
    "reads_past_keys",
    "finite_lse_for_hidden",
    "nan_for_hidden",
    "nan_swallowed",
)
