"""Runs a generated Gluon kernel on the CPU, in numpy: Triton's interpreter takes no Gluon.

The module's own text is executed against stand-ins for the few words of Gluon that it uses. Values
are exact up to the order of sums; layouts mean nothing here. What runs side by side on the device
is as late or as early as the program allows, so that a missing wait shows as a wrong result:

- the partitions of a block take turns, changed at random where one waits for a barrier;
- a load by TMA lands when it is issued, a store leaves its tile when it is waited for;
- a product reads its operands in shared memory when it is waited for.

A block in which every partition waits is a `Deadlock`, a store past the end of a tensor an
`OutOfBounds`.
"""

from __future__ import annotations

import ast
import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fagen.generate.descriptors import block_shape
from fagen.generate.families import family_of
from fagen.generate.program import Program, Sizes, Workspace
from fagen.run.arguments import TENSORS, described, sizes_of
from fagen.run.cuda import dense_strides

LOG2_E = 1.4426950408889634


class Deadlock(Exception):
    """Every partition of a block waits for a barrier that nobody will complete."""


class OutOfBounds(Exception):
    """A store outside of its tensor."""


class Array(np.ndarray):
    """A tensor in registers."""

    def to(self, dtype: str, bitcast: bool = False) -> Array:
        return self if bitcast else rounded(self, dtype)

    def permute(self, *axes: int) -> Array:
        return self.transpose(axes)


def rounded(x: np.ndarray, dtype: str) -> Array:
    """To the nearest value of the dtype, as float32."""
    if dtype == "float32":
        return np.asarray(x, np.float32).view(Array)
    if dtype == "fp16":
        return np.asarray(x, np.float16).astype(np.float32).view(Array)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, near.view(np.float32)).astype(np.float32).view(Array)


@dataclass
class Shared:
    """A tile in shared memory; views share its memory."""

    data: np.ndarray

    @property
    def address(self) -> int:
        return int(self.data.__array_interface__["data"][0])

    def index(self, slot: int) -> Shared:
        assert 0 <= slot < len(self.data)
        return Shared(self.data[int(slot)])

    def reshape(self, shape: list[int]) -> Shared:
        view = self.data.reshape(shape)
        assert np.shares_memory(view, self.data)
        return Shared(view)

    def permute(self, axes: tuple[int, ...]) -> Shared:
        return Shared(self.data.transpose(axes))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        assert start + length <= self.data.shape[dim]
        return Shared(np.moveaxis(np.moveaxis(self.data, dim, 0)[start : start + length], 0, dim))

    def load(self, layout: object) -> Array:
        return self.data.copy().view(Array)

    def store(self, value: np.ndarray) -> None:
        self.data[...] = value


@dataclass
class Pointer:
    """An address in global memory: elements of `memory`, from `offset` on."""

    memory: np.ndarray
    offset: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def store(self, value: Any, mask: Any = True) -> None:
        where, value, mask = np.broadcast_arrays(self.offset, value, mask)
        self.memory[self._inside(where[mask])] = value[mask]

    def load(self, mask: Any = True, other: float = np.nan) -> Array:
        where, mask = np.broadcast_arrays(self.offset, mask)
        found = np.full(where.shape, other, np.float32)
        found[mask] = self.memory[self._inside(where[mask])]
        return found.view(Array)

    def _inside(self, chosen: Any) -> Any:
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < self.memory.size):
            raise OutOfBounds(f"elements {chosen.min()} to {chosen.max()} of {self.memory.size}")
        return chosen


@dataclass
class Descriptor:
    """A tensor as TMA sees it, zeros outside of it, and the box that a copy moves."""

    memory: np.ndarray
    box: list[int]
    dtype: str = "bf16"
    layout: object = None

    @property
    def block_type(self) -> SimpleNamespace:
        item = 4 if self.dtype == "fp32" else 2
        return SimpleNamespace(nbytes=item * math.prod(self.box), shape=self.box)

    def parts(self, where: Sequence[int]) -> tuple[Any, Any]:
        """(what of the tensor, what of the tile) lies in both."""
        outer, inner = [], []
        for start, size, length in zip(where, self.box, self.memory.shape, strict=True):
            first = max(start, 0)
            last = max(first, min(start + size, length))
            outer.append(slice(first, last))
            inner.append(slice(first - start, last - start))
        return tuple(outer), tuple(inner)


@dataclass
class Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


@dataclass
class Product:
    """A product under way."""

    a: Any
    b: Shared
    acc: Any
    use_acc: bool
    value: Array | None = None

    def finish(self) -> None:
        a = self.a.data if isinstance(self.a, Shared) else self.a
        self.value = (np.asarray(a) @ self.b.data).astype(np.float32).view(Array)
        if self.use_acc:
            acc = self.acc.value if isinstance(self.acc, Product) else self.acc
            self.value = self.value + acc


@dataclass
class Flight:
    """What one partition has under way."""

    products: list[Product] = field(default_factory=list)
    stores: list[tuple[Descriptor, Any, Shared, bool]] = field(default_factory=list)


class Block:
    """One block: its barriers, and its partitions, of which one runs at a time."""

    def __init__(self, number: int, blocks: int, dice: random.Random) -> None:
        self.number, self.blocks, self.dice = number, blocks, dice
        self.barriers: dict[int, Barrier] = {}
        self.kept: list[np.ndarray] = []  # an address stands for a barrier: none may be freed
        self.own = threading.local()
        self.turns: list[threading.Semaphore] = []
        self.alive: list[int] = []
        self.waiting: dict[int, tuple[Barrier, int]] = {}
        self.failure: BaseException | None = None

    def specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(partitions) == len(warps) + 1 == len(registers) + 1
        self.turns = [threading.Semaphore(0) for _ in partitions]
        self.alive = list(range(len(partitions)))
        threads = [
            threading.Thread(target=self._partition, args=(i, function, args))
            for i, (function, args) in enumerate(partitions)
        ]
        for thread in threads:
            thread.start()
        self.turns[self.dice.choice(self.alive)].release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        assert all(b.bytes == 0 for b in self.barriers.values())

    def _partition(self, i: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.own.i, self.own.flight = i, Flight()
        self.turns[i].acquire()
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):
                    function(*args)
                assert not self.own.flight.stores, "a store that nobody waits for"
        except BaseException as error:
            self.failure = self.failure or error
        self.alive.remove(i)
        if self.alive:
            if self.failure is None and not self._ready():
                self.failure = Deadlock(f"{len(self.alive)} partitions wait")
            # After a failure whoever is woken raises it, too, and wakes the next.
            self.turns[self.dice.choice(self._ready() or self.alive)].release()

    def _ready(self) -> list[int]:
        """Partitions that wait for nothing, or no longer."""
        blocked = {i for i, (bar, parity) in self.waiting.items() if bar.phase % 2 == parity}
        return [i for i in self.alive if i not in blocked]

    def _give_way(self) -> None:
        i, ready = self.own.i, self._ready()
        if not ready:
            raise Deadlock(f"partition {i} of {len(self.turns)}")
        chosen = self.dice.choice(ready)
        if chosen != i:
            self.turns[chosen].release()
            self.turns[i].acquire()
        if self.failure is not None:
            raise self.failure

    @property
    def flight(self) -> Flight:
        flight: Flight = self.own.flight
        return flight

    # mbarrier

    def init(self, bar: Shared, count: int) -> None:
        self.barriers[bar.address] = Barrier(count, count)

    def arrive(self, bar: Shared) -> None:
        self.expect(bar, 0)

    def expect(self, bar: Shared, nbytes: int) -> None:
        barrier = self.barriers[bar.address]
        barrier.bytes += nbytes
        barrier.pending -= 1
        barrier.settle()

    def wait(self, bar: Shared, parity: int, pred: bool = True) -> None:
        if not pred:
            return
        barrier = self.barriers[bar.address]
        if self.dice.random() < 0.1:
            self._give_way()
        if barrier.phase % 2 == parity:
            self.waiting[self.own.i] = (barrier, parity)
            self._give_way()
            del self.waiting[self.own.i]

    # tma

    def load(self, desc: Descriptor, where: Sequence[int], bar: Shared, tile: Shared) -> None:
        outer, inner = desc.parts(where)
        box = tile.data.reshape(desc.box)
        box[...] = 0.0
        box[inner] = desc.memory[outer]
        barrier = self.barriers[bar.address]
        barrier.bytes -= desc.block_type.nbytes
        barrier.settle()

    def store(self, desc: Descriptor, where: Sequence[int], tile: Shared) -> None:
        self._send(desc, where, tile, adds=False)

    def reduce_add(self, desc: Descriptor, where: Sequence[int], tile: Shared) -> None:
        self._send(desc, where, tile, adds=True)

    def _send(self, desc: Descriptor, where: Sequence[int], tile: Shared, *, adds: bool) -> None:
        assert min(where) >= 0, "TMA stores no tile that begins before row 0"
        self.flight.stores.append((desc, where, tile, adds))

    def store_wait(self, most: int) -> None:
        while len(self.flight.stores) > most:
            desc, where, tile, adds = self.flight.stores.pop(0)
            outer, inner = desc.parts(where)
            sent = tile.data.reshape(desc.box)[inner]
            desc.memory[outer] = desc.memory[outer] + sent if adds else sent

    # products

    def multiply(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        assert is_async
        product = Product(a, b, acc, use_acc)
        self.flight.products.append(product)
        return product

    def multiply_wait(self, most: int, wanted: tuple[Any, ...]) -> Any:
        if self.dice.random() < 0.3:
            self._give_way()
        while len(self.flight.products) > most:
            self.flight.products.pop(0).finish()
        values = tuple(x.value if isinstance(x, Product) else x for x in wanted)
        assert all(value is not None for value in values), "used before its product is done"
        return values if len(values) > 1 else values[0]

    def allocate(self, dtype: str, shape: list[int], layout: object) -> Shared:
        types = {"i32": np.int32, "i64": np.int64}
        data = np.zeros(shape, types.get(dtype, np.float32))
        if dtype not in types:
            data[...] = np.nan
        self.kept.append(data)
        return Shared(data)


def _assembly(text: str, letters: str, args: list[Any], *rest: Any) -> Any:
    """What the inline assembly of the templates computes."""
    if text.startswith("shfl.sync"):
        return args[0]
    if "ld.acquire" in text:
        turn, mine = args
        held = int(turn.memory[turn.offset])
        if held != mine:  # blocks run one after the other: nobody will come any more
            raise Deadlock(f"it is the turn of block {held}, not {mine}")
        return held
    if "red.release" in text:
        (turn,) = args
        turn.memory[turn.offset] += 1
        return 0
    if "atom.relaxed" in text:
        (counter,) = args
        old = int(counter.memory[counter.offset])
        counter.memory[counter.offset] = old + 1
        return old
    if text.startswith("cvt.rn."):  # a pair in one register: here, in one complex number
        low, high = (rounded(x, "bf16" if "bf16" in text else "fp16") for x in args)
        return (low + 1j * high).astype(np.complex64).view(Array)
    if text.startswith("mov.b32 {$0"):
        (pair,) = args
        return pair.real, pair.imag
    if ".approx.ftz.f32" in text:
        (x,) = args
        return (1.0 / x if text.startswith("rcp") else np.log2(x)).astype(np.float32).view(Array)
    if "vote.sync.any" in text:
        (alpha,) = args
        warps = (np.asarray(alpha) < 1.0).reshape(4, 16)
        return np.repeat(warps.any(1), 16).view(Array)
    assert "SKIP" in text, text
    o, alpha, moved = args
    return np.where(moved, o * alpha, o).view(Array)


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    if np.ndim(condition) == 0:
        return yes if condition else no
    return np.where(condition, yes, no).astype(np.float32).view(Array)


def _split(x: Array) -> tuple[Array, Array]:
    return x[..., 0], x[..., 1]


def _larger(x: Any, y: Any) -> Any:
    return np.fmax(x, y)  # as on the device: of a number and a NaN, the number


def _itself(thing: Any) -> Any:
    return thing


def _words(block: Block) -> dict[str, Any]:
    def nothing(*_args: object, **_words: object) -> None:
        return None

    gl = SimpleNamespace(
        **{name: name for name in ("int16", "int32", "int64", "float32")},
        **dict.fromkeys(
            [
                *("NVMMADistributedLayout", "DistributedLinearLayout", "DotOperandLayout"),
                *("SliceLayout", "BlockedLayout", "SwizzledSharedLayout"),
            ],
            nothing,
        ),
        NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
        constexpr=lambda value: value,
        static_range=range,
        program_id=lambda axis: block.number,
        num_programs=lambda axis: block.blocks,
        allocate_shared_memory=block.allocate,
        warp_specialize=block.specialize,
        inline_asm_elementwise=_assembly,
        arange=lambda start, end, layout: np.arange(start, end).view(Array),
        zeros=lambda shape, dtype, layout: np.zeros(shape, np.float32).view(Array),
        zeros_like=np.zeros_like,
        full=lambda shape, value, dtype, layout: np.full(shape, value).view(Array),
        convert_layout=lambda x, layout: x,
        join=lambda x, y: np.stack((x, y), -1).view(Array),
        split=_split,
        where=_choose,
        maximum=_larger,
        minimum=np.minimum,
        cdiv=lambda size, by: -(-size // by),
        max=np.fmax.reduce,
        sum=np.sum,
        exp2=np.exp2,
        log2=np.log2,
        store=lambda pointer, value, mask=True: pointer.store(value, mask),
        load=lambda pointer, mask=True, other=np.nan: pointer.load(mask, other),
    )
    gl.tensor = gl.shared_memory_descriptor = object
    gl.int32, gl.int64, gl.float16, gl.bfloat16 = "i32", "i64", "fp16", "bf16"
    return {
        "gl": gl,
        "gluon": SimpleNamespace(jit=_itself, constexpr_function=_itself),
        "aggregate": _itself,
        "reduce_add": block.reduce_add,  # which Gluon lacks: the module makes it of the builder's
        "fence_async_shared": nothing,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=nothing,
            init=block.init,
            arrive=block.arrive,
            expect=block.expect,
            wait=block.wait,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=block.load,
            async_copy_shared_to_global=block.store,
            async_load=block.load,
            async_store=block.store,
            store_wait=block.store_wait,
        ),
        "warpgroup_mma": block.multiply,
        "warpgroup_mma_wait": block.multiply_wait,
    }


def _has_word(node: ast.stmt) -> bool:
    """Whether `_words` has what this defines."""
    defined = isinstance(node, ast.FunctionDef) and node.name == "reduce_add"
    return defined or isinstance(node, ast.ImportFrom)


class Stepper:
    """A Program in Gluon, as a `Runner.launch` on CPU tensors."""

    def __init__(self, program: Program, sm_count: int = 3, seed: int = 0) -> None:
        # Integers are as long as they need to be, and sizes have no methods.
        tree = ast.parse(program.source.replace(".to(gl.int64)", ""))
        tree.body = [node for node in tree.body if not _has_word(node)]
        self.program = program
        self.sm_count = sm_count
        self.dice = random.Random(seed)
        self.counter = np.zeros(1, np.int64)
        self._code = compile(tree, program.name, "exec")

    def function(self, name: str, block: Block | None = None) -> Callable[..., Any]:
        """A function of the module by its name."""
        words = _words(block or Block(0, 1, self.dice))
        exec(self._code, words)
        found: Callable[..., Any] = words[name]
        return found

    def launch(self, *given: Any) -> None:
        """As `Runner.launch`; outputs are contiguous."""
        direction = self.program.problem.direction
        tensors: dict[str, Tensor] = dict(zip(TENSORS[direction], given[:-1], strict=True))
        sizes = sizes_of(*given[:3])
        if sizes.batch * sizes.heads_q * sizes.seq_q * sizes.seq_kv == 0:
            _launch_nothing(direction, tensors)
            return
        problem, knobs = self.program.problem, self.program.config.knobs
        family = family_of(self.program.config)
        memory = {name: x.float().numpy() for name, x in tensors.items()}
        spaces = family.workspaces(knobs, sizes)
        memory |= {space.name: _poisoned(space) for space in spaces}
        values: dict[str, Any] = {
            "counter": Pointer(self.counter),
            **{name: Pointer(x.reshape(-1)) for name, x in memory.items()},
            "scale_log2": np.float32(given[-1] * LOG2_E),
            **_strides(tensors),
            **_sizes(sizes),
            **family.scalars(problem, knobs, sizes, self.sm_count),
        }
        for number, entry in enumerate(self.program.entries):
            args = [
                _descriptor(arg.type, memory[described(arg)], sizes.heads_kv)
                if arg.type.startswith("tensordesc")
                else values[arg.name]
                for arg in entry.args
            ]
            grid = family.grid(problem, knobs, number, sizes, self.sm_count)
            for block in range(grid[0]):
                self.function(entry.function, Block(block, grid[0], self.dice))(*args)
        for name in ("O", "LSE") if direction == "forward" else ("DQ", "DK", "DV"):
            tensors[name].copy_(torch.from_numpy(memory[name]))


def _poisoned(space: Workspace) -> np.ndarray:
    if space.dtype == "i32":
        return np.full(space.shape, -1, np.int64)
    return np.full(space.shape, np.nan, np.float32)


def _launch_nothing(direction: str, tensors: dict[str, Tensor]) -> None:
    if direction == "forward":
        tensors["O"].zero_()
        tensors["LSE"].fill_(-torch.inf)
    else:
        for name in ("DQ", "DK", "DV"):
            tensors[name].zero_()


def _strides(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Those of dense copies: numpy has each tensor's elements side by side."""
    return {
        f"stride_{name.lower()}{dim}": stride
        for name, tensor in tensors.items()
        if tensor.ndim == 4
        for dim, stride in zip("bhsd", dense_strides(tuple(tensor.shape)), strict=True)
    }


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {**sizes._asdict(), "group": sizes.heads_q // sizes.heads_kv}


def _descriptor(word: str, memory: np.ndarray, heads_kv: int) -> Descriptor:
    box, dtype = block_shape(word), word[word.index("<") + 1 : word.index("[")]
    if len(box) == 5:  # heads that share keys, as a dimension after the rows
        batch, heads, rows, dim = memory.shape
        memory = memory.reshape(batch, heads_kv, heads // heads_kv, rows, dim).swapaxes(2, 3)
    return Descriptor(memory, box, dtype)
