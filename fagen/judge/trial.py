"""One case made ready: guarded tensors, truth, budgets; run it and get its errors."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fagen.judge import reference
from fagen.judge.arena import Guarded, Output, make_far, make_input, make_output, sealed
from fagen.judge.cases import Case, fill
from fagen.problem import Problem

# Of every launch. They count elements, and none is allowed: unwritten: poison left in an output;
# guards: writes beside an output; inputs: changed bits.
COMMON = ("unwritten", "guards", "inputs")
# o_max, o_l2, lse: errors. The rest count, too: hidden: rows that see no key without O = 0,
# LSE = -inf; nan_kept: rows in which a NaN input went missing.
KINDS = ("o_max", "o_l2", "lse", "hidden", "nan_kept", *COMMON)

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EPS32 = 2.0**-23
SLACK = 1e-5
LSE_SLACK = 1e-4
FAR_OFF = 1e30  # the error of a value that is NaN or infinite and should not be: JSON has neither

# float64 work that a truth may cost: below a second on an H200, and on a CPU. Above, the truth is
# taken of PATCH_ROWS query rows at random places, the first and the last ones among them.
TRUTH_FLOPS = {"cuda": 20e12, "cpu": 10e9}
PATCH_ROWS = 128
MOST_PATCHES = 64
FAR_APART = 1 << 18  # elements between the tensors of a far case

Launch = Callable[..., None]  # inputs, outputs and the scale, as `Runner.launch` takes them
Patch = tuple[int, int, int]  # batch, query head, first row


class Judged(Protocol):
    """What a case's outputs are held against."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the errors of `judged`, and COMMON."""

    @property
    def sample(self) -> str:
        """What is compared, where it is not all."""

    def judged(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """An error each, on the device."""


@dataclass(frozen=True)
class Right:
    """What is right at the compared rows: all of them, or those of `patches`, stacked.

    ignored: rows that a NaN input reaches, of which must_nan have to show it.
    """

    o: Tensor
    lse: Tensor
    ignored: Tensor
    must_nan: Tensor
    patches: tuple[Patch, ...] | None

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS

    @property
    def sample(self) -> str:
        few = self.patches
        return "" if few is None else f"truth of {len(few)} patches of {PATCH_ROWS} rows"

    def judged(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        o, lse = map(self.picked, outputs)
        kept = (torch.isnan(o).all(-1) & torch.isnan(lse)) | ~self.must_nan
        return [*self.errors(o, lse), (~kept).sum()]

    def picked(self, whole: Tensor) -> Tensor:
        if self.patches is None:
            return whole
        rows = self.lse.shape[1]
        return torch.stack([whole[b, h, r : r + rows] for b, h, r in self.patches])

    def errors(self, o: Tensor, lse: Tensor) -> list[Tensor]:
        """o_max, o_l2, lse, hidden, of picked outputs."""
        unseen = (self.lse == -torch.inf) & ~self.ignored
        seen = ~unseen & ~self.ignored
        off = finite((o.double() - self.o).abs()).masked_fill(self.ignored[..., None], 0.0)
        size = self.o.masked_fill(self.ignored[..., None], 0.0).norm()
        allowed = self.lse.abs().mul(4 * EPS32)
        lse_off = finite((lse.double() - self.lse).abs() - allowed).clamp_min(0.0)
        not_zero = ((o != 0).any(-1) | (lse != -torch.inf)) & unseen
        return [
            largest(off),
            off.norm() / torch.where(size > 0, size, 1.0),
            largest(lse_off.masked_fill(~seen, 0.0)),
            not_zero.sum(),
        ]


@dataclass(frozen=True)
class Prepared:
    """A case on the device. `budgets` stand beside the kinds of `right`."""

    case: Case
    inputs: tuple[Guarded, ...]
    outputs: tuple[Output, ...]
    right: Judged
    budgets: tuple[float, ...]

    @property
    def detail(self) -> str:
        s, case = self.case.sizes, self.case
        words = [
            f"B{s.batch} H{s.heads_q}/{s.heads_kv} N{s.seq_q}x{s.seq_kv}",
            f"D{s.head_dim}/{s.head_dim_v}",
            f"scores {case.scores} {case.amount:.4g}, values {case.values}",
            f"scale {case.scale:.4g}",
            f"strides {'far' if case.far else case.layout}",
            self.right.sample,
        ]
        return ", ".join(filter(None, words))

    def run(self, launch: Launch) -> Tensor:
        """One launch into poisoned outputs; errors in the order of the kinds, on the device."""
        self._launch(launch)
        none = torch.zeros((), device=self.outputs[0].view.device)
        found = [
            *self.right.judged([one.view for one in self.outputs]),
            sum((one.unwritten() for one in self.outputs), none),
            sum((one.trespassed() for one in self.outputs), none),
            sum((one.changed() for one in self.inputs), none),
        ]
        return torch.stack([value.double() for value in found])

    def differing(self, launch: Launch, times: int) -> Tensor:
        """How many output elements differ in bits from the first launch, over `times` launches."""
        self._launch(launch)
        first = [one.bits.clone() for one in self.outputs]
        differing = torch.zeros((), dtype=torch.int64, device=first[0].device)
        for _ in range(times - 1):
            self._launch(launch)
            for one, bits in zip(self.outputs, first, strict=True):
                differing += (one.bits != bits).sum()
        return differing

    def _launch(self, launch: Launch) -> None:
        tensors: tuple[Guarded | Output, ...] = (*self.inputs, *self.outputs)
        for one in tensors:
            one.reset()
        with warnings.catch_warnings():
            # Under the interpreter numpy warns of the very NaN and overflow judged here.
            warnings.simplefilter("ignore", RuntimeWarning)
            launch(*(one.view for one in tensors), self.case.scale)


def prepare(
    case: Case, problem: Problem, device: torch.device, gap: int, far_home: Callable[[], Tensor]
) -> Prepared:
    """Draws the inputs, computes truth, baseline and budgets, then plants the NaN of the case."""
    made = make_inputs(case, problem, device, gap, far_home)
    q, k, v = (one.view for one in made)
    fill(case, q, k, v, zlib.crc32(case.name.encode()))
    right, budgets = _judge(case, problem, q, k, v)
    _plant_nan(case, q, k, v)
    s = case.sizes
    o = make_output((s.batch, s.heads_q, s.seq_q, s.head_dim_v), q.dtype, device)
    lse = make_output((s.batch, s.heads_q, s.seq_q), torch.float32, device)
    return Prepared(case, tuple(map(sealed, made)), (o, lse), right, budgets)


def make_inputs(
    case: Case, problem: Problem, device: torch.device, gap: int, far_home: Callable[[], Tensor]
) -> list[Guarded]:
    """Q, K and V, their values still to be written."""
    s = case.sizes
    dims = [
        (s.batch, s.heads_q, s.seq_q, s.head_dim),
        (s.batch, s.heads_kv, s.seq_kv, s.head_dim),
        (s.batch, s.heads_kv, s.seq_kv, s.head_dim_v),
    ]
    if case.far:
        home = far_home()
        return [make_far(one, home, i * FAR_APART) for i, one in enumerate(dims)]
    dtype = TORCH_DTYPE[problem.shape.dtype]
    layouts = [case.layout if i or case.layout != "expanded" else "gapped" for i in range(3)]
    return [
        make_input(layout, one, dtype, device, gap)
        for layout, one in zip(layouts, dims, strict=True)
    ]


def _judge(
    case: Case, problem: Problem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Right, tuple[float, ...]]:
    patches = _patches(case, q.device)
    features, scale = problem.features, case.scale
    if patches is None:
        o, lse = reference.truth(q, k, v, features, scale)
        base = reference.baseline(q, k, v, features, scale)
    else:
        each = [_one_head(q, k, v, patch) for patch in patches]
        exact = [reference.truth_patch(*t, features, scale, rows) for t, rows in each]
        plain = [reference.baseline_patch(*t, features, scale, rows) for t, rows in each]
        o, lse = (torch.cat(part).flatten(0, 1) for part in zip(*exact, strict=True))
        base_o, base_lse = (torch.cat(part).flatten(0, 1) for part in zip(*plain, strict=True))
        base = base_o, base_lse
    ignored, must_nan = _nan_rows(case, lse)
    right = Right(o, lse, ignored, must_nan, patches)
    o_max, o_l2 = (float(error) for error in right.errors(*base)[:2])
    counts = (0.0,) * (len(KINDS) - 3)
    return right, (2 * o_max + SLACK, 2 * o_l2 + SLACK, LSE_SLACK, *counts)


def _patches(case: Case, device: torch.device) -> tuple[Patch, ...] | None:
    """None when the whole truth is affordable."""
    s = case.sizes
    row_flops = 2.0 * s.seq_kv * (s.head_dim + s.head_dim_v)
    rows = s.batch * s.heads_q * s.seq_q
    limit = TRUTH_FLOPS["cpu" if device.type == "cpu" else "cuda"]
    if row_flops * rows <= limit or s.seq_q < PATCH_ROWS:
        return None
    count = max(2, min(MOST_PATCHES, int(limit / (row_flops * PATCH_ROWS))))
    dice = random.Random(0)
    last = s.seq_q - PATCH_ROWS
    inner = [
        (dice.randrange(s.batch), dice.randrange(s.heads_q), dice.randrange(last + 1))
        for _ in range(count - 2)
    ]
    return ((0, 0, 0), (s.batch - 1, s.heads_q - 1, last), *inner)


def _one_head(
    q: Tensor, k: Tensor, v: Tensor, patch: Patch
) -> tuple[tuple[Tensor, Tensor, Tensor], slice]:
    b, h, first = patch
    kv = h // (q.shape[1] // k.shape[1])
    pick, group = slice(b, b + 1), slice(kv, kv + 1)
    heads = (q[pick, h : h + 1], k[pick, group], v[pick, group])
    return heads, slice(first, first + PATCH_ROWS)


def _nan_rows(case: Case, lse: Tensor) -> tuple[Tensor, Tensor]:
    reached = torch.zeros_like(lse, dtype=torch.bool)
    for where in _nan_places(case):
        reached[where] = True
    return reached, reached & (lse != -torch.inf)


def _nan_places(case: Case) -> Iterator[tuple[int, slice, slice]]:
    """(batch, query heads, rows) that a case's NaN reaches; key 0 is seen by all that see any."""
    s = case.sizes
    if case.broken == "query_row":
        row = max(s.seq_q - 2, 0)
        yield s.batch - 1, slice(0, 1), slice(row, row + 1)
    elif case.broken == "kv_head":
        yield s.batch - 1, slice(0, s.heads_q // s.heads_kv), slice(None)


def _plant_nan(case: Case, q: Tensor, k: Tensor, v: Tensor) -> None:
    if case.broken == "query_row":
        for batch, heads, rows in _nan_places(case):
            q[batch, heads, rows] = torch.nan
    elif case.broken == "kv_head":
        k[-1, 0, 0] = torch.nan
        v[-1, 0, 0] = torch.nan


def finite(values: Tensor) -> Tensor:
    return values.nan_to_num_(nan=FAR_OFF, posinf=FAR_OFF, neginf=FAR_OFF)


def largest(values: Tensor) -> Tensor:
    return values.amax() if values.numel() else values.new_zeros(())
