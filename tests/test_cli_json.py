"""--json: strict JSON on stdout, always one document, whatever the database holds."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from cli_fixtures import fagen, rows_of, write_trials
from fagen.cli.main import main
from fagen.errors import Interrupted, NoValidConfig
from fagen.generate.families import config_from_dict
from fagen.generate.space import seeds_of
from fagen.outcome import Check, Outcome, Status, Timing, Verdict
from fagen.problem import Problem, make_problem
from fagen.target import preset
from fagen.tune.events import OnEvent, Started, TrialDone
from fagen.tune.result import Final, TuneResult

SHAPE = ["--seq", "64", "--head-dim", "16"]
OFFLINE = [*SHAPE, "--target", "h200"]
Install = Callable[..., list[dict[str, object]]]
LISTS = [["db", "list"], ["db", "best"], ["db", "trials"], ["doctor"]]
OTHERS = [
    ["db", "path"],
    ["db", "check"],
    ["why", *OFFLINE],
    ["show", *OFFLINE],
    ["bench", *OFFLINE],
]
OF_A_TRIAL = [["show", "1"], ["db", "show", "1"], ["repro", "1"]]
H200 = preset("h200")


def strict(text: str):
    """Parse one JSON document; NaN and Infinity are no JSON."""

    def refuse(token: str):
        raise AssertionError(f"{token} in JSON")

    return json.loads(text, parse_constant=refuse)


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> object:
    assert main([*words, "--json"]) == 0
    return strict(capsys.readouterr().out)


@pytest.fixture
def unknown_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The default database, which does not exist."""
    monkeypatch.delenv("FAGEN_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


@pytest.fixture
def odd_database():
    """Failed trials, no times, an infinite error, a name that is not ASCII, text of many lines."""
    write_trials(
        [
            {"us": 3.25, "reason": "quick"},
            {"status": Status.WRONG_RESULT, "error": float("nan"), "reason": 'a "quoted"\nreason'},
            {"status": Status.CRASHED, "error": float("inf")},
            {"status": Status.PREDICTED},
            {"target": replace(H200, name="NVIDIA Ünïcøde™ 漢字")},
        ]
    )


# D02
@pytest.mark.parametrize("words", [["list"], ["best"], ["trials"]], ids=" ".join)
def test_a_list_of_nothing_is_an_empty_array(
    words: list[str], capsys: pytest.CaptureFixture[str], unknown_database: None
):
    assert shown(["db", *words], capsys) == []


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_every_other_command_works_on_nothing_too(
    words: list[str], capsys: pytest.CaptureFixture[str], unknown_database: None
):
    assert isinstance(shown(words, capsys), dict)


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_lists_are_arrays_of_flat_objects_of_one_field_set(
    words: list[str], capsys: pytest.CaptureFixture[str], odd_database: None
):
    rows = shown(words, capsys)
    assert rows
    assert len({tuple(row) for row in rows}) == 1
    assert not any(isinstance(value, dict | list) for row in rows for value in row.values())


# D02
@pytest.mark.parametrize(
    "words", [*OTHERS, *OF_A_TRIAL, ["show", "2"], ["db", "show", "3"], ["repro", "3"]]
)
def test_odd_rows_are_still_strict_json(
    words: list[str], capsys: pytest.CaptureFixture[str], odd_database: None
):
    assert isinstance(shown(words, capsys), dict)


# D02
def test_missing_values_are_null_and_numbers_whole(
    capsys: pytest.CaptureFixture[str], odd_database: None
):
    rows = {row["trial_id"]: row for row in shown(["db", "trials"], capsys)}
    assert (rows[1]["median_us"], rows[2]["median_us"]) == (3.25, None)
    assert rows[5]["target"] == "NVIDIA Ünïcøde™ 漢字"
    assert shown(["db", "show", "2"], capsys)["reason"] == 'a "quoted"\nreason'
    [check] = shown(["db", "show", "3"], capsys)["verdict"]["checks"]
    assert (check["error"], check["passed"]) == (None, False)


# D04
def test_times_carry_their_offset(capsys: pytest.CaptureFixture[str], odd_database: None):
    for words, field in ((["db", "list"], "started"), (["db", "trials"], "created")):
        for row in shown(words, capsys):
            assert row[field].endswith("+00:00")
            assert datetime.fromisoformat(row[field]).utcoffset() is not None


def test_a_null_time_in_the_file_is_null(capsys: pytest.CaptureFixture[str], odd_database: None):
    rows_of(Path(os.environ["FAGEN_DB"]), "UPDATE trial SET median_us = NULL WHERE id = 1")
    rows = shown(["db", "trials"], capsys)
    assert next(row for row in rows if row["trial_id"] == 1)["median_us"] is None


# D02
def test_warnings_and_logs_stay_off_stdout(odd_database: None):
    env = {"FAGEN_LOG": "debug", "PYTHONWARNINGS": "always", "PYTHONIOENCODING": "ascii"}
    rows_of(Path(os.environ["FAGEN_DB"]), "UPDATE trial SET config = '{' WHERE id = 1")
    done = fagen("db", "trials", "--json", env=env)
    assert len(strict(done.stdout)) == 4
    assert "left out" in done.stderr


def test_tables_show_any_name_on_any_terminal(odd_database: None):
    for encoding, name in (("latin-1", r"™ \u6f22".encode("latin-1", "backslashreplace")),
                           ("utf-8", "™ 漢字".encode())):  # fmt: skip
        done = fagen("db", "list", env={"PYTHONIOENCODING": encoding}, text=False)
        assert (done.returncode, name in done.stdout) == (0, True)


@pytest.mark.parametrize(
    "words",
    [
        ["show", "99"],
        ["db", "show", "99"],
        ["repro", "99"],
        ["why", "--seq", "1", "--head-dim", "0"],
    ],
)
def test_an_error_leaves_stdout_empty(
    words: list[str], capsys: pytest.CaptureFixture[str], odd_database: None
):
    assert main([*words, "--json"]) != 0
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)


# tune, with a tuner that only tells a story


def story(problem: Problem, *, timed: bool):
    """A run's events and its result."""
    first, second, *_ = seeds_of(problem, H200)
    verdict = Verdict((Check("o_max", 0.1, 0.5), Check("lse", float("nan"), 1.0)), "here")
    win = Outcome(
        second,
        Status.OK if timed else Status.PREDICTED,
        verdict=verdict,
        timing=Timing((10.0, 12.0), "p") if timed else None,
        predicted_us=9.0,
    )
    wrong = Outcome(first, Status.WRONG_RESULT, "too far\noff")
    events = [
        Started(problem, H200, timed, 7, 0, 2, 60.0, {("slim", "row_holds_keys"): 3}),
        TrialDone(wrong, 1, 2, None, 50.0),
        TrialDone(win, 2, 2, 10.0, 40.0),
    ]
    finals = (
        Final("k1", "program", Timing((11.0,), "p"), win, chosen=True),
        Final("k0", "program", Timing((22.0,), "p"), replace(wrong, status=Status.OK)),
        Final("sdpa-flash", "peer", Timing((33.0,), "p")),
    )
    result = TuneResult(
        problem=problem, target=H200, run_id=5, state="finished", timed=timed, winner=win,
        default=first, tried=2, space=7, counts={Status.OK: 1, Status.WRONG_RESULT: 1},
        seconds=1.5, finals=finals if timed else (), missing={"sdpa-cudnn": "no cuDNN"},
    )  # fmt: skip
    return events, result


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch):
    """Replace the tuner by the story; returns the arguments of each call."""
    calls: list[dict[str, object]] = []

    def install(*, timed: bool):
        def tune(problem: Problem, *, on_event: OnEvent, **words: list[str]):
            calls.append(words)
            warnings.warn("a warning in the run", stacklevel=1)
            events, result = story(problem, timed=timed)
            for event in events:
                on_event(event)
            return result

        monkeypatch.setattr("fagen.tune.tuner.tune", tune)
        return calls

    return install


# D02
@pytest.mark.filterwarnings("default:a warning in the run")
def test_tune_prints_one_document_and_progress_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], tuned: Install
):
    calls = tuned(timed=True)
    words = ["--trials", "9", "--timeout", "3.5", "--seed", "4"]
    assert main(["tune", *OFFLINE, *words, "--json"]) == 0
    out, err = capsys.readouterr()
    row = strict(out)
    assert (calls[0]["trials"], calls[0]["timeout"], calls[0]["seed"]) == (9, 3.5, 4)
    assert calls[0]["target"] == H200
    assert (row["run_id"], row["winner_us"], row["default_us"]) == (5, 11.0, 22.0)
    assert [f["kind"] for f in row["finals"]] == ["winner", "default", "peer"]
    assert [f["times_winner"] for f in row["finals"]] == [1.0, 2.0, 3.0]
    assert row["rejected"] == [{"status": "wrong_result", "reason": "too far\noff", "count": 1}]
    assert row["missing"] == [{"name": "sdpa-cudnn", "reason": "no cuDNN"}]
    assert config_from_dict(row["winner"]) is not None
    assert err.splitlines()[0].startswith("Tuning forward bf16 B1 H16 N64 D16 full on NVIDIA H200")
    assert "2/2 tried, best 10 us, 40 s left" in err


@pytest.mark.filterwarnings("ignore:a warning in the run")
def test_a_time_that_was_only_predicted_is_never_shown_as_measured(
    capsys: pytest.CaptureFixture[str], tuned: Install
):
    tuned(timed=False)
    assert main(["tune", *OFFLINE, "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    row = strict(out)
    assert (row["timed"], row["winner_us"], row["winner_predicted_us"]) == (False, None, 9.0)
    assert [(f["kind"], f["median_us"], f["predicted_us"]) for f in row["finals"]] == [
        ("predicted", None, 9.0)
    ]
    assert err == ""
    assert main(["tune", *OFFLINE, "-q"]) == 0
    out = capsys.readouterr().out
    assert "Nothing was timed" in out and "Until then" not in out
    write_trials([{"us": 3.25}])
    assert main(["tune", *OFFLINE, "-q"]) == 0
    out = capsys.readouterr().out
    assert "Until then fagen.get serves what was timed there. tuned: " in out
    assert "trial 1, tuned for forward bf16 B1 H16 N64 D16 full: 3.25 us" in out


# T01
@pytest.mark.filterwarnings("ignore:a warning in the run")
def test_the_table_says_what_was_rejected_where_it_is_and_what_is_next(
    capsys: pytest.CaptureFixture[str], tuned: Install
):
    tuned(timed=True)
    assert main(["tune", *OFFLINE, "-q"]) == 0
    out = capsys.readouterr().out
    for said in (
        "Rejected 1 wrong_result: too far off",
        "Not measured: sdpa-cudnn: no cuDNN",
        "slim 3 by row_holds_keys",
        f"Stored as run 5 in {os.environ['FAGEN_DB']}",
        "Next: kernel = fagen.get(seq=64, head_dim=16)",
    ):
        assert said in out


def test_a_run_without_a_winner_prints_nothing_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def tune(*_args: object, **_words: object):
        raise NoValidConfig("None of 3 candidates is right: 3 crashed.")

    monkeypatch.setattr("fagen.tune.tuner.tune", tune)
    assert main(["tune", *OFFLINE, "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "3 crashed" in err


@pytest.mark.parametrize("failing", ["forward", "backward"])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_direction_without_a_winner_leaves_the_other_one(
    failing: str,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    tuned = []

    def tune(problem: Problem, *, on_event: OnEvent, **_words: object):
        tuned.append(problem.direction)
        if problem.direction == failing:
            raise NoValidConfig("None of 3 candidates is right: 3 crashed.")
        events, result = story(problem, timed=True)
        for event in events:
            on_event(event)
        return result

    monkeypatch.setattr("fagen.tune.tuner.tune", tune)
    words = ["tune", *OFFLINE, "--direction", "both", "-q", *["--json"] * as_json]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert tuned == ["forward", "backward"]
    assert err.startswith(f"fagen: {failing} bf16") and "3 crashed" in err
    [other] = {"forward", "backward"} - {failing}
    if as_json:
        [row] = strict(out)
        assert row["problem"].startswith(other)
    else:
        assert out.startswith(f"{other} bf16")


def test_a_prediction_is_not_called_tuned(capsys: pytest.CaptureFixture[str]):
    write_trials([{}, {"status": Status.PREDICTED}])
    rows = {row["status"]: row["origin"] for row in shown(["db", "trials"], capsys)}
    assert rows == {"ok": "tuned", "predicted": "predicted"}


def test_why_names_every_field_and_whether_it_fits(capsys: pytest.CaptureFixture[str]):
    problem = make_problem(64, 16)
    write_trials([{}])
    row = shown(["why", *OFFLINE], capsys)
    fields = {f["field"]: f for f in row["fields"]}
    assert row["origin"] == "tuned" and row["trial_id"] == 1
    assert {f["match"] for f in row["fields"]} == {"hit"}
    assert fields["seq_q"]["wanted"] == str(problem.bucket[0])
    nearest = shown(["why", *OFFLINE, "--seq", "128"], capsys)
    assert nearest["origin"] == "nearest"
    missed = {f["field"] for f in nearest["fields"] if f["match"] == "miss"}
    assert missed == {"seq_q", "seq_kv"}
    causal = shown(["why", *OFFLINE, "--causal"], capsys)
    assert (causal["origin"], causal["next_step"]) == (
        "default",
        "Run: fagen tune --seq 64 --head-dim 16 --causal",
    )


def test_show_holds_source_config_verdict_and_facts(capsys: pytest.CaptureFixture[str]):
    write_trials([{"findings": ("32 wgmma, 4 waits", "4 TMA loads")}])
    row = shown(["show", "1"], capsys)
    assert row["source_key"] == row["stored_source_key"]
    assert row["name"] in row["source"]
    assert row["facts"]["registers"] == 64
    assert row["facts"]["findings"] == ["32 wgmma, 4 waits", "4 TMA loads"]
    assert shown(["db", "show", "1"], capsys)["facts"] == row["facts"]
    assert row["verdict"]["checks"][0]["budget"] == 0.5


def test_bench_without_a_gpu_gives_the_analysis(capsys: pytest.CaptureFixture[str]):
    row = shown(["bench", *OFFLINE], capsys)
    assert [cost["form"] for cost in row["analysis"]] == [
        "standard",
        "queries outside",
        "keys outside",
    ]
    assert (row["flops"], row["raced"]) == (make_problem(64, 16).flops, [])


def test_an_interrupted_run_shows_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def tune(problem: Problem, **_words: object):
        result = replace(story(problem, timed=True)[1], state="interrupted")
        raise Interrupted("Stopped.", result=result)

    monkeypatch.setattr("fagen.tune.tuner.tune", tune)
    words = ["tune", *SHAPE, "--target", "h200", "-q"]
    assert main(words) == 130
    out, err = capsys.readouterr()
    assert "Partial: the run was interrupted" in out and "sdpa-flash" in out
    assert err == "fagen: Stopped.\n"
    assert main([*words, "--json"]) == 130
    assert capsys.readouterr().out == ""
