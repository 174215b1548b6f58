"""`fagen bench`: shapes and grids from its options, and what is shown of races made up here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from fagen.cli import bench
from fagen.cli.main import main
from fagen.cli.options import grid_options
from fagen.errors import VerificationFailed
from fagen.generate.space import seeds_of
from fagen.judge.calls import CallTiming
from fagen.judge.peers.lineup import BACKENDS
from fagen.outcome import Timing
from fagen.problem import Problem
from fagen.report import plot
from fagen.serve.compare import DETERMINISTIC, KERNEL, Comparison
from fagen.target import preset

H200 = preset("h200")
GRID = ["--seq", "256,512", "--head-dim", "64"]


def problems(*words: str) -> list[str]:
    """The shapes that options mean, as text."""

    @click.command
    @grid_options
    def command(problems: list[Problem]) -> list[Problem]:
        return problems

    found = command.main([*words], standalone_mode=False)
    return [str(one).removeprefix("forward bf16 ") for one in found]


# Options


def test_one_shape_is_a_grid_of_one():
    assert problems("--seq", "512", "--head-dim", "64") == ["B1 H16 N512 D64 full"]


def test_lists_and_repeats_make_the_same_grid_each_shape_once():
    wanted = [
        *("B1 H16 N256 D64 full", "B1 H16 N512 D64 full"),
        *("B1 H16 N256 D64 causal", "B1 H16 N512 D64 causal"),
        *("B1 H16 N256 D128 full", "B1 H16 N512 D128 full"),
        *("B1 H16 N256 D128 causal", "B1 H16 N512 D128 causal"),
    ]
    masks = ["--no-causal", "--causal"]
    assert problems("--seq", "256,512", "--head-dim", "64,128", *masks) == wanted
    repeated = ["--seq", "256", "--seq", "512,256", "--head-dim", "64", "--head-dim", "128"]
    assert problems(*repeated, *masks) == wanted


def test_tokens_and_hidden_make_batch_and_heads_follow():
    words = ["--seq", "512,16384", "--head-dim", "64,256", "--causal"]
    assert problems(*words, "--tokens", "16384", "--hidden", "2048") == [
        *("B32 H32 N512 D64 causal", "B1 H32 N16384 D64 causal"),
        *("B32 H8 N512 D256 causal", "B1 H8 N16384 D256 causal"),
    ]


def test_an_alignment_concerns_the_causal_shapes_of_a_grid():
    words = ["--seq", "64", "--head-dim", "64", "--causal-align", "bottom_right"]
    assert problems(*words, "--causal", "--no-causal") == [
        "B1 H16 N64 D64 causal bottom-right",
        "B1 H16 N64 D64 full",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seq", "12,x"], "'12,x' is no whole number"),
        (["--seq", ""], "'' is no whole number"),
        (["--seq", "0"], "is no multiple of --seq 0"),
        (["--seq", "3000"], "--tokens 16384 is no multiple of --seq 3000"),
        (["--seq", "512", "--batch", "1"], "--tokens makes --batch follow"),
        (["--seq", "512", "--causal-align", "top_left"], "nothing without --causal"),
        (["--seq", "512", "--peers", "fa2"], "Peer 'fa2' is unknown"),
    ],
)
def test_what_makes_no_grid_is_a_usage_error(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("fagen.cli.places.place_of", lambda *_: (H200, True))
    assert main(["bench", "--head-dim", "64", "--tokens", "16384", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err


def test_an_unknown_peer_is_a_usage_error_without_a_gpu_too(capsys: pytest.CaptureFixture[str]):
    words = ["--seq", "512", "--head-dim", "64", "--target", "h200", "--peers", "foo"]
    assert main(["bench", *words]) == 2
    assert "Peer 'foo' is unknown" in capsys.readouterr().err


def test_help_names_every_peer():
    [option] = [p for p in bench.command.params if p.name == "peers"]
    assert ", ".join(BACKENDS) in option.help


# Races


class Races:
    """Stands for `serve.compare.compare`: each kernel takes as long as its shape is."""

    def __init__(self) -> None:
        self.asked: list[tuple[Problem, tuple[str, ...]]] = []
        self.fails: dict[int, BaseException] = {}  # by sequence length

    def __call__(
        self, problem: Problem, device: Any, db: Any, *, backends: tuple[str, ...]
    ) -> Comparison:
        self.asked.append((problem, backends))
        seq = problem.shape.seq_q
        if seq in self.fails:
            raise self.fails[seq]
        times = {KERNEL: seq / 10, "fa3 (fa3-fwd 1)": seq / 8, "sdpa-flash (torch 2)": seq / 4}
        return Comparison(
            problem,
            SimpleNamespace(config=seeds_of(problem, H200)[0], origin="tuned"),  # type: ignore[arg-type]
            {name: Timing((us,) * 3, "p") for name, us in times.items()},
            {
                n: CallTiming(Timing((9.0,) * 3, "w"), Timing((us + 9,) * 3, "w"))
                for n, us in times.items()
            },
            {"fa4 (flash-attn-4)": "not installed; run: pip install flash-attn-4"},
            "p",
        )


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    found = Races()
    monkeypatch.setattr("fagen.cli.places.place_of", lambda *_: (H200, True))
    monkeypatch.setattr("fagen.serve.compare.compare", found)
    return found


def test_a_grid_is_a_table_with_progress_on_stderr(
    races: Races, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", *GRID, "--peers", "fa3,flash", "--fa4"]) == 0
    out, err = capsys.readouterr()
    assert [backends for _, backends in races.asked] == [("fa3", "flash", "fa4")] * 2
    assert "[2/2] fagen 51.2 us, fa3 64 us, 1.250x fagen's" in err
    assert "Kernel time of the best peer is 1.25x fagen's, geometric mean of 2" in out
    assert "Not measured at 2 of 2: fa4 (flash-attn-4): not installed; run: pip install" in out


def test_json_is_an_array_for_a_grid_and_an_object_for_a_shape(
    races: Races, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", *GRID, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["seq"] for row in rows] == [256, 512]
    assert [row["times_best_kernel"] for row in rows] == [1.25, 1.25]
    assert main(["bench", "--seq", "256", "--head-dim", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows[0]
    assert "fa4" not in races.asked[0][1]


def test_a_shape_that_fails_ends_only_itself_and_the_exit_code_tells(
    races: Races, capsys: pytest.CaptureFixture[str]
):
    races.fails[256] = VerificationFailed("None of 2 kernels can be used.")
    assert main(["bench", *GRID]) == 1
    out, err = capsys.readouterr()
    assert "Failed: bf16 B1 H16 N256 D64 full: None of 2 kernels can be used." in out
    assert err.splitlines()[-1].startswith("fagen: 1 of 2 shapes failed")
    assert "[2/2] fagen 51.2 us" in err


def test_ctrl_c_shows_what_is_done(
    races: Races, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    races.fails[512] = KeyboardInterrupt()
    picture = tmp_path / "bench.svg"
    assert main(["bench", *GRID, "--plot", str(picture)]) == 130
    out, err = capsys.readouterr()
    assert "Partial: 1 of 2 shapes." in out and "25.6" in out
    assert err.splitlines()[-1] == "fagen: Interrupted."
    assert picture.exists()
    assert main(["bench", *GRID, "--json"]) == 130
    assert capsys.readouterr().out == ""


# The picture


def test_the_plot_has_a_line_for_everybody_and_the_roofline(
    races: Races, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    picture = tmp_path / "bench.svg"
    words = ["bench", "--seq", "256,512,1024", "--head-dim", "64,128", "--causal", "--no-causal"]
    assert main([*words, "--plot", str(picture)]) == 0
    text = picture.read_text()
    for label in ("roofline", KERNEL, "fa3", "flash"):
        assert text.count(f"<!-- {label} -->") == 4  # once in the legend of each panel
    assert "<!-- bf16 D64 causal -->" in text and "<!-- 1024 -->" in text
    assert f"Drew {picture}." in capsys.readouterr().err


def test_a_png_is_a_png(races: Races, tmp_path: Path):
    picture = tmp_path / "bench.PNG"
    assert main(["bench", *GRID, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "said", "code"),
    [
        ("bench.gif", "Name it bench.png, .svg or .pdf.", 2),
        ("none/bench.png", "there is no folder", 2),
    ],
)
def test_a_picture_that_can_not_be_is_refused_before_anything_is_measured(
    name: str,
    said: str,
    code: int,
    races: Races,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    assert main(["bench", *GRID, "--plot", str(tmp_path / name)]) == code
    assert said in capsys.readouterr().err
    assert races.asked == []


def test_without_matplotlib_the_command_that_installs_it_is_told(
    races: Races,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        plot.importlib.util, "find_spec", lambda n: None if n == "matplotlib" else real(n)
    )
    assert main(["bench", *GRID, "--plot", str(tmp_path / "bench.png")]) == 1
    assert "pip install 'fagen[plot]'" in capsys.readouterr().err
    assert races.asked == []


def test_a_plot_needs_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = ["bench", *GRID, "--target", "h200", "--plot", str(tmp_path / "bench.png")]
    assert main(words) == 1
    assert "--plot draws measured times" in capsys.readouterr().err


def test_every_contestant_has_a_colour_of_its_own():
    assert set(plot.COLOURS) == {KERNEL, DETERMINISTIC, *BACKENDS}
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)
