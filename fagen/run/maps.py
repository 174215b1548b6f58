"""Tensor maps: what the hardware that copies tiles (TMA) reads of a tensor, encoded on the host.

A map depends on address, shape, strides and element type alone. So one that was kept is right even
for memory that was freed and given out again; and a launch copies it, as does a graph's node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fagen.generate.program import Entry
from fagen.run.arguments import Extent

MOST_MAPS = 64  # kept of each descriptor; tensors of a program come back to few addresses


class Missing(Exception):
    """Why a kernel's tensor maps can't be encoded, or its C function not be called, by fagen."""


class Maps(dict[int, Any]):
    """Tensor maps of one descriptor by address, each encoded when it is first asked for."""

    def __init__(self, encode: Callable[[int], Any]) -> None:
        self._encode = encode

    def __missing__(self, address: int) -> Any:
        if len(self) >= MOST_MAPS:
            self.clear()
        made = self[address] = self._encode(address)
        return made


MakeMaps = Callable[[Extent], Maps]


def map_makers(kernel: Any, entry: Entry) -> tuple[MakeMaps, ...]:
    """One for each descriptor of a CompiledKernel, in both dialects. Raises Missing."""
    count = sum(arg.type.startswith("tensordesc") for arg in entry.args)
    if not count:
        return ()
    from triton.backends.nvidia import driver as backend
    from triton.runtime import driver

    metas = getattr(kernel.metadata, "tensordesc_meta", None) or []
    if len(metas) != count or any(m is None for m in metas):
        raise Missing("its descriptors were turned into pointers")
    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor", None)  # Triton 3.6
    fill = getattr(utils, "fill_tma_descriptor_tiled", fill)  # 3.7 and later
    types = getattr(backend, "TMA_DTYPE_DEVICE_TO_HOST", None)
    if fill is None or types is None:
        raise Missing("Triton's way to encode a tensor map is not known")
    return tuple(_map_maker(fill, types, meta) for meta in metas)


def _map_maker(fill: Any, types: Any, meta: dict[str, Any]) -> MakeMaps:
    if meta.get("fp4_padded") or meta.get("is_im2col"):
        raise Missing("a descriptor is of a kind that fagen does not use")
    head = meta["swizzle"], meta["elem_size"], types[meta["elem_type"]], meta["block_size"]

    def make(extent: Extent) -> Maps:
        # The last value asks for zeros, not NaN, outside of the tensor.
        return Maps(lambda address: fill(address, *head, extent.shape, extent.strides, 0))

    return make
