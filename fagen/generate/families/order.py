"""Which tiles a persistent launch has, so that its multiprocessors end together."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from math import ceil

from fagen.generate.families.tiling import cdiv

# Time of a tile with a group less, of a tall one: the groups wait for each other's products, not
# for the tensor cores. From D128 full at N1024, N4096 and N16384 in tiles of 192 rows, one H200
# (benchmarks/results/h200_flash_ws_race3.json); taken to hold for 128 rows, too.
SHORT_TILE = 0.9
# Short tiles for each multiprocessor, about the most: more have nothing left to even out.
SHORT_WAVES = 8
# Tiles of the last section, for each multiprocessor, where they are from long to none: one head's
# longest tile begins too late. 1 is 3 to 6 % slower, 2 0.2 to 1.2 %, 8 0.2 to 4 % (one H200,
# benchmarks/results/h200_flash_ws_race5.json).
LAST_WAVES = 4


@lru_cache(maxsize=1024)
def cut(units: int, groups: int, heads: int, places: int) -> tuple[int, int]:
    """(tall, short) tiles of a head: `groups` of its `units` of rows each, or one less.

    All tiles of a launch alike leave places idle at its end: 16384 rows of 16 heads in tiles of
    192 are 10.4 for each of 132 multiprocessors, and take the time of 11.
    """
    whole = cdiv(units, groups)
    if groups == 1:
        return whole, 0
    choices = [(whole, 0)]
    for tall in range(units // groups, -1, -1):
        short = cdiv(units - tall * groups, groups - 1)
        if short * heads > SHORT_WAVES * places and len(choices) > groups:
            break
        choices.append((tall, short))
    return min(choices, key=lambda cut: ends(cut[0] * heads, cut[1] * heads, places))


def ends(talls: int, shorts: int, places: int) -> float:
    """When the last tile ends, in tall tiles' time: each goes to the place that is free first."""
    waves = max(0, shorts // places - 4)  # whole ones, which only shift the end
    shorts -= waves * places
    rounds, more = divmod(talls, places)
    free = [(float(rounds), places - more)] + ([(rounds + 1.0, more)] if more else [])
    end = free[-1][0]
    while shorts:
        time, count = heappop(free)
        taken = min(count, shorts)
        heappush(free, (time + SHORT_TILE, taken))
        if taken < count:
            heappush(free, (time, count - taken))
        shorts -= taken
        end = max(end, time + SHORT_TILE)
    return end + waves * SHORT_TILE


def last_heads(tiles_m: int, spread: float, places: int) -> int:
    """How many heads the last section has at least.

    spread: what the shortest tile of a head lacks to the longest, as a share of it, or more. Tiles
    nearly alike end together anyway: one section of all 64 heads of 1024 queries at the end of
    8192 keys is four passes over keys that L2 can't hold.
    """
    return cdiv(ceil(LAST_WAVES * min(1.0, spread) * places), max(1, tiles_m))


def sections(
    heads: int, group: int, head_bytes: int, most_bytes: int, *, last: int
) -> tuple[int, int]:
    """(heads of a section, such sections before the last one, which has `last` heads or more).

    head_bytes: keys and values that `group` heads share; a section has most_bytes of them.
    """
    left = heads - last
    if left <= 0:
        return 1, 0
    number = cdiv(left, max(1, most_bytes * group // max(1, head_bytes)))
    return left // number, number
