"""Candidates that act on real child processes, and a look at which processes are there.

`acting_worker` is the child; a candidate's source says what it does there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fagen.config import Config
from fagen.generate.program import Program
from fagen.outcome import Status
from fagen.problem import Problem
from fagen.tune import pool, proxies
from fagen.tune.children import Child
from fakes import formula_us, render_fake

TESTS = Path(__file__).resolve().parent
MARK = "FAGEN_TEST_CHILDREN_OF"  # in the environment of every process that a test's tuner started


@dataclass(frozen=True)
class Act:
    """Statements that a candidate runs where it is built, where it is tried and where it is
    confirmed as a finalist; and what its row must say. ends: its device process is replaced."""

    build: str = ""
    device: str = ""
    confirm: str = ""
    status: Status = Status.OK
    reason: str = ""  # a regular expression
    ends: bool = False


RIGHT = Act()
HANG = "while True: time.sleep(1)"


def rendering(act_of: Callable[[Config], Act]) -> Callable[[Problem, Config], Program]:
    """A renderer whose sources act; a right one takes `formula_us`."""

    def render(problem: Problem, config: Config) -> Program:
        act = act_of(config)
        does = {"build": act.build, "device": act.device, "confirm": act.confirm}
        source = json.dumps({"us": formula_us(config), **does})
        return replace(render_fake(problem, config), source=source)

    return render


def act_in_children() -> None:
    """Every child of this process's tuners is an `acting_worker` from now on."""
    pool.Child = proxies.Child = partial(Child, module="acting_worker")  # type: ignore[misc]


def acting_environment(folder: Path) -> dict[str, str]:
    """For a tuner's process: its children find `acting_worker`, and are marked with `folder`."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return {"PYTHONPATH": path, "ACTING": str(folder), MARK: str(folder)}


def left_over(folder: Path) -> dict[int, str]:
    """Living processes that were started under this mark, whoever is their parent by now."""
    mark, found = f"{MARK}={folder}".encode(), {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has just ended, or belongs to somebody else
            continue
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return True


def gone(pid: int, within_s: float = 5.0) -> bool:
    return awaited(lambda: not alive(pid), within_s)


def awaited(holds: Callable[[], object], within_s: float) -> bool:
    """Whether it came true in that time."""
    until = time.monotonic() + within_s
    while not (found := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(found)


@contextlib.contextmanager
def killing(*flags: Path) -> Iterator[list[Path]]:
    """Kills, as each file appears, the process that wrote its number there."""
    killed: list[Path] = []

    def watch(flag: Path) -> None:
        if awaited(lambda: flag.exists() and flag.read_text(), 60.0):
            os.kill(int(flag.read_text()), signal.SIGKILL)
            killed.append(flag)

    threads = [threading.Thread(target=watch, args=[flag], daemon=True) for flag in flags]
    for thread in threads:
        thread.start()
    yield killed
    for thread in threads:
        thread.join()
