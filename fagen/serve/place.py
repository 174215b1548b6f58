"""Where a kernel is to run, or is only looked at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fagen import target as targets
from fagen.errors import NoDevice
from fagen.target import Target, Toolchain

if TYPE_CHECKING:
    import torch

INTERPRETER_TARGET = "h200"  # what the interpreter's kernels are chosen for, if not said
INTERPRETER_KEY = "interpreter"  # device key of verdicts that Triton's interpreter gave


@dataclass(frozen=True)
class Place:
    """`device` is None when the target is only looked at. `db` as given, None for the default."""

    target: Target
    toolchain: Toolchain
    device: torch.device | None
    db: str | None

    @property
    def device_key(self) -> str:
        """The device key of a verdict."""
        on_cpu = self.device is not None and self.device.type == "cpu"
        return INTERPRETER_KEY if on_cpu else self.target.device_key


def place_of(device: Any, target: str | Target | None, db: str | None) -> Place:
    """The place that `get`'s arguments mean; with only a target there is no device.

    Raises NoDevice, NoTriton, UnknownTarget.
    """
    named = target if isinstance(target, Target) or target is None else targets.preset(target)
    toolchain = targets.toolchain()
    if named is not None and device is None:
        return Place(named, toolchain, None, db)
    import torch

    try:
        where = torch.device("cuda" if device is None else _cuda_name(device))
    except (RuntimeError, TypeError):
        raise NoDevice(f"{device!r} is no device.", "Say device=0, or 'cuda:1'.") from None
    if where.type == "cpu":
        return Place(named or targets.preset(INTERPRETER_TARGET), toolchain, where, db)
    if where.type != "cuda":
        raise NoDevice(f"fagen's kernels run on CUDA devices, not on {where}.")
    index = _current_device() if where.index is None else where.index
    found = _detected(index)
    if named is not None and named.device_key != found.device_key:
        raise NoDevice(f"{where} is {found}, not {named}.", "Leave out device= or target=.")
    return Place(found, toolchain, torch.device("cuda", index), db)


def _cuda_name(device: Any) -> Any:
    return f"cuda:{device}" if str(device).isdigit() else device


def _current_device() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.current_device()
    try:
        targets.detect()  # says why there is none
    except NoDevice as error:
        step = "To read a kernel say target='h200', or run fagen show --target h200."
        raise NoDevice(error.message, step) from None
    raise NoDevice("No GPU is visible.")


@lru_cache(maxsize=64)
def _detected(index: int) -> Target:
    return targets.detect(index)
