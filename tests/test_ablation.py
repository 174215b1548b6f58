"""benchmarks/ablation.py: ratios of stored trials whose times are a formula of their knobs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import fields
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fagen.config import Config
from fagen.generate.families import FAMILIES, config_from_dict
from fagen.outcome import GATE, Check, Outcome, Status, Timing, Verdict
from fagen.problem import Problem, make_problem
from fagen.records import Plan, Records
from fagen.target import Target, Toolchain, preset

H200 = preset("h200")
TOOLS = Toolchain("3.6.0", "12.8.93", "2.11.0")
FULL = make_problem(512, 64)
CAUSAL = make_problem(512, 64, causal=True)
PASSED = Verdict((Check("o_max", 0.1, 0.5),), H200.name)

Times = Iterable[tuple[Config, float]]


@pytest.fixture(scope="module")
def ablation(root: Path) -> Iterable[ModuleType]:
    spec = importlib.util.spec_from_file_location("ablation", root / "benchmarks/ablation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ablation"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["ablation"]


def flash(**knobs: Any) -> Config:
    return Config("flash", FAMILIES["flash"].Knobs(**knobs))


def slim() -> Config:
    return Config("slim", FAMILIES["slim"].Knobs())


def tuned(
    path: Path,
    times: Times,
    problem: Problem = FULL,
    *,
    won: Config | None = None,
    target: Target = H200,
    status: Status = Status.OK,
    policy: str = "graph",
) -> Path:
    """One finished run added to a database; `won` is the config that its race chose."""
    with Records.open(str(path), "write", config_from_dict) as records:
        plan = Plan(policy, GATE, "tpe", seed=0, trials=None, timeout_s=None)
        run = records.begin_run(problem, target, TOOLS, plan)
        for config, us in times:
            timing = Timing((us * 1.1, us, us * 0.9), policy)
            records.save(run, Outcome(config, status, "", config.key, "", None, PASSED, timing))
        if won is not None:
            records.save_finals(run, {won.key: Timing((1.0,), policy)}, chosen=won.key)
        records.finish_run(run)
    return path


def square() -> Times:
    """16 configs: stages 3 take 0.9 of 2, blocks of 64 take 1.5 of 128, tma 0.8 of pointers
    with 2 stages and nothing else with 3."""
    for stages, block, loads in product((2, 3), (128, 64), ("pointer", "tma")):
        us = 100.0 * (0.9 if stages == 3 else 1.0) * (1.5 if block == 64 else 1.0)
        us *= 0.8 if loads == "tma" and stages == 2 else 1.0
        yield flash(block_n=block, num_stages=stages, loads=loads), us


def only(ablation: ModuleType, *databases: Path, family: str | None = None) -> Any:
    [shape] = ablation.shapes(ablation.read(map(str, databases)), family)
    return shape


def change(shape: Any, *knobs: str) -> Any:
    [found] = [c for c in shape.changes if c.knobs == knobs]
    return found


def table_rows(text: str, title: str) -> dict[str, list[str]]:
    """The cells of the table under a heading, by knob and change."""
    under = text.split(f"{title}\n")[1].split("\n#")[0]
    lines = [line.strip("| ").split(" | ") for line in under.splitlines() if line[:1] == "|"]
    return {f"{line[0]} {line[1]}": line[2:] for line in lines[2:]}


def test_pairs_that_differ_in_one_knob_are_compared(ablation: ModuleType, tmp_path: Path) -> None:
    shape = only(ablation, tuned(tmp_path / "a.db", square()))
    block = change(shape, "block_n")
    assert (block.before, block.after) == ((64,), (128,))  # the declared order, not the stored
    assert block.ratios == pytest.approx([1 / 1.5] * 4)
    loads = change(shape, "loads")
    assert loads.ratios == pytest.approx([0.8, 0.8, 1.0, 1.0])
    assert shape.pairs == 12


def test_a_held_knob_loses_what_the_best_with_it_loses(
    ablation: ModuleType, tmp_path: Path
) -> None:
    shape = only(ablation, tuned(tmp_path / "a.db", square()))
    assert shape.best.us == pytest.approx(80.0)
    held = {c.knobs[0]: (c.best_before, c.best_after) for c in shape.changes}
    assert held["block_n"] == pytest.approx((1.5, 1.0))
    assert held["num_stages"] == pytest.approx((1.0, 90 / 80))
    assert held["loads"] == pytest.approx((90 / 80, 1.0))


def test_pairs_of_two_runs_are_none(ablation: ModuleType, tmp_path: Path) -> None:
    fast, slow = flash(num_stages=2), flash(num_stages=3)
    path = tuned(tmp_path / "a.db", [(fast, 10.0)])
    shape = only(ablation, tuned(path, [(slow, 20.0)]))
    assert change(shape, "num_stages").ratios == ()
    assert change(shape, "num_stages").best_after == pytest.approx(2.0)
    # Runs of two databases have the same number and are two all the same.
    other = tuned(tmp_path / "b.db", [(slow, 20.0)])
    first = tuned(tmp_path / "c.db", [(fast, 10.0)])
    assert change(only(ablation, first, other), "num_stages").ratios == ()


def test_knobs_that_a_rule_ties_change_together(ablation: ModuleType, tmp_path: Path) -> None:
    always = flash(rescale_tau=0.0, rescale_skip="never")
    rarely = flash(rescale_tau=8.0, rescale_skip="branch")
    shape = only(ablation, tuned(tmp_path / "a.db", [(always, 10.0), (rarely, 9.0)]))
    assert change(shape, "rescale_tau").ratios == ()
    tied = change(shape, "rescale_tau", "rescale_skip")
    assert (tied.before, tied.after) == ((0.0, "never"), (8.0, "branch"))
    assert tied.ratios == pytest.approx([0.9])
    assert (tied.best_before, tied.best_after) == pytest.approx((10 / 9, 1.0))


def test_two_free_knobs_that_differ_make_no_pair(ablation: ModuleType, tmp_path: Path) -> None:
    times = [
        (flash(num_stages=2, loads="pointer"), 9.0),
        (flash(num_stages=3, loads="tma"), 10.0),
    ]
    shape = only(ablation, tuned(tmp_path / "a.db", times))
    assert {len(c.knobs) for c in shape.changes} == {1}
    assert shape.pairs == 0


def test_the_last_pass_of_a_config_counts(ablation: ModuleType, tmp_path: Path) -> None:
    path = tuned(tmp_path / "a.db", [(flash(num_stages=2), 5.0), (flash(num_stages=3), 10.0)])
    shape = only(ablation, tuned(path, [(flash(num_stages=2), 20.0)]))
    assert shape.best.record.config == flash(num_stages=3)
    assert change(shape, "num_stages").best_before == pytest.approx(2.0)


def test_configs_of_the_winners_family_are_compared(ablation: ModuleType, tmp_path: Path) -> None:
    times = [(slim(), 5.0), (flash(), 10.0), (flash(num_stages=2), 12.0)]
    assert only(ablation, tuned(tmp_path / "a.db", times)).family == "slim"  # none was raced
    raced = tuned(tmp_path / "b.db", times, won=flash())
    shape = only(ablation, raced)
    assert (shape.family, len(shape.passes)) == ("flash", 2)
    assert only(ablation, raced, family="slim").family == "slim"


def test_what_was_wrong_or_set_aside_is_left_out(ablation: ModuleType, tmp_path: Path) -> None:
    path = tuned(tmp_path / "a.db", [(flash(num_stages=2), 5.0), (flash(num_stages=3), 9.0)])
    tuned(path, [(flash(num_stages=4), 1.0)], status=Status.WRONG_RESULT)
    with Records.open(str(path), "write", config_from_dict) as records:
        records.quarantine(1, "crashed in use")
    [only_one] = ablation.read([str(path)])
    assert only_one.record.config == flash(num_stages=3)


def test_devices_and_policies_are_not_mixed(ablation: ModuleType, tmp_path: Path) -> None:
    path = tuned(tmp_path / "a.db", [(flash(), 5.0)])
    tuned(path, [(flash(num_stages=2), 9.0)], target=preset("h100"))
    tuned(path, [(flash(num_stages=2), 9.0)], policy="flush")
    found = ablation.shapes(ablation.read([str(path)]), None)
    assert [len(shape.passes) for shape in found] == [1, 1, 1]
    text = ablation.page(found, 3)
    assert text.count("\n## NVIDIA H100 80GB HBM3") == 1
    assert text.count("\n## NVIDIA H200") == 2


def test_the_page_shows_ratios_spread_and_pairs(ablation: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "docs" / "ablation.md"
    path = tuned(tmp_path / "a.db", square())
    assert ablation.main(["--db", str(path), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "8 timed configs of 1 shape(s) in 1 run(s), of which 12 pairs" in text
    assert "Times of one pass drift" in text
    rows = table_rows(text, f"### {FULL}")
    assert rows == {
        "`block_n` 64 to 128": ["0.667", "0.667 to 0.667", "4", "1.500", "1.000"],
        "`num_stages` 2 to 3": ["1.012", "0.900 to 1.125", "4", "1.000", "1.125"],
        "`loads` pointer to tma": ["0.900", "0.800 to 1.000", "4", "1.125", "1.000"],
    }
    knobs = [f.name for f in fields(FAMILIES["flash"].Knobs)]
    order = [next(k for k in knobs if f"`{k}`" in row) for row in rows]
    assert order == sorted(order, key=knobs.index)
    assert "One value alone was timed of: `block_m` " in text
    for declared in fields(FAMILIES["flash"].Knobs):
        assert f"| `{declared.name}` | " in text
        assert declared.metadata["doc"] in text


def test_full_and_causal_shapes_have_a_table_over_all_of_each(
    ablation: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "a.db"
    for seq, ratio in ((512, 0.9), (1024, 0.8), (2048, 1.2)):
        times = [(flash(num_stages=2), 10.0), (flash(num_stages=3), 10.0 * ratio)]
        tuned(path, times, make_problem(seq, 64, causal=True))
    tuned(path, [(flash(num_stages=2), 10.0), (flash(num_stages=3), 7.0)])
    text = ablation.page(ablation.shapes(ablation.read([str(path)]), None), 4)
    rows = table_rows(text, "### All causal shapes of flash (3)")
    assert rows == {"`num_stages` 2 to 3": ["0.900", "0.800", "1.200", "3", "3", "1.111", "1.000"]}
    assert "### All full shapes" not in text  # one alone is its own table
    places = [text.index(f"### {make_problem(n, 64, causal=True)}\n") for n in (512, 1024, 2048)]
    assert places == sorted(places)


def test_the_same_databases_give_the_same_bytes(
    ablation: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tuned(tuned(tmp_path / "a.db", square()), square(), CAUSAL)
    first, second = tmp_path / "1.md", tmp_path / "2.md"
    for out in (first, second):
        ablation.main(["--db", str(path), "--out", str(out)])
    assert first.read_bytes() == second.read_bytes()
    capsys.readouterr()
    ablation.main(["--db", str(path)])
    assert capsys.readouterr().out == first.read_text(encoding="utf-8")


def test_nothing_to_compare_is_said(
    ablation: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.md"
    assert ablation.main(["--db", str(tmp_path / "none.db"), "--out", str(out)]) == 1
    assert "none.db" in capsys.readouterr().err
    path = tuned(tmp_path / "a.db", [(flash(), 5.0)])
    assert ablation.main(["--db", str(path), "--family", "slim", "--out", str(out)]) == 1
    assert "family slim" in capsys.readouterr().err
    assert not out.exists()
