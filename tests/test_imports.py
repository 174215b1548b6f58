"""Importing fagen and asking it for help is quick, and leaves machine and device alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "triton", "optuna", "sqlalchemy", "alembic"}

# Run in a fresh process: what `import fagen` loads, writes and dlopens, and how long it takes.
WATCHED_IMPORT = """
import os, sys, time
written, libraries = [], []

def watch(event, args):
    changes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if changes and "__pycache__" not in str(args[0]):  # Python's own, at a first import
        written.append(str(args[0]))
    if event in ("sqlite3.connect", "subprocess.Popen", "socket.connect"):
        written.append(event)
    if event == "ctypes.dlopen":
        libraries.append(str(args[0]))

before = set(sys.modules)
sys.addaudithook(watch)
start = time.process_time()
import fagen
seconds = time.process_time() - start
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(repr((seconds, sorted(loaded), written, libraries)))
"""


def python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(cwd)}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=True
    )


def children_cpu_s() -> float:
    """CPU seconds of ended child processes: a machine that is busy with others changes little."""
    used = os.times()
    return used.children_user + used.children_system


def watched_import(root: Path) -> tuple[float, list[str], list[str], list[str]]:
    found: tuple[float, list[str], list[str], list[str]]
    found = eval(python("-c", WATCHED_IMPORT, cwd=root).stdout)
    return found


# R04
def test_import_is_light(root: Path) -> None:
    _, loaded, _, _ = watched_import(root)
    assert "fagen" in loaded
    assert HEAVY.isdisjoint(loaded)


# R04
def test_import_writes_nothing_and_touches_no_device(root: Path) -> None:
    _, _, written, libraries = watched_import(root)
    assert (written, libraries) == ([], [])


# R04
def test_import_takes_less_than_300_ms(root: Path) -> None:
    assert min(watched_import(root)[0] for _ in range(5)) < 0.3


# R04
@pytest.mark.parametrize("words", [["--help"], ["db", "list"]], ids=" ".join)
def test_help_and_db_list_take_less_than_a_second(
    root: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FAGEN_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # the default database, missing
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    seconds = []
    for _ in range(3):
        start = children_cpu_s()
        python("-m", "fagen", *words, cwd=root)
        seconds.append(children_cpu_s() - start)
    assert min(seconds) < 1.0


def test_fagen_tune_is_the_function_whatever_was_imported_before(root: Path) -> None:
    asked = "import fagen.tune.tuner, fagen; fagen.tune(seq='many', head_dim=64, target='h200')"
    done = subprocess.run([sys.executable, "-c", asked], cwd=root, capture_output=True, text=True)
    assert "BadProblem: seq must be a whole number" in done.stderr
