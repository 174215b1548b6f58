"""What the argument names of a generated kernel stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fagen.generate.descriptors import block_shape
from fagen.generate.program import Arg, Sizes, Workspace
from fagen.run.cuda import dense_strides

if TYPE_CHECKING:
    from torch import Tensor

# The first tensors of each launch, in this order. G is the gradient of O.
TENSORS = {
    "forward": ("Q", "K", "V", "O", "LSE"),
    "backward": ("Q", "K", "V", "O", "LSE", "G", "DQ", "DK", "DV"),
}
SCALE = "scale_log2"
COUNTER = "counter"
ALIGNED = 16  # elements: a multiple of 16 bytes in every dtype


class Extent(NamedTuple):
    """Shape and strides, in elements, as a tensor descriptor takes them."""

    shape: list[int]
    strides: list[int]

    @classmethod
    def of(cls, shape: tuple[int, ...], strides: tuple[int, ...]) -> Extent:
        # A stride over one element is never used, may be anything, and must look aligned.
        kept = [s if n > 1 else ALIGNED for n, s in zip(shape, strides, strict=True)]
        kept[-1] = 1
        return cls(list(shape), kept)


@dataclass(frozen=True)
class Settled:
    """All that the sizes and strides of a call decide about one entry kernel's launch.

    numbers: integer arguments by name.
    places: which of a launch's tensors an argument name means.
    extents: for descriptors, by tensor and rank. Those of Q and O have 4, or 5 where heads that
        share keys are a dimension of their own.
    """

    grid: tuple[int, int, int]
    numbers: dict[str, int]
    places: dict[str, int]
    extents: dict[tuple[str, int], Extent]


class Wires(NamedTuple):
    """A launch's values, with holes for what each launch brings, and where those are."""

    values: list[Any]
    pointers: list[tuple[int, int]]  # (index in values, which tensor)
    descriptors: list[tuple[int, int, Extent]]
    scales: list[int]


Spread = Callable[[Extent], list[Any]]  # what a descriptor's one argument is spread to


def wire(args: tuple[Arg, ...], settled: Settled, spread: Spread) -> Wires:
    """The values of an entry kernel's arguments in their order."""
    wires = Wires([], [], [], [])
    for arg in args:
        at = len(wires.values)
        if arg.type.startswith("tensordesc"):
            name = described(arg)
            extent = settled.extents[name, len(block_shape(arg.type))]
            wires.descriptors.append((at, settled.places[name], extent))
            wires.values.extend(spread(extent))
            continue
        if arg.name in settled.places:
            wires.pointers.append((at, settled.places[arg.name]))
            wires.values.append(None)
        elif arg.name == SCALE:
            wires.scales.append(at)
            wires.values.append(None)
        else:
            wires.values.append(settled.numbers[arg.name])
    return wires


def described(arg: Arg) -> str:
    """The tensor or workspace of a descriptor: its name up to the first underscore."""
    return arg.name.partition("_")[0].upper()


def numbers_of(inputs: Sequence[Tensor], sizes: Sizes) -> dict[str, int]:
    """Every integer that a kernel may ask for by a name that all families share.

    inputs: q, k, v, and of a backward pass g.
    """
    numbers = {
        "batch": sizes.batch,
        "heads_q": sizes.heads_q,
        "group": sizes.heads_q // sizes.heads_kv,
        "seq_q": sizes.seq_q,
        "seq_kv": sizes.seq_kv,
    }
    for letter, tensor in zip("qkvg", inputs, strict=False):
        for dim, stride in zip("bhsd", tensor.stride(), strict=True):
            numbers[f"stride_{letter}{dim}"] = stride
    return numbers


def extents_of(
    inputs: Sequence[Tensor], sizes: Sizes, spaces: Sequence[Workspace] = ()
) -> dict[tuple[str, int], Extent]:
    """Those of all that a descriptor may stand for; see Settled.

    inputs: q, k, v, and of a backward pass g. Outputs and workspaces are dense.
    """
    of: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        name: (tuple(t.shape), t.stride()) for name, t in zip("QKVG", inputs, strict=False)
    }
    dense: dict[str, tuple[int, ...]] = {
        "O": (sizes.batch, sizes.heads_q, sizes.seq_q, sizes.head_dim_v)
    }
    if "G" in of:
        dense |= {f"D{name}": of[name][0] for name in "QKV"}
    dense |= {space.name: space.shape for space in spaces}
    of |= {name: (shape, dense_strides(shape)) for name, shape in dense.items()}
    extents = {(name, len(one[0])): Extent.of(*one) for name, one in of.items()}
    return extents | {(name, 5): _grouped(*of[name], sizes) for name in "QO"}


def _grouped(shape: tuple[int, ...], strides: tuple[int, ...], sizes: Sizes) -> Extent:
    """(B, Hq, S, D) as (B, Hkv, S, heads that share keys, D)."""
    batch, heads, rows, dim = shape
    to_batch, to_head, to_row, to_column = strides
    group = heads // sizes.heads_kv if sizes.heads_kv else 1
    return Extent.of(
        (batch, sizes.heads_kv, rows, group, dim),
        (to_batch, to_head * group, to_row, to_head, to_column),
    )


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    batch, heads_q, seq_q, dim = q.shape
    return Sizes(batch, heads_q, k.shape[1], seq_q, k.shape[2], dim, v.shape[3])
