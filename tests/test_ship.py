"""benchmarks/ship.py: what becomes a shipped record, what does not, and who is served it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import fagen
from fagen.cli.main import main as cli
from fagen.config import Config
from fagen.generate.families import FAMILIES, config_from_dict
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.outcome import GATE, Check, Outcome, Status, Timing, Verdict
from fagen.problem import Problem, make_problem, problem_from_dict
from fagen.records import Plan, Records
from fagen.serve import library
from fagen.serve.place import Place
from fagen.target import Target, Toolchain, preset, toolchain
from fagen.tune.ledger import Ledger
from fagen.tune.tuner import run
from fakes import FakeShop
from serve_fixtures import FakeMachine
from tuning_db import exchange

H200 = preset("h200")
SHORT, LONG = (make_problem(seq, 64, heads=2) for seq in (256, 1024))
LARGER = make_problem(4096, 64, heads=2)
PASSED = Verdict((Check("o_max", 0.1, 0.5),), H200.name)
FAILED = Verdict((Check("o_max", 0.6, 0.5),), H200.name)
SLOW, FAST = (Config("flash", FAMILIES["flash"].Knobs(64, n, 4)) for n in (64, 32))


@pytest.fixture(scope="module")
def ship(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ship", root / "benchmarks/ship.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shipped() -> Iterator[Path]:
    """Where `fagen.get` finds shipped records in a test."""
    library.forget()
    yield exchange.SHIPPED
    library.forget()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine()
    monkeypatch.setattr("fagen.run.kernel.load", fake.load)
    monkeypatch.setattr("fagen.judge.verify.Gate", fake.gate)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    return fake


def source(problem: Problem, config: Config) -> str:
    return render(problem, config, toolchain().triton_minor).key


def tuned(
    path: Path,
    problem: Problem = SHORT,
    us: dict[Config, float] | None = None,
    *,
    verdict: Verdict | None = PASSED,
    raced: bool = True,
    target: Target = H200,
    tools: Toolchain | None = None,
    gate: str = GATE,
    chosen: Config | None = None,
) -> Path:
    """One finished run added to a database; its race's times are half those of its trials."""
    times = us or {SLOW: 9.0, FAST: 7.0}
    with Records.open(str(path), "write", config_from_dict) as records:
        plan = Plan("graph", gate, "tpe", seed=0, trials=2, timeout_s=None)
        run = records.begin_run(problem, target, tools or toolchain(), plan)
        for config, one in times.items():
            key = source(problem, config)
            timing = Timing((one,), "graph")
            records.save(run, Outcome(config, Status.OK, "", key, verdict=verdict, timing=timing))
        if raced:
            winner = chosen or min(times, key=lambda config: times[config])
            finals = {source(problem, c): Timing((one / 2,), "graph") for c, one in times.items()}
            records.save_finals(run, finals, chosen=source(problem, winner))
        records.finish_run(run)
    return path


def written(ship: ModuleType, out: Path, *databases: Path) -> list[exchange.Winner]:
    words = ["--db", *map(str, databases), "--out", str(out)]
    assert ship.main(words) == 0
    return exchange.read_lines(out.read_text(encoding="utf-8").splitlines())


def test_the_winner_of_each_race_becomes_one_line(ship: ModuleType, tmp_path: Path) -> None:
    database = tuned(tmp_path / "a.db", LONG)
    tuned(database, SHORT, {SLOW: 9.0, FAST: 9.1}, chosen=FAST)  # alike within noise
    first, second = written(ship, tmp_path / "h200.jsonl", database)
    assert (first.problem, second.problem) == (SHORT.to_dict(), LONG.to_dict())
    assert (first.config, second.config) == (FAST.to_dict(), FAST.to_dict())
    assert (first.median_us, second.median_us) == (4.55, 3.5)
    assert second.checks[0]["error"] == 0.1


def test_two_problems_of_one_bucket_both_have_a_line(ship: ModuleType, tmp_path: Path) -> None:
    ragged = make_problem(1000, 64, heads=2)
    assert ragged.bucket_key == LONG.bucket_key
    database = tuned(tuned(tmp_path / "a.db", LONG), ragged, {SLOW: 8.0})
    lines = written(ship, tmp_path / "h200.jsonl", database)
    assert [line.problem["shape"]["seq_q"] for line in lines] == [1000, 1024]


def test_the_same_input_gives_the_same_bytes(ship: ModuleType, tmp_path: Path) -> None:
    database = tuned(tuned(tmp_path / "a.db", LONG), SHORT)
    out, other = tmp_path / "h200.jsonl", tmp_path / "other.jsonl"
    written(ship, out, database)
    first = out.read_bytes()
    written(ship, out, database)  # onto what it wrote
    written(ship, other, database)
    assert out.read_bytes() == other.read_bytes() == first
    assert first.endswith(b"}\n")


def test_of_one_problem_the_faster_is_kept_and_it_is_said(
    ship: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "h200.jsonl"
    written(ship, out, tuned(tmp_path / "a.db", SHORT, {SLOW: 9.0}))
    slower = tuned(tmp_path / "b.db", SHORT, {FAST: 10.0})
    assert [w.median_us for w in written(ship, out, slower)] == [4.5]
    faster = tuned(tuned(tmp_path / "c.db", SHORT, {FAST: 8.0}), LONG)
    assert [w.median_us for w in written(ship, out, faster)] == [4.0, 3.5]
    said = capsys.readouterr().out
    assert f"{SHORT}: 4.5 us is kept, not 5 us" in said
    assert f"{SHORT}: 4 us is kept, not 4.5 us" in said


GRADIENTS = replace(make_problem(1024, 64, heads=2), direction="backward")
IN_NO_ORDER, IN_TURNS, APART = (
    Config("flash_bwd_ws", FAMILIES["flash_bwd_ws"].Knobs(kv_block_m=128, dq=dq))
    for dq in ("reduce", "ordered", "kernel")
)


def test_beside_a_winner_that_may_differ_the_fastest_that_repeats_is_shipped(
    ship: ModuleType, tmp_path: Path
) -> None:
    out = tmp_path / "h200.jsonl"
    times = {IN_NO_ORDER: 8.0, IN_TURNS: 9.0, APART: 9.5}
    lines = written(ship, out, tuned(tmp_path / "a.db", GRADIENTS, times))
    assert [w.config["knobs"]["dq"] for w in lines] == ["reduce", "ordered"]
    # A faster one of another run takes the place of both: it repeats.
    lines = written(ship, out, tuned(tmp_path / "b.db", GRADIENTS, {APART: 7.0}))
    assert [w.config["knobs"]["dq"] for w in lines] == ["kernel"]


def test_who_asks_for_the_same_bits_is_served_the_shipped_kernel_that_gives_them(
    ship: ModuleType, tmp_path: Path, shipped: Path
) -> None:
    times = {IN_NO_ORDER: 8.0, IN_TURNS: 9.0}
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db", GRADIENTS, times))
    for deterministic, config in ((False, IN_NO_ORDER), (True, IN_TURNS)):
        kernel = fagen.get(GRADIENTS, target="h200", deterministic=deterministic)
        assert (kernel.origin, kernel.config) == ("shipped", config)
        said = library.why(GRADIENTS, target="h200", deterministic=deterministic)
        assert (said.origin, said.config) == ("shipped", config)
    with Records.open(str(tmp_path / "own.db"), "write", config_from_dict) as records:
        assert Ledger(records, GRADIENTS, H200, toolchain()).incumbent() == IN_NO_ORDER


def test_todays_gate_replaces_an_older_one_though_it_is_slower(
    ship: ModuleType, tmp_path: Path
) -> None:
    out = tmp_path / "h200.jsonl"
    [old] = written(ship, out, tuned(tmp_path / "a.db", SHORT, {FAST: 5.0}))
    out.write_text(ship.text_of([replace(old, exactness_policy="0: lax")]), encoding="utf-8")
    [new] = written(ship, out, tuned(tmp_path / "b.db", SHORT, {SLOW: 9.0}))
    assert (new.exactness_policy, new.median_us) == (GATE, 4.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"verdict": FAILED}, "no passed verdict"),
        ({"verdict": Verdict(())}, "no verdict"),
        ({"verdict": None}, "no verdict"),
        ({"gate": "0: lax"}, "judged by gate '0: lax'"),
        ({"raced": False}, "never raced"),
        ({"us": {Config("flash", FAMILIES["flash"].Knobs(16, 64, 4)): 5.0}}, "A tile of 16 rows"),
    ],
)
def test_what_must_not_be_served_is_not_shipped(
    ship: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: dict[str, object],
    said: str,
) -> None:
    out = tmp_path / "h200.jsonl"
    bad = tuned(tmp_path / "bad.db", SHORT, **words)  # type: ignore[arg-type]
    assert ship.main(["--db", str(bad), "--out", str(out)]) == 1
    assert not out.exists()
    told = capsys.readouterr().err
    assert f"left out: {bad}: {SHORT}: " in told
    assert said in told
    # A sound one beside it is shipped alone.
    [only] = written(ship, out, bad, tuned(tmp_path / "good.db", LONG))
    assert only.problem == LONG.to_dict()


def test_a_record_whose_keys_are_not_its_own_is_unfit(ship: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "h200.jsonl"
    [good] = written(ship, out, tuned(tmp_path / "a.db"))
    assert ship.why_unfit(good) is None
    assert "problem_key" in ship.why_unfit(replace(good, problem_key="f" * 16))
    assert "device_key" in ship.why_unfit(replace(good, target=preset("h100").to_dict()))
    strange = {"family": "of_tomorrow", "knobs": {}}
    assert "of_tomorrow" in ship.why_unfit(replace(good, config=strange))


def test_a_file_with_an_unfit_record_is_not_written_again(
    ship: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "h200.jsonl"
    database = tuned(tmp_path / "a.db")
    [good] = written(ship, out, database)
    spoilt = ship.text_of([replace(good, config={"family": "of_tomorrow", "knobs": {}})])
    out.write_text(spoilt, encoding="utf-8")
    assert ship.main(["--db", str(database), "--out", str(out)]) == 1
    assert "record 1" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == spoilt


def test_a_file_holds_one_device_and_toolchain(
    ship: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, out = toolchain(), tmp_path / "h200.jsonl"
    other = replace(here, ptxas="1.2.3")
    database = tuned(tuned(tmp_path / "a.db", target=preset("h100")), LONG, tools=other)
    tuned(database, SHORT)
    words = ["--db", str(database), "--out", str(out)]
    assert ship.main(words) == 2
    told = capsys.readouterr().err
    assert f"--device-key {preset('h100').device_key} --toolchain-key {here.key}" in told
    assert not out.exists()
    keys = ["--device-key", H200.device_key, "--toolchain-key", other.key]
    assert ship.main([*words, *keys]) == 0
    [only] = exchange.read_lines(out.read_text(encoding="utf-8").splitlines())
    assert (only.problem, only.toolchain["ptxas"]) == (LONG.to_dict(), "1.2.3")
    # What is there already counts, too.
    assert ship.main([*words, "--device-key", preset("h100").device_key]) == 2


def test_a_source_that_is_emitted_no_more_is_counted(
    ship: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database, out = tuned(tmp_path / "a.db"), tmp_path / "h200.jsonl"
    written(ship, out, database)
    assert "first use" not in capsys.readouterr().out
    monkeypatch.setattr(ship, "render", lambda problem, *words: render(LONG, SLOW, *words[1:]))
    written(ship, out, database)
    assert "1 of another source" in capsys.readouterr().out


def test_a_missing_database_and_a_name_that_is_not_read_are_refused(
    ship: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "h200.jsonl"
    assert ship.main(["--db", str(tmp_path / "none.db"), "--out", str(out)]) == 1
    assert "none.db" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ship.main(["--db", "a.db", "--out", str(tmp_path / "h200.json")])
    assert "*.jsonl" in capsys.readouterr().err


def test_a_shipped_shape_is_served_on_its_device_without_another_check(
    ship: ModuleType, tmp_path: Path, shipped: Path, machine: FakeMachine
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    device = fagen_device(H200)
    chosen = library.choose(device, "raise", SHORT)
    assert (chosen.origin, chosen.program.config) == ("shipped", FAST)
    assert len(machine.loaded) == 1
    assert (chosen.notes, machine.checked) == ((), [])


def test_what_ships_for_a_shape_is_a_seed_of_its_tuning_and_stays_until_it_is_beaten(
    ship: ModuleType, tmp_path: Path, shipped: Path
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    with Records.open(str(tmp_path / "own.db"), "write", config_from_dict) as records:
        here = Ledger(records, SHORT, H200, toolchain())
        assert here.history("fake timer") == []
        assert (here.neighbours()[0], here.incumbent()) == (FAST, FAST)
        # Another shape, device or toolchain: a seed, and nothing that is served there.
        for other in (
            Ledger(records, LARGER, H200, toolchain()),
            Ledger(records, SHORT, preset("a100"), toolchain()),
            Ledger(records, SHORT, H200, Toolchain("3.5.0", "1")),
        ):
            assert (other.neighbours()[0], other.incumbent()) == (FAST, None)
    tuned(tmp_path / "own.db", us={SLOW: 1.0})
    with Records.open(str(tmp_path / "own.db"), "write", config_from_dict) as records:
        assert Ledger(records, SHORT, H200, toolchain()).incumbent() == SLOW


def test_a_run_of_one_trial_tries_what_ships(
    ship: ModuleType, tmp_path: Path, shipped: Path
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    space = SearchSpace.of(SHORT, H200)
    assert space.seeds[0] != FAST
    with Records.open(str(tmp_path / "own.db"), "write", config_from_dict) as records:
        shop = FakeShop(ledger=Ledger(records, SHORT, H200, toolchain()))
        result = run(replace(shop.plan(space, trials=1), problem=SHORT, target=H200))
    assert result.winner is not None and result.winner.config == FAST


def test_get_and_why_name_a_shipped_record_and_its_time(
    ship: ModuleType, tmp_path: Path, shipped: Path
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    kernel = fagen.get(SHORT, target="h200")
    assert (kernel.origin, kernel.config) == ("shipped", FAST)
    assert "shipped" in repr(kernel)
    said = library.why(SHORT, target="h200")
    assert said.origin == "shipped"
    assert said.verdict == PASSED
    assert said.record is not None
    assert said.record.median_us == 3.5
    assert {f.name: f.match for f in said.fields}["device"] == "hit"
    assert said.next_step == ""
    assert library.why(LARGER, target="h200").next_step.startswith("Run: fagen tune")
    assert library.why(make_problem(4096, 64, heads=2), target="h200").origin == "nearest"


def test_what_came_with_fagen_is_listed_without_a_database(
    ship: ModuleType,
    tmp_path: Path,
    shipped: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    monkeypatch.delenv("FAGEN_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    capsys.readouterr()
    assert cli(["db", "best", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["origin"] for row in rows} == {"shipped"}
    assert {row["trial_id"] for row in rows} == {None}
    assert (str(SHORT), 3.5) in {(row["problem"], row["median_us"]) for row in rows}
    assert cli(["why", "--seq", "512", "--head-dim", "64", "--target", "h200"]) == 0
    assert "comes with fagen, tuned for" in capsys.readouterr().out


def test_a_broken_database_leaves_the_shipped_records(
    ship: ModuleType, tmp_path: Path, shipped: Path
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"no database" * 100)
    assert library.why(SHORT, target="h200", db=str(broken)).origin == "shipped"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda _: b"{}\n", "Line 1 is no exported winner"),
        (lambda _: b"\xff\xfe\n", "h200.jsonl is no text"),
        (lambda _: b"[" * 100_000, "Line 1 is no exported winner"),
        (lambda line: line.replace(b'"seq_q":256', b'"seq_q":"256"'), "row(s) of another version"),
        (lambda line: line.replace(b'"seq_q":256', b'"seq_q":512'), "row(s) of another version"),
    ],
)
def test_a_damaged_record_file_is_a_miss_with_a_warning(
    ship: ModuleType,
    tmp_path: Path,
    shipped: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
    said: str,
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    path = shipped / "h200.jsonl"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert library.why(SHORT, target="h200").origin in ("default", "nearest")
    assert any("shipped records" in line and said in line for line in caplog.messages)


def test_another_device_ignores_what_was_shipped(
    ship: ModuleType, tmp_path: Path, shipped: Path, machine: FakeMachine
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    for target in (preset("h100"), replace(H200, mig="1g.18gb")):
        assert fagen.get(SHORT, target=target).origin == "default"
        assert library.why(SHORT, target=target).origin == "default"
        assert library.choose(fagen_device(target), "nearest", SHORT).origin == "default"


def test_another_toolchain_checks_a_shipped_kernel_first(
    ship: ModuleType, tmp_path: Path, shipped: Path, machine: FakeMachine
) -> None:
    other = replace(toolchain(), ptxas="1.2.3")
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db", tools=other))
    chosen = library.choose(fagen_device(H200), "raise", SHORT)
    assert (chosen.origin, chosen.program.config) == ("shipped", FAST)
    assert machine.checked == [source(SHORT, FAST)]


def test_the_users_own_result_comes_before_a_shipped_one(
    ship: ModuleType, tmp_path: Path, shipped: Path
) -> None:
    written(ship, shipped / "h200.jsonl", tuned(tmp_path / "a.db"))
    own = tuned(tmp_path / "own.db", SHORT, {SLOW: 90.0})
    assert library.why(SHORT, target="h200", db=str(own)).origin == "tuned"


def test_committed_records_are_fit_and_as_ship_writes_them(
    ship: ModuleType, root: Path, tmp_path: Path
) -> None:
    folder = root / "tuning_db/records"
    assert (folder / "README.md").exists()
    unfit, differing = [], []
    for file in sorted(folder.glob("*.jsonl")):
        text = file.read_text(encoding="utf-8")
        winners = exchange.read_lines(text.splitlines())
        unfit += [(file.name, why) for w in winners if (why := ship.why_unfit(w)) is not None]
        # Of another source than was raced: its time says nothing, and it is checked at first use.
        unfit += [(file.name, w.problem) for w in winners if ship.emits_another_source(w)]
        if len(ship.places(winners)) != 1 or text != ship.text_of(ship.merged(winners)[0]):
            differing.append(file.name)
    assert (unfit, differing) == ([], [])


def test_what_was_raced_with_other_libraries_is_what_ships(root: Path) -> None:
    """The README's tables are of the kernels that a user is served."""
    lines = (root / "tuning_db/records/h200.jsonl").read_text(encoding="utf-8").splitlines()
    shipped: dict[str, str] = {}
    for winner in exchange.read_lines(lines):  # of a problem's lines the first is served
        shipped.setdefault(winner.problem_key, winner.program_key)
    parts = ("direction", "shape", "features")
    raced = {
        (name.name, problem_from_dict({part: cell["problem"][part] for part in parts}).key): cell
        for name in sorted((root / "benchmarks/results").glob("h200-*ward*.json"))
        for cell in json.loads(name.read_text(encoding="utf-8"))["cells"]
    }
    assert len(raced) >= 51  # both grids
    others = [
        (name, cell["problem"]["text"])
        for (name, key), cell in raced.items()
        if shipped.get(key) != cell["source"]
    ]
    assert others == []


def fagen_device(target: Target) -> Place:
    """A GPU of this kind, which is not there."""
    import torch

    return Place(target, toolchain(), torch.device("cuda", 0), None)


def test_lines_are_strict_json_with_every_field(ship: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "h200.jsonl"
    written(ship, out, tuned(tmp_path / "a.db"))
    [line] = out.read_text(encoding="utf-8").splitlines()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    plain = json.loads(line, parse_constant=refuse)
    assert set(plain) == set(exchange.Winner.__dataclass_fields__)
