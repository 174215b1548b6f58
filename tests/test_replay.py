"""Data sets and searches on them: records.dataset, tune.replay, fagen db export, bench-tuner."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import ClassVar

import pytest

from fagen.cli.main import main
from fagen.config import Config
from fagen.errors import DatabaseError
from fagen.generate.families import config_from_dict
from fagen.outcome import GATE, Outcome, Seconds, Status, Timing
from fagen.problem import Problem, make_problem
from fagen.records import Plan, Records, dataset
from fagen.records.dataset import Dataset, Measured
from fagen.target import Toolchain, preset
from fagen.tune.replay import (
    STRATEGIES,
    Course,
    RandomOrder,
    checkpoints,
    quantile,
    replay,
    scores,
)
from fakes import PASSED, formula_us, full_space

H200, TOOLS = preset("h200"), Toolchain("3.6.0", "12.8.93", "2.11.0", "")
POLICY = "graph-test"
PROBLEM = full_space().problem
COSTS = Seconds(4.0, 0.4, 0.2)


def row(config: Config, *medians_us: float) -> Measured:
    passes = tuple((us, us, us) for us in medians_us)
    status = Status.OK if medians_us else Status.LINT_REJECTED
    return Measured(config, status, "" if medians_us else "spills", passes, COSTS, config.key)


def space(count: int = 400, noise: float = 0.003) -> Dataset:
    """Of the fake formula, each config in two noisy passes, and every twentieth a failure. Whole
    but for some knobs that are held, so that neighbours have neighbours."""
    dice = random.Random(1)
    configs = [
        c
        for c in full_space().configs
        if c.family == "kv_outer" or (c.family == "flash" and c.knobs.max_registers == 0)
    ]
    configs = [c for c in configs if getattr(c.knobs, "order", "tiles_first") == "tiles_first"]
    configs = [c for c in configs if getattr(c.knobs, "loads", "tma") == "tma"][:count]
    rows = [
        row(c)
        if i % 20 == 7
        else row(c, *(formula_us(c) * dice.gauss(1, noise) for _ in range(2)))
        for i, c in enumerate(configs)
    ]
    return Dataset(PROBLEM, H200, TOOLS, POLICY, GATE, tuple(rows))


def stored(
    path: Path, *runs: dict[Config, float | None], problem: Problem = PROBLEM, **other: object
) -> Path:
    """A database with a run for each mapping of configs to times; None is a failure."""
    with Records.open(str(path), "write", config_from_dict) as records:
        for times in runs:
            plan = Plan(POLICY, GATE, "test", 0, None, None)
            tools = replace(TOOLS, **other)  # type: ignore[arg-type]
            run = records.begin_run(problem, H200, tools, plan)
            for config, us in times.items():
                outcome = Outcome(config, Status.WRONG_RESULT, "wrong", config.key, seconds=COSTS)
                if us is not None:
                    timing = Timing((us, us + 1, us - 1), POLICY)
                    outcome = replace(
                        outcome, status=Status.OK, reason="", verdict=PASSED, timing=timing
                    )
                records.save(run, outcome)
            records.finish_run(run)
    return path


def collected(path: Path) -> tuple[Dataset, int]:
    with Records.open(str(path), "read", config_from_dict) as records:
        return dataset.collected(records, PROBLEM)


def test_a_database_becomes_a_data_set_and_a_file_and_is_read_back(tmp_path: Path) -> None:
    a, b, c = full_space().configs[:3]
    db = stored(tmp_path / "t.db", {a: 10.0, b: 20.0, c: None}, {b: 22.0, a: 11.0})
    found, left_out = collected(db)
    assert left_out == 0
    assert [(r.config, r.status, r.medians_us) for r in found.rows] == [
        (a, Status.OK, (10.0, 11.0)),
        (b, Status.OK, (20.0, 22.0)),
        (c, Status.WRONG_RESULT, ()),
    ]
    assert found.rows[0].true_us == 10.5 and found.optimum_us == 10.5
    assert {r.seconds for r in found.rows} == {COSTS}
    for name in ("d.jsonl", "d.jsonl.gz"):
        dataset.write(found, tmp_path / name)
        assert dataset.read(tmp_path / name, config_from_dict) == found
    first = (tmp_path / "d.jsonl.gz").read_bytes()
    dataset.write(found, tmp_path / "d.jsonl.gz")
    assert (tmp_path / "d.jsonl.gz").read_bytes() == first
    assert gzip.decompress(first) == (tmp_path / "d.jsonl").read_bytes()


def test_what_was_clearly_slower_is_timed_and_never_the_best() -> None:
    a, b = full_space().configs[:2]
    slower = replace(row(b, 5.0), status=Status.SLOWER)
    course = Course(Dataset(PROBLEM, H200, TOOLS, POLICY, GATE, (row(a, 10.0), slower)))
    assert course.optimum_us == 10.0 and course.told(0)[b] == 5.0
    assert replay(course, RandomOrder(course, 0, 2), 2, 0).found[-1] == 1.0


def test_who_has_tried_slower_ones_alone_picks_the_best_of_them() -> None:
    a, b, c = full_space().configs[:3]
    slower = [replace(row(x, us), status=Status.SLOWER) for x, us in ((b, 12.5), (c, 20.0))]
    course = Course(Dataset(PROBLEM, H200, TOOLS, POLICY, GATE, (row(a, 10.0), *slower)))

    class Order:
        left: ClassVar = [a, b, c]

        def ask(self) -> Config | None:
            return self.left.pop() if self.left else None

        def tell(self, config: Config, value_us: float | None) -> None:
            pass

    assert replay(course, Order(), 3, 0).found == (0.5, 0.8, 1.0)


def test_what_failed_in_the_end_has_no_time(tmp_path: Path) -> None:
    a, b = full_space().configs[:2]
    found, _ = collected(stored(tmp_path / "t.db", {a: 10.0, b: 5.0}, {b: None}))
    assert found.optimum_us == 10.0
    assert found.rows[1].passes_us == () and found.rows[1].reason == "wrong"


def test_one_toolchain_alone_and_the_rest_is_counted(tmp_path: Path) -> None:
    a, b, c = full_space().configs[:3]
    db = stored(tmp_path / "t.db", {a: 5.0}, triton="3.7.0")
    stored(db, {a: 10.0, b: 20.0, c: None})
    found, left_out = collected(db)
    assert (len(found.rows), found.optimum_us, left_out) == (3, 10.0, 1)
    assert found.toolchain.triton == "3.6.0"


def test_nothing_timed_is_said(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="Nothing was timed"):
        collected(stored(tmp_path / "t.db", {full_space().configs[0]: None}))


def edited(data: bytes, twice: bool = False, **fields: object) -> bytes:
    """With other fields in the first row, or with the second one like the first."""
    head, first, second, *rest = gzip.decompress(data).splitlines()
    row = json.dumps({**json.loads(first), **fields}).encode()
    return b"\n".join([head, row, row if twice else second, *rest]) + b"\n"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "no data set"),
        (lambda data: b"", "no data set"),
        (lambda data: b"hello\n", "no data set"),
        (lambda data: b"[1]\n", "no data set"),
        (lambda data: gzip.decompress(data).replace(b'"schema":1', b'"schema":7'), "schema is 7"),
        (lambda data: gzip.decompress(data).rsplit(b"\n", 2)[0] + b"\n", "holds 399 of 400"),
        (lambda data: gzip.decompress(data).replace(b'"flash"', b'"gone"'), "gone"),
        (lambda data: gzip.decompress(data).replace(b"passes_us", b"passes"), "passes_us"),
        (lambda data: data[:80] + b"?" + data[81:], "no data set"),
        (lambda data: b"[" * 100_000, "no data set"),
        (lambda data: edited(data, passes_us=[[0.0]]), "not above 0"),
        (lambda data: edited(data, passes_us=[[1.0, float("nan")]]), "not above 0"),
        (lambda data: edited(data, passes_us=[[]]), "not above 0"),
        (lambda data: edited(data, seconds=[1.0, -1.0, 0.0]), "seconds"),
        (lambda data: edited(data, twice=True), "twice"),
        (
            lambda data: gzip.decompress(data).replace(b'"sm_count":132', b'"sm_count":0'),
            "sm_count",
        ),
    ],
)
def test_a_file_that_is_no_whole_data_set_is_refused(
    damage: object, said: str, tmp_path: Path
) -> None:
    found = space()
    found = replace(found, rows=found.rows[:400])
    path = tmp_path / "d.jsonl.gz"
    dataset.write(found, path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DatabaseError, match=said) as caught:
        dataset.read(path, config_from_dict)
    assert str(path) in caught.value.message and "fagen db export" in caught.value.next_step
    with pytest.raises(DatabaseError, match="No such file"):
        dataset.read(tmp_path / "none.gz", config_from_dict)


def test_a_replay_tells_what_was_measured_and_spends_what_it_took() -> None:
    course = Course(space())
    searcher = RandomOrder(course, 3, 40)
    order, told = [], {}

    class Watched:
        def ask(self) -> Config | None:
            order.append(searcher.ask())
            return order[-1]

        def tell(self, config: Config, value_us: float | None) -> None:
            told[config] = value_us

    run = replay(course, Watched(), 40, 5)
    assert list(told) == order and len(order) == 40
    for config, value in told.items():
        medians = course.rows[config].medians_us
        assert value in medians if medians else value is None
    # 40 builds of 4 s on 16 cores beside 40 times 0.6 s on the device.
    assert run.seconds[0] == pytest.approx(4.6)
    assert run.seconds[15] == pytest.approx(4.0 + 16 * 0.6)
    assert run.seconds[-1] <= 4.0 + 40 * 0.6 + 4.0
    right = [c for c, value in told.items() if value is not None]
    picked = sorted(right, key=lambda c: told[c] or 0.0)[:4]
    best = min(course.rows[c].true_us or 0.0 for c in picked)
    assert run.found[-1] == pytest.approx(course.optimum_us / best)


def test_a_search_that_ends_early_keeps_what_it_found() -> None:
    found = space()
    course = Course(replace(found, rows=found.rows[:5]))
    run = replay(course, RandomOrder(course, 0, 64), 64, 0)
    assert len(run.found) == 5 and run.found[-1] == 1.0
    assert scores(course, STRATEGIES["random"], 64, range(3))[64].median == 1.0


def test_of_the_seeds_only_those_that_were_measured_count() -> None:
    seed = full_space().seeds[0]
    with_it = replace(space(), rows=(*space(80).rows, row(seed, 10.0)))
    assert Course(with_it).space.seeds == (seed,)
    assert seed not in Course(space(80)).space.seeds


@pytest.mark.parametrize("name", [n for n in STRATEGIES if n != "no-seeds-gp"])  # needs scipy
def test_every_strategy_runs_and_is_the_same_for_the_same_seed(name: str) -> None:
    course = Course(space(80))
    first, second = (scores(course, STRATEGIES[name], 24, range(2)) for _ in range(2))
    assert first == second
    assert list(first) == [16, 24]
    assert 0.5 < first[24].p10 <= first[24].median <= 1.0
    assert 0.0 < first[16].seconds < first[24].seconds


def test_the_search_beats_random_order_where_nothing_is_known() -> None:
    course = Course(space())
    seeds = range(10)
    found = {name: scores(course, STRATEGIES[name], 64, seeds) for name in ("blind", "random")}
    assert found["blind"][64].median >= 0.95
    assert found["blind"][64].median > found["random"][64].median
    assert found["blind"][64].p10 > found["random"][64].p10


def test_checkpoints_and_quantiles() -> None:
    assert checkpoints(64) == [16, 32, 64]
    assert checkpoints(100) == [16, 32, 64, 100]
    assert checkpoints(5) == [5]
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert quantile(values, 0.5) == median(values)
    assert (quantile(values, 0.0), quantile(values, 1.0), quantile(values, 0.1)) == (1.0, 5.0, 1.4)


def test_export_and_replay_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {r.config: r.true_us for r in space().rows[::4]}
    problem = make_problem(1024, 128)
    assert problem == PROBLEM
    db = stored(tmp_path / "t.db", times)
    out = tmp_path / "d.jsonl.gz"
    words = ["db", "export", "--seq", "1024", "--head-dim", "128", "--db", str(db)]
    assert main([*words, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert f"{len(times)} configs" in said.out and f"--replay {out}" in said.err
    assert main([*words, "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*words, "--out", str(out), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["configs"] == len(times)

    shown = ["bench-tuner", "--replay", str(out), "--trials", "20", "--seeds", "2"]
    assert main([*shown, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["strategies"]) == {"default", "no-seeds", "random"}
    assert set(found["strategies"]["default"]) == {"16", "20"}
    assert {"median", "p10"} <= set(found["strategies"]["random"]["20"])
    assert (found["trials"], found["seeds"], found["configs"]) == (20, 2, len(times))
    assert main([*shown, "--strategy", "blind"]) == 0
    assert "blind" in capsys.readouterr().out
    assert main([*shown, "--strategy", "clever"]) == 2
    assert "no strategy 'clever'" in capsys.readouterr().err
    assert main(["bench-tuner", "--replay", str(tmp_path / "none")]) == 1
    assert "fagen db export" in capsys.readouterr().err
    before = db.read_bytes()
    for name in (db, db.with_name(f"{db.name}-wal")):
        assert main([*words, "--out", str(name), "--force"]) == 2
        assert "is the database" in capsys.readouterr().err
        assert main(["repro", "1", "--db", str(db), "--out", str(name), "--force"]) == 2
        assert "is the database" in capsys.readouterr().err
    assert db.read_bytes() == before
    assert main([*words[:3], "77", *words[4:], "--out", str(tmp_path / "e.gz")]) == 1
    assert "Nothing was timed" in capsys.readouterr().err
    assert not (tmp_path / "e.gz").exists()
