"""Ctrl-C and SIGTERM end a run in order: children gone, results kept, no traceback."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that takes the way of Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within, SIGTERM raises Terminated, unless the program has a handler of its own.

    Only a main thread can ask for that.
    """
    free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread() or not free:
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def shielded() -> Iterator[None]:
    """Within, a second Ctrl-C or SIGTERM changes nothing: the run is ending already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in STOPPING]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
