"""benchmarks/forward.py: its grids, and the file that it writes cell by cell."""

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
from fagen.serve.compare import KERNEL, Comparison
from fagen.target import preset

H200 = preset("h200")
CALL = ["--grid", "call", "--commit", "abc", "--clean", "yes"]


@pytest.fixture
def forward(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    module = importlib.import_module("forward")
    monkeypatch.setattr(module, "detect", lambda: H200)
    return module


class Races:
    """Stands for `compare`: fagen at 10 us, a peer at 11, or at 9 for causal shapes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...], str | None]] = []
        self.fails: set[str] = set()  # causal fields

    def __call__(
        self, problem: Problem, device: Any, db: str | None, *, backends: Any, **_: Any
    ) -> Comparison:
        causal = problem.features.causal
        self.asked.append((str(problem), backends, db))
        if causal in self.fails:
            raise VerificationFailed("No kernel\ncan be used.")
        times = {KERNEL: 10.0, "fa3 (fa3-fwd 1)": 11.0 if causal == "none" else 9.0}
        checks = (Check("lse", 0.0, 1e-4), Check("o_max", 0.004, 0.005), Check("o", 0.1, 1.0))
        return Comparison(
            problem,
            SimpleNamespace(  # type: ignore[arg-type]
                config=seeds_of(problem, H200)[0],
                origin="tuned",
                verdict=Verdict(checks, "NVIDIA H200"),
                chosen=SimpleNamespace(program=SimpleNamespace(key="k")),
            ),
            {name: Timing((us, us, us + 1), "p", (1980,)) for name, us in times.items()},
            {n: CallTiming(Timing((5.0,), "w"), Timing((30.0,), "w")) for n in times},
            {"fa4 (flash-attn-4)": "not installed"},
            "p",
        )


@pytest.fixture
def races(forward: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Races:
    found = Races()
    monkeypatch.setattr(forward, "compare", found)
    return found


def test_the_grids_have_the_cells_that_are_promised(forward: ModuleType):
    cells = forward.grid_g()
    assert len(set(cells)) == 36
    for cell in cells:
        s = cell.shape
        assert (s.batch * s.seq_q, s.heads_q * s.head_dim) == (16384, 2048)
    others = forward.grid_g2()
    assert len(set(others)) == 15 and not set(cells) & set(others)
    texts = [str(one) for one in others]
    assert "forward bf16 B2 H32/8 N16384 D128 causal" in texts
    assert "forward bf16 B4 H16 N4096 D192/128 full" in texts
    assert "forward bf16 B4 H16 N1024x8192 D128 causal bottom-right" in texts
    assert "forward bf16 B1 H16 N3000 D128 causal" in texts


def test_the_list_is_what_fagen_tune_takes(
    forward: ModuleType, capsys: pytest.CaptureFixture[str]
):
    words = ["--grid", "G", "--list", "--match", "D256", "--match", "causal", "--match", "N512"]
    assert forward.main(words) == 0
    assert capsys.readouterr().out == "--seq 512 --head-dim 256 --batch 32 --heads 8 --causal\n"


def test_a_file_says_what_ran_and_every_cell_has_its_samples(
    forward: ModuleType, races: Races, tmp_path: Path
):
    out = tmp_path / "h200-forward.json"
    assert forward.main([*CALL, "--db", "w.db", "--fa4", "--out", str(out)]) == 0
    peers = ("auto", "cudnn", "flash", "fa3", "fa4")
    assert races.asked == [
        ("forward bf16 B1 H8 N128 D128 full", peers, "w.db"),
        ("forward bf16 B1 H8 N128 D128 causal", peers, "w.db"),
    ]
    found = json.loads(out.read_text())
    assert found["device"]["name"] == "NVIDIA H200"
    assert found["commit"] == {"id": "abc", "clean": True, "how": found["commit"]["how"]}
    assert found["command"].startswith("python benchmarks/forward.py --grid call")
    assert str(out) not in found["command"] and f"--out {out.name}" in found["command"]
    options = forward._options([*CALL, f"--out={out}", "--db=/a//b/w.db", "--match", "H32/8"])
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


def test_a_run_cut_short_keeps_its_cells_and_is_continued(
    forward: ModuleType, races: Races, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "f.json"
    races.fails = {"top_left"}
    assert forward.main([*CALL, "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert len(found["cells"]) == 1
    assert found["failed"][0]["reason"] == "No kernel can be used."
    races.fails = set()
    assert forward.main([*CALL, "--out", str(out)]) == 1
    assert "Say --append" in capsys.readouterr().err
    races.asked.clear()
    assert forward.main([*CALL, "--out", str(out), "--append"]) == 0
    assert len(races.asked) == 1
    found = json.loads(out.read_text())
    assert (len(found["cells"]), found["failed"]) == (2, [])
    assert found["command"].count("python benchmarks/forward.py") == 2


def test_a_file_of_another_device_or_commit_is_not_continued(
    forward: ModuleType, races: Races, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "f.json"
    assert forward.main([*CALL, "--out", str(out)]) == 0
    before = out.read_text()
    other = ["--grid", "G", "--commit", "def", "--clean", "yes", "--out", str(out), "--append"]
    assert forward.main(other) == 1
    assert "its commit is" in capsys.readouterr().err
    assert out.read_text() == before


def test_an_unknown_peer_is_refused(forward: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        forward.main([*CALL, "--peers", "fa2", "--out", "f.json"])
    assert "Peer 'fa2' is unknown" in capsys.readouterr().err
