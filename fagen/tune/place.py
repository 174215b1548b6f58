"""Where a run takes place: on a GPU of this machine, or offline for a named one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fagen import target as targets
from fagen.errors import BadSetting, NoDevice
from fagen.target import Target
from fagen.tune.device import device_lock, report_other_load
from fagen.tune.events import OnEvent

OFFLINE = "h200"


@dataclass(frozen=True)
class Place:
    """`device` is a torch device name, or None: nothing can be timed."""

    target: Target
    device: str | None
    uuid: str = ""

    @contextmanager
    def held(self, wait_s: float, on_event: OnEvent) -> Iterator[None]:
        """One tuner at a time on a GPU; offline needs no lock. Raises DeviceBusy."""
        if self.device is None:
            yield
            return
        with device_lock(self.uuid or self.device, wait_s, on_event):
            report_other_load(self.uuid, on_event)
            yield


def place_of(target: Target | str | None, device: int | str | None) -> Place:
    """A named target is offline; else the GPU asked for, or the current one, or offline.

    Raises NoDevice when a device was asked for that is not there, BadSetting for both.
    """
    if target is not None and device is not None:
        raise BadSetting(
            "A named target is offline, a device is not.", "Name either a target or a device."
        )
    if target is not None:
        return Place(targets.preset(target) if isinstance(target, str) else target, None)
    try:
        found = targets.detect(device)
    except NoDevice:
        if device is not None:
            raise
        return Place(targets.preset(OFFLINE), None)
    return Place(found, *targets.cuda_name(device))
