"""Several GPUs share one run: who tries what, in which order it is told, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fagen.cli.main import main
from fagen.config import Config
from fagen.errors import BadSetting, FagenError, Interrupted, NoDevice, WorkerDied
from fagen.generate.program import Program
from fagen.outcome import Status
from fagen.target import preset
from fagen.tune import place
from fagen.tune.jobs import Tried
from fagen.tune.place import Place, place_of
from fagen.tune.tuner import run
from fakes import FakeShop, FakeWorker, formula_us, full_space, timed

H200 = preset("h200")


class Slow(FakeWorker):
    """Takes real time, so that two of them can be at work at once."""

    seconds = 0.01
    busy = 0
    most_busy = 0
    lock = threading.Lock()

    def try_program(self, program: Program, seconds: float) -> Tried:
        with Slow.lock:
            Slow.busy += 1
            Slow.most_busy = max(Slow.most_busy, Slow.busy)
        time.sleep(self.seconds)
        with Slow.lock:
            Slow.busy -= 1
        return super().try_program(program, seconds)


@pytest.fixture(autouse=True)
def idle() -> None:
    Slow.busy = Slow.most_busy = 0


def shared(*workers: FakeWorker, **changes: Any) -> tuple[FakeShop, Any]:
    shop = FakeShop(worker=workers[0])
    return shop, shop.plan(workers=workers, **changes)


def test_two_devices_try_all_once_and_each_outcome_is_kept() -> None:
    one, two = Slow(), Slow()
    shop, plan = shared(one, two, trials=30)
    result = run(plan)
    assert Slow.most_busy == 2
    assert min(len(one.tried), len(two.tried)) >= 8
    both = Counter([*one.tried, *two.tried])
    assert set(both.values()) == {1} and len(both) == 30 == result.tried
    assert Counter(row.config for row in shop.ledger.rows) == both
    assert {row.median_us for row in shop.ledger.rows} == {formula_us(c) for c in both}
    assert (one.prepared, two.prepared) == (2, 1)  # the first one holds the race too
    assert len(one.raced) == 1 and two.raced == []
    assert one.closed and two.closed


def test_a_slow_device_does_not_hold_up_a_quick_one() -> None:
    quick, slow = Slow(), Slow()
    slow.seconds = 0.05
    run(shared(quick, slow, trials=30)[1])
    assert len(quick.tried) > 1.5 * len(slow.tried)


def test_a_candidate_that_hangs_holds_up_its_own_device_alone() -> None:
    one, two = Slow(), Slow()
    hangs = full_space().seeds[0]
    release = threading.Event()

    def behave(config: Config) -> BaseException | None:
        if config != hangs:
            if len(one.tried) + len(two.tried) == 24:
                release.set()
            return None
        assert release.wait(20.0)  # until all others were tried
        return WorkerDied("killed at its deadline", timed_out=True)

    one.behave = two.behave = behave
    shop, plan = shared(one, two, trials=24)
    assert run(plan).counts == {Status.OK: 23, Status.TIMED_OUT: 1}
    stored = [row.config for row in shop.ledger.rows]
    assert stored.index(hangs) >= 22  # the 24th may still be at work


@pytest.mark.parametrize("ends", ["interrupted", "time up"])
def test_what_other_devices_measured_is_kept_when_a_run_ends_early(ends: str) -> None:
    workers = [Slow() for _ in range(3)]
    first = full_space().seeds[0]
    tried = threading.Barrier(3, timeout=20.0)

    def behave(config: Config) -> BaseException | None:
        tried.wait()  # all three are at work
        if config != first:
            return None
        time.sleep(0.2)  # by now the others are done
        return KeyboardInterrupt() if ends == "interrupted" else None

    for worker in workers:
        worker.behave = behave
    shop, plan = shared(*workers, trials=3)
    if ends == "interrupted":
        with pytest.raises(Interrupted, match="2 candidates are kept"):
            run(plan)
    else:
        assert run(plan).tried == 3
    assert len(shop.ledger.rows) == (2 if ends == "interrupted" else 3)


def test_what_kills_one_worker_costs_one_row() -> None:
    one, two = Slow(), Slow()
    bad = full_space().seeds[1]

    def behave(config: Config) -> BaseException | None:
        return WorkerDied("SIGSEGV", timed_out=False) if config == bad else None

    one.behave = two.behave = behave
    shop, plan = shared(one, two, trials=24)
    assert run(plan).counts == {Status.OK: 23, Status.CRASHED: 1}
    assert [row.config for row in shop.ledger.rows if row.status is not Status.OK] == [bad]


def test_a_source_that_two_configs_share_is_tried_once() -> None:
    one, two = Slow(), Slow()
    first, second = full_space().seeds[:2]
    shop, plan = shared(one, two, trials=24)
    same = replace(plan.render(plan.problem, first), key="same")

    def render(problem: Any, config: Config) -> Program:
        plain = plan.render(problem, config)
        return replace(same, config=config) if config in (first, second) else plain

    run(replace(plan, render=render))
    tried = [*one.tried, *two.tried]
    assert first in tried and second not in tried
    assert "same source" in next(r.reason for r in shop.ledger.rows if r.config == second)


def test_a_device_that_cannot_be_prepared_ends_the_run() -> None:
    class Broken(FakeWorker):
        def prepare(self, *job: Any) -> None:
            raise FagenError("The GPU can't be prepared for this shape: out of memory")

    one = FakeWorker()
    _, plan = shared(one, Broken())
    with pytest.raises(FagenError, match="can't be prepared"):
        run(plan)
    assert one.tried == [] and one.closed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two H200 and an H100."""
    cards = {"0": H200, "1": H200, "2": preset("h100")}

    def detect(device: Any) -> Any:
        if str(device) not in cards:
            raise NoDevice(f"Device {device!r} does not exist.")
        return cards[str(device)]

    monkeypatch.setattr(place.targets, "detect", detect)
    monkeypatch.setattr(place.targets, "cuda_name", lambda d: (f"cuda:{d}", f"GPU-{d}"))


@pytest.mark.usefixtures("machine")
def test_devices_that_are_alike_make_a_place() -> None:
    assert place_of(None, None, [1, "0"]) == Place(H200, "cuda:1", "GPU-1", (("cuda:0", "GPU-0"),))
    assert place_of(None, None, ["0"]) == Place(H200, "cuda:0", "GPU-0")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"devices": [0, 2]}, "cuda:0 is a NVIDIA H200, cuda:2 a NVIDIA H100"),
        ({"devices": [0, 0]}, "named twice"),
        ({"devices": []}, "list of GPUs"),
        ({"devices": "0,1"}, "list of GPUs"),
        ({"devices": 5}, "list of GPUs"),
        ({"devices": [0, 1], "device": 0}, "stand alone"),
        ({"devices": [0, 1], "target": "h200"}, "stand alone"),
        ({"devices": [0, 7]}, "does not exist"),
    ],
)
def test_devices_that_make_no_run_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises((BadSetting, NoDevice), match=said):
        place_of(words.get("target"), words.get("device"), words["devices"])


def test_every_device_is_locked_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []

    class Lock:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def __enter__(self) -> None:
            held.append(self.name)

        def __exit__(self, *_: object) -> None:
            held.remove(self.name)

    monkeypatch.setattr(place, "device_lock", Lock)
    monkeypatch.setattr(place, "report_other_load", lambda *_: None)
    for first, second in (("a", "b"), ("b", "a")):
        both = Place(H200, "cuda:0", f"GPU-{first}", (("cuda:1", f"GPU-{second}"),))
        with both.held(1.0, print):
            assert held == ["GPU-a", "GPU-b"]
        assert held == []


def test_the_command_line_hands_them_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def tune(problem: Any, **words: Any) -> Any:
        asked.update(words)
        return run(FakeShop(worker=FakeWorker(behave=lambda c: timed(10.0))).plan(trials=3))

    monkeypatch.setattr("fagen.cli.places.place_of", lambda *where: (H200, where == ("0", None)))
    monkeypatch.setattr("fagen.tune.tuner.tune", tune)
    words = ["tune", "--seq", "1024", "--head-dim", "128", "-q", "--json"]
    assert main([*words, "--devices", "0, 1"]) == 0
    assert asked["devices"] == ("0", "1") and asked["device"] is None
    assert json.loads(capsys.readouterr().out)["tried"] == 3
    for more in (["--device", "0"], ["--target", "h200"]):
        assert main([*words, "--devices", "0,1", *more]) == 2
        assert "--devices stands alone" in capsys.readouterr().err
