"""Progress of a run: plain lines with signs of life, a bar on terminals, or silence."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from fagen.cli import progress
from fagen.cli.progress import Bar, PlainLines, Quiet, Watcher
from fagen.generate.families import config_from_dict
from fagen.outcome import Outcome, Status
from fagen.problem import make_problem
from fagen.target import preset
from fagen.tune.events import Finished, Preparing, Racing, Started, TrialDone

if TYPE_CHECKING:
    import pytest

CONFIG = config_from_dict({"family": "flash"})
STARTED = Started(make_problem(64, 16), preset("h200"), True, 7, 2, 3, 60.0, {})


def done(number: int, best_us: float | None = 12.0, status: Status = Status.OK) -> TrialDone:
    reason = "" if status is Status.OK else "too far"
    return TrialDone(Outcome(CONFIG, status, reason), number, 3, best_us, 50.0)


def test_plain_lines_say_done_total_best_and_time_left(capsys: pytest.CaptureFixture[str]):
    with Watcher(PlainLines()) as watcher:
        for event in (STARTED, Preparing(), done(1, None), done(3), Racing(2), Finished("x", 1.5)):
            watcher(event)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "7 valid configs, timed, 2 known from earlier runs.",
        "Preparing inputs and the exact result.",
        "3/3 tried, best 12 us, 50 s left",
        "Measuring 2 finalists again, interleaved with the peers.",
        "Run x after 1.5 s.",
    ]


def test_a_run_that_times_nothing_calls_its_best_predicted(capsys: pytest.CaptureFixture[str]):
    with Watcher(PlainLines()) as watcher:
        watcher(replace(STARTED, timed=False))
        watcher(done(3, status=Status.PREDICTED))
    assert capsys.readouterr().err.splitlines() == [
        "7 valid configs, offline: nothing is timed, 2 known from earlier runs.",
        "3/3 tried, best predicted 12 us, 50 s left",
    ]


def test_a_line_appears_while_one_candidate_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "SILENCE_S", 0.1)
    with Watcher(PlainLines()) as watcher:
        watcher(Preparing())
        time.sleep(0.8)
        watcher(done(1))
        time.sleep(0.8)
    err = capsys.readouterr().err
    assert "Still: Preparing inputs" in err
    assert "1/3 tried, best 12 us, 49 s left" in err  # the time left goes on running


def test_nothing_is_said_after_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "SILENCE_S", 0.1)
    with Watcher(PlainLines()) as watcher:
        watcher(Preparing())
    capsys.readouterr()
    time.sleep(0.8)
    assert capsys.readouterr().err == ""


def test_quiet_says_nothing_and_still_counts_what_was_rejected(
    capsys: pytest.CaptureFixture[str],
):
    with Watcher(Quiet()) as watcher:
        for event in (STARTED, done(1), done(2, status=Status.CRASHED), done(3)):
            watcher(event)
    assert capsys.readouterr() == ("", "")
    assert watcher.rejected == {(Status.CRASHED, "too far"): 1}
    assert watcher.started is STARTED


def test_the_bar_shows_best_and_time_left(monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Watcher(Bar()) as watcher:
        watcher(STARTED)
        watcher(done(2))
        time.sleep(0.2)
    shown = terminal.getvalue()
    assert "7 valid configs" in shown
    assert "best 12 us" in shown and "50 s left" in shown
