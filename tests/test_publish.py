"""benchmarks/publish.py: what a result file says of a run, from a small database made here."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest

from fagen.config import Config
from fagen.generate.families import FAMILIES, config_from_dict
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.outcome import Built, Check, KernelFacts, Outcome, Status, Timing, Verdict
from fagen.problem import make_problem
from fagen.records import Plan, Records
from fagen.target import Toolchain, preset

PROBLEM = make_problem(512, 64, layout="any")  # its default is one of `flash`
TARGET = preset("h200")
TOOLS = Toolchain("3.6.0", "12.8.93", "2.11.0")
POLICY = "graph-rotate-w10-b4-n3-p25"
DEFAULT = SearchSpace.of(PROBLEM, TARGET).seeds[0]
# Name, predicted and measured microseconds of the timed configs.
TIMED = [(64, 9.0, 7.0), (128, 8.0, 8.0), (32, 12.0, 11.0)]


@pytest.fixture(scope="module")
def publish(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("publish", root / "benchmarks/publish.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(block_n: int) -> Config:
    """The config of that many keys a block; 128 stands for the default, whose blocks have 64."""
    return DEFAULT if block_n == 128 else Config("flash", FAMILIES["flash"].Knobs(64, block_n, 4))


def source(block_n: int) -> str:
    return render(PROBLEM, config(block_n), TOOLS.triton_minor).key


def samples(us: float, policy: str = POLICY) -> Timing:
    return Timing((us * 1.01, us, us * 0.99), policy, (1965, 1980))


def outcome(block_n: int, predicted_us: float, us: float) -> Outcome:
    checks = (Check("o_max[ragged]", 0.004, 0.008, "N197x325"), Check("lse", 0.0, 1e-4))
    return Outcome(
        config(block_n),
        Status.OK,
        program_key=source(block_n),
        template_digest="t1",
        built=Built("m.py", (KernelFacts("k", 4096, 168, 0),)),
        verdict=Verdict(checks, TARGET.name),
        timing=samples(us),
        predicted_us=predicted_us,
    )


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """One finished run: three timed configs, one refused; a race of two programs and two peers."""
    path = tmp_path / "runs.db"
    with Records.open(str(path), "write", config_from_dict) as records:
        plan = Plan(POLICY, "gate", "tpe", seed=7, trials=4, timeout_s=60.0)
        run = records.begin_run(PROBLEM, TARGET, TOOLS, plan)
        for row in TIMED:
            records.save(run, outcome(*row))
        wrong = Config("flash", FAMILIES["flash"].Knobs(64, 64, 8))
        records.save(run, Outcome(wrong, Status.WRONG_RESULT, "o_max: error nan over budget"))
        records.save_finals(
            run,
            {source(64): samples(7.5), source(128): samples(10.0)},
            peers={
                "sdpa-cudnn 9.19.0 (torch 2.11.0+cu130)": samples(6.0),
                "sdpa-flash (torch 2.11.0+cu130)": samples(15.0),
            },
            missing={"eager (torch 2.11.0+cu130)": "too much memory"},
            chosen=source(64),
        )
        records.finish_run(run)
    return path


@pytest.fixture
def result(publish: ModuleType, database: Path, tmp_path: Path) -> dict[str, Any]:
    return published(publish, database, tmp_path / "a.json")


def published(publish: ModuleType, database: Path, out: Path, *more: str) -> dict[str, Any]:
    command = "fagen tune --seq 512 --head-dim 64"
    words = ["--db", str(database), "--run", "1", "--out", str(out), "--command", command]
    given = ["--commit", "abc123", "--clean", "yes", "--driver", "580.82", "--cuda", "13.0"]
    given += ["--cold-start-s", "71.9"]
    assert publish.main([*words, *(more or given)]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    plain: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"), parse_constant=refuse)
    return plain


def test_a_result_says_what_ran_where_and_how(result: dict[str, Any]):
    assert result["schema"] == 1
    assert result["command"] == "fagen tune --seq 512 --head-dim 64"
    assert result["seed"] == 7
    assert result["run"]["cold_start_s"] == 71.9
    assert (result["device"]["name"], result["device"]["driver"]) == ("NVIDIA H200", "580.82")
    software = result["software"]
    assert (software["torch"], software["triton"]) == ("2.11.0+cu130", "3.6.0")
    assert (software["ptxas"], software["cuda"]) == ("12.8.93", "13.0")
    assert result["commit"]["id"] == "abc123"
    assert result["commit"]["clean"] is True
    assert "by hand" in result["commit"]["how"]
    assert result["problem"]["text"] == str(PROBLEM)
    assert result["policy"]["l2"] == "rotate"
    assert result["policy"]["race_rounds"] == 3
    assert result["run"]["outcomes"] == {"ok": 3, "wrong_result": 1}
    assert result["date"].endswith("+00:00")


def test_the_race_names_winner_default_and_peers_with_their_ratios(result: dict[str, Any]):
    rows = {row["kind"] + " " + row["name"].split("(")[0].strip(): row for row in result["race"]}
    assert list(rows) == [
        *("peer sdpa-cudnn 9.19.0", "winner flash", "default flash", "peer sdpa-flash"),
        "peer eager",
    ]
    winner = rows["winner flash"]
    assert winner["median_us"] == 7.5
    assert winner["tflops"] == pytest.approx(PROBLEM.flops / 7.5e6, rel=1e-5)
    assert (winner["speed_to_cudnn"], winner["speed_to_flash"]) == (0.8, 2.0)
    assert winner["config"] == config(64).to_dict()
    assert winner["source"] == source(64)
    assert winner["samples_us"] == list(samples(7.5).samples_us)
    assert [(c["error"], c["budget"]) for c in winner["verdict"]["checks"]] == [
        *((0.004, 0.008), (0.0, 1e-4)),
    ]
    assert rows["peer eager"]["reason"] == "too much memory"


def test_every_timed_row_and_every_refused_one_is_there(result: dict[str, Any]):
    rows = result["timed_rows"]
    assert [(r["predicted_us"], r["median_us"]) for r in rows] == [t[1:] for t in TIMED]
    assert [r["source"] for r in rows] == [source(n) for n, _, _ in TIMED]
    assert all(r["median_us"] == pytest.approx(median(r["samples_us"])) for r in rows)
    assert rows[0]["worst_check"]["name"] == "o_max[ragged]"
    [refused] = result["not_timed"]
    assert (refused["status"], refused["reason"][:5]) == ("wrong_result", "o_max")


def test_timed_values_of_each_knob_are_listed(result: dict[str, Any]):
    knobs = result["knobs_timed"]["flash"]
    assert knobs["configs"] == len(TIMED)
    assert knobs["block_m"] == [64, 128]
    assert knobs["block_n"] == [32, 64]
    assert knobs["mask"] == ["split"]


def test_the_model_is_compared_with_what_was_timed(result: dict[str, Any]):
    # Predicted order 128, 64, 32; measured 64, 128, 32: one pair of three swapped.
    model = result["model"]
    assert model["spearman"] == 0.5
    assert model["spearman_by_family"] == {"flash": 0.5}
    assert (model["winner_rank"], model["rows"]) == (2, 3)
    assert model["winner_rank_share"] == pytest.approx(2 / 3, rel=1e-5)


def test_sources_tell_whether_the_checkout_is_the_one_that_ran(
    publish: ModuleType, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch, database: Path
):
    assert result["commit"]["sources"] == {"timed": 3, "emitted_alike_by_this_checkout": 3}
    other = make_problem(512, 128)
    monkeypatch.setattr(publish, "render", lambda problem, *words: render(other, *words))
    again = published(publish, database, database.with_suffix(".json"))
    assert again["commit"]["sources"]["emitted_alike_by_this_checkout"] == 0


def test_publishing_twice_gives_the_same_bytes_and_compact_ones(
    publish: ModuleType, database: Path, tmp_path: Path
):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    published(publish, database, first)
    published(publish, database, second)
    assert first.read_bytes() == second.read_bytes()
    lines = first.read_text(encoding="utf-8").splitlines()
    assert '  "samples_us": [7.07, 7.0, 6.93],' in [line[1:] for line in lines]


def test_nothing_is_claimed_of_a_machine_that_is_not_here(
    publish: ModuleType, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = {"detect": preset("a100"), "toolchain": TOOLS}
    for name, found in other.items():
        monkeypatch.setattr(publish.targets, name, lambda found=found: found)
    bare = published(publish, database, tmp_path / "bare.json", "--commit", "abc123")
    assert bare["commit"]["clean"] is None
    assert (bare["device"]["driver"], bare["software"]["cuda"]) == (None, None)
    assert "another machine" in bare["software"]["driver_and_cuda"]


def test_driver_and_cuda_are_asked_where_the_run_can_have_been(
    publish: ModuleType, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = {"detect": TARGET, "toolchain": TOOLS, "torch_build": ("2.11.0+cu130", "13.0")}
    for name, found in here.items():
        monkeypatch.setattr(publish.targets, name, lambda found=found: found)
    monkeypatch.setattr(publish, "_driver", lambda: "580.82")
    same = published(publish, database, tmp_path / "same.json", "--commit", "abc123")
    assert (same["device"]["driver"], same["software"]["cuda"]) == ("580.82", "13.0")
    assert "asked" in same["software"]["driver_and_cuda"]


def test_a_changed_tree_is_not_clean_but_a_new_result_leaves_it_clean(
    publish: ModuleType, tmp_path: Path
):
    def git(*words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", *who, "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/new.json").write_text("{}\n")
    found = publish.commit(tmp_path, None, None)
    assert (len(found["id"]), found["clean"]) == (40, True)
    (tmp_path / "code.py").write_text("x = 2\n")
    assert publish.commit(tmp_path, None, None)["clean"] is False


def test_without_git_nothing_is_known_of_the_commit(publish: ModuleType, tmp_path: Path):
    found = publish.commit(tmp_path / "nowhere", None, None)
    assert (found["id"], found["clean"]) == (None, None)


def test_rows_timed_by_two_policies_are_not_published(
    publish: ModuleType, database: Path, tmp_path: Path
):
    with Records.open(str(database), "write", config_from_dict) as records:
        records.save_finals(1, {}, peers={"other": samples(5.0, "graph-flush-w10-b4-n3-p25")})
    with pytest.raises(ValueError, match="graph-flush"):
        published(publish, database, tmp_path / "mixed.json")


def test_a_run_that_is_not_there_writes_nothing(
    publish: ModuleType, database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "none.json"
    words = ["--db", str(database), "--run", "9", "--out", str(out), "--command", "fagen tune"]
    assert publish.main(words) == 1
    assert "no run 9" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("xs", "ys", "rho"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        # Without ties 1 - 6 sum(d^2) / (n (n^2 - 1)); IQ against hours of television, a common
        # worked example: d^2 sums to 194 over 10 rows.
        (
            [86, 97, 99, 100, 101, 103, 106, 110, 112, 113],
            [2, 20, 28, 27, 50, 29, 7, 17, 6, 12],
            -29 / 165,
        ),
        # Ties: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: r = 4.5 / sqrt(4.5 * 5).
        ([1, 5, 5, 9], [1, 2, 3, 4], 4.5 / math.sqrt(22.5)),
    ],
)
def test_spearman_equals_known_values(
    publish: ModuleType, xs: list[float], ys: list[float], rho: float
):
    assert publish.spearman(xs, ys) == pytest.approx(rho, abs=1e-12)
    assert publish.spearman(ys, xs) == pytest.approx(rho, abs=1e-12)


def test_spearman_of_equal_values_is_no_number(publish: ModuleType):
    assert math.isnan(publish.spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))


def test_equal_values_share_their_mean_rank(publish: ModuleType):
    assert publish.average_ranks([7.0, 3.0, 7.0, 1.0, 7.0]) == [4.0, 2.0, 4.0, 1.0, 4.0]
