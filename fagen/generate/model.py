"""An analytic estimate of a kernel's time: what ranks candidates before anything is timed.

Cycles of one tile step on one multiprocessor: the matrix products, the exponentials, the other
fp32 work and the loads, as far as the loop form and the resident blocks let them overlap; times
the steps that the mask leaves, spread over whole blocks and multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

from fagen.config import Config
from fagen.generate.backward import backward_us
from fagen.generate.families import family_of, flash_ws
from fagen.generate.families.base import Backward, Family
from fagen.generate.families.tiling import cdiv, padded
from fagen.generate.persistent import persistent_us
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
REGISTER_UNIT = 8  # registers of a thread are handed out in eights (256 a warp)
L2_BYTES_CLOCK_SM = 64.0  # the port of a multiprocessor

# "Fitted" below: to the flash rows of five runs on one H200, bf16 B1 H16 N8192 D128, three full
# and two causal, 2026-11-29: 515 single passes of 338 configs and the races' medians twice, with
# weight sqrt(best / time); twelve numbers by robust least squares of log time, then rounded.
# "Pairs": rows of a run that differ in one knob. Each fifth of the configs, predicted from the
# rest and without `built`: Spearman 0.95 to 0.97 in each run, the raced winner fourth or better;
# causal from full alone: 0.93. No other shape or device was fitted.
SUSTAINED = 0.975  # of the datasheet's clock; fitted
MEMORY_SHARE = 0.9  # 4.3 of 4.8 TB/s for a copy, measured on one H200
L2_LATENCY_CYCLES = 780.0  # a loaded tile's, through barrier and wait; fitted
ISSUED_LATE = 0.9  # fitted: of a step, when its loads are issued; two stages lose 15 % to three
# Fitted. Of the work of the other resident blocks, how much runs while one waits for its tile:
# what makes three small blocks in one stage fast, and 64x64 in one stage as fast as in three.
OTHERS_COVER = 0.465
# Of kv_outer's running output, fitted to its 61 rows: full comes out 14 % high, causal 16 % low.
STATE_BYTES_CLOCK_SM = 13.0
LAUNCH_US = 2.0
TILE_CYCLES = 4000.0  # prologue and epilogue of a query tile, 2-3 us when nothing hides them
STEP_CYCLES = 100.0  # barriers of a step; set by hand
NARROW_KEYS = 20.0  # a product over n keys runs at n / (n + this) of its rate: 64 costs 12 %
# To TMA, by compute capability; none elsewhere, and registers apart. 90: fitted; 17 full pairs
# have 1.04 to 1.18, causal ones scatter about 1.0. 100: a guess.
POINTER_SLOWDOWN = {90: 1.045, 100: 1.2}
SERIAL_WGMMA = 2.2  # 128 rows on 4 warps: a wait after every wgmma (seen in the SASS)
ROWS_WARP = 16  # of a matrix instruction: with fewer rows than that a warp, warps share them
# Fitted. Two warp groups that share rows split the keys: maxima and probabilities pass through
# shared memory, with barriers, at every step. One group of few rows was not measured, nor charged.
SPLIT_KEYS_CYCLES = 915.0
# Where the running heads' keys don't fit in L2. By hand: 23 full pairs have median 1.02, causal
# ones no difference to head_groups.
HEADS_INNERMOST = 1.01
# Fitted, under a causal mask: what of the longest tile's time the last multiprocessor is late.
# Tiles of one head that are neighbours end with a head of their own, heads side by side together.
RAGGED = 0.54
RAGGED_TILES_FIRST = 0.46  # with the longest rows first
RAGGED_HEADS_BESIDE = 0.05

# fp32 instructions a score: scale and subtract, maximum, sum, half a conversion; mask: two
# comparisons and a select. Read off the SASS of the plain loop.
SCORE_OPS = 4.0
MASK_OPS = 3.0
# Vote and branch of a skipped rescale, by hand: 16 pairs at 128x128 with TMA gain 1 to 4 %.
BRANCH_CYCLES = 75.0
# Where one warp group's rows, or a single stage, leave nothing to run meanwhile, the branch makes
# the products wait: under TMA and a loop of whole tiles, 1.2 to 1.45 times at 64x128, 1.04 to 1.11
# at 64x64, 1.01 at 64x32, and not with pointers or every tile masked (41 pairs). Fitted, with the
# square in the keys set by hand.
BRANCH_WAIT_CYCLES = 660.0
# The share of the shorter of {matrix, softmax} that is hidden inside one block; fitted. A plain
# loop hides it only where two groups of four warps have rows of their own and drift apart. That a
# rotated loop hides no more is what was seen, not what it was made for.
HIDDEN = {"plain": 0.33, "rotate_s": 0.33, "rotate_p": 0.0}
TWO_GROUPS = 8  # warps
CARRIED = {"plain": 1.5, "rotate_s": 2.5, "rotate_p": 2.0}  # score tiles held in registers
MOST_SUMMED = 4096  # query tiles looked at one by one; of more, an even sample
# fp32 has no matrix instructions: operands pass from shared memory to registers, for fewer
# products the smaller a thread's part. By rows and warps, of the time that the lanes need: the
# best of 180 timed configs at D128 N2048 full, one H200 (benchmarks/spaces/fp32.jsonl.gz).
FP32_SLOWDOWN = {(16, 4): 9.1, (64, 8): 5.1}
# Spilled words of a thread at D128, from the same compiled kernels. Of a tile that TMA brings
# ptxas loads all operands ahead; with pointers that happens where every step rescales, at D192 and
# above always (40 to 80 KB), at D128 in half of the forms.
FP32_TMA_SPILLS = {(16, 4): 300.0, (64, 8): 1100.0}
FP32_RESCALE_SPILLS = 450.0
FP32_WIDE_SPILLS = 10000.0
BASE_REGISTERS = 27  # 187 registers at 128x128 D128 on 8 warps, of which 160 accumulate
MOST_REGISTERS = 255
# Registers, read off the compiled kernels of those runs. In one stage 64x128 on 4 warps takes 168,
# not 187, and so fits three times: the bound of 170 is between a full and a causal mask.
ONE_STAGE_CARRIES_LESS = 0.35  # score tiles
POINTER_REGISTERS = 43.0  # addresses: 138 become 182 at 128x64; recomputed before anything spills
MASK_REGISTERS = 8.0  # of a causal mask over WIDE_KEYS, 4 to 18; none over fewer
WIDE_KEYS = 128


@dataclass(frozen=True)
class _Step:
    """Cycles of one query tile against one key tile, each resource by itself.

    hidden: those of the shorter of matrix and softmax that run under the longer in one block.
    """

    matrix: float
    softmax: float
    load: float
    fixed: float
    hidden: float


def predict_us(problem: Problem, target: Target, config: Config, built: Built | None) -> float:
    """Microseconds of one launch. `built` makes occupancy and spills exact, not estimated."""
    family, knobs = family_of(config), config.knobs
    sizes = Sizes.of(problem)
    if not problem.flops:
        return LAUNCH_US
    if family.DIRECTION == "backward":
        return backward_us(problem, target, cast(Backward, family), knobs)
    if config.family == flash_ws.NAME:
        return persistent_us(problem, target, knobs)
    blocks = prod(family.grid(problem, knobs, 0, sizes, target.sm_count))
    resident = _resident_blocks(problem, target, family, knobs, built)
    resident = min(resident, cdiv(blocks, target.sm_count))  # a short grid fills no second place
    step = _step(problem, target, family, knobs, built)
    cycles = _step_cycles(step, knobs, resident) * _slowdown(problem, target, knobs, resident)
    steps, longest = _steps(problem, family.tile(knobs))
    tiles = _tile_count(problem, family.tile(knobs))
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
    if shape.dtype == "fp32":
        matrix *= FP32_SLOWDOWN.get((rows, _warps(knobs)), 1.0)
    scores = rows * keys
    masked = getattr(knobs, "mask", "split") == "every_tile"
    vector = scores * (SCORE_OPS + MASK_OPS * masked) / FP32_LANES_SM
    softmax = scores / target.exp2_per_clock_sm + vector + _rescale_cycles(knobs, rows, dim_v)
    fixed = STEP_CYCLES + _spill_cycles(problem, family, knobs, built)
    fixed += _branch_wait_cycles(knobs, rows, keys)
    # fp32 products are made without matrix instructions, so rows are divided otherwise.
    two_groups = _warps(knobs) >= TWO_GROUPS
    shared_rows = two_groups and shape.dtype != "fp32" and rows < ROWS_WARP * _warps(knobs)
    if shared_rows:
        fixed += SPLIT_KEYS_CYCLES
    loop = getattr(knobs, "loop", "plain")
    overlaps = loop != "plain" or (two_groups and not shared_rows)
    hidden = HIDDEN[loop] * min(matrix, softmax) if overlaps else 0.0
    item = ITEM_BYTES[shape.dtype]
    if _keeps_state_outside(knobs):  # queries pass by the keys, with their running output
        load = rows * (dim * item + 2 * 4 * (dim_v + 2)) / STATE_BYTES_CLOCK_SM
    else:
        load = keys * (dim + dim_v) * item / L2_BYTES_CLOCK_SM
    return _Step(matrix, softmax, load, fixed, hidden)


def _step_cycles(step: _Step, knobs: Any, resident: int) -> float:
    """Resident blocks fill each other's gaps.

    In one stage V takes the place of K: a step waits for each of them.
    """
    long, short = max(step.matrix, step.softmax), min(step.matrix, step.softmax)
    busy = long + (short - step.hidden) / resident
    ahead = 1.0  # where nothing is said of stages
    if hasattr(knobs, "num_stages"):
        ahead = max(0.0, knobs.num_stages - 1 - ISSUED_LATE)
    trips = 2 if getattr(knobs, "num_stages", None) == 1 else 1
    covered = busy * (ahead * resident + OTHERS_COVER * (resident - 1))
    wait = max(0.0, trips * L2_LATENCY_CYCLES - covered) / resident
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
    last = RAGGED
    if getattr(knobs, "mask", "split") == "longest_first":
        last = RAGGED_TILES_FIRST if knobs.order == "tiles_first" else RAGGED_HEADS_BESIDE
    return even + last * longest


@lru_cache(maxsize=256)
def _steps(problem: Problem, tile: tuple[int, int]) -> tuple[int, int]:
    """Key tiles visited by all query tiles of all heads, and by the longest query tile."""
    shape = problem.shape
    rows, keys = tile
    shift = shape.seq_kv - shape.seq_q if problem.features.causal == "bottom_right" else 0
    tiles = cdiv(shape.seq_q, rows)
    every = max(1, cdiv(tiles, MOST_SUMMED))
    visited = []
    for first in range(0, shape.seq_q, rows * every):
        seen = shape.seq_kv
        if problem.features.causal != "none":
            seen = min(seen, max(0, min(first + rows, shape.seq_q) + shift))
        visited.append(cdiv(seen, keys))
    mean = sum(visited) / max(len(visited), 1)
    return round(mean * tiles) * shape.batch * shape.heads_q, max(visited, default=0)


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
    each = max(1, cdiv(int(min(registers, MOST_REGISTERS)), REGISTER_UNIT)) * REGISTER_UNIT
    by_registers = target.registers_sm // (each * WARP_SIZE * warps)
    return max(1, min(by_shared, by_registers, WARPS_SM // warps))


def _registers(problem: Problem, family: Family, knobs: Any) -> float:
    """Of a thread, as compiled: what must be held, what is held where there is room, the cap."""
    registers = _held_registers(problem, family, knobs)
    if getattr(knobs, "loads", "pointer") == "pointer":
        registers += POINTER_REGISTERS
    if problem.features.causal != "none" and family.tile(knobs)[1] >= WIDE_KEYS:
        registers += MASK_REGISTERS
    return min(registers, getattr(knobs, "max_registers", 0) or MOST_REGISTERS)


def _held_registers(problem: Problem, family: Family, knobs: Any) -> float:
    rows, keys = family.tile(knobs)
    carried = CARRIED[getattr(knobs, "loop", "plain")]
    if getattr(knobs, "num_stages", None) == 1:
        carried -= ONE_STAGE_CARRIES_LESS
    columns = padded(problem.shape.head_dim_v) + carried * keys
    return BASE_REGISTERS + rows * columns / (WARP_SIZE * _warps(knobs))


def _spill_cycles(problem: Problem, family: Family, knobs: Any, built: Built | None) -> float:
    """Local loads and stores of a step, each a quarter of a warp instruction a clock and SM."""
    if built is not None:
        words = built.spill_bytes / 4
    elif problem.shape.dtype == "fp32":
        words = _fp32_spills(problem, family, knobs)
    else:
        words = 2 * max(0.0, _held_registers(problem, family, knobs) - MOST_REGISTERS)
    return 2.0 * words * _warps(knobs) / SCHEDULERS_SM


def _fp32_spills(problem: Problem, family: Family, knobs: Any) -> float:
    dim = max(padded(problem.shape.head_dim), padded(problem.shape.head_dim_v))
    if getattr(knobs, "loads", "pointer") == "tma":
        return FP32_TMA_SPILLS.get((family.tile(knobs)[0], _warps(knobs)), 0.0) * dim / 128
    if getattr(knobs, "rescale_skip", "branch") == "branch" or dim < 128:
        return 0.0
    return FP32_RESCALE_SPILLS if dim == 128 else FP32_WIDE_SPILLS


def _branch_wait_cycles(knobs: Any, rows: int, keys: int) -> float:
    if getattr(knobs, "rescale_skip", "never") != "branch":
        return 0.0
    whole_tiles = knobs.loads == "tma" and knobs.mask != "every_tile"
    alone = rows < ROWS_WARP * TWO_GROUPS or knobs.num_stages == 1
    return BRANCH_WAIT_CYCLES * (keys / WIDE_KEYS) ** 2 if whole_tiles and alone else 0.0


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
