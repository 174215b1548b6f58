"""benchmarks/grids.py: its grids, and the file that it writes cell by cell."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fagen.errors import VerificationFailed
from fagen.generate.space import seeds_of
from fagen.judge.calls import CallTiming
from fagen.outcome import Check, Timing, Verdict
from fagen.problem import Problem
from fagen.serve.compare import DETERMINISTIC, KERNEL, Comparison
from fagen.target import preset

H200 = preset("h200")
CALL = ["--grid", "call", "--commit", "abc", "--clean", "yes"]


@pytest.fixture
def grids(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    module = importlib.import_module("grids")
    monkeypatch.setattr(module, "detect", lambda: H200)
    return module


class Races:
    """Stands for `compare`: fagen at 10 us, a peer at 11, or at 9 for causal shapes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...], str | None]] = []
        self.fails: set[str] = set()  # causal fields
        self.repeats = {"none", "top_left"}  # those whose kernel gives the same bits

    def __call__(
        self, problem: Problem, device: Any, db: str | None, *, backends: Any, **_: Any
    ) -> Comparison:
        causal = problem.features.causal
        self.asked.append((str(problem), backends, db))
        if causal in self.fails:
            raise VerificationFailed("No kernel\ncan be used.")
        times = {KERNEL: 10.0, "fa3 (fa3-fwd 1)": 11.0 if causal == "none" else 9.0}
        if causal not in self.repeats:
            times[DETERMINISTIC] = 12.0
        checks = (Check("lse", 0.0, 1e-4), Check("o_max", 0.004, 0.005), Check("o", 0.1, 1.0))

        def served(key: str) -> Any:
            return SimpleNamespace(
                config=seeds_of(problem, H200)[0],
                origin="tuned",
                verdict=Verdict(checks, "NVIDIA H200"),
                chosen=SimpleNamespace(program=SimpleNamespace(key=key)),
            )

        return Comparison(
            problem,
            served("k"),
            {name: Timing((us, us, us + 1), "p", (1980,)) for name, us in times.items()},
            {n: CallTiming(Timing((5.0,), "w"), Timing((30.0,), "w")) for n in times},
            {"fa4 (flash-attn-4)": "not installed"},
            "p",
            deterministic=None if causal in self.repeats else served("repeating"),
        )


@pytest.fixture
def races(grids: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Races:
    found = Races()
    monkeypatch.setattr(grids, "compare", found)
    return found


def test_the_grids_have_the_cells_that_are_promised(grids: ModuleType):
    cells = grids.grid_g("forward")
    assert len(set(cells)) == 36
    for cell in cells:
        s = cell.shape
        assert (s.batch * s.seq_q, s.heads_q * s.head_dim) == (16384, 2048)
    others = grids.grid_g2("forward")
    assert len(set(others)) == 15 and not set(cells) & set(others)
    texts = [str(one) for one in others]
    assert "forward bf16 B2 H32/8 N16384 D128 causal" in texts
    assert "forward bf16 B4 H16 N4096 D192/128 full" in texts
    assert "forward bf16 B4 H16 N1024x8192 D128 causal bottom-right" in texts
    assert "forward bf16 B1 H16 N3000 D128 causal" in texts


def test_the_grids_of_the_backward_pass_have_the_cells_that_are_promised(grids: ModuleType):
    cells = grids.grid_g("backward")
    assert len(set(cells)) == 30
    for cell in cells:
        s = cell.shape
        assert (s.batch * s.seq_q, s.heads_q * s.head_dim) == (16384, 2048)
        assert cell.direction == "backward" and s.seq_q >= 1024
    texts = [str(one).removeprefix("backward bf16 ") for one in grids.grid_g2("backward")]
    assert texts == [
        *("B2 H32/8 N4096 D128 causal", "B2 H32/8 N8192 D128 causal"),
        *("B4 H16 N4096 D96 full", "B4 H16 N4096 D96 causal"),
        *("B4 H16 N4096 D192/128 full", "B4 H16 N4096 D192/128 causal"),
        *("B1 H16 N3000 D128 full", "B1 H16 N3000 D128 causal"),
    ]


def test_the_list_is_what_fagen_tune_takes(grids: ModuleType, capsys: pytest.CaptureFixture[str]):
    words = ["--grid", "G", "--list", "--match", "D256", "--match", "causal", "--match", "N512"]
    assert grids.main(words) == 0
    assert capsys.readouterr().out == "--seq 512 --head-dim 256 --batch 32 --heads 8 --causal\n"
    words = ["--grid", "G2", "--direction", "backward", "--list", "--match", "N8192"]
    assert grids.main(words) == 0
    assert capsys.readouterr().out == (
        "--seq 8192 --head-dim 128 --batch 2 --heads 32 --kv-heads 8 --causal"
        " --direction backward\n"
    )


def test_a_file_says_what_ran_and_every_cell_has_its_samples(
    grids: ModuleType, races: Races, tmp_path: Path
):
    out = tmp_path / "h200-forward.json"
    assert grids.main([*CALL, "--db", "w.db", "--fa4", "--out", str(out)]) == 0
    peers = ("auto", "cudnn", "flash", "fa3", "fa4")
    assert races.asked == [
        ("forward bf16 B1 H8 N128 D128 full", peers, "w.db"),
        ("forward bf16 B1 H8 N128 D128 causal", peers, "w.db"),
    ]
    found = json.loads(out.read_text())
    assert found["device"]["name"] == "NVIDIA H200"
    assert found["commit"] == {"id": "abc", "clean": True, "how": found["commit"]["how"]}
    assert found["command"].startswith("python benchmarks/grids.py --grid call")
    assert str(out) not in found["command"] and f"--out {out.name}" in found["command"]
    options = grids._options([*CALL, f"--out={out}", "--db=/a//b/w.db", "--match", "H32/8"])
    assert options.words[-4:] == [f"--out={out.name}", "--db=w.db", "--match", "H32/8"]
    assert (found["l2"], found["policy"]["rounds"]) == ("rotate", 11)
    assert set(found["versions"]) == {"fagen", "torch", "cuda", "triton", "ptxas", "python"}
    full, causal = found["cells"]
    assert full["kernel_us"] == {KERNEL: 10.0, "fa3 (fa3-fwd 1)": 11.0}
    assert full["samples_us"]["fa3 (fa3-fwd 1)"] == [11.0, 11.0, 12.0]
    assert full["call_us"] == {KERNEL: 30.0, "fa3 (fa3-fwd 1)": 30.0}
    assert full["host_us"][KERNEL] == 5.0
    assert [one["name"] for one in full["errors"]] == ["o_max", "o", "lse"]
    assert full["config"]["family"] and full["missing"] == {"fa4 (flash-attn-4)": "not installed"}
    assert full["times_best_peer"][0] == 1.1 and causal["times_best_peer"][0] == 0.9
    text = "forward bf16 B1 H8 N128 D128 causal"
    assert found["summary"] == {
        "cells": 2,
        "geometric_mean": pytest.approx((1.1 * 0.9) ** 0.5, rel=1e-5),
        "least": [0.9, text],
        "under_1": [text],
    }


def test_a_cell_of_the_backward_pass_tells_of_the_kernel_that_repeats(
    grids: ModuleType, races: Races, tmp_path: Path
):
    out = tmp_path / "h200-backward.json"
    races.repeats = {"none"}
    assert grids.main([*CALL, "--direction", "backward", "--out", str(out)]) == 0
    named = ("auto", "cudnn", "flash", "efficient", "fa3")
    assert [peers for _, peers, _ in races.asked] == [named] * 2
    found = json.loads(out.read_text())
    full, causal = found["cells"]
    assert full["problem"]["direction"] == causal["problem"]["direction"] == "backward"
    assert (full["best_peer"], full["times_best_peer"][0]) == ("fa3 (fa3-fwd 1)", 1.1)
    assert full["deterministic"]["name"] == KERNEL
    assert full["deterministic"]["times_best_peer"] == full["times_best_peer"]
    assert causal["deterministic"]["name"] == DETERMINISTIC
    assert causal["deterministic"]["times_best_peer"][0] == 0.75
    assert causal["kernel_us"] == {KERNEL: 10.0, "fa3 (fa3-fwd 1)": 9.0, DETERMINISTIC: 12.0}
    assert (causal["source"], causal["deterministic"]["source"]) == ("k", "repeating")
    text = "backward bf16 B1 H8 N128 D128 causal"
    assert found["summary"]["least"] == [0.9, text]
    assert found["summary"]["deterministic"]["least"] == [0.75, text]


def test_a_run_cut_short_keeps_its_cells_and_is_continued(
    grids: ModuleType, races: Races, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "f.json"
    races.fails = {"top_left"}
    assert grids.main([*CALL, "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert len(found["cells"]) == 1
    assert found["failed"][0]["reason"] == "No kernel can be used."
    races.fails = set()
    assert grids.main([*CALL, "--out", str(out)]) == 1
    assert "Say --append" in capsys.readouterr().err
    races.asked.clear()
    assert grids.main([*CALL, "--out", str(out), "--append"]) == 0
    assert len(races.asked) == 1
    found = json.loads(out.read_text())
    assert (len(found["cells"]), found["failed"]) == (2, [])
    assert found["command"].count("python benchmarks/grids.py") == 2


def test_a_file_of_another_device_or_commit_is_not_continued(
    grids: ModuleType, races: Races, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "f.json"
    assert grids.main([*CALL, "--out", str(out)]) == 0
    before = out.read_text()
    other = ["--grid", "G", "--commit", "def", "--clean", "yes", "--out", str(out), "--append"]
    assert grids.main(other) == 1
    assert "its commit is" in capsys.readouterr().err
    assert out.read_text() == before


def test_an_unknown_peer_is_refused(grids: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        grids.main([*CALL, "--peers", "fa2", "--out", "f.json"])
    assert "Peer 'fa2' is unknown" in capsys.readouterr().err
