"""Small programs that use what launches have to get right: a tile counter, descriptors, Gluon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fagen.config import Config
from fagen.generate.families import flash
from fagen.generate.program import Arg, Entry, Program, Sizes
from fagen.problem import make_problem

ROWS, DIM = 64, 64
PROGRAMS = 8  # blocks of a launch of `counting`: few, so that launches do run side by side

# O = Q * scale, each tile claimed by the counter; LSE counts how often its rows were written.
# Every block claims once past the last tile; whoever makes the very last claim resets.
COUNTING = """\
import triton
import triton.language as tl


@triton.jit
def counting(Q, O, LSE, scale_log2, heads_q, seq_q, batch, counter, ROWS: tl.constexpr = 64,
             DIM: tl.constexpr = 64):
    tiles = batch * heads_q * tl.cdiv(seq_q, ROWS)
    tile = tl.atomic_add(counter, 1)
    while tile < tiles:
        rows = tile * ROWS + tl.arange(0, ROWS)
        at = rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
        q = tl.load(Q + at).to(tl.float32)
        spun = q
        for _ in range(200):  # long enough for others to come between
            spun = spun * 0.5 + q
        tl.store(O + at, (q * scale_log2 + spun * 0.0).to(tl.bfloat16))
        tl.store(LSE + rows, tl.load(LSE + rows) + 1.0)
        tile = tl.atomic_add(counter, 1)
    if tile == tiles + tl.num_programs(0) - 1:
        tl.atomic_xchg(counter, 0)
"""

# O = Q, tile by tile through shared memory. The names of the copies changed after Triton 3.7.
COPYING = """\
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def copying(q_desc, o_desc, heads_q):
    head = gl.program_id(1)
    at = [head // heads_q, head % heads_q, gl.program_id(0) * q_desc.block_type.shape[2], 0]
    room = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, q_desc.block_type.nbytes)
    load(q_desc, at, bar, room)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    store(o_desc, at, room)
    tma.store_wait(pendings=0)
"""


def _program(name: str, source: str, args: tuple[Arg, ...], dialect: Any) -> Program:
    entry = Entry(name, args, 4, 1, dialect=dialect)
    problem = make_problem(1024, DIM)
    config = Config("flash", flash.Knobs())
    return Program(problem, config, name, source, f"test_{name}", "", (entry,))


def counting() -> Program:
    """Needs a dense Q, seq_q a multiple of ROWS, and LSE of zeros."""
    tensors = Arg("Q", "*bf16", 16), Arg("O", "*bf16", 16), Arg("LSE", "*fp32", 16)
    sizes = tuple(Arg(name, "i32") for name in ("heads_q", "seq_q", "batch"))
    args = (*tensors, Arg("scale_log2", "fp32"), *sizes, Arg("counter", "*i32", 4))
    return _program("counting", COUNTING, args, "triton")


def copying() -> Program:
    """Any aligned Q of DIM columns."""
    word = f"tensordesc<bf16[1,1,{ROWS},{DIM}]>"
    args = Arg("q_desc", word), Arg("o_desc", word), Arg("heads_q", "i32")
    return _program("copying", COPYING, args, "gluon")


def _grid(
    problem: Any, knobs: Any, entry: int, sizes: Sizes, sm_count: int
) -> tuple[int, int, int]:
    return (-(-sizes.seq_q // ROWS), sizes.batch * sizes.heads_q, 1)


def family(persistent: bool) -> Any:
    """The part of a family that a Runner asks."""
    grid = (lambda *_: (PROGRAMS, 1, 1)) if persistent else _grid
    return SimpleNamespace(grid=grid, scalars=lambda *_: {}, workspaces=lambda *_: ())
