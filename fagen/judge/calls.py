"""Call time: what an eager call costs, host included. Wall time, never a CUDA graph.

host: calls are issued one after the other, none is waited for, and the device was idle before the
first. Wall time until the last one has returned, a call. At most 64 calls are in flight, far
fewer launches than a stream takes before it makes the host wait: so this is host time even where
the device falls behind.

call: each call is waited for before the next one is made. Wall time from before the call until
the device is idle again.

Both on one input set, on caches as they are. docs/measuring.md says how to read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fagen.errors import MeasureError
from fagen.judge.measure import checked, one_line, turns
from fagen.outcome import Timing

if TYPE_CHECKING:
    import torch

BATCH_MS = 2.0  # about how long the calls of one sample take
FEWEST_CALLS, MOST_CALLS = 2, 64
POLICY = f"wall-b{BATCH_MS:g}-n{FEWEST_CALLS}to{MOST_CALLS}"


@dataclass(frozen=True)
class Caller:
    """One eager call. setting: entered around a batch of calls, outside of what is timed."""

    call: Callable[[], object]
    setting: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class CallTiming:
    """Sample i of both was taken in round i."""

    host: Timing
    call: Timing


@dataclass
class _Taken:
    """A contestant with its samples so far. calls: how many make one sample."""

    caller: Caller
    calls: int
    host_us: list[float] = field(default_factory=list)
    call_us: list[float] = field(default_factory=list)


def race_calls(
    callers: Mapping[str, Caller],
    rounds: int,
    *,
    device: torch.device | str = "cuda",
    failed: dict[str, str] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, CallTiming]:
    """Contestants in turns as in `race`, one host and one call sample a turn.

    One that raises is named in `failed` with its reason and left out; without `failed` it raises.
    now: a clock in seconds.
    """
    wait = _waiting(device)
    ready: dict[str, _Taken] = {}
    for name, caller in callers.items():
        try:
            ready[name] = _Taken(caller, _calls_a_sample(caller, wait, now))
        except (RuntimeError, MeasureError) as error:
            if failed is None:
                raise
            failed[name] = one_line(error)
    for name in turns(ready, rounds):
        _take(ready[name], wait, now)
    return {
        name: CallTiming(
            Timing(tuple(taken.host_us), POLICY), Timing(tuple(taken.call_us), POLICY)
        )
        for name, taken in ready.items()
        if taken.host_us
    }


def _take(taken: _Taken, wait: Callable[[], None], now: Callable[[], float]) -> None:
    call, calls = taken.caller.call, taken.calls
    with taken.caller.setting():
        call()  # untimed, as in `race`
        wait()
        start = now()
        for _ in range(calls):
            call()
        issued = now()
        wait()
        taken.host_us.append(checked((issued - start) * 1e6 / calls))
        start = now()
        for _ in range(calls):
            call()
            wait()
        taken.call_us.append(checked((now() - start) * 1e6 / calls))


def _calls_a_sample(caller: Caller, wait: Callable[[], None], now: Callable[[], float]) -> int:
    """About BATCH_MS of calls, going by the last of three: the first ones fill caches."""
    us = 0.0
    with caller.setting():
        for _ in range(3):
            start = now()
            caller.call()
            wait()
            us = checked((now() - start) * 1e6)
    return max(FEWEST_CALLS, min(MOST_CALLS, int(BATCH_MS * 1e3 / us)))


def _waiting(device: torch.device | str) -> Callable[[], None]:
    import torch

    where = torch.device(device)
    if where.type == "cuda":
        return lambda: torch.cuda.synchronize(where)
    return lambda: None
