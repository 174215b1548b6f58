"""torch's cheapest calls for what every launch asks: device, stream, captures, new memory.

Each is one of those that code compiled by torch itself uses, with the public call behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Size = tuple[int, ...]


def current_device() -> Callable[[], int]:
    """Gives the index of the current CUDA device, in a process that has used CUDA already."""
    import torch

    raw: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
    return torch.cuda.current_device if raw is None else raw


def current_stream(device: torch.device) -> Callable[[], int]:
    """Gives the handle of the device's current stream; 0 on the CPU, where there is none."""
    import torch

    if device.type != "cuda":
        return lambda: 0
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return partial(raw, device.index)


def capturing() -> Callable[[], bool]:
    """Says whether a graph is captured on the current stream of the current CUDA device."""
    import torch

    raw: Callable[[], bool] | None = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    return torch.cuda.is_current_stream_capturing if raw is None else raw


def allocate(shape: Size, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Gives a new dense tensor of undefined contents each time.

    A CUDA `device` must be the current one when it is called.
    """
    import torch

    raw: Callable[[Size, Size, torch.dtype], Tensor] | None = None
    if device.type == "cuda":
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        raw = getattr(guards, "_empty_strided_cuda", None)
    if raw is None:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    return partial(raw, shape, dense_strides(shape), dtype)


def dense_strides(shape: Size) -> Size:
    """Strides, in elements, of a tensor without gaps, its last dimension innermost."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))
