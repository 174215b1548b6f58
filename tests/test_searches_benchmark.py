"""benchmarks/searches.py: which configs are known, its runs and races, its file, its page."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fagen.config import Config
from fagen.generate.families import config_from_dict, flash
from fagen.generate.render import render
from fagen.generate.space import why_invalid
from fagen.outcome import Status, Timing
from fagen.problem import make_problem
from fagen.serve.database import dataset
from fagen.target import preset, toolchain
from fagen.tune.jobs import Confirm, Prepare, Race, RaceReply, Tried
from fagen.tune.worker import Bench

H200 = preset("h200")
PROBLEM = make_problem(256, 64)
ROOT = Path(__file__).resolve().parent.parent
SLOW, GOOD, BEST, WRONG = (
    Config("flash", flash.Knobs(64, 32, 4, stages)) for stages in (1, 2, 3, 4)
)


@pytest.fixture(scope="module")
def searches(root: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        yield importlib.import_module("searches")


def test_six_shapes_start_cold_with_a_neighbour_each_and_one_is_repeated(searches: ModuleType):
    cells = searches.CELLS.values()
    assert [cell.neighbour is None for cell in cells].count(False) >= 6
    repeated = [cell for cell in cells if cell.neighbour is None]
    assert len(repeated) == 1 and searches.REPEATS >= 5 and searches.WARM_TRIALS <= 12
    for cell in cells:
        if cell.neighbour is not None:
            assert cell.neighbour != cell.problem
            near, own = cell.neighbour.shape, cell.problem.shape
            assert (near.head_dim, near.dtype) == (own.head_dim, own.dtype)


def test_best_known_are_the_best_right_ones_of_the_space_and_what_ships(
    searches: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
):
    for cell in searches.CELLS.values():
        rows = dataset(root / f"benchmarks/spaces/{cell.space}.jsonl.gz").rows
        right = sorted(row.true_us for row in rows if row.right and row.true_us)
        by_config = {row.config: row.true_us for row in rows}
        known = searches.known(cell.problem, cell.space)
        assert all(why_invalid(cell.problem, H200, config) is None for config in known)
        times = [by_config[config] for config in known if config in by_config]
        assert sorted(times)[: searches.KNOWN] == right[: searches.KNOWN]
    cell = searches.CELLS["d128-full"]
    ships = SimpleNamespace(problem=cell.problem, config=GOOD)
    other = SimpleNamespace(problem=PROBLEM, config=SLOW)
    monkeypatch.setattr(searches, "shipped", lambda key, decode: [other, ships])
    assert searches.known(cell.problem, "") == [GOOD]
    assert searches.known(cell.problem, cell.space)[0] == GOOD


TIMES = {SLOW: (12.0, 12.6), GOOD: (10.1, 10.5), BEST: (10.0, 10.4)}


class FakeBench(Bench):
    """TIMES by config, without a GPU."""

    def prepare(self, job: Prepare) -> None:
        assert (job.problem, job.device) == (PROBLEM, "cuda:3")

    def confirm(self, job: Confirm) -> Tried:
        assert job.level == "full"
        if job.program.config == WRONG:
            return Tried(Status.WRONG_RESULT, "o_max")
        return Tried(Status.OK)

    def race(self, job: Race) -> RaceReply:
        timings = {p.key: Timing(TIMES[p.config], "p", (1980,)) for p in job.programs}
        return RaceReply(timings, {"fa3": Timing((11.0, 11.0), "p", (1980,))})


def test_a_race_gives_each_source_its_share_of_the_fastest_and_names_who_is_wrong(
    searches: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fagen.tune.worker.Bench", FakeBench)
    monkeypatch.setattr(searches, "current_device", lambda: lambda: 3)
    monkeypatch.setattr(searches, "detect", lambda: H200)
    plains = [config.to_dict() for config in (GOOD, BEST, SLOW, WRONG, GOOD)]
    found = searches.race({"problem": PROBLEM.to_dict(), "configs": plains})
    rows = {config_from_dict(row["configs"][0]): row for row in found["rows"]}
    assert list(rows) == [BEST, GOOD, SLOW]
    assert [len(row["configs"]) for row in found["rows"]] == [1, 1, 1]
    assert rows[BEST]["share"] == 1.0
    assert rows[GOOD]["share"] == pytest.approx((10.0 / 10.1 + 10.4 / 10.5) / 2, abs=1e-5)
    assert rows[SLOW]["samples_us"] == [12.0, 12.6]
    assert found["rejected"] == [{"configs": [WRONG.to_dict()], "reason": "wrong_result: o_max"}]
    assert list(found["peers"]) == ["fa3"]


def answers(searches: ModuleType, asked: list[list[str]]) -> Any:
    """`run_step` of a machine on which BEST is known and runs choose GOOD, then BEST."""
    chosen = iter([GOOD, BEST, BEST, SLOW])

    def run_step(words: list[str], folder: Path, deadline_s: float, root: Path = ROOT) -> Any:
        asked.append(words[1:])
        assert ("tune" in words) == (root != ROOT)
        assert (root / "fagen/tune/tuner.py").exists() and (root / "templates").exists()
        assert list(root.glob("tuning_db/records/*")) == [] or root == ROOT
        if "--race" in words:
            job = json.loads(Path(words[-1]).read_text(encoding="utf-8"))
            shares = {GOOD: 0.99, BEST: 1.0, SLOW: 0.8}
            plains = {json.dumps(plain): plain for plain in job["configs"]}.values()
            rows = [{"configs": [p], "share": shares[config_from_dict(p)]} for p in plains]
            return searches.Ended(3.0, {"rows": rows})
        winner = next(chosen)
        if winner == SLOW:
            return searches.Ended(180.0, None, "It took more than 180 s.")
        answer = {"tried": 64, "counts": {"ok": 64}, "state": "finished", "seconds": 40.0}
        answer |= {"winner": winner.to_dict(), "winner_us": 1.0}
        answer |= {"default": SLOW.to_dict(), "default_us": 2.0}
        return searches.Ended(44.0, answer)

    return run_step


def test_runs_are_kept_with_their_share_and_a_cell_is_not_run_twice(
    searches: ModuleType,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    asked: list[list[str]] = []
    neighbour = make_problem(512, 64)
    cells = {
        "cell": searches.Cell(PROBLEM, neighbour),
        "again": searches.Cell(PROBLEM),
    }
    monkeypatch.setattr(searches, "CELLS", cells)
    monkeypatch.setattr(searches, "known", lambda problem, space: [BEST])
    monkeypatch.setattr(searches, "detect", lambda: H200)
    monkeypatch.setattr(searches, "run_step", answers(searches, asked))
    out = tmp_path / "h200_searches.json"
    words = ["--out", str(out), "--repeats", "2", "--commit", "abc", "--clean", "yes"]
    assert searches.main([*words, "--cell", "cell"]) == 0
    cold, warm = json.loads(out.read_text(encoding="utf-8"))["shapes"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    assert [run["share"] for run in (*cold["runs"], *warm["runs"])] == [0.99, 1.0]
    assert (cold["default_share"], cold["runs"][0]["process_s"]) == (0.8, 44.0)
    assert asked[0][1:3] == ["fagen", "tune"] and "--trials" not in asked[0]
    assert asked[1][asked[1].index("--trials") + 1] == "12"
    assert searches.main(words) == 1  # the second of the repeated runs did not end
    shapes = json.loads(out.read_text(encoding="utf-8"))["shapes"]
    assert [shape["name"] for shape in shapes] == ["cell", "cell neighbour", "again"]
    first, second = shapes[-1]["runs"]
    assert first["share"] == 1.0 and second["reason"] == "It took more than 180 s."
    seeds = [words[words.index("--seed") + 1] for words in asked if "--seed" in words]
    assert seeds == ["0", "1"]
    assert "It took more than 180 s." in capsys.readouterr().out
    spec = importlib.util.spec_from_file_location("docs_generate", root / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    page = generator.searches()
    assert "| bf16 B1 H16 N256 D64 full | cold | 64 | 44.0 | 0.9900 | 0.8000 |" in page
    assert "It took more than 180 s." in page


def test_a_file_of_elsewhere_is_not_gone_on_with_and_what_failed_is_run_again(
    searches: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    asked: list[list[str]] = []
    monkeypatch.setattr(searches, "CELLS", {"again": searches.Cell(PROBLEM)})
    monkeypatch.setattr(searches, "known", lambda problem, space: [BEST])
    monkeypatch.setattr(searches, "detect", lambda: H200)
    monkeypatch.setattr(searches, "run_step", lambda *_: searches.Ended(9.0, None, "no time"))
    out = tmp_path / "found.json"
    words = ["--out", str(out), "--repeats", "2", "--clean", "yes", "--commit"]
    assert searches.main([*words, "abc"]) == 1
    before = out.read_bytes()
    assert searches.main([*words, "def"]) == 1
    assert "another commit" in capsys.readouterr().err and out.read_bytes() == before
    monkeypatch.setattr(searches, "detect", lambda: preset("b200"))
    assert searches.main([*words, "abc"]) == 1
    assert "another device" in capsys.readouterr().err and out.read_bytes() == before
    monkeypatch.setattr(searches, "detect", lambda: H200)
    monkeypatch.setattr(searches, "run_step", answers(searches, asked))
    assert searches.main([*words, "abc"]) == 0
    [shape] = json.loads(out.read_text(encoding="utf-8"))["shapes"]
    assert [run["share"] for run in shape["runs"]] == [0.99, 1.0]
    for text, said in (("{", "Expecting"), ("[]", "no result of searches.py")):
        out.write_text(text, encoding="utf-8")
        assert searches.main([*words, "abc"]) == 1
        assert said in capsys.readouterr().err and out.read_text(encoding="utf-8") == text
    asked.clear()
    assert searches.main(["--out", str(tmp_path / "none" / "x.json")]) == 1
    assert asked == [] and "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        searches.main(["--out", str(out), "--repeats", "0"])


def test_runs_use_a_fagen_with_which_nothing_ships(searches: ModuleType, tmp_path: Path):
    code = """
import fagen, json
from fagen.generate.families import config_from_dict
from fagen.records import shipped
print(json.dumps({"file": fagen.__file__, "shipped": len(shipped(None, config_from_dict))}))
"""
    root = searches.bare(tmp_path)
    for where, least in ((root, 0), (ROOT, 50)):
        words = [sys.executable, "-c", code]
        answer = searches.run_step(words, tmp_path / "step", 60.0, where).answer
        assert Path(answer["file"]).is_relative_to(where)
        assert answer["shipped"] >= least and (least or answer["shipped"] == 0)


def test_without_a_file_nothing_runs(searches: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        searches.main(["--cell", "decode"])
    assert "--out is needed" in capsys.readouterr().err


def test_the_default_and_the_best_known_render_for_this_triton(searches: ModuleType):
    cell = searches.CELLS["decode"]
    keys = {
        render(cell.problem, config, toolchain().triton_minor).key
        for config in searches.known(cell.problem, cell.space)
    }
    assert len(keys) == searches.KNOWN
