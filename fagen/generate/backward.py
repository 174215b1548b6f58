"""An analytic estimate of a backward pass: its main kernels one after the other, and what is left.

Cycles of a step on one multiprocessor: the products, and the exponentials with their arithmetic,
as far as the other groups or blocks there hide them.
"""

from __future__ import annotations

from typing import Any

from fagen.generate.families.base import Backward, Pass
from fagen.generate.families.tiling import cdiv, padded
from fagen.problem import ITEM_BYTES, Problem
from fagen.target import Target

# Set by hand so that kernels alone come out as measured on one H200 (bf16, N8192): 690 TFLOP/s of
# its own products for dK and dV at D128 with 64x64 on 4 warps, two blocks; 610 for dQ with 128x64
# on 8 warps. Ranks are what they are for.
SUSTAINED = 0.9  # of the datasheet's clock
LAUNCH_US = 3.0  # each kernel
MEMORY_SHARE = 0.9  # 4.3 of 4.8 TB/s for a copy
SCORE_OPS = 9.0  # fp32 instructions a score: scale, P, dP - delta, dS, and two conversions
FP32_LANES_SM = 128
NARROW_KEYS = 12.0  # a product over n keys or rows runs at n / (n + this) of its rate
HIDDEN = {1: 0.5, 2: 0.85}  # of the shorter of products and arithmetic, by what runs side by side
TILE_CYCLES = 3500.0  # what a block owns is loaded and stored with nothing beside it
L2_LATENCY_CYCLES = 800.0  # of a tile's loads, where none is in flight meanwhile
MOST_REGISTERS = 210.0  # of a thread's accumulators and scores; past it they spill
SPILLED = 0.02  # slower by this for each register more


def backward_us(problem: Problem, target: Target, family: Backward, knobs: Any) -> float:
    """Microseconds of a whole backward pass."""
    main = sum(_pass_us(problem, target, one) for one in family.passes(problem, knobs))
    return main + _side_us(problem, target, family.adds(knobs))


def _pass_us(problem: Problem, target: Target, one: Pass) -> float:
    shape = problem.shape
    rate = target.tensor_tflops * 1e3 / (target.sm_count * target.clock_ghz)
    if shape.dtype == "fp32":  # the fp32 lanes, a multiply-add each
        rate = 2.0 * FP32_LANES_SM
    narrow = min(one.rows, one.keys)
    products = 2.0 * one.rows * one.keys * one.columns / rate * (1 + NARROW_KEYS / narrow)
    scores = one.rows * one.keys
    arithmetic = scores * (1 / target.exp2_per_clock_sm + SCORE_OPS / FP32_LANES_SM)
    hidden = HIDDEN[min(one.beside, 2)] * min(products, arithmetic)
    step = (products + arithmetic - hidden) * (
        1 + SPILLED * max(0.0, one.registers - MOST_REGISTERS)
    )
    if one.stages == 1:
        step += L2_LATENCY_CYCLES / one.beside
    heads = shape.batch * shape.heads_q
    pairs = problem.visible_pairs
    if problem.features.causal != "none":  # tiles on the diagonal are computed whole
        pairs += shape.seq_q * max(one.rows, one.keys) // 2
    owners = shape.batch * (
        cdiv(shape.seq_kv, one.keys) * shape.heads_kv
        if one.owns_keys
        else cdiv(shape.seq_q, one.rows) * shape.heads_q
    )
    work = pairs / scores * heads * step + owners * TILE_CYCLES
    share = min(owners / target.sm_count, 1.0)  # of the multiprocessors that have anything to do
    return work / (target.sm_count * share) / (target.clock_ghz * SUSTAINED * 1e3) + LAUNCH_US


def _side_us(problem: Problem, target: Target, adds: bool) -> float:
    """delta reads O and its gradient; dQ added up in fp32 is cleared before, converted after."""
    shape, item = problem.shape, ITEM_BYTES[problem.shape.dtype]
    rows = shape.batch * shape.heads_q * shape.seq_q
    traffic = 2.0 * rows * shape.head_dim_v * item
    launches = 1
    if adds:
        traffic += rows * padded(shape.head_dim) * (4 + 4 + item)
        launches = 2
    return traffic / (target.memory_gbps * MEMORY_SHARE * 1e3) + launches * LAUNCH_US
