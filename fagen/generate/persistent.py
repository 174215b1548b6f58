"""An analytic estimate of flash_ws's time, whose consumer groups overlap by design.

Cycles from one step of a group to its next: its own products and softmax one after the other, or
all groups' products, which share the tensor cores, whichever is longer.
"""

from __future__ import annotations

from fagen.generate.families import order
from fagen.generate.families.flash_ws import ROWS, Knobs, scalars
from fagen.generate.families.parts import width
from fagen.generate.families.tiling import cdiv
from fagen.generate.program import Sizes
from fagen.problem import Problem
from fagen.target import Target

# Fitted on one H200 (bf16, 16384 tokens, 2026-11-30) to 1082 times of a card that had rested: two
# races (benchmarks/results/h200_flash_ws_race3.json), and the first two samples of each pass of
# eight runs of the tuner at D128 N8192 and of 31 at D64, 128 and 256, N512 to N16384
# (h200_flash_ws_trials.json). Within a shape 4 % off in the mean square, the fastest weighing
# most. Neither turns nor where Q is kept came out as more than nothing. Loads hide.
SUSTAINED = 0.874  # of the datasheet's clock
LAUNCH_US = 4.0
MEMORY_SHARE = 0.9  # 4.3 of 4.8 TB/s for a copy
# Instructions of a step. The SASS has 452 at D128 and 128 keys, 411 at D64.
SCORE_INSTRUCTIONS = 5.04
VALUE_INSTRUCTIONS = 0.123  # the rescale of O, for each accumulator of a thread
STEP_INSTRUCTIONS = 5.04
ISSUE_CYCLES = 3.19  # from one instruction of a warp to its next, while the softmax runs
NARROW_KEYS = 3.0  # a product over n keys runs at n / (n + this) of its rate
CROWDED = 0.59  # by a third group on the same schedulers
NARROW_TURNS = 1.065  # with 64 keys, turns that end when the products are done come too late
# What a tile costs beside its blocks. 3140 fitted; less, as it is less code now, by the means of
# benchmarks/results/h200_flash_ws_race4.json.
TILE_CYCLES = 2700.0
STORES_CYCLES = 490.0  # and where it is stored row by row
# Of the rescale's instructions: under QK^T, with a threshold, with one after the softmax.
OVER, KEPT, KEPT_LATE = 3.95, 0.2, 1.41
EARLY_CLAIM = 1.014  # a tile claimed early is one that an idle block can't take
UNEVEN = 1.02
MOST_SUMMED = 4096  # tiles looked at one by one; of more, an even sample


def persistent_us(problem: Problem, target: Target, knobs: Knobs) -> float:
    """Microseconds of one launch."""
    sizes = Sizes.of(problem)
    groups = knobs.block_m // ROWS
    launch = scalars(problem, knobs, sizes, target.sm_count)
    # A single group shares its multiprocessor with another block's.
    together = groups if groups > 1 else 2
    step = _step_cycles(problem, target, knobs, together) * groups / together
    tile = TILE_CYCLES + (STORES_CYCLES if knobs.output == "stores" else 0.0)
    tile *= groups / together
    if problem.features.causal == "none" and groups > 1:
        rounds = order.ends(launch["talls"], launch["tiles"] - launch["talls"], target.sm_count)
        cycles = rounds * (cdiv(problem.shape.seq_kv, knobs.block_n) * step + tile)
    else:
        cycles = _even_cycles(problem, knobs, launch, step, tile, target.sm_count)
    if knobs.claim == "early":
        cycles *= EARLY_CLAIM
    compute_us = cycles / (target.clock_ghz * SUSTAINED * 1e3)
    memory_us = problem.io_bytes / (target.memory_gbps * MEMORY_SHARE * 1e3)
    # Loads and products overlap but at the ends.
    return float((compute_us**4 + memory_us**4) ** 0.25) + LAUNCH_US


def _even_cycles(
    problem: Problem, knobs: Knobs, launch: dict[str, int], step: float, tile: float, places: int
) -> float:
    """Of a launch whose tiles are so many, or so unlike, that all places end nearly together."""
    tiles = launch["tiles"]
    blocks = _blocks(problem, knobs, launch.get("end_row", 0), launch["tiles_m"])
    blocks *= tiles // max(1, launch["tiles_m"])
    longest = blocks / max(tiles, 1) * step + tile
    return max((blocks * step + tiles * tile) / places * UNEVEN, longest)


def _step_cycles(problem: Problem, target: Target, knobs: Knobs, groups: int) -> float:
    """Of one block of keys against a group's rows, all groups at it."""
    dim, dim_v = width(problem.shape.head_dim), width(problem.shape.head_dim_v)
    rate = target.tensor_tflops * 1e3 / (target.sm_count * target.clock_ghz)
    rate *= knobs.block_n / (knobs.block_n + NARROW_KEYS)
    products = 2.0 * ROWS * knobs.block_n * (dim + dim_v) / rate
    late = knobs.rescale == "after_softmax"
    kept = (KEPT_LATE if late else KEPT) if knobs.rescale_tau else 1.0 if late else OVER
    rescale = VALUE_INSTRUCTIONS * dim_v / 2 * kept
    instructions = SCORE_INSTRUCTIONS * knobs.block_n / 2 + rescale + STEP_INSTRUCTIONS
    # Groups that share a scheduler wait for each other now and then.
    softmax = ISSUE_CYCLES * instructions * (1.0 + CROWDED * (groups - 2))
    shared = groups * products
    # The longer, and more where they are alike.
    busy = ((products + softmax) ** 6 + shared**6) ** (1 / 6)
    narrow = knobs.ping_pong and knobs.block_n < 128
    return float(busy) * (NARROW_TURNS if narrow else 1.0)


def _blocks(problem: Problem, knobs: Knobs, end_row: int, tiles_m: int) -> float:
    """Key blocks of one head's tiles; half of one where a diagonal halves it for half a tile."""
    shape, causal = problem.shape, problem.features.causal
    pack = shape.heads_q // shape.heads_kv if knobs.pack_heads else 1
    if causal == "none":
        # Groups without rows compute one block.
        busy = min(tiles_m, cdiv(shape.seq_q * pack, ROWS) * ROWS / knobs.block_m)
        return float(busy * cdiv(shape.seq_kv, knobs.block_n))
    shift = shape.seq_kv - shape.seq_q if causal == "bottom_right" else 0
    every = max(1, cdiv(tiles_m, MOST_SUMMED))
    ends = [(end_row - i * knobs.block_m) // pack + shift for i in range(0, tiles_m, every)]
    seen = sum(cdiv(max(1, min(end, shape.seq_kv)), knobs.block_n) for end in ends)
    return (seen / max(1, len(ends)) - (0.25 if knobs.half_diagonal else 0.0)) * tiles_m
