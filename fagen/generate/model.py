"""An analytic estimate of a kernel's time: what ranks candidates before anything is timed.

Cycles of one tile step on one multiprocessor: the matrix products, the exponentials, the other
fp32 work and the loads, as far as the loop form and the resident blocks let them overlap; times
the steps that the mask leaves, spread over whole blocks and multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from fagen.config import Config
from fagen.generate.families import family_of
from fagen.generate.families.base import Family
from fagen.generate.families.tiling import cdiv, padded
from fagen.generate.program import Sizes
from fagen.outcome import Built
from fagen.problem import ITEM_BYTES, Problem
from fagen.target import Target

# Fixed by the hardware: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"
# and "Technical Specifications per Compute Capability".
FP32_LANES_SM = 128
WARP_SIZE = 32
WARPS_SM = 64
SHARED_RESERVED_BYTES = 1024  # of each block, by the driver
SCHEDULERS_SM = 4

# Measured on one H200 (D128, bf16): 796 TFLOP/s for a large matmul of 989, 4.3 of 4.8 TB/s for a
# copy. FlashAttention-3's 1.48 us a 128x128 step draw 44 bytes a clock and multiprocessor from L2,
# 64-row tiles of plain Triton less.
SUSTAINED = 0.88  # of the boost clock under matrix load: the card is power-capped
MEMORY_SHARE = 0.9
L2_BYTES_CLOCK_SM = 36.0
L2_LATENCY_CYCLES = 700.0
LAUNCH_US = 2.0
TILE_CYCLES = 4000.0  # prologue and epilogue of a query tile, 2-3 us when nothing hides them
STEP_CYCLES = 150.0  # barriers and waits of a step
NARROW_KEYS = 20.0  # a product over n keys runs at n / (n + this) of its rate: 64 costs 12 %
POINTER_SLOWDOWN = {90: 1.15, 100: 1.2}  # to TMA, by compute capability; elsewhere there is none
SERIAL_WGMMA = 2.2  # 128 rows on 4 warps: a wait after every wgmma (seen in the SASS)
SPLIT_KEYS = 1.15  # two warp groups on 64 rows share the keys and each reads all of Q
HEADS_INNERMOST = 1.1  # 6-15 % when the keys of all running heads don't fit in L2

# fp32 instructions a score: scale and subtract, maximum, sum, half a conversion; mask: two
# comparisons and a select. Read off the SASS of the plain loop.
SCORE_OPS = 4.0
MASK_OPS = 3.0
BRANCH_CYCLES = 180.0  # vote and branch of a skipped rescale: it only pays at D256
# The share of the shorter of {matrix, softmax} that is hidden inside one block. Plain: its two
# warp groups drift apart; set so that 128x128, D128 comes near the measured 500 TFLOP/s.
HIDDEN = {"plain": 0.5, "rotate_s": 0.55, "rotate_p": 0.6}
CARRIED = {"plain": 1.5, "rotate_s": 2.5, "rotate_p": 2.0}  # score tiles held in registers
BASE_REGISTERS = 27  # 187 registers at 128x128 D128 on 8 warps, of which 160 accumulate
MOST_REGISTERS = 255


@dataclass(frozen=True)
class _Step:
    """Cycles of one query tile against one key tile, each resource by itself."""

    matrix: float
    softmax: float
    load: float
    fixed: float


def predict_us(problem: Problem, target: Target, config: Config, built: Built | None) -> float:
    """Microseconds of one launch. `built` makes occupancy and spills exact, not estimated."""
    family, knobs = family_of(config), config.knobs
    sizes = Sizes.of(problem)
    if not problem.flops:
        return LAUNCH_US
    resident = _resident_blocks(problem, target, family, knobs, built)
    step = _step(problem, target, family, knobs, built)
    cycles = _step_cycles(step, knobs, resident) * _slowdown(problem, target, knobs, resident)
    steps, longest = _steps(problem, family.tile(knobs))
    tiles = _tile_count(problem, family.tile(knobs))
    blocks = prod(family.grid(knobs, 0, sizes))
    work = steps * cycles + tiles * TILE_CYCLES / min(resident, 2)
    busy = _spread(problem, target, knobs, work, blocks, longest * cycles)
    compute_us = busy / (target.clock_ghz * SUSTAINED * 1e3)
    memory_us = _memory_us(problem, target, knobs, steps, family.tile(knobs))
    return max(compute_us, memory_us) + LAUNCH_US


def _step(
    problem: Problem, target: Target, family: Family, knobs: Any, built: Built | None
) -> _Step:
    shape = problem.shape
    rows, keys = family.tile(knobs)
    dim, dim_v = padded(shape.head_dim), padded(shape.head_dim_v)
    rate = _matrix_flops_clock(problem, target) * keys / (keys + NARROW_KEYS)
    matrix = 2.0 * rows * keys * (dim + dim_v) / rate
    if target.arch == 90 and rows >= 128 and _warps(knobs) == 4:
        matrix *= SERIAL_WGMMA
    if target.arch == 90 and rows <= 64 and _warps(knobs) == 8:
        matrix *= SPLIT_KEYS
    scores = rows * keys
    masked = getattr(knobs, "mask", "split") == "every_tile"
    vector = scores * (SCORE_OPS + MASK_OPS * masked) / FP32_LANES_SM
    softmax = scores / target.exp2_per_clock_sm + vector + _rescale_cycles(knobs, rows, dim_v)
    fixed = STEP_CYCLES + _spill_cycles(problem, family, knobs, built)
    item = ITEM_BYTES[shape.dtype]
    if _keeps_state_outside(knobs):  # queries pass by the keys, with their running output
        moved = rows * (dim * item + 2 * 4 * (dim_v + 2))
    else:
        moved = keys * (dim + dim_v) * item
    load = moved / L2_BYTES_CLOCK_SM
    return _Step(matrix, softmax, load, fixed)


def _step_cycles(step: _Step, knobs: Any, resident: int) -> float:
    """Resident blocks fill each other's gaps; a rotated loop fills some of its own."""
    long, short = max(step.matrix, step.softmax), min(step.matrix, step.softmax)
    hidden = HIDDEN[getattr(knobs, "loop", "plain")] * short
    busy = long + (short - hidden) / resident
    ahead = max(0, getattr(knobs, "num_stages", 2) - 1)
    wait = max(0.0, L2_LATENCY_CYCLES + step.load - ahead * busy * resident) / resident
    together = float((busy**3 + step.load**3) ** (1 / 3))  # the longer, more where they are alike
    return together + wait + step.fixed / resident


def _slowdown(problem: Problem, target: Target, knobs: Any, resident: int) -> float:
    factor = 1.0
    if getattr(knobs, "loads", "pointer") == "pointer" and problem.shape.dtype != "fp32":
        factor *= POINTER_SLOWDOWN.get(target.arch, 1.0)
    if getattr(knobs, "order", "tiles_first") == "heads_first":
        shape = problem.shape
        row = (shape.head_dim + shape.head_dim_v) * ITEM_BYTES[shape.dtype]
        heads = min(shape.batch * shape.heads_kv, target.sm_count * resident)
        if heads * shape.seq_kv * row > target.l2_bytes / 2:
            factor *= HEADS_INNERMOST
    return factor


def _spread(
    problem: Problem, target: Target, knobs: Any, work: float, blocks: int, longest: float
) -> float:
    """Cycles until the last multiprocessor is done."""
    even = work / target.sm_count
    if blocks <= target.sm_count:
        return max(work / blocks, longest)
    if problem.features.causal == "none":
        return even * cdiv(blocks, target.sm_count) * target.sm_count / blocks
    # The hardware hands out blocks in order; what starts last decides how ragged the end is.
    last = 0.05 if getattr(knobs, "mask", "split") == "longest_first" else 0.6
    return even + last * longest


@lru_cache(maxsize=256)
def _steps(problem: Problem, tile: tuple[int, int]) -> tuple[int, int]:
    """Key tiles visited by all query tiles of all heads, and by the longest query tile."""
    shape = problem.shape
    rows, keys = tile
    shift = shape.seq_kv - shape.seq_q if problem.features.causal == "bottom_right" else 0
    visited = []
    for first in range(0, shape.seq_q, rows):
        seen = shape.seq_kv
        if problem.features.causal != "none":
            seen = min(seen, max(0, min(first + rows, shape.seq_q) + shift))
        visited.append(cdiv(seen, keys))
    return sum(visited) * shape.batch * shape.heads_q, max(visited, default=0)


def _tile_count(problem: Problem, tile: tuple[int, int]) -> int:
    return cdiv(problem.shape.seq_q, tile[0]) * problem.shape.batch * problem.shape.heads_q


def _resident_blocks(
    problem: Problem, target: Target, family: Family, knobs: Any, built: Built | None
) -> int:
    """Blocks that share a multiprocessor: by shared memory, registers and warps."""
    shared = built.shared_bytes if built else family.shared_bytes(problem, knobs)
    registers = built.registers if built else _registers(problem, family, knobs)
    warps = _warps(knobs)
    by_shared = (target.shared_bytes + SHARED_RESERVED_BYTES) // (shared + SHARED_RESERVED_BYTES)
    used = max(1.0, min(registers, MOST_REGISTERS)) * WARP_SIZE * warps
    return max(1, min(by_shared, int(target.registers_sm // used), WARPS_SM // warps))


def _registers(problem: Problem, family: Family, knobs: Any) -> float:
    rows, keys = family.tile(knobs)
    columns = padded(problem.shape.head_dim_v) + CARRIED[getattr(knobs, "loop", "plain")] * keys
    return BASE_REGISTERS + rows * columns / (WARP_SIZE * _warps(knobs))


def _spill_cycles(problem: Problem, family: Family, knobs: Any, built: Built | None) -> float:
    """Local loads and stores of a step, each a quarter of a warp instruction a clock and SM."""
    if built is not None:
        words = built.spill_bytes / 4
    else:
        words = 2 * max(0.0, _registers(problem, family, knobs) - MOST_REGISTERS)
    return 2.0 * words * _warps(knobs) / SCHEDULERS_SM


def _rescale_cycles(knobs: Any, rows: int, dim_v: int) -> float:
    multiply = rows * dim_v / FP32_LANES_SM
    if getattr(knobs, "rescale_skip", "never") == "branch":
        return BRANCH_CYCLES
    return multiply


def _memory_us(
    problem: Problem, target: Target, knobs: Any, steps: int, tile: tuple[int, int]
) -> float:
    """Compulsory traffic, and for kv_outer the running output read and written at every step."""
    traffic = float(problem.io_bytes)
    if _keeps_state_outside(knobs):
        state = 4 * tile[0] * (padded(problem.shape.head_dim_v) + 2)
        traffic += 2.0 * steps * state
    return traffic / (target.memory_gbps * MEMORY_SHARE * 1e3)


def _matrix_flops_clock(problem: Problem, target: Target) -> float:
    """Floating point operations a clock and multiprocessor of the matrix products."""
    if problem.shape.dtype == "fp32":  # exact products: the fp32 lanes, a multiply-add each
        return 2.0 * FP32_LANES_SM
    return target.tensor_tflops * 1e3 / (target.sm_count * target.clock_ghz)


def _keeps_state_outside(knobs: Any) -> bool:
    return hasattr(knobs, "q_tiles")


def _warps(knobs: Any) -> int:
    return int(getattr(knobs, "num_warps", 4))
