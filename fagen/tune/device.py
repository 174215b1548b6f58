"""One tuner at a time on a GPU, and a look at who else computes there."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fagen import settings
from fagen.errors import DeviceBusy
from fagen.tune.events import OnEvent, OtherLoad, WaitingForDevice

POLL_S = 0.5
EVENT_EVERY_S = 5.0
ASK_LIMIT_S = 10.0


@contextmanager
def device_lock(name: str, wait_s: float, on_event: OnEvent) -> Iterator[None]:
    """Hold the lock of a device, waiting for another tuner. Raises DeviceBusy after `wait_s`.

    The system frees the lock of a process that died, however it died.
    """
    import fcntl  # not on every platform that fagen can be imported on

    path = lock_path(name)
    until, told = time.monotonic() + wait_s, float("-inf")
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                left = until - time.monotonic()
                if left <= 0:
                    raise DeviceBusy(
                        f"Another tuner holds {name} ({_holder(path)}).",
                        "Wait for it, or choose another --device.",
                    ) from None
                if time.monotonic() - told >= EVENT_EVERY_S:
                    on_event(WaitingForDevice(_holder(path), left))
                    told = time.monotonic()
                time.sleep(min(POLL_S, left))
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def lock_path(name: str) -> Path:
    """In the user's own folder; the file stays, only its lock matters."""
    return settings.lock_dir() / (re.sub(r"[^A-Za-z0-9-]+", "_", name) + ".lock")


def report_other_load(uuid: str, on_event: OnEvent) -> None:
    """Tell of processes that compute on the card; silent where nvidia-smi can't say."""
    fields = ["--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader"]
    try:
        shown = subprocess.run(
            ["nvidia-smi", *fields],
            capture_output=True,
            text=True,
            timeout=ASK_LIMIT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in others_in(shown, uuid, os.getpid()):
        on_event(OtherLoad(line))


def others_in(shown: str, uuid: str, own_pid: int) -> list[str]:
    """The other processes on one card, from nvidia-smi's list."""
    notes = []
    for line in shown.splitlines():
        card, pid, memory = ([part.strip() for part in line.split(",")] + ["", "", ""])[:3]
        if uuid and uuid in card and pid.isdigit() and int(pid) != own_pid:
            notes.append(f"process {pid} also uses this GPU ({memory})")
    return notes


def _holder(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() or "unknown process"
