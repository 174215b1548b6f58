"""Where the LSE goes that nobody asked for.

Every kernel writes it, and to allocate it takes 1.1 us of a call's 13 (host of one H200). So small
ones share one place on a device: launches of all streams write there, and nothing ever reads it.
It is never freed, since launches in flight and graphs hold its address.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from fagen.run.cuda import capturing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST = 1 << 18  # floats: 1 MB a device; a kernel with more rows runs longer than its call takes

_places: dict[torch.device, Tensor] = {}
_lock = threading.Lock()


def unread_lse(shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """fp32 memory of a shape that a kernel may write and nobody may read.

    None where it is to be allocated like any output: on the CPU, for many rows, and while a graph
    is captured, whose memory is its own.
    """
    if device.type != "cuda" or math.prod(shape) > MOST or capturing()():
        return None
    import torch

    with _lock:
        place = _places.get(device)
        if place is None:
            place = _places[device] = torch.empty(MOST, dtype=torch.float32, device=device)
    return place[: math.prod(shape)].view(shape)
