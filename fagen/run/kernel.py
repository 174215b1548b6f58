"""A Program that can be called on tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from fagen.errors import BadInput, NoDevice
from fagen.generate.build import compile_entry, load_module
from fagen.generate.families import family_of
from fagen.generate.program import Entry, Program, Sizes, Workspace
from fagen.run.arguments import (
    COUNTER,
    TENSORS,
    Settled,
    extents_of,
    numbers_of,
    sizes_of,
)
from fagen.run.counters import Counters
from fagen.run.cuda import allocate, current_stream
from fagen.run.launch import Launchable, Step, ThroughTriton, launchable
from fagen.target import Target

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LOG2_E = math.log2(math.e)
GIVEN_BACKWARD = len(TENSORS["backward"]) + 1  # and the scale
MOST_PREPARED = 256  # kept by `launch`; varied lengths must not grow the process

GRADIENTS = ("DQ", "DK", "DV")


class Runner:
    """A Program on one device, made by `load`. Does no checking of its inputs.

    A CUDA device must be the current one at every call.
    """

    def __init__(
        self,
        program: Program,
        target: Target,
        device: torch.device,
        kernels: list[Launchable],
    ) -> None:
        self.program = program
        self.device = device
        self._sm_count = target.sm_count
        self._family = family_of(program.config)
        self._kernels = kernels
        self._stream = current_stream(device)
        counts = any(arg.name == COUNTER for entry in program.entries for arg in entry.args)
        self._counters = Counters(device) if counts else None
        self._prepared: dict[Any, Prepared] = {}

    @property
    def paths(self) -> tuple[str, ...]:
        """How each entry kernel is launched: "direct", "triton" or "interpreter"."""
        return tuple(kernel.path for kernel in self._kernels)

    def launch(self, *given: Any) -> None:
        """q, k, v, o, lse, scale: write o (B, Hq, Sq, Dv), contiguous, and lse (B, Hq, Sq), fp32,
        on the current stream. A backward program takes q, k, v, o, lse, g, dq, dk, dv, scale: it
        writes the gradients of q, k and v, contiguous, for g, the gradient of o.

        q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) of the program's dtype, head sizes
        and layout class, g like o; zero sizes are legal. Raises BadInput for a size outside of
        program.limits.
        """
        self._kept(given)(*given)

    def launch_poisoned(self, *given: Any) -> None:
        """`launch` with NaN in its scratch memory: what the gate runs.

        Fresh memory often still holds what an earlier launch of the same kernel left there, and
        a kernel that forgets to write its state would be right by luck.
        """
        self._kept(given)(*given, poisoned=True)

    def prepare(self, *inputs: Tensor, wanted: Collection[str] = GRADIENTS) -> Prepared:
        """`launch` for tensors of just these sizes and strides, at other addresses and scales.

        inputs: q, k, v, and g for a backward program, of whose outputs only those `wanted` are
        sure to be written. Raises BadInput for a size outside of program.limits.
        """
        sizes = sizes_of(*inputs[:3])
        backward = self.program.problem.direction == "backward"
        if sizes.batch * sizes.heads_q * sizes.seq_q * (sizes.seq_kv if backward else 1) == 0:
            return Prepared((_no_gradient,) if backward else (), (), self)
        if sizes.seq_kv == 0:  # nothing to see: no tile, and no descriptor of a length of zero
            return Prepared((_blank,), (), self)
        unfit = self.program.why_unfit(sizes)
        if unfit is not None:
            raise BadInput(unfit)
        spaces = self._family.workspaces(self.program.config.knobs, sizes)
        return Prepared(self._steps(inputs, sizes, spaces, wanted), spaces, self)

    def _steps(
        self,
        inputs: tuple[Tensor, ...],
        sizes: Sizes,
        spaces: tuple[Workspace, ...],
        wanted: Collection[str],
    ) -> tuple[Step, ...]:
        knobs = self.program.config.knobs
        numbers = numbers_of(inputs, sizes)
        numbers |= self._family.scalars(self.program.problem, knobs, sizes, self._sm_count)
        tensors = TENSORS[self.program.problem.direction]
        names = (*tensors, *(space.name for space in spaces), COUNTER)
        places = {name: place for place, name in enumerate(names)}
        extents = extents_of(inputs, sizes, spaces)
        entries = zip(self.program.entries, self._kernels, strict=True)
        steps = []
        for number, (entry, kernel) in enumerate(entries):
            if entry.is_for(wanted):
                grid = self._family.grid(
                    self.program.problem, knobs, number, sizes, self._sm_count
                )
                steps.append(kernel.bind(Settled(grid, numbers, places, extents)))
        return tuple(steps)

    def _kept(self, given: tuple[Any, ...]) -> Prepared:
        inputs = given[:3] if len(given) < GIVEN_BACKWARD else (*given[:3], given[5])
        key = tuple((one.shape, one.stride()) for one in inputs)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self.prepare(*inputs)
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            self._prepared[key] = prepared
        return prepared


class Prepared:
    """A launch whose grid, sizes and strides are settled; see `Runner.prepare`."""

    def __init__(
        self,
        steps: tuple[Step, ...],
        spaces: tuple[Workspace, ...],
        runner: Runner,
    ) -> None:
        self.paths = runner.paths
        self._steps = steps
        self._scratch = tuple(_scratch(space, runner.device) for space in spaces)
        self._stream = runner._stream
        self._counters = runner._counters

    def __call__(self, *given: Any, poisoned: bool = False) -> None:
        """`Runner.launch`, or with `poisoned` `Runner.launch_poisoned`."""
        tensors: tuple[Tensor, ...] = given[:-1]
        scale: float = given[-1]
        for new, poison in self._scratch:
            memory = new()
            tensors = (*tensors, memory.fill_(poison) if poisoned else memory)
        stream = self._stream()
        if self._counters is not None:
            tensors = (*tensors, self._counters.take(stream))
        scale_log2 = scale * LOG2_E
        for step in self._steps:
            step(tensors, scale_log2, stream)


def load(program: Program, target: Target, device: torch.device | str) -> Runner:
    """Compile for the target (or take what is cached) and bind to the device.

    On the CPU the kernels run in Triton's interpreter: TRITON_INTERPRET=1 must have been set
    before triton was imported. Raises BuildFailed, NoDevice.
    """
    import torch

    where = torch.device(device)
    if where.type == "cpu":
        return Runner(program, target, where, [_interpreted(program, e) for e in program.entries])
    with _current(where):
        where = torch.device(where.type, torch.cuda.current_device())
        kernels = [_compiled(program, entry, target, where) for entry in program.entries]
        return Runner(program, target, where, kernels)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton loads machine code on the current device."""
    import torch

    return nullcontext() if device.index is None else torch.cuda.device(device)


def _compiled(program: Program, entry: Entry, target: Target, device: torch.device) -> Launchable:
    kernel = compile_entry(program, entry, target)
    function = getattr(load_module(program), entry.function)
    constants = [p.default for p in function.params if p.is_constexpr]
    kernel._init_handles()  # loads the cubin now, so that running out of resources shows here
    return launchable(kernel, entry, constants, device)


def _interpreted(program: Program, entry: Entry) -> ThroughTriton:
    from triton import knobs

    if not knobs.runtime.interpret:
        raise NoDevice(
            "Kernels run on CPU tensors only in Triton's interpreter.",
            "Set TRITON_INTERPRET=1 before Python starts, or use CUDA tensors.",
        )
    function = getattr(load_module(program), entry.function)

    def run(grid: tuple[int, int, int], args: list[Any]) -> None:
        function[grid](*args)

    return ThroughTriton(entry.args, run, "interpreter")


def _blank(tensors: tuple[Tensor, ...], _scale_log2: float, _stream: int) -> None:
    """The answer for queries that see no key."""
    _, _, _, o, lse, *_ = tensors
    o.zero_()
    lse.fill_(float("-inf"))


def _no_gradient(tensors: tuple[Tensor, ...], _scale_log2: float, _stream: int) -> None:
    """That of nothing, or of what nobody sees."""
    *_, dq, dk, dv = tensors[: len(TENSORS["backward"])]
    for gradient in (dq, dk, dv):
        gradient.zero_()


def _scratch(space: Workspace, device: torch.device) -> tuple[Callable[[], Tensor], float]:
    """New memory for it, and what poisons that."""
    import torch

    types = {"fp32": (torch.float32, math.nan), "i32": (torch.int32, -1)}
    dtype, poison = types[space.dtype]
    return allocate(space.shape, dtype, device), poison
