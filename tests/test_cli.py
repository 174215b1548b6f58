"""The command line: help, usage errors, exit codes, pipes, and how little it loads."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
import torch

import tuning_db
from cli_fixtures import fagen, rows_of, write_trials
from fagen.cli.main import cli, main
from fagen.errors import (
    DatabaseError,
    FagenError,
    Interrupted,
    NoDevice,
    NoValidConfig,
    TerminatedRun,
)
from fagen.outcome import Status

SHAPE = ["--seq", "64", "--head-dim", "16"]
HEAVY = {"torch", "triton", "optuna", "alembic", "jinja2"}


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command's words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


EVERY = list(commands())


# Help


def test_the_commands_are_these():
    assert {" ".join(words) for words in EVERY} == {
        *("tune", "why", "show", "repro", "bench", "bench-tuner", "doctor", "db"),
        *(f"db {name}" for name in ("path", "list", "show", "best", "trials", "export", "check")),
    }


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_help_shows_an_example_and_loads_nothing_heavy(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Example:\n\s+fagen " + " ".join(words), out)


@pytest.mark.parametrize("words", [w for w in EVERY if w != ("db",)], ids=" ".join)
def test_every_command_takes_json_and_db(words: list[str]):
    group, command = cli, None
    for name in words:
        command = group.get_command(click.Context(group), name)
        group = command
    names = {option for param in command.params for option in param.opts}
    assert {"--json", "--db"} - ({"--db"} if words == ("bench-tuner",) else set()) <= names


# R04
@pytest.mark.parametrize(
    "words", [["--help"], ["tune", "--help"], ["db", "list"], ["db", "path"]], ids=" ".join
)
def test_help_and_lists_load_no_heavy_library(words: list[str], tmp_path: Path):
    code = (
        "import sys; from fagen.cli.main import main; code = main(sys.argv[1:]);"
        "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "FAGEN_DB": "", "XDG_DATA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "fagen" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"fagen \S+\n", capsys.readouterr().out)


# Usage errors: 2, a message that names the value, nothing on stdout


# D03
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "No such command 'nope'"),
        (["tune", "--seq", "64"], "Missing option '--head-dim'"),
        (["tune", "--seq", "64", "--head-dim", "0"], "head_dim must be 1 to 256, got 0"),
        (["tune", "--seq", "64", "--head-dim", "-1"], "head_dim must be 1 to 256, got -1"),
        (["tune", "--seq", "64", "--head-dim", "999"], "head_dim must be 1 to 256, got 999"),
        (["tune", "--seq", "64", "--head-dim", "abc"], "'abc' is not a valid integer"),
        (["tune", "--seq", "64", "--head-dim", "7.5"], "'7.5' is not a valid integer"),
        (["why", *SHAPE, "--heads", "3", "--kv-heads", "2"], "heads 3 is not a multiple"),
        (["why", *SHAPE, "--dtype", "int8"], "dtype 'int8' is not supported"),
        (["why", *SHAPE, "--target", "h999"], "Target 'h999' is unknown"),
        (["show"], "Name either a trial or a shape"),
        (["show", "3", *SHAPE], "Name either a trial or a shape"),
        (["show", "--seq", "64"], "needs both --seq and --head-dim"),
        (["show", "1", "--dtype", "fp32"], "--dtype says nothing without --seq"),
        (["db", "trials", "--direction", "backward"], "--direction says nothing without --seq"),
        (["show", "x"], "'x' is not a valid integer"),
        (["show", *SHAPE, "--target", "h200", "--config", "{"], "The config is no JSON"),
        (["show", *SHAPE, "--target", "h200", "--config", "{}"], "amily 'None' is unknown"),
        (["db", "list", "--since", "yesterday"], "'yesterday' is no ISO date"),
        (["db", "trials", "--status", "fine"], "'fine' is not one of"),
        (["db", "trials", "--limit", "0"], "0 is not in the range"),
        (["db", "trials", "--limit", str(2**63)], "is not in the range"),
        (["db", "trials", "--run", str(2**63)], "is not in the range"),
        (["db", "show", str(2**63)], "is not in the range"),
        (["show", str(2**63)], "is not in the range"),
        (["repro"], "Missing argument 'TRIAL'"),
        (["repro", str(2**63)], "is not in the range"),
        (["repro", "1", "--force"], "--force says nothing without --out"),
        (["why", "--head-dim", "64", "--seq", str(2**31)], "seq must be 0 to 2147479552"),
        (["why", *SHAPE, "--causal-align", "bottom_right"], "says nothing without --causal"),
        (["why", *SHAPE, "--device", "0", "--target", "h200"], "Name one of them"),
        (["tune", *SHAPE, "-q", "--timeout", "nan"], "timeout must be 0 to"),
        (["tune", *SHAPE, "-q", "--timeout", "inf"], "timeout must be 0 to"),
        (["tune", *SHAPE, "-q", "--seed", "-1"], "seed must be 0 to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_exits_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err and "Traceback" not in err


# Failures


# D03
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoValidConfig("none is right."), 1),
        (NoDevice("no GPU."), 1),
        (DatabaseError("locked."), 1),
        (Interrupted("stopped."), 130),
        (TerminatedRun("stopped."), 143),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("a bug\nin two lines"), 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_command_raises_is_one_line_and_a_code(
    error: BaseException,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def tune(*_args: object, **_words: object):
        raise error

    monkeypatch.setattr("fagen.tune.tuner.tune", tune)
    assert main(["tune", *SHAPE, "--target", "h200", "-q"]) == code
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert isinstance(error, FagenError | KeyboardInterrupt) or "FAGEN_DEBUG=1" in err


def test_the_traceback_of_a_bug_is_shown_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def tune(*_args: object, **_words: object):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("fagen.tune.tuner.tune", tune)
    monkeypatch.setenv("FAGEN_DEBUG", "1")
    assert main(["tune", *SHAPE, "--target", "h200", "-q"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("command", ["tune", "bench", "why"])
def test_a_device_that_is_not_there_is_an_error(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([command, *SHAPE, "--device", "0"]) == 1
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "No GPU" in err and "fagen doctor" in err


# D03
@pytest.mark.parametrize(
    "words", [["show", "7"], ["db", "show", "7"], ["repro", "7"]], ids=" ".join
)
def test_an_unknown_trial_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]):
    write_trials([{}])
    assert main(words) == 1
    assert "There is no trial 7." in capsys.readouterr().err


# D03
@pytest.mark.parametrize("words", [["list"], ["best"], ["trials"], ["show", "1"], ["check"]])
def test_a_named_database_that_is_missing_is_an_error(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = tmp_path / "other" / "none.db"
    assert main(["db", *words, "--db", str(path)]) == 1
    out, err = capsys.readouterr()
    assert (out, path.parent.exists()) == ("", False)
    assert str(path) in err


# C02
def test_a_database_of_another_program_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "text.db").write_text("hello")
    assert main(["db", "list", "--db", str(tmp_path / "text.db")]) == 1
    assert "text.db is no SQLite database" in capsys.readouterr().err


def test_a_bad_log_level_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAGEN_LOG", "loud")
    assert main(["db", "path"]) == 2
    assert "FAGEN_LOG is 'loud'" in capsys.readouterr().err


# Pipes


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of 5,000 trials."""
    path = tmp_path_factory.mktemp("big") / "big.db"
    write_trials([{}] * 10, db=str(path))
    rows_of(
        path,
        "INSERT INTO trial SELECT NULL, run_id, config, config_key, program_key || n.value,"
        " template_digest, status, reason, facts, checks, checked_on, samples_us, clocks_mhz,"
        " measure_policy, median_us, predicted_us, created, quarantined, seconds FROM trial,"
        " (WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n LIMIT 499)"
        " SELECT value FROM n) AS n",
    )
    return path


# D03
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_head_gets_its_line_and_nobody_complains(big: Path, unbuffered: str, form: list[str]):
    command = [sys.executable, "-m", "fagen", "db", "trials", "--db", str(big), *form]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    producer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert producer.stdout is not None and producer.stderr is not None
    first = producer.stdout.readline()
    producer.stdout.close()
    err = producer.stderr.read()
    producer.stderr.close()
    assert (producer.wait(), err) == (0, b"")
    assert first.startswith(b"[" if form else b"trial_id")


# D03
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["--help"], ["db", "path"], ["db", "list", "--json"]])
def test_a_full_disk_is_an_error(words: list[str]):
    with open("/dev/full", "w") as full:
        done = fagen(*words, stdout=full, env={"FAGEN_DB": "", "XDG_DATA_HOME": "/nonexistent"})
    assert done.returncode == 1
    assert done.stderr == "fagen: Can't write the result: No space left on device.\n"


# D03
def test_a_closed_stdout_is_an_error_and_the_database_is_not_mistaken_for_it(tmp_path: Path):
    path = tmp_path / "t.db"
    write_trials([{}], db=str(path))
    before = path.read_bytes()
    command = f'exec "{sys.executable}" -m fagen db trials --db "{path}" >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "fagen: Can't write the result: stdout is closed.\n",
    )
    assert path.read_bytes() == before


# Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_its_code_and_no_traceback(
    number: int, code: int, tmp_path: Path
):
    waiting = (
        "import sys, time, fagen.cli.places as places;"
        "places.place_of = lambda *_: (print('ready', flush=True), time.sleep(60));"
        "from fagen.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", waiting, "tune", *SHAPE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    child.send_signal(number)
    _, err = child.communicate(timeout=20)
    assert child.returncode == code
    assert len(err.splitlines()) == 1 and "Traceback" not in err


# What is shown


# D04
def test_list_shows_local_times_with_their_zone_and_since_goes_by_the_instant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        write_trials([{}, {}])
        edt = datetime(2026, 11, 1, 5, 30, tzinfo=UTC)
        for run_id, started in ((1, edt), (2, edt + timedelta(hours=1))):
            rows_of(
                Path(os.environ["FAGEN_DB"]),
                f"UPDATE run SET started = '{started:%Y-%m-%dT%H:%M:%S.%fZ}' WHERE id = {run_id}",
            )
        assert main(["db", "list"]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        assert [re.search(r"2026\S+ \S+ \S+", line).group() for line in lines] == [
            "2026-11-01 01:30:00 EST",
            "2026-11-01 01:30:00 EDT",
        ]
        for since, runs in (("2026-11-01", 2), ("2026-11-01T06:00+00:00", 1), ("2026-11-02", 0)):
            assert main(["db", "list", "--since", since]) == 0
            assert len(capsys.readouterr().out.splitlines()) == (runs + 1 if runs else 0)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_empty_database_says_what_to_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("FAGEN_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for words in (["list"], ["best"], ["trials"]):
        assert main(["db", *words]) == 0
        out, err = capsys.readouterr()
        assert out == "" and "fagen tune" in err
    assert list(tmp_path.iterdir()) == []  # asking makes no file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["best"], "Nothing was timed yet."),
        (["trials", "--status", "crashed"], "Nothing that is stored matches."),
        (["trials", "--seq", "65", "--head-dim", "16"], "Nothing that is stored matches."),
        (["list", "--since", "2999-01-01"], "Nothing that is stored matches."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_empty_list_of_a_filled_database_does_not_say_that_nothing_is_stored(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    write_trials([{"status": Status.PREDICTED}])
    assert main(["db", *words]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(said)


def test_show_of_a_trial_is_its_source_and_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (trial,) = write_trials([{}])
    assert main(["show", str(trial)]) == 0
    out = capsys.readouterr().out
    assert compile(out, "shown.py", "exec") is not None
    assert out.startswith('"""Generated by fagen')


@pytest.mark.parametrize("words", [["show", "1"], ["show", *SHAPE, "--target", "h200"]])
def test_show_says_beside_the_source_what_its_machine_code_shows(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    write_trials([{"findings": ("32 wgmma, 4 waits", "64 of 66 exp2 under PV")}])
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "wgmma" not in out
    first, *findings = err.splitlines()
    assert first.endswith(": 64 registers, 1024 bytes of shared memory, 0 bytes spilled")
    assert findings == ["  32 wgmma, 4 waits", "  64 of 66 exp2 under PV"]


def test_a_stored_trial_shows_a_finding_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]):
    write_trials([{"findings": ("serialised wgmma", "C7511: why")}])
    assert main(["db", "show", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:-1] == ["  serialised wgmma", "  C7511: why"]
    assert not any(line.startswith("findings") for line in lines)


def test_show_takes_a_config_that_keeps_the_rules(capsys: pytest.CaptureFixture[str]):
    words = ["show", *SHAPE, "--target", "h200", "--config"]
    assert main([*words, '{"family": "flash", "knobs": {"block_m": 64, "num_warps": 4}}']) == 0
    assert "block_m=64" in capsys.readouterr().out
    assert main([*words, '{"family": "flash", "knobs": {"block_m": 16, "num_warps": 8}}']) == 2
    assert "breaks a rule" in capsys.readouterr().err


def test_trials_can_be_narrowed_by_run_status_and_shape(capsys: pytest.CaptureFixture[str]):
    write_trials([{}, {"status": Status.WRONG_RESULT}, {"seq": 128}])
    for words, ids in (
        ([], ["3", "2", "1"]),
        (["--status", "wrong_result"], ["2"]),
        (["--run", "1"], ["1"]),
        (["--seq", "128", "--head-dim", "16"], ["3"]),
        (["--limit", "1"], ["3"]),
    ):
        assert main(["db", "trials", *words]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        assert [line.split()[0] for line in lines] == ids


def test_check_says_what_is_there_and_migrates_nothing_new(capsys: pytest.CaptureFixture[str]):
    write_trials([{}])
    assert main(["db", "check"]) == 0
    assert "1 runs, 1 trials" in capsys.readouterr().out
    assert tuning_db.Store(os.environ["FAGEN_DB"]).runs() != []


def test_check_finds_damage_that_no_question_meets(capsys: pytest.CaptureFixture[str]):
    write_trials([{} for _ in range(40)])
    path = Path(os.environ["FAGEN_DB"])
    with sqlite3.connect(path) as connection:
        named = "SELECT rootpage FROM sqlite_master WHERE name='ix_trial_program_key'"
        (root,) = connection.execute(named)
        (size,) = connection.execute("PRAGMA page_size")
    connection.close()
    content = bytearray(path.read_bytes())
    content[root[0] * size[0] - 64 : root[0] * size[0]] = b"\1" * 64
    path.write_bytes(content)
    assert main(["db", "check"]) == 1
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert f"{path} is damaged" in err and "Move it aside" in err
