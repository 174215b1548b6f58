"""A Program that can be called on tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fagen.errors import BadInput, NoDevice
from fagen.generate.build import compile_entry, load_module
from fagen.generate.descriptors import block_shape, shared_layout
from fagen.generate.families import family_of
from fagen.generate.program import Arg, Entry, Program, Sizes, Workspace
from fagen.target import Target

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LOG2_E = math.log2(math.e)
ALIGNED = 16  # elements: a multiple of 16 bytes in every dtype


class Runner:
    """A Program on one device. Made by `load`; `launch` does no checking of its inputs."""

    def __init__(
        self, program: Program, target: Target, device: torch.device, kernels: list[Any]
    ) -> None:
        self.program = program
        self.device = device
        self._sm_count = target.sm_count
        self._family = family_of(program.config)
        self._kernels = kernels

    def _counter(self) -> Tensor:
        import torch

        if not hasattr(self, "_kept"):
            self._kept = torch.zeros(1, dtype=torch.int32, device=self.device)
        return self._kept

    def launch_poisoned(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> None:
        """`launch` with NaN in its scratch memory: what the gate runs.

        Fresh memory often still holds what an earlier launch of the same kernel left there, and
        a kernel that forgets to write its state would be right by luck.
        """
        self._launch(q, k, v, o, lse, scale, poisoned=True)

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> None:
        """Write o (B, Hq, Sq, Dv), contiguous, and lse (B, Hq, Sq), fp32, on the current stream.

        q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) of the program's dtype, head sizes
        and layout class; zero sizes are legal. Raises BadInput for a size above program.limits.
        """
        self._launch(q, k, v, o, lse, scale, poisoned=False)

    def _launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        scale: float,
        *,
        poisoned: bool,
    ) -> None:
        sizes = _sizes(q, k, v)
        if o.numel() == 0 and lse.numel() == 0:
            return
        if sizes.seq_kv == 0:  # nothing to see: no tile, and no descriptor of a length of zero
            o.zero_()
            lse.fill_(float("-inf"))
            return
        too_large = self.program.why_too_large(sizes)
        if too_large is not None:
            raise BadInput(too_large)
        knobs = self.program.config.knobs
        values = _values(q, k, v, o, lse, scale, sizes)
        values |= self._family.scalars(self.program.problem, knobs, sizes)
        values["counter"] = self._counter()
        for space in self._family.workspaces(knobs, sizes):
            values[space.name] = _scratch(space, self.device, poisoned=poisoned)
        for number, (entry, kernel) in enumerate(
            zip(self.program.entries, self._kernels, strict=True)
        ):
            grid = self._family.grid(self.program.problem, knobs, number, sizes, self._sm_count)
            kernel(grid, [_value(arg, values, entry) for arg in entry.args])


def load(program: Program, target: Target, device: torch.device | str) -> Runner:
    """Compile for the target (or take what is cached) and bind to the device.

    On the CPU the kernels run in Triton's interpreter: TRITON_INTERPRET=1 must have been set
    before triton was imported. Raises BuildFailed, NoDevice.
    """
    import torch

    where = torch.device(device)
    if where.type == "cpu":
        return Runner(program, target, where, [_interpreted(program, e) for e in program.entries])
    return Runner(program, target, where, [_compiled(program, e, target) for e in program.entries])


def _compiled(program: Program, entry: Entry, target: Target) -> Any:
    kernel = compile_entry(program, entry, target)
    function = getattr(load_module(program), entry.function)
    constants = [p.default for p in function.params if p.is_constexpr]
    kernel._init_handles()  # loads the cubin now, so that running out of resources shows here

    def run(grid: tuple[int, int, int], args: list[Any]) -> None:
        kernel[grid](*args, *constants)

    return run


def _interpreted(program: Program, entry: Entry) -> Any:
    from triton import knobs

    if not knobs.runtime.interpret:
        raise NoDevice(
            "Kernels run on CPU tensors only in Triton's interpreter.",
            "Set TRITON_INTERPRET=1 before Python starts, or use CUDA tensors.",
        )
    function = getattr(load_module(program), entry.function)

    def run(grid: tuple[int, int, int], args: list[Any]) -> None:
        function[grid](*args)

    return run


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    batch, heads_q, seq_q, dim = q.shape
    return Sizes(batch, heads_q, k.shape[1], seq_q, k.shape[2], dim, v.shape[3])


def _values(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, sizes: Sizes
) -> dict[str, Any]:
    """What each argument name of a generated kernel stands for."""
    values: dict[str, Any] = {
        "Q": q,
        "K": k,
        "V": v,
        "O": o,
        "LSE": lse,
        "scale_log2": scale * LOG2_E,
        "batch": sizes.batch,
        "heads_q": sizes.heads_q,
        "group": sizes.heads_q // sizes.heads_kv,
        "seq_q": sizes.seq_q,
        "seq_kv": sizes.seq_kv,
        "q_desc": q,
        "k_desc": k,
        "v_desc": v,
    }
    for letter, tensor in (("q", q), ("k", k), ("v", v)):
        for dim, stride in zip("bhsd", tensor.stride(), strict=True):
            values[f"stride_{letter}{dim}"] = stride
    return values


def _value(arg: Arg, values: dict[str, Any], entry: Entry) -> Any:
    if not arg.type.startswith("tensordesc"):
        return values[arg.name]
    tensor = values[{"q": "Q", "k": "K", "v": "V", "o": "O"}[arg.name[0]]]
    return _descriptor(tensor, arg, entry)


def _descriptor(tensor: Tensor, arg: Arg, entry: Entry) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape = list(tensor.shape)
    # A stride over one element is never used, may be anything, and must look aligned all the same.
    strides = [s if n > 1 else ALIGNED for n, s in zip(shape, tensor.stride(), strict=True)]
    strides[-1] = 1
    block = block_shape(arg.type)
    if entry.dialect == "gluon":
        return GluonDescriptor(tensor, shape, strides, block, shared_layout(arg.type))
    return TensorDescriptor(tensor, shape, strides, block)


def _scratch(space: Workspace, device: torch.device, *, poisoned: bool) -> Tensor:
    import torch

    types = {"fp32": torch.float32}
    memory = torch.empty(space.elements, dtype=types[space.dtype], device=device)
    return memory.fill_(float("nan")) if poisoned else memory
