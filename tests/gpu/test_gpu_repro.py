"""A script of `fagen repro` on a GPU: right, wrong, and hanging kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_fixtures import run_script, write_trials
from fagen.cli.main import main
from fagen.config import Config
from fagen.generate.families import FAMILIES
from gpu_fixtures import here

CONFIG = Config("flash", FAMILIES["flash"].Knobs(block_m=64, block_n=32, num_warps=4))
LAST = "    acc = acc / l_i[:, None]\n"
# The gate poisons LSE before each launch with a NaN, which is unequal to every number.
HANGS = "    while tl.atomic_add(LSE, 0.0) != 1.0:\n        l_i = l_i * 0.5\n" + LAST


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    write_trials([{"config": CONFIG, "seq": 256, "target": here(), "us": 10.0}])
    assert main(["repro", "1"]) == 0
    text = capsys.readouterr().out
    assert LAST in text
    return text


@pytest.mark.parametrize("words", [[], ["--finalist"]], ids=["full", "finalist"])
def test_a_right_kernel_is_checked_and_timed(
    words: list[str], script: str, tmp_path: Path, root: Path
):
    done = run_script(script, tmp_path, root, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Right on {here().name}." in done.stdout
    assert ("repeat[" in done.stdout) == bool(words)
    assert "this kernel" in done.stdout and "sdpa-flash" in done.stdout


def test_a_wrong_kernel_ends_with_1(script: str, tmp_path: Path, root: Path):
    done = run_script(script.replace(LAST, f"{LAST}    acc = acc * 1.05\n"), tmp_path, root)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("wrong_result: o_")


def test_a_kernel_that_hangs_is_ended(script: str, tmp_path: Path, root: Path):
    done = run_script(script.replace(LAST, HANGS), tmp_path, root, "--timeout", "20")
    assert done.returncode == 1
    assert done.stderr.startswith("fagen: Ended after 20 s of checking.")
