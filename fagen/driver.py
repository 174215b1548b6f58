"""What the CUDA driver says of this machine's GPUs, without torch: its import takes 3 s."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, create_string_buffer
from dataclasses import dataclass
from functools import cache
from typing import Any

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NAME_BYTES, UUID_BYTES = 256, 16
# CUdevice_attribute, as in the CUDA driver API's cuda.h.
ATTRIBUTES = {
    "sm_count": 16,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
    "registers_sm": 82,
    "shared_bytes": 97,  # the most one block may opt into
}


@dataclass(frozen=True)
class Device:
    """One GPU, as cudaDeviceProp has it. uuid: without the prefix of nvidia-smi."""

    name: str
    uuid: str
    sm_count: int
    l2_bytes: int
    major: int
    minor: int
    registers_sm: int
    shared_bytes: int


class NoDriver(Exception):
    """The driver is missing or can't start; says which."""


@cache
def devices() -> tuple[Device, ...]:
    """The visible GPUs in the order in which CUDA, and so torch, counts them. Raises NoDriver."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        raise NoDriver(f"there is no CUDA driver ({LIBRARY})") from None
    return asked(library)


def asked(library: Any) -> tuple[Device, ...]:
    """The GPUs that a driver library sees. Raises NoDriver."""
    code = library.cuInit(0)
    if code == NO_DEVICE:
        return ()
    _check(library, code)
    try:
        count = _number(library, library.cuDeviceGetCount)
        return tuple(_device(library, index) for index in range(count))
    except AttributeError as missing:
        raise NoDriver(f"the CUDA driver is too old: {missing}") from None


def _device(library: Any, index: int) -> Device:
    handle = _number(library, library.cuDeviceGet, index)
    name, code = create_string_buffer(NAME_BYTES), create_string_buffer(UUID_BYTES)
    _check(library, library.cuDeviceGetName(name, NAME_BYTES, handle))
    # The newer of two entry points: it tells slices of one GPU (MIG) apart.
    _check(library, library.cuDeviceGetUuid_v2(code, handle))
    facts = {
        fact: _number(library, library.cuDeviceGetAttribute, number, handle)
        for fact, number in ATTRIBUTES.items()
    }
    return Device(name.value.decode(errors="replace"), str(uuid.UUID(bytes=code.raw)), **facts)


def _number(library: Any, call: Callable[..., int], *words: int) -> int:
    """What a call writes to its first argument."""
    found = c_int()
    _check(library, call(byref(found), *words))
    return found.value


def _check(library: Any, code: int) -> None:
    if code == 0:
        return
    said = c_char_p()
    library.cuGetErrorString(code, byref(said))
    text = (said.value or b"").decode(errors="replace")
    raise NoDriver(f"the CUDA driver says {text or f'error {code}'}")
