"""Which target a command works for: the one named, the GPU that is there, or the offline one."""

from __future__ import annotations

from fagen import target as targets
from fagen.errors import BadSetting, NoDevice
from fagen.target import Target

OFFLINE = "h200"


def target_of(device: str | None, name: str | None) -> Target:
    """The Target to work for. Raises NoDevice only when a device was asked for by number."""
    return place_of(device, name)[0]


def place_of(device: str | None, name: str | None) -> tuple[Target, bool]:
    """The Target, and whether it is this machine's GPU, so that kernels can be timed."""
    if name is not None and device is not None:
        raise BadSetting("--target works offline, --device does not.", "Name one of them.")
    if name is not None:
        return targets.preset(name), False
    try:
        return targets.detect(device), True
    except NoDevice:
        if device is not None:
            raise
        return targets.preset(OFFLINE), False
