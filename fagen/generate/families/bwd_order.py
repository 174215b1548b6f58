"""In which order the Hopper backward kernels launch their blocks (templates/parts/order.j2).

Blocks of some heads take turns. Under a causal mask the longest blocks of all of these heads come
first, so that fewer multiprocessors are idle at the end of a launch: times 1.02 at N1024, 1.05 at
N4096 and N8192, 1.22 with 32 heads on 8 at N4096. Where blocks wait for each other to add up dQ
(`dq=ordered`), those of one head begin apart and find that it is their turn: 0.94 to 0.97 of the
speed without turns, where one head after the other was 0.65 to 0.90.
"""

from __future__ import annotations

from fagen.generate.families.tiling import cdiv, padded
from fagen.generate.program import Arg, Sizes
from fagen.problem import Problem

ARG = Arg("abreast", "i32")
BLOCKS = Arg("blocks", "i32")  # tiles of all heads, which fewer blocks take one after another
# Best, or within 1 % of it, among 1 to 64 heads abreast on an H200: D64, D128 and D256, N1024 to
# N16384, 16384 rows and 2048 columns of all heads in each.
# Rows of all heads abreast, of 128 columns: what L2 holds with room to spare. At least so many
# heads where it would be fewer.
ROWS_ABREAST, LEAST_ABREAST = 16384, 4
# Heads abreast, times the steps of an average block, where blocks wait for each other; and bounds.
# Under a mask each block is a step shorter than the one before it, so those that were begun
# together end together, and the next ones have no distance again.
TURNS_FULL, TURNS_CAUSAL = 256, 1024
BOUNDS_FULL, BOUNDS_CAUSAL = (4, 16), (8, 32)


def scalars(
    problem: Problem, sizes: Sizes, block_m: int, *, turns: bool = False
) -> dict[str, int]:
    """block_m: query rows of a step. turns: blocks wait for each other."""
    causal = problem.features.causal != "none"
    columns = max(padded(sizes.head_dim), padded(sizes.head_dim_v))
    if turns:
        least, most = BOUNDS_CAUSAL if causal else BOUNDS_FULL
        steps = sizes.group * cdiv(sizes.seq_q, block_m) * columns
        wanted = 128 * (2 * TURNS_CAUSAL if causal else TURNS_FULL) // steps
        heads = min(most, max(least, wanted))
    elif causal:
        heads = max(LEAST_ABREAST, 128 * ROWS_ABREAST // (sizes.seq_q * columns))
    else:
        heads = 1
    # No more than there are: then tiles times heads abreast, which a block divides by, are at most
    # the blocks of a launch, and fit 32 bits.
    return {ARG.name: min(heads, sizes.batch * sizes.heads_kv)}
