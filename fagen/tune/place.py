"""Where a run takes place: on a GPU of this machine, or offline for a named one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fagen import target as targets
from fagen.errors import BadSetting, NoDevice
from fagen.target import Target
from fagen.tune.device import device_lock, report_other_load
from fagen.tune.events import OnEvent

OFFLINE = "h200"


@dataclass(frozen=True)
class Place:
    """`device` is a torch device name, or None: nothing can be timed. `others`: names and UUIDs of
    more devices like it, which share the run."""

    target: Target
    device: str | None
    uuid: str = ""
    others: tuple[tuple[str, str], ...] = ()

    @contextmanager
    def held(self, wait_s: float, on_event: OnEvent) -> Iterator[None]:
        """One tuner at a time on a GPU; offline needs no lock. Raises DeviceBusy."""
        mine = [] if self.device is None else [(self.device, self.uuid), *self.others]
        with ExitStack() as locks:
            # In one order everywhere, so that two tuners never wait for each other.
            for name, uuid in sorted(mine, key=lambda pair: (pair[1], pair[0])):
                locks.enter_context(device_lock(uuid or name, wait_s, on_event))
                report_other_load(uuid, on_event)
            yield


def place_of(
    target: Target | str | None,
    device: int | str | None,
    devices: Sequence[int | str] | None = None,
) -> Place:
    """A named target is offline; else the GPU or GPUs asked for, or the current one, or offline.

    Raises NoDevice when a device was asked for that is not there, BadSetting for both, and for
    devices that are not alike.
    """
    if devices is not None:
        if target is not None or device is not None:
            raise BadSetting("devices stand alone.", "Name no target and no single device.")
        return _place_of_several(devices)
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


def _place_of_several(devices: Sequence[int | str]) -> Place:
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise BadSetting(
            f"devices must be a list of GPUs, got {devices!r}.", "Say devices=[0, 1]."
        )
    found = [(targets.detect(device), *targets.cuda_name(device)) for device in devices]
    first, name, uuid = found[0]
    names = [name for _, name, _ in found]
    if len(set(names)) < len(names):
        raise BadSetting(f"A device is named twice: {', '.join(names)}.")
    for other, other_name, _ in found:
        if other.device_key != first.device_key:
            raise BadSetting(
                f"{name} is a {first.name}, {other_name} a {other.name}; a run is of one kind.",
                "Run fagen tune for each.",
            )
    return Place(first, name, uuid, tuple((n, u) for _, n, u in found[1:]))
