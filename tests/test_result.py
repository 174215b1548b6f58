"""What a tuning result says of itself."""

from __future__ import annotations

from fagen.config import Config
from fagen.generate.families import FAMILIES
from fagen.outcome import Outcome, Status, Timing
from fagen.problem import make_problem
from fagen.target import preset
from fagen.tune.result import Final, TuneResult

CONFIG = Config("flash", FAMILIES["flash"].Knobs())


def result(*, timed: bool, raced: bool) -> TuneResult:
    outcome = Outcome(
        CONFIG, Status.OK, timing=Timing((12.0,), "p") if timed else None, predicted_us=15.0
    )
    finals = (Final("a", "program", Timing((11.5,), "p"), outcome, chosen=True),)
    return TuneResult(
        problem=make_problem(512, 64),
        target=preset("h200"),
        run_id=1,
        state="finished",
        timed=timed,
        winner=outcome,
        default=CONFIG,
        tried=7,
        space=90,
        counts={Status.OK: 7},
        seconds=1.0,
        finals=finals if raced else (),
    )


def test_a_result_is_one_line_with_the_time_that_counts():
    raced, alone, predicted = (
        repr(result(timed=timed, raced=raced))
        for timed, raced in ((True, True), (True, False), (False, False))
    )
    assert f"{CONFIG}, 11.5 us; 7 of 90 configs tried, finished>" in raced
    assert ", 12 us;" in alone
    assert ", 15 us predicted;" in predicted
    assert all("\n" not in text for text in (raced, alone, predicted))
