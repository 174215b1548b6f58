"""Who runs a run, and whether that process is still there."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

HEARTBEAT_LIMIT = timedelta(minutes=10)


class Owner(NamedTuple):
    """host names everything inside which a pid means one process: machine, boot, pid namespace.

    token is the start time of the process, since pids are used again.
    """

    host: str
    pid: int
    token: str


def this_process() -> Owner:
    return Owner(_host(), os.getpid(), _start_token(os.getpid()) or "")


def is_gone(owner: Owner, heartbeat: datetime, now: datetime) -> bool:
    """True if the owner has surely ended; on another host, if it was silent for ten minutes."""
    if owner.host != _host():
        return now - heartbeat > HEARTBEAT_LIMIT
    if not _exists(owner.pid):
        return True
    token = _start_token(owner.pid)
    return token is not None and token != owner.token


def _host() -> str:
    parts = [platform.node()]
    for read in (_boot_id, _pid_namespace):
        try:
            parts.append(read())
        except OSError:  # no /proc: the host name has to do
            continue
    return "/".join(parts)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _exists(pid: int) -> bool:
    if os.name == "nt":  # there, signal 0 would end the process; the heartbeat has to do
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there and belongs to somebody else
        return True
    return True


def _start_token(pid: int) -> str | None:
    # None where the kernel does not tell: no Linux, or processes of others are hidden.
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()
    state, start_ticks = after_name[0], after_name[19]
    return "ended" if state in "ZX" else start_ticks  # a zombie runs nothing any more
