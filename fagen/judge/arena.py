"""Tensors carved out of larger buffers, so that every access outside them shows.

Around an input lies NaN: before it, after its last row and, where the layout leaves room, between
heads and past the last column. Around an output lies a known bit pattern, inside it a NaN whose
bits no arithmetic makes. `reset` restores every bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Dims = tuple[int, int, int, int]  # batch, heads, rows, columns

BITS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
# Quiet NaNs with a payload; computed NaNs carry none (or all ones).
POISON: dict[torch.dtype, int] = {
    torch.bfloat16: 0x7FD5,
    torch.float16: 0x7ED5,
    torch.float32: 0x7FD5A5D5,
}
GUARD_BITS = 0x5A5A
OUTPUT_GUARD = 4096  # elements on each side
FAR_ELEMENTS = (1 << 31) + (1 << 20)

# Strides that a problem's layout class lets a caller pass. Cases take turns.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "aligned16": ("tight", "gapped", "rows_outside"),
    "any": ("gapped", "odd", "columns", "rows_outside", "expanded", "tight"),
}


@dataclass(frozen=True)
class Guarded:
    """`view` is what a launch gets; `pristine` is every bit as it has to be before a launch."""

    buffer: Tensor
    view: Tensor
    pristine: Tensor

    def reset(self) -> None:
        self.buffer.copy_(self.pristine)

    def changed(self) -> Tensor:
        """How many elements differ from the pristine bits, as a scalar on the device."""
        return (self.buffer != self.pristine).sum()


@dataclass(frozen=True)
class Output:
    """A contiguous output between two guards. `bits` has the output's shape."""

    guarded: Guarded
    bits: Tensor

    @property
    def view(self) -> Tensor:
        return self.guarded.view

    def reset(self) -> None:
        self.guarded.reset()

    def unwritten(self) -> Tensor:
        return (self.bits == POISON[self.view.dtype]).sum()

    def trespassed(self) -> Tensor:
        """How many guard elements changed, before and after the output."""
        now, due, guard = self.guarded.buffer, self.guarded.pristine, OUTPUT_GUARD
        end = guard + self.bits.numel()
        return (now[:guard] != due[:guard]).sum() + (now[end:] != due[end:]).sum()


def make_input(
    layout: str, dims: Dims, dtype: torch.dtype, device: torch.device, gap: int
) -> Guarded:
    """An input in NaN surroundings, its values still to be written; then call `sealed`.

    gap: rows of NaN before the first and after the last row, and between heads where it can be.
    """
    per_16 = 16 // dtype.itemsize
    strides, row = _strides(layout, dims, per_16, gap)
    guard = _round_up(gap * row, 64)
    start = guard + (1 if layout == "odd" else 0)
    reach = sum(max(n - 1, 0) * s for n, s in zip(dims, strides, strict=True)) + 1
    floats = torch.full((start + reach + guard,), torch.nan, dtype=dtype, device=device)
    view = floats.as_strided(dims, strides, start)
    bits = floats.view(BITS[dtype])
    return Guarded(bits, view, bits)


def sealed(made: Guarded) -> Guarded:
    """The input with the values that its view holds now as its pristine ones."""
    return Guarded(made.buffer, made.view, made.buffer.clone())


def make_dense(values: Tensor) -> Guarded:
    """A contiguous input that a forward pass left, between two guards of NaN."""
    end = OUTPUT_GUARD + values.numel()
    floats = values.new_full((end + OUTPUT_GUARD,), torch.nan)
    view = floats[OUTPUT_GUARD:end].view(values.shape)
    view.copy_(values)
    bits = floats.view(BITS[values.dtype])
    return Guarded(bits, view, bits.clone())


def make_far(dims: Dims, home: Tensor, offset: int) -> Guarded:
    """An input whose last element lies past 2**31 elements of `home`, every stride below 2**31.

    Such strides have a product that wraps in 32 bits. Only the view's own bits are watched, and
    few pages of `home` are ever touched.
    """
    batch, heads, rows, columns = dims
    row = _round_up(columns, 16)
    if batch > 2:
        far = _round_up((1 << 31) // (batch - 1), 64)
        strides = (far, rows * row, row, 1)
    else:
        far = _round_up((1 << 31) // max(heads - 1, 1), 64)
        strides = (rows * row, far, row, 1)
    view = home.as_strided(dims, strides, offset)
    bits = home.view(BITS[home.dtype]).as_strided(dims, strides, offset)
    return Guarded(bits, view, bits)


def make_output(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Output:
    count = prod(dims)
    kind = BITS[dtype]
    pristine = torch.full((count + 2 * OUTPUT_GUARD,), GUARD_BITS, dtype=kind, device=device)
    pristine[OUTPUT_GUARD : OUTPUT_GUARD + count] = POISON[dtype]
    buffer = pristine.clone()
    bits = buffer[OUTPUT_GUARD : OUTPUT_GUARD + count].view(dims)
    return Output(Guarded(buffer, bits.view(dtype), pristine), bits)


def _strides(layout: str, dims: Dims, per_16: int, gap: int) -> tuple[Dims, int]:
    """Strides of the layout, in elements, and the distance between rows that guards go by."""
    _, heads, rows, columns = dims
    rows = max(rows, 1)
    wide = _round_up(columns, per_16) + per_16
    if layout == "rows_outside":  # (B, S, H, D) seen as (B, H, S, D)
        row = heads * wide
        return ((rows + gap) * row, wide, row, 1), row
    if layout == "gapped":
        head = (rows + gap) * wide
        return (heads * head, head, wide, 1), wide
    if layout == "odd":  # a base and row stride that no vector load can take
        row = columns + 3 - columns % 2
        return (heads * rows * row + 1, rows * row, row, 1), row
    if layout == "columns":  # every second column of every second row
        row = 4 * columns + 2
        return (heads * rows * row, rows * row, row, 2), row
    if layout == "expanded":  # one head's rows for all of them
        return ((rows + gap) * wide, 0, wide, 1), wide
    row = _round_up(columns, per_16)
    return (heads * rows * row, rows * row, row, 1), row


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
