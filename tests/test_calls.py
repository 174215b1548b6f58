"""Call time: what is issued without waiting, what is waited for, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fagen.judge import calls
from fagen.judge.calls import MOST_CALLS, Caller, race_calls


class Machine:
    """A host that issues, a device that lags behind it, and a clock in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.busy_until = 0.0
        self.log: list[str] = []
        monkeypatch.setattr(calls, "_waiting", lambda _device: self.wait)

    def caller(self, name: str, host_us: float, device_us: float) -> Caller:
        def call() -> None:
            self.log.append(name)
            self.seconds += host_us * 1e-6
            self.busy_until = max(self.busy_until, self.seconds) + device_us * 1e-6

        return Caller(call)

    def wait(self) -> None:
        self.seconds = max(self.seconds, self.busy_until)

    def race(self, callers: dict[str, Caller], rounds: int = 4, **more: object):
        return race_calls(callers, rounds, now=lambda: self.seconds, **more)  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_host_time_is_issue_alone_and_call_time_ends_with_the_device(machine: Machine):
    found = machine.race({"a": machine.caller("a", host_us=20.0, device_us=500.0)})["a"]
    assert found.host.samples_us == pytest.approx([20.0] * 4)
    assert found.call.samples_us == pytest.approx([520.0] * 4)
    assert found.host.policy == found.call.policy == "wall-b2-n2to64"


def test_a_device_that_is_faster_than_the_host_adds_its_last_kernel_alone(machine: Machine):
    found = machine.race({"a": machine.caller("a", host_us=20.0, device_us=5.0)})["a"]
    assert found.host.median_us == pytest.approx(20.0)
    assert found.call.median_us == pytest.approx(25.0)


def test_contestants_take_turns_in_an_order_that_changes(machine: Machine):
    machine.race({n: machine.caller(n, 10.0, 3000.0) for n in "abc"}, rounds=3)
    taken = "".join(machine.log)[9:]  # three calls of each say how many make a sample
    turns = [taken[at] for at in range(0, len(taken), 5)]  # 1 untimed, 2 issued, 2 waited for
    assert "".join(turns) == "abccbabca"


def test_a_sample_has_as_many_calls_as_fit_and_a_few_at_least(machine: Machine):
    machine.race({"fast": machine.caller("fast", 1.0, 1.0)}, rounds=1)
    assert len(machine.log) == 3 + 1 + 2 * MOST_CALLS
    machine.log.clear()
    machine.race({"slow": machine.caller("slow", 1.0, 1e5)}, rounds=1)
    assert len(machine.log) == 3 + 1 + 2 * 2


def test_the_setting_is_entered_around_a_batch_and_not_timed(machine: Machine):
    entered: list[float] = []

    @contextmanager
    def slow_setting() -> Iterator[None]:
        entered.append(machine.seconds)
        machine.seconds += 1.0
        yield
        machine.seconds += 1.0

    call = machine.caller("a", 20.0, 5.0).call
    found = machine.race({"a": Caller(call, slow_setting)}, rounds=2)["a"]
    assert len(entered) == 1 + 2
    assert found.host.median_us == pytest.approx(20.0)


def test_one_that_raises_is_left_out_and_named(machine: Machine):
    def broken() -> None:
        raise RuntimeError("no such kernel\nmore")

    callers = {"broken": Caller(broken), "a": machine.caller("a", 20.0, 5.0)}
    failed: dict[str, str] = {}
    assert list(machine.race(callers, failed=failed)) == ["a"]
    assert failed == {"broken": "RuntimeError: no such kernel"}
    with pytest.raises(RuntimeError, match="no such kernel"):
        machine.race(callers)


def test_real_calls_on_the_cpu_take_real_time():
    found = race_calls({"sum": Caller(lambda: sum(range(1000)))}, 3, device="cpu")["sum"]
    assert all(us > 1.0 for us in found.call.samples_us)
