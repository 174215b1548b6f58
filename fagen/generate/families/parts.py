"""How a head dim that is no power of two is cut: tiles have a power of two of columns."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Part(NamedTuple):
    """Columns [start, start + width) of a head dim, as one tile; `suffix` of its names."""

    start: int
    width: int
    suffix: str

    @property
    def half(self) -> int:
        """Columns of Q that stay in registers where half of them do."""
        return self.width // 2

    @property
    def packed(self) -> int:
        """Registers of a thread that one rescale takes: all it has of the tile, at most 32."""
        return min(32, self.width // 2)

    @property
    def registers(self) -> list[list[int]]:
        """Bases of a tile held eight neighbouring columns a thread (64 rows, four warps)."""
        wide = [[0, 1 << bit] for bit in range(5, self.width.bit_length() - 1)]
        return [[0, 1], [0, 2], [0, 4], [8, 0], *wide]


@cache
def parts(dim: int) -> tuple[Part, ...]:
    """A head dim as one tile, or as two where that wastes less: 96 = 64 + 32, 192 = 128 + 64."""
    whole = max(16, 1 << (dim - 1).bit_length())
    rest = dim - whole // 2
    second = max(16, 1 << (rest - 1).bit_length())
    if whole // 2 + second < whole:
        return Part(0, whole // 2, ""), Part(whole // 2, second, "_2")
    return (Part(0, whole, ""),)


@cache
def width(dim: int) -> int:
    return sum(part.width for part in parts(dim))
