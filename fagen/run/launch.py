"""Ways to launch a compiled entry kernel: by the launcher's C function, or through Triton.

At each launch `kernel[grid](...)` takes a checked descriptor object for each tensor map, encodes
the maps anew and asks the driver about every pointer. `Direct` calls the C function below all that
with values that are ready: addresses as integers, and maps that were kept.

That C function is no public interface, and it changed between Triton 3.6 and 3.7. What is found is
recognised by its features, then tried once with a grid of no blocks, for which it reads every
argument and launches nothing. Where that fails, and while launch hooks are set (profilers that
come with Triton count on them), launches go through Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from fagen.generate.descriptors import block_shape
from fagen.generate.program import Arg, Entry
from fagen.run.arguments import Extent, Settled, described, wire
from fagen.run.cuda import current_stream
from fagen.run.maps import MakeMaps, Missing, map_makers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

Grid = tuple[int, int, int]
# (tensors, scale times log2(e), stream): the tensors of TENSORS, then scratch and counter.
Step = Callable[["tuple[Tensor, ...]", float, int], None]
Call = Callable[[Grid, list[Any]], None]
Send = Callable[[int, list[Any]], None]  # (stream, values of all arguments)


class Launchable(Protocol):
    """One entry kernel on its device."""

    @property
    def path(self) -> str:
        """How it is launched: "direct", "triton" or "interpreter"."""

    def bind(self, settled: Settled) -> Step:
        """The launch for calls of one set of sizes and strides."""


@dataclass(frozen=True)
class ThroughTriton:
    """Launches by Triton's own means; `call` takes the grid and the arguments of `args`."""

    args: tuple[Arg, ...]
    call: Call
    path: str = "triton"

    def bind(self, settled: Settled) -> Step:
        wires = wire(self.args, settled, lambda _: [None])
        blocks = (block_shape(a.type) for a in self.args if a.type.startswith("tensordesc"))
        described = [
            (*place, block) for place, block in zip(wires.descriptors, blocks, strict=True)
        ]

        def step(tensors: tuple[Tensor, ...], scale_log2: float, stream: int) -> None:
            values = wires.values.copy()
            for at, which in wires.pointers:
                values[at] = tensors[which]
            for at, which, extent, block in described:
                values[at] = _descriptor(tensors[which], extent, block)
            for at in wires.scales:
                values[at] = scale_log2
            self.call(settled.grid, values)

        return step


@dataclass(frozen=True)
class Direct:
    """Launches by the launcher's C function.

    send_to: makes the call of that function for a grid.
    maps: makes the kept tensor maps of each descriptor, in the order of the arguments.
    constants: of the compiled kernel's constexpr parameters, which follow the arguments.
    """

    args: tuple[Arg, ...]
    send_to: Callable[[Grid], Send]
    maps: tuple[MakeMaps, ...]
    constants: tuple[Any, ...]
    hooked: Callable[[], bool]
    slow: ThroughTriton
    path: str = "direct"

    def bind(self, settled: Settled) -> Step:
        wires = wire(self.args, settled, lambda e: [None, *e.shape, *e.strides])
        wires.values.extend(self.constants)
        described = [
            (at, which, make(extent))
            for (at, which, extent), make in zip(wires.descriptors, self.maps, strict=True)
        ]
        send, hooked, slow = self.send_to(settled.grid), self.hooked, self.slow.bind(settled)
        fixed, pointers, scales = wires.values, wires.pointers, wires.scales

        def step(tensors: tuple[Tensor, ...], scale_log2: float, stream: int) -> None:
            if hooked():
                slow(tensors, scale_log2, stream)
                return
            values = fixed.copy()
            for at, which in pointers:
                values[at] = tensors[which].data_ptr()
            for at, which, maps in described:
                values[at] = maps[tensors[which].data_ptr()]
            for at in scales:
                values[at] = scale_log2
            send(stream, values)

        return step


def start_driver(device: torch.device) -> None:
    """What the first load of a kernel would wait for: Triton compiles its driver's C code."""
    if device.type == "cuda":
        from triton.runtime import driver

        _ = driver.active.utils


def launchable(
    kernel: Any, entry: Entry, constants: list[Any], device: torch.device
) -> Launchable:
    """The quickest way that works for a CompiledKernel whose handles are loaded on `device`."""
    from triton import knobs

    def through(grid: Grid, values: list[Any]) -> None:
        kernel[grid](*values, *constants)

    slow = ThroughTriton(entry.args, through)
    try:
        direct = Direct(
            entry.args,
            send_to(kernel),
            map_makers(kernel, entry),
            tuple(constants),
            hooks_of(knobs.runtime),
            slow,
        )
        _try_out(direct, device)
    except Missing as why:
        log.debug("%s is launched through Triton: %s", entry.function, why)
        return slow
    log.debug("%s is launched directly", entry.function)
    return direct


def send_to(kernel: Any) -> Callable[[Grid], Send]:
    """The call of the C function of a CompiledKernel's launcher. Raises Missing."""
    launcher = kernel.run
    if getattr(launcher, "gsan_enabled", False):
        raise Missing("it is instrumented")
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise Missing("its scratch memory is Triton's to allocate")
    entry_point = _below_descriptors(launcher.launch)
    if hasattr(launcher, "arg_annotations") and hasattr(launcher, "kernel_signature"):
        return _annotated(kernel, launcher, entry_point)
    if not hasattr(launcher, "arg_annotations"):
        return _positional(kernel, launcher, entry_point)
    raise Missing("its launcher is of no known shape")


def _below_descriptors(launch: Any) -> Any:
    """The C function: itself, or what Triton's wrapper that expands descriptors holds."""
    code = getattr(launch, "__code__", None)
    if code is not None and "launcher" in code.co_freevars:
        launch = launch.__closure__[code.co_freevars.index("launcher")].cell_contents
    if not callable(launch) or hasattr(launch, "__code__"):
        raise Missing("its launcher holds no C function")
    return launch


def _positional(kernel: Any, launcher: Any, entry_point: Any) -> Callable[[Grid], Send]:
    """Triton 3.6: a C function compiled for the kernel's signature, each argument by itself."""
    head = kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    # global and profile scratch, launch options, metadata for hooks, the hooks
    tail = None, None, kernel.packed_metadata, None, None, None

    def to(grid: Grid) -> Send:
        def send(stream: int, values: list[Any]) -> None:
            entry_point(*grid, stream, *head, *tail, *values)

        return send

    return to


def _annotated(kernel: Any, launcher: Any, entry_point: Any) -> Callable[[Grid], Send]:
    """Triton 3.7 to 3.9: one C function for all kernels, which is told the signature."""
    head = kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    # launch options, metadata for hooks, the hooks, global and profile scratch
    options = kernel.packed_metadata, None, None, None, None, None
    tail = (*head, *options, launcher.arg_annotations, launcher.kernel_signature)

    def to(grid: Grid) -> Send:
        def send(stream: int, values: list[Any]) -> None:
            entry_point(*grid, stream, *tail, values)

        return send

    return to


def hooks_of(runtime: Any) -> Callable[[], bool]:
    """Says whether somebody wants to be called around launches, as Triton's profiler does.

    runtime: `triton.knobs.runtime`.
    """

    def hooked() -> bool:
        # Each is a chain with its hooks in `calls`, or a single hook, or None.
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    return hooked


def _try_out(direct: Direct, device: torch.device) -> None:
    """Calls the C function with every argument and a grid of no blocks. Raises Missing."""
    import torch

    room = torch.empty(1024, dtype=torch.uint8, device=device)
    descriptors = [arg for arg in direct.args if arg.type.startswith("tensordesc")]
    ranks = [(described(arg), len(block_shape(arg.type))) for arg in descriptors]
    extents = {
        (name, rank): Extent.of((*(1,) * (rank - 1), 64), (*(64,) * (rank - 1), 1))
        for name, rank in ranks
    }
    pointers = [arg.name for arg in direct.args if arg.type.startswith("*")]
    places = dict.fromkeys((*pointers, *(name for name, _ in ranks)), 0)
    numbers = {arg.name: 0 for arg in direct.args if not arg.type.startswith("*")}
    settled = Settled((0, 0, 0), numbers, places, extents)
    step = replace(direct, hooked=lambda: False).bind(settled)
    try:
        step((room,), 1.0, current_stream(device)())
    except Exception as error:  # whatever an unknown function makes of what it is given
        raise Missing(f"a trial gave {type(error).__name__}: {error}") from error


def _descriptor(tensor: Tensor, extent: Extent, block: list[int]) -> Any:
    """Swizzle and element type come with the compiled kernel, so one kind serves both dialects."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, extent.shape, extent.strides, block)
