"""Records: fagen's values in, the same values out, and what each database setting means."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fagen.errors import BadProblem, DatabaseError, UnknownTrial
from fagen.outcome import GATE, Check, Outcome, Seconds, Status, Timing, Verdict
from fagen.problem import Problem, make_problem
from fagen.records import Records, Staleness
from fagen.target import PRESETS, Toolchain
from store_rows import OLD_GATE, PLAN, TOOLCHAIN, V2, copy_of_v2, decode, demo, outcome, sql
from tuning_db import Store, exchange, schema

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROBLEM = make_problem(8192, 128)
H200, A100 = PRESETS["h200"], PRESETS["a100"]
OTHER_TRITON = replace(TOOLCHAIN, triton="3.6.0")


@pytest.fixture
def records() -> Iterator[Records]:
    with Records(Store(None, "write"), decode) as opened:
        yield opened


def begin(
    records: Records,
    problem: Problem = PROBLEM,
    target: Any = H200,
    tools: Toolchain = TOOLCHAIN,
    gate: str = GATE,
) -> int:
    return records.begin_run(problem, target, tools, replace(PLAN, exactness=gate))


def timing(us: float) -> Timing:
    return Timing((us,), PLAN.policy)


@pytest.mark.parametrize(
    "written",
    [
        outcome(10.0),
        outcome(None, status=Status.CRASHED, reason="illegal access", verdict=None, built=None),
        outcome(None, status=Status.PREDICTED, timing=None),
        Outcome(demo(128, "rotated"), Status.INVALID, "BLOCK_M 128 needs 8 warps."),
    ],
    ids=lambda written: str(written.status),
)
def test_an_outcome_is_read_back_as_it_was_saved(records: Records, written: Outcome) -> None:
    before = datetime.now(UTC)
    trial_id = records.save(begin(records), written)
    found = records.trial(trial_id)
    assert found.outcome == written
    assert (found.problem, found.target, found.toolchain) == (PROBLEM, H200, TOOLCHAIN)
    assert (found.median_us, found.trial_id) == (written.median_us, trial_id)
    assert before <= found.created <= datetime.now(UTC)
    assert records.history(PROBLEM, H200, TOOLCHAIN) == [written]


def test_errors_that_are_no_numbers_survive(records: Records) -> None:
    checks = tuple(
        Check(name, error, 1e-3)
        for name, error in (("nan", float("nan")), ("inf", float("inf")), ("fine", 1e-4))
    )
    wrong = outcome(None, status=Status.WRONG_RESULT, verdict=Verdict(checks, "gpu"))
    found = records.trial(records.save(begin(records), wrong)).verdict
    assert found is not None
    assert repr(found) == repr(wrong.verdict)
    assert [check.passed for check in found.checks] == [False, False, True]


@pytest.mark.parametrize("us", [float("nan"), float("inf"), 0.0, -2.0])
def test_a_time_that_is_none_is_refused(records: Records, us: float) -> None:
    run_id = begin(records)
    with pytest.raises(ValueError, match=r"finite|above 0"):
        records.save(run_id, outcome(us))
    with pytest.raises(ValueError, match=r"finite|above 0"):
        records.save_finals(run_id, {"p64": timing(us)})
    assert records.trials() == []


def test_a_run_is_listed_with_its_plan_and_counts(records: Records) -> None:
    run_id = begin(records)
    records.save(run_id, outcome(10.0))
    records.save(run_id, outcome(None, status=Status.TIMED_OUT))
    records.finish_run(run_id, interrupted=True)
    other = begin(records, make_problem(512, 64))
    records.finish_run(other)
    [run] = records.runs(problem=PROBLEM)
    assert (run.run_id, run.plan, run.state, run.partial) == (run_id, PLAN, "interrupted", True)
    assert (run.problem, run.target, run.toolchain) == (PROBLEM, H200, TOOLCHAIN)
    assert run.counts == {"ok": 1, "timed_out": 1}
    assert run.ended is not None
    assert run.started <= run.ended
    assert [r.run_id for r in records.runs()] == [other, run_id]
    assert records.runs(since=datetime.now(UTC) + timedelta(seconds=1)) == []
    assert [r.state for r in records.runs(run_id=other)] == ["finished"]


# O03
def test_a_run_whose_process_is_gone_is_shown_as_interrupted(tmp_path: Path) -> None:
    store = Store(tmp_path / "t.db", "write")
    records = Records(store, decode)
    mine = begin(records)
    killed = begin(records)
    sql(tmp_path / "t.db", "UPDATE run SET owner_token = 'x' WHERE id = ?", killed)

    def states() -> dict[int, tuple[str, bool]]:
        return {run.run_id: (run.state, run.partial) for run in records.runs()}

    assert states() == {mine: ("running", False), killed: ("interrupted", True)}
    assert [run.state for run in store.runs(run_id=killed)] == ["running"]
    newest = begin(records)
    assert [run.state for run in store.runs(run_id=killed)] == ["interrupted"]
    assert states()[newest] == ("running", False)


def test_history_is_the_last_outcome_of_each_config_of_this_very_key(records: Records) -> None:
    run_id = begin(records)
    records.save(run_id, outcome(None, status=Status.TIMED_OUT, block_m=64))
    records.save(run_id, outcome(12.0, block_m=128))
    records.save(begin(records), outcome(10.0, block_m=64))
    for other in (
        begin(records, make_problem(8191, 128)),
        begin(records, target=A100),
        begin(records, tools=OTHER_TRITON),
    ):
        records.save(other, outcome(1.0))
    history = records.history(PROBLEM, H200, TOOLCHAIN)
    assert [(o.config, o.median_us) for o in history] == [(demo(128), 12.0), (demo(64), 10.0)]
    newer_driver = replace(TOOLCHAIN, torch="2.14.1", driver="600")
    assert records.history(PROBLEM, H200, newer_driver) == history
    assert records.history(PROBLEM, H200, TOOLCHAIN, policy="warm") == []
    assert records.history(PROBLEM, H200, TOOLCHAIN, policy=PLAN.policy) == history


def test_the_choice_of_the_race_is_best_whatever_single_passes_said(records: Records) -> None:
    run_id = begin(records)
    for block_m, us in ((64, 10.0), (128, 10.5), (256, 9.0)):
        records.save(run_id, outcome(us, block_m=block_m))
    best = records.best(PROBLEM, H200)
    assert best is not None
    assert (best.config, best.chosen) == (demo(256), False)
    race = {"p64": timing(10.8), "p128": timing(10.2), "p256": timing(10.1)}
    peers, missing = {"cudnn": timing(9.5)}, {"flash3": "is not installed"}
    records.save_finals(run_id, race, peers=peers, missing=missing, chosen="p128")
    best = records.best(PROBLEM, H200)
    assert best is not None
    assert (best.config, best.chosen, best.median_us) == (demo(128), True, 10.2)
    assert best.outcome.median_us == 10.5
    assert [(f.name, f.kind, f.timing, f.reason, f.chosen) for f in records.finals(run_id)] == [
        ("cudnn", "peer", timing(9.5), "", False),
        ("p256", "program", timing(10.1), "", False),
        ("p128", "program", timing(10.2), "", True),
        ("p64", "program", timing(10.8), "", False),
        ("flash3", "peer", None, "is not installed", False),
    ]


def test_candidates_are_the_best_of_every_bucket_device_and_toolchain(records: Records) -> None:
    near = make_problem(1024, 128)
    for problem, target, tools, us in (
        (PROBLEM, H200, TOOLCHAIN, 10.0),
        (PROBLEM, A100, TOOLCHAIN, 20.0),
        (PROBLEM, H200, OTHER_TRITON, 11.0),
        (near, H200, TOOLCHAIN, 2.0),
        (make_problem(8192, 64), H200, TOOLCHAIN, 5.0),
    ):
        run_id = begin(records, problem, target, tools)
        records.save(run_id, outcome(us, block_m=64))
        records.save(run_id, outcome(us + 1, block_m=128))
        records.save(run_id, outcome(None, status=Status.WRONG_RESULT, block_m=256))
    found = records.candidates(PROBLEM.class_key, each=1)
    assert sorted((r.problem.shape.seq_q, r.target.name, r.median_us or 0) for r in found) == [
        (1024, H200.name, 2.0),
        (8192, A100.name, 20.0),
        (8192, H200.name, 10.0),
        (8192, H200.name, 11.0),
    ]
    assert len(records.candidates(PROBLEM.class_key)) == 8
    assert len(records.winners()) == 5
    assert records.best(make_problem(7000, 128), H200, TOOLCHAIN) is not None
    assert records.best(make_problem(512, 128), H200) is None


def test_predicted_rows_are_candidates_after_timed_ones_and_never_best(records: Records) -> None:
    run_id = begin(records)
    for block_m, us in ((64, 3.0), (128, 2.0)):
        guess = outcome(None, block_m=block_m, status=Status.PREDICTED, predicted_us=us)
        records.save(run_id, guess)
    assert records.best(PROBLEM, H200) is None
    assert [r.config for r in records.candidates(PROBLEM.class_key)] == [demo(128), demo(64)]
    records.save(run_id, outcome(50.0, block_m=256))
    assert [r.config for r in records.candidates(PROBLEM.class_key, each=1)] == [
        demo(256),
        demo(128),
    ]


@pytest.mark.parametrize(
    ("target", "tools", "program", "staleness"),
    [
        (H200, TOOLCHAIN, "p64", Staleness.EXACT),
        (H200, TOOLCHAIN, None, Staleness.EXACT),
        (H200, replace(TOOLCHAIN, torch="2.14.1", driver="600"), "p64", Staleness.EXACT),
        (replace(H200, memory_gbps=1.0), TOOLCHAIN, "p64", Staleness.EXACT),
        (H200, TOOLCHAIN, "edited", Staleness.OTHER_BUILD),
        (H200, OTHER_TRITON, "p64", Staleness.OTHER_BUILD),
        (H200, replace(TOOLCHAIN, ptxas="13.0.1"), None, Staleness.OTHER_BUILD),
        (A100, TOOLCHAIN, "p64", Staleness.OTHER_DEVICE),
        (replace(H200, mig="1g.18gb"), TOOLCHAIN, "p64", Staleness.OTHER_DEVICE),
    ],
)
def test_staleness_has_three_states(
    records: Records, target: Any, tools: Toolchain, program: str | None, staleness: Staleness
) -> None:
    record = records.trial(records.save(begin(records), outcome(10.0)))
    assert record.staleness(target, tools, program) is staleness


def test_what_another_gate_judged_is_verified_again_like_another_build(records: Records) -> None:
    record = records.trial(records.save(begin(records, gate=OLD_GATE), outcome(10.0)))
    assert record.exactness == OLD_GATE
    assert record.staleness(H200, TOOLCHAIN, "p64") is Staleness.OTHER_BUILD
    assert record.staleness(A100, TOOLCHAIN, "p64") is Staleness.OTHER_DEVICE


def test_history_and_winners_are_of_this_gate_first(records: Records) -> None:
    old = begin(records, gate=OLD_GATE)
    for block_m in (64, 128):
        records.save(old, outcome(5.0, block_m=block_m))
    records.save_finals(old, {"p64": timing(4.0)}, chosen="p64")
    assert records.history(PROBLEM, H200, TOOLCHAIN) == []
    assert [(r.config, r.exactness) for r in records.winners()] == [(demo(64), OLD_GATE)]
    slower = outcome(50.0, block_m=128)
    records.save(begin(records), slower)
    assert records.history(PROBLEM, H200, TOOLCHAIN) == [slower]
    [winner] = records.winners()
    assert (winner.config, winner.median_us, winner.exactness) == (demo(128), 50.0, GATE)
    assert [r.config for r in records.candidates(PROBLEM.class_key)] == [demo(128), demo(64)]


def test_a_quarantined_trial_is_kept_and_no_answer(records: Records) -> None:
    run_id = begin(records)
    bad = records.save(run_id, outcome(5.0, block_m=64))
    records.save(run_id, outcome(6.0, block_m=128))
    records.quarantine(bad, "does not load")
    best = records.best(PROBLEM, H200)
    assert best is not None
    assert best.config == demo(128)
    assert [r.config for r in records.candidates(PROBLEM.class_key)] == [demo(128)]
    assert [o.config for o in records.history(PROBLEM, H200, TOOLCHAIN)] == [demo(128)]
    assert records.trial(bad).quarantined == "does not load"


def test_an_unknown_trial_is_an_error(records: Records) -> None:
    with pytest.raises(UnknownTrial, match="42"):
        records.trial(42)
    with pytest.raises(UnknownTrial, match="42"):
        records.quarantine(42, "nothing")


def test_the_last_verdict_of_a_source_device_and_toolchain_counts(records: Records) -> None:
    keys = ("p64", H200.device_key, TOOLCHAIN.key)
    failed, passed = (Verdict((Check("o", e, 1e-3),), "gpu") for e in (1.0, 1e-4))
    assert records.verdict(*keys) is None
    records.save_verdict(*keys, failed)
    records.save_verdict(*keys, passed)
    assert records.verdict(*keys) == passed
    assert records.verdict("p64", A100.device_key, TOOLCHAIN.key) is None


def test_a_verdict_is_worth_only_under_the_gate_that_gave_it(records: Records) -> None:
    keys = ("p64", H200.device_key, TOOLCHAIN.key)
    passed, failed = (Verdict((Check("o", e, 1e-3),), "gpu") for e in (1e-4, 1.0))
    records.save_verdict(*keys, passed, exactness=OLD_GATE)
    assert records.verdict(*keys) is None
    records.save_verdict(*keys, failed)
    assert records.verdict(*keys) == failed
    assert records.verdict(*keys, exactness=OLD_GATE) == passed


def test_rows_of_another_version_are_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.db"
    records = Records(Store(path, "write"), decode)
    run_id = begin(records)
    for block_m in (16, 32, 64, 128, 256):
        records.save(run_id, outcome(float(block_m), block_m=block_m))
    strange = [
        json.dumps({"family": "of_tomorrow", "knobs": {}}),
        json.dumps({"family": "demo", "knobs": {"block_q": 1}}),
        json.dumps(["demo"]),
    ]
    for trial_id, config in enumerate(strange, 1):
        sql(path, "UPDATE trial SET config = ? WHERE id = ?", config, trial_id)
    sql(path, "UPDATE trial SET status = 'of tomorrow' WHERE id = 4")
    for trial_id, why in ((1, "'of_tomorrow' is unknown"), (2, "block_q"), (4, "of tomorrow")):
        with pytest.raises(UnknownTrial, match=rf"Trial {trial_id} is of another.*{why}"):
            records.trial(trial_id)
    assert [r.config for r in records.trials()] == [demo(256)]
    [warning] = caplog.messages
    assert "4 row(s)" in warning
    best = records.best(PROBLEM, H200)
    assert best is not None
    assert best.config == demo(256)


def test_shipped_winners_are_candidates_of_their_own(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(None, "write")) as store:
        Records(store, decode).save(begin(Records(store, decode)), outcome(10.0))
        (tmp_path / "h200.jsonl").write_text("\n".join(exchange.export_lines(store)))
    monkeypatch.setattr(exchange, "SHIPPED", tmp_path)
    exchange.shipped_rows.cache_clear()
    try:
        found = records.candidates(PROBLEM.class_key)
    finally:
        exchange.shipped_rows.cache_clear()
    [record] = found
    assert (record.shipped, record.trial_id, record.median_us) == (True, 0, 10.0)
    assert (record.problem, record.target, record.config) == (PROBLEM, H200, demo(64))
    assert record.verdict == outcome(10.0).verdict
    assert record.staleness(H200, TOOLCHAIN, "p64") is Staleness.EXACT


def test_the_default_file_may_be_missing_when_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAGEN_DB")
    monkeypatch.setattr("fagen.settings.default_database_path", lambda: tmp_path / "d" / "t.db")
    with Records.open(None, "read", decode) as records:
        assert (records.trials(), records.runs(), records.winners()) == ([], [], [])
        assert "does not exist yet" in Records.describe(None)
        assert list(tmp_path.iterdir()) == []
    with Records.open(None, "write", decode) as records:
        records.save(begin(records), outcome(10.0))
    with Records.open(None, "read", decode) as records:
        assert len(records.trials()) == 1
    assert "1 runs, 1 trials" in Records.describe(None)


def test_a_named_file_must_be_there_when_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, in_variable = tmp_path / "a.db", tmp_path / "b.db"
    monkeypatch.setenv("FAGEN_DB", str(in_variable))
    for setting, missing in ((str(named), named), (None, in_variable)):
        with pytest.raises(DatabaseError, match=missing.name) as raised:
            Records.open(setting, "read", decode)
        assert raised.value.exit_code == 1
        assert raised.value.next_step
    with Records.open(None, "write", decode):
        assert in_variable.is_file()
    with Records.open(f"sqlite:///{named}", "write", decode):
        assert named.is_file()


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("content", [b"hello", V2.read_bytes()[:100]])
def test_a_bad_file_is_named_and_never_deleted(tmp_path: Path, mode: Any, content: bytes) -> None:
    path = tmp_path / "bad.db"
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match=str(path)) as raised:
        Records.open(str(path), mode, decode)
    assert raised.value.next_step
    assert path.read_bytes() == content
    with pytest.raises(DatabaseError, match=str(path)):
        Records.describe(str(path))


def test_reading_writes_verdicts_and_quarantine_marks_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with Records.open(str(path), "write", decode) as records:
        trial_id = records.save(begin(records), outcome(10.0))
    keys = ("p64", H200.device_key, TOOLCHAIN.key)
    passed = Verdict((Check("o", 1e-4, 1e-3),), "gpu")
    with Records.open(str(path), "read", decode) as records:
        records.save_verdict(*keys, passed)
        records.quarantine(trial_id, "does not load")
        assert records.verdict(*keys) == passed
        assert records.best(PROBLEM, H200) is None
        with pytest.raises(DatabaseError):
            begin(records)


# D05
def test_an_older_file_is_never_migrated_for_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_v2(tmp_path)
    with Records.open(str(path), "read", decode) as records:
        before = path.read_bytes()
        monkeypatch.setattr(schema, "HEAD", 3)
        with pytest.raises(DatabaseError, match="schema version 2"):
            records.save_verdict("p", "d", "t", Verdict(()))
    with pytest.raises(DatabaseError, match="fagen db check"):
        Records.open(str(path), "read", decode)
    assert path.read_bytes() == before


# D05
@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_database_of_version_2_still_answers(tmp_path: Path, mode: Any) -> None:
    with Records.open(str(copy_of_v2(tmp_path)), mode, decode) as records:
        best = records.best(PROBLEM, H200, TOOLCHAIN)
        assert best is not None
        assert (best.config, best.median_us, best.outcome.median_us) == (demo(128), 11.0, 10.5)
        assert best.outcome.seconds == Seconds(2.5, 0.25, 0.125)
        assert best.staleness(H200, TOOLCHAIN, "slow-but-chosen") is Staleness.OTHER_BUILD
        assert (best.exactness, records.history(PROBLEM, H200, TOOLCHAIN)) == (OLD_GATE, [])
        asked = {"policy": PLAN.policy, "exactness": OLD_GATE}
        history = records.history(PROBLEM, H200, TOOLCHAIN, **asked)
        assert {(o.config, o.status.value) for o in history} == {
            (demo(64), "ok"),
            (demo(128), "ok"),
            (demo(256), "crashed"),
        }
        keys = ("slow-but-chosen", H200.device_key, TOOLCHAIN.key)
        assert records.verdict(*keys) is None
        verdict = records.verdict(*keys, exactness=OLD_GATE)
        assert verdict is not None
        assert verdict.passed
        assert [(f.name, f.reason) for f in records.finals(1)][-1] == ("flash", "not built")
        if mode == "write":
            records.save(begin(records), outcome(1.0, block_m=16))
            assert [o.config for o in records.history(PROBLEM, H200, TOOLCHAIN)] == [demo(16)]


# D01
def test_a_winner_stored_with_sizes_of_numpy_and_torch_is_found_by_plain_ones(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.db"
    heads, seq = torch.Size([16, 8192])
    odd = make_problem(np.int64(8192), np.uint8(128), heads=heads, seq_kv=seq, batch=np.int32(1))
    with Records.open(str(path), "write", decode) as records:
        records.save(begin(records, odd), outcome(float(np.float32(10.5))))
    with Records.open(str(path), "read", decode) as records:
        best = records.best(PROBLEM, H200)
        assert best is not None
        assert (best.problem, best.median_us) == (PROBLEM, 10.5)
    [(text,)] = sql(path, "SELECT problem FROM run")
    assert json.loads(text)["shape"]["seq_q"] == 8192
    with pytest.raises(BadProblem, match="whole number, got True"):
        make_problem(8192, 128, heads=True)
