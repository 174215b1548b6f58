"""What attention costs on paper: arithmetic, memory and traffic, standard against tiled.

Pure functions over a Problem and a Target. Sources: FlashAttention (Dao et al. 2022), algorithm 0
for the standard form and algorithm 1 for keys outside; FlashAttention-2 (Dao 2023), section 3, for
queries outside. `asked` is what the kernel asks for; what is read again while it still lies in the
L2 cache never reaches HBM, and that is counted as all or nothing: the part that is used again fits
or it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from fagen.problem import ITEM_BYTES, Problem
from fagen.target import Target

STATE_BYTES = 4  # running output, maximum and sum, and LSE, are fp32


@dataclass(frozen=True)
class Cost:
    """One way to compute a problem. extra_bytes: memory besides q, k, v, o and LSE."""

    form: str
    flops: int
    extra_bytes: int
    asked_bytes: int
    hbm_bytes: int

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity, by the bytes that reach HBM."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else 0.0

    def least_us(self, target: Target) -> float:
        """The larger of memory and tensor-core time at the target's peak rates."""
        memory_us = self.hbm_bytes / (target.memory_gbps * 1e3)
        return max(memory_us, self.flops / (target.tensor_tflops * 1e6))


def roofline_us(problem: Problem, target: Target) -> float:
    """No kernel is faster on paper: the larger of q, k, v, o and LSE passing HBM once, and the
    two products at the tensor peak, which for fp32 is TF32's, half of bf16's."""
    peak = target.tensor_tflops * (0.5 if problem.shape.dtype == "fp32" else 1.0)
    memory_us = problem.io_bytes / (target.memory_gbps * 1e3)
    return max(memory_us, problem.flops / (peak * 1e6))


def costs(problem: Problem, target: Target, block_m: int = 128, block_n: int = 128) -> list[Cost]:
    """Standard attention and the two loop orders, at tiles of block_m x block_n."""
    return [
        standard(problem, target),
        query_outside(problem, target, block_m),
        keys_outside(problem, target, block_n),
    ]


def standard(problem: Problem, target: Target) -> Cost:
    """S = q k^T written, read by the softmax; P written, read by P v. Masked pairs are stored too.

    matrix = B * H * Sq * Sk * item; extra = 2 * matrix; asked = q + k + v + o + 4 * matrix.
    """
    s, item = problem.shape, ITEM_BYTES[problem.shape.dtype]
    matrix = s.batch * s.heads_q * s.seq_q * s.seq_kv * item
    once = problem.io_bytes - STATE_BYTES * s.batch * s.heads_q * s.seq_q  # no LSE
    asked = once + 4 * matrix
    hbm = once if 2 * matrix <= target.l2_bytes else asked
    return Cost("standard", problem.flops, 2 * matrix, asked, hbm)


def query_outside(problem: Problem, target: Target, block_m: int) -> Cost:
    """Each query tile reads the keys and values that its last row sees; q, o, LSE pass once.

    asked = q + o + lse + B * H * (sum over query tiles of keys seen) * (D + Dv) * item.
    Used again: keys and values of the heads whose tiles run at one time, one tile a SM.
    """
    s, item = problem.shape, ITEM_BYTES[problem.shape.dtype]
    heads, row = s.batch * s.heads_q, (s.head_dim + s.head_dim_v) * item
    ends = [min(first + block_m, s.seq_q) for first in range(0, s.seq_q, block_m)]
    key_rows = sum(_keys_seen(problem, end - 1) for end in ends)
    asked = heads * (s.seq_q * (row + STATE_BYTES) + key_rows * row)
    at_once = min(heads, -(-target.sm_count // max(len(ends), 1)))
    fits = at_once * s.seq_kv * row <= target.l2_bytes
    return Cost("queries outside", problem.flops, 0, asked, problem.io_bytes if fits else asked)


def keys_outside(problem: Problem, target: Target, block_n: int) -> Cost:
    """Each key tile reads the queries that see it, and reads and writes their running state.

    state of a row = (Dv + 2) fp32; extra = B * H * Sq * state;
    asked = B * H * (k + v + o + lse + state + rows * (D * item + 2 * state)).
    Used again: queries and state of the heads that run at one time, one head a SM.
    """
    s, item = problem.shape, ITEM_BYTES[problem.shape.dtype]
    heads, state = s.batch * s.heads_q, (s.head_dim_v + 2) * STATE_BYTES
    rows = sum(s.seq_q - _first_row(problem, first) for first in range(0, s.seq_kv, block_n))
    keys = s.seq_kv * (s.head_dim + s.head_dim_v) * item
    end = s.seq_q * (state + s.head_dim_v * item + STATE_BYTES)
    asked = heads * (keys + end + rows * (s.head_dim * item + 2 * state))
    extra = heads * s.seq_q * state
    again = min(heads, target.sm_count) * s.seq_q * (s.head_dim * item + state)
    hbm = problem.io_bytes + 2 * extra if again <= target.l2_bytes else asked
    return Cost("keys outside", problem.flops, extra, asked, min(hbm, asked))


def _shift(problem: Problem) -> int:
    s = problem.shape
    return s.seq_kv - s.seq_q if problem.features.causal == "bottom_right" else 0


def _keys_seen(problem: Problem, row: int) -> int:
    if problem.features.causal == "none":
        return problem.shape.seq_kv
    return min(max(row + 1 + _shift(problem), 0), problem.shape.seq_kv)


def _first_row(problem: Problem, key: int) -> int:
    """The first query row that sees a key."""
    if problem.features.causal == "none":
        return 0
    return min(max(key - _shift(problem), 0), problem.shape.seq_q)
