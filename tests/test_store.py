"""The store's contract on every kind of database, and what its columns take."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from store_rows import (
    OLD_GATE,
    V2,
    copy_of_v1,
    final_row,
    later,
    python,
    run_row,
    sql,
    third_version,
    trial_row,
    verdict_row,
)
from tuning_db import (
    RunRow,
    Store,
    StoreError,
    schema,
)
from tuning_db.exchange import export_lines, import_lines, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["memory", "file", "upgraded"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    where: Path | None = tmp_path / "t.db"
    if request.param == "memory":
        where = None
    elif request.param == "upgraded":
        where = copy_of_v1(tmp_path)
        monkeypatch.setattr(schema, "MIGRATIONS", third_version(tmp_path))
        monkeypatch.setattr(schema, "HEAD", 3)
    opened = Store(where, "write")
    yield opened
    opened.close()


class TestContract:
    """What every store does. The upgraded one holds the rows of version 1 besides."""

    def test_a_run_is_read_back_as_it_was_written(self, store: Store) -> None:
        row = run_row(ended=later(1), state="finished", partial=True, timeout_s=None)
        run_id = store.add_run(row)
        [found] = store.runs(run_id=run_id)
        assert found == RunRow(**{**vars(row), "id": run_id})

    def test_a_trial_is_read_back_as_it_was_written(self, store: Store) -> None:
        row = trial_row(store.add_run(run_row()), 10.5)
        trial_id = store.add_trial(row)
        view = store.trial(trial_id)
        assert view is not None
        assert vars(view.trial) == {**vars(row), "id": trial_id}
        assert (view.final_us, view.chosen, view.best_us) == (None, False, 10.5)

    def test_an_unknown_trial_is_none(self, store: Store) -> None:
        assert store.trial(10**6) is None

    def test_trials_come_newest_first_and_can_be_narrowed(self, store: Store) -> None:
        run_id = store.add_run(run_row("mine"))
        for second, us in ((1, 10.0), (3, None), (2, 11.0)):
            store.add_trial(trial_row(run_id, us, f"p{second}", created=later(second)))

        def names(**asked: Any) -> list[str]:
            keys = {"problem_key": "mine"}
            return [v.trial.program_key for v in store.trials(keys=keys, **asked)]

        assert names() == ["p3", "p2", "p1"]
        assert names(status="ok") == ["p2", "p1"]
        assert names(since=later(2)) == ["p3", "p2"]
        assert names(limit=1) == ["p3"]
        assert names(run_id=run_id + 1) == []

    def test_best_is_the_fastest_single_pass_until_a_race_was_run(self, store: Store) -> None:
        run_id = store.add_run(run_row("mine"))
        for name, us in (("a", 12.0), ("b", 10.0), ("c", 11.0), ("d", None)):
            store.add_trial(trial_row(run_id, us, name))
        assert self.best(store) == ["b", "c", "a"]
        race = [final_row(run_id, "a", 10.9, chosen=True), final_row(run_id, "b", 10.8)]
        peer = final_row(run_id, "cudnn", 9.0, kind="peer")
        store.add_finals([*race, peer])
        assert self.best(store) == ["a", "b", "c"]

    def test_the_newest_choice_wins_with_a_trial_of_an_older_run(self, store: Store) -> None:
        first = store.add_run(run_row("mine"))
        store.add_trial(trial_row(first, 10.0, "a"))
        store.add_trial(trial_row(first, 11.0, "b"))
        store.add_finals([final_row(first, "a", 10.0, chosen=True), final_row(first, "b", 11.0)])
        second = store.add_run(run_row("mine"))
        store.add_finals([final_row(second, "b", 13.0, chosen=True)])
        assert self.best(store) == ["b", "a"]

    def test_a_quarantined_source_is_never_best_and_never_gone(self, store: Store) -> None:
        run_id = store.add_run(run_row("mine"))
        ids = [store.add_trial(trial_row(run_id, us, "a")) for us in (9.0, 9.5)]
        store.add_trial(trial_row(run_id, 20.0, "b"))
        other = store.add_run(run_row("mine", device_key="other"))
        store.add_trial(trial_row(other, 9.0, "a"))
        assert store.quarantine(ids[0], "does not load")
        assert self.best(store) == ["b"]
        assert self.best(store, device_key="other") == ["a"]
        kept = [store.trial(trial_id) for trial_id in ids]
        assert [v.trial.quarantined for v in kept if v] == ["does not load"] * 2
        assert not store.quarantine(10**6, "nothing")

    def test_a_source_is_listed_once_in_each_bucket_device_and_toolchain(
        self, store: Store
    ) -> None:
        for device in ("dev", "dev", "other"):
            run_id = store.add_run(run_row("mine", device_key=device))
            store.add_trial(trial_row(run_id, 10.0, "a"))
            store.add_trial(trial_row(run_id, 9.0, "b"))
        found = store.best(each=2, keys={"problem_key": "mine"})
        assert [(v.run.device_key, v.trial.program_key) for v in found] == [
            ("dev", "b"),
            ("dev", "a"),
            ("other", "b"),
            ("other", "a"),
        ]
        assert len(store.best(keys={"problem_key": "mine"})) == 2

    def test_the_last_verdict_counts(self, store: Store) -> None:
        store.put_verdict(verdict_row(passed=False, program="new"))
        store.put_verdict(verdict_row(passed=True, program="new"))
        found = store.verdict("new", "dev", "tool", OLD_GATE)
        assert found == verdict_row(passed=True, program="new")
        assert store.verdict("new", "dev", "another", OLD_GATE) is None

    def test_each_gate_has_its_own_verdict(self, store: Store) -> None:
        passed, failed = (
            verdict_row(passed=ok, program="new", exactness=gate)
            for ok, gate in ((True, OLD_GATE), (False, "stricter"))
        )
        store.put_verdict(passed)
        assert store.verdict("new", "dev", "tool", "stricter") is None
        store.put_verdict(failed)
        assert store.verdict("new", "dev", "tool", OLD_GATE) == passed
        assert store.verdict("new", "dev", "tool", "stricter") == failed

    def test_trials_under_the_asked_gate_are_best_whatever_another_chose(
        self, store: Store
    ) -> None:
        old = store.add_run(run_row("mine"))
        for name, us in (("a", 9.0), ("b", 8.0), ("c", 7.0)):
            store.add_trial(trial_row(old, us, name))
        store.add_finals([final_row(old, "a", 6.0, chosen=True)])
        new = store.add_run(run_row("mine", exactness_policy="stricter"))
        again = [
            store.add_trial(trial_row(new, us, name)) for name, us in (("a", 20.0), ("b", 10.0))
        ]
        found = store.best(each=9, keys={"problem_key": "mine"}, exactness="stricter")
        assert [(v.trial.id, v.best_us, v.chosen) for v in found[:2]] == [
            (again[1], 10.0, False),
            (again[0], 20.0, False),
        ]
        assert [v.trial.program_key for v in found] == ["b", "a", "c"]
        assert self.best(store) == ["a", "c", "b"]

    def test_finals_come_fastest_first_and_unmeasured_ones_last(self, store: Store) -> None:
        run_id = store.add_run(run_row())
        missing = final_row(run_id, "flash", None, kind="peer", reason="needs sm_80")
        store.add_finals([missing, final_row(run_id, "b", 2.0), final_row(run_id, "a", 3.0)])
        store.add_finals([final_row(run_id, "a", 1.0, chosen=True)])
        assert [(f.name, f.median_us, f.reason, f.chosen) for f in store.finals(run_id)] == [
            ("a", 1.0, "", True),
            ("b", 2.0, "", False),
            ("flash", None, "needs sm_80", False),
        ]

    def test_a_run_ends_once(self, store: Store) -> None:
        run_id = store.add_run(run_row())
        store.end_run(run_id, "interrupted", partial=True, ended=later(5))
        store.end_run(run_id, "finished", partial=False, ended=later(9))
        [run] = store.runs(run_id=run_id)
        assert (run.state, run.partial, run.ended) == ("interrupted", True, later(5))

    def test_trials_are_counted_by_run_and_status(self, store: Store) -> None:
        run_id = store.add_run(run_row())
        for us in (1.0, 2.0, None):
            store.add_trial(trial_row(run_id, us))
        assert store.status_counts()[run_id] == {"ok": 2, "crashed": 1}

    # D01
    @pytest.mark.parametrize("us", [float("nan"), float("inf"), 0.0, -1.0, np.float32("nan")])
    def test_what_is_no_time_is_refused(self, store: Store, us: float) -> None:
        run_id = store.add_run(run_row())
        with pytest.raises(ValueError, match=r"finite|above 0"):
            store.add_trial(trial_row(run_id, 1.0, median_us=us))
        with pytest.raises(ValueError, match=r"finite|above 0"):
            trial_row(run_id, 1.0, samples_us=[1.0, us])
        with pytest.raises(ValueError, match=r"finite|above 0"):
            final_row(run_id, "a", us)
        assert store.trials(run_id=run_id) == []

    @pytest.mark.parametrize("value", [float("nan"), np.float64("inf"), object()])
    def test_what_strict_json_does_not_know_is_refused(self, store: Store, value: Any) -> None:
        run_id = store.add_run(run_row())
        with pytest.raises(ValueError, match=r"JSON|Out of range"):
            store.add_trial(trial_row(run_id, 1.0, facts={"registers": value}))
        assert store.trials(run_id=run_id) == []

    def test_a_time_without_a_zone_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="no zone"):
            store.add_run(run_row(started=datetime(2026, 1, 1)))

    def test_a_run_of_a_living_process_is_not_touched(self, store: Store) -> None:
        run_id = store.add_run(run_row())
        store.end_abandoned_runs(later(10**6))
        assert store.runs(run_id=run_id)[0].state == "running"

    @pytest.mark.parametrize(
        ("owner", "silence", "state"),
        [
            ({"owner_token": "started at another time"}, 0, "interrupted"),
            ({"owner_pid": 2**22 + 1}, 0, "interrupted"),
            ({"owner_host": "elsewhere"}, 599, "running"),
            ({"owner_host": "elsewhere"}, 601, "interrupted"),
        ],
    )
    def test_a_run_whose_owner_is_gone_becomes_interrupted(
        self, store: Store, owner: dict[str, Any], silence: int, state: str
    ) -> None:
        run_id = store.add_run(run_row(**owner))
        store.beat(run_id, later(100))
        store.end_abandoned_runs(later(100 + silence))
        [run] = store.runs(run_id=run_id)
        assert (run.state, run.partial) == (state, state == "interrupted")

    @staticmethod
    def best(store: Store, device_key: str = "dev") -> list[str]:
        keys = {"problem_key": "mine", "device_key": device_key}
        return [view.trial.program_key for view in store.best(each=9, keys=keys)]


# D01
def test_numpy_numbers_are_stored_as_numbers_and_found_by_plain_ones(tmp_path: Path) -> None:
    store = Store(tmp_path / "t.db", "write")
    run = run_row(
        seed=np.int64(3),
        trials_budget=np.int32(64),
        partial=np.bool_(True),
        timeout_s=np.float32(1.5),
        problem={"seq": np.int64(8192), "sizes": (np.int32(1), np.float32(0.5), np.bool_(True))},
    )
    run_id = np.int64(store.add_run(run))
    trial_id = store.add_trial(trial_row(run_id, np.float32(2.5), clocks_mhz=[np.int64(1980)]))
    found = store.trials(run_id=run_id)[0]
    assert found.run.problem == {"seq": 8192, "sizes": [1, 0.5, True]}
    assert (found.trial.id, found.trial.median_us, found.run.partial) == (trial_id, 2.5, True)
    run_types = (
        "typeof(id), typeof(seed), typeof(trials_budget), typeof(owner_pid), typeof(partial)"
    )
    assert sql(tmp_path / "t.db", f"SELECT {run_types} FROM run") == [("integer",) * 5]
    trial_types = "typeof(id), typeof(run_id), typeof(median_us), typeof(predicted_us)"
    assert sql(tmp_path / "t.db", f"SELECT {trial_types} FROM trial") == [
        ("integer", "integer", "real", "real")
    ]
    assert sql(tmp_path / "t.db", "SELECT clocks_mhz FROM trial") == [("[1980]",)]


# D04
def test_times_keep_their_instant_whatever_the_zones_of_writer_and_reader(tmp_path: Path) -> None:
    eastern = [datetime(2026, 11, 1, 1, 30, tzinfo=timezone(timedelta(hours=h))) for h in (-4, -5)]
    write = (
        "import sys, datetime as d; sys.path[:0] = sys.argv[3:]\n"
        "from store_rows import run_row; from tuning_db import Store\n"
        "at = d.datetime.fromtimestamp(float(sys.argv[2])).astimezone()\n"
        "Store(sys.argv[1], 'write').add_run(run_row(started=at))\n"
    )
    read = (
        "import sys, datetime as d; sys.path[:0] = sys.argv[3:]\n"
        "from tuning_db import Store\n"
        "since = d.datetime.fromtimestamp(float(sys.argv[2])).astimezone()\n"
        "store = Store(sys.argv[1])\n"
        "rows = store.runs() + store.runs(since=since)\n"
        "sys.stdout.write(repr([r.started.isoformat() for r in rows]))\n"
    )
    for at in reversed(eastern):
        python(write, tmp_path / "t.db", at.timestamp(), TZ="America/New_York")
    shown = python(read, tmp_path / "t.db", eastern[1].timestamp(), TZ="Asia/Tokyo")
    early, late = "2026-11-01T05:30:00+00:00", "2026-11-01T06:30:00+00:00"
    assert eval(shown) == [late, early, late]
    stored = [text for (text,) in sql(tmp_path / "t.db", "SELECT started FROM run")]
    assert stored == ["2026-11-01T06:30:00.000000Z", "2026-11-01T05:30:00.000000Z"]


# C02
@pytest.mark.parametrize(
    ("column", "value"),
    [("config", '{"family": "de'), ("created", "yesterday"), ("median_us", "fast")],
)
def test_a_damaged_row_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str, value: str
) -> None:
    store = Store(tmp_path / "t.db", "write")
    run_id = store.add_run(run_row())
    for name in "abc":
        store.add_trial(trial_row(run_id, 5.0, name))
    sql(tmp_path / "t.db", f"UPDATE trial SET {column} = '{value}' WHERE program_key < 'c'")
    assert [view.trial.program_key for view in store.trials()] == ["c"]
    [warning] = caplog.messages
    assert "2 damaged row(s)" in warning
    assert str(tmp_path / "t.db") in warning


def test_a_failure_in_the_middle_stores_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "t.db", "write")
    run_id = store.add_run(run_row())
    with pytest.raises(StoreError):
        store.add_finals([final_row(run_id, "a", 1.0), final_row(run_id + 1, "b", 1.0)])
    assert store.finals(run_id) == []


def test_a_row_that_holds_no_number_is_left_out_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    store = Store(path, "write")
    run_id = store.add_run(run_row())
    damaged, whole = (store.add_trial(trial_row(run_id, us)) for us in (1.0, 2.0))
    for stored in ("[1.0, null]", '["a"]', "[0.0]"):
        sql(path, "UPDATE trial SET samples_us = ? WHERE id = ?", stored, damaged)
        assert [view.trial.id for view in store.trials()] == [whole]


def test_winners_are_exported_and_imported(tmp_path: Path) -> None:
    lines = export_lines(Store(V2))
    [winner] = read_lines(lines)
    assert (winner.program_key, winner.median_us) == ("slow-but-chosen", 11.0)
    assert (winner.problem["shape"]["seq_q"], winner.checked_on) == (8192, "gpu")
    other = Store(tmp_path / "t.db", "write")
    assert import_lines(other, lines) == 1
    assert export_lines(other) == lines


@pytest.mark.parametrize("line", ["{}", "[1]", '{"problem": 1', "null"])
def test_a_line_that_is_no_winner_is_named(line: str) -> None:
    with pytest.raises(StoreError, match="Line 2"):
        read_lines([*export_lines(Store(V2)), line])
