"""Steps of a benchmark: each a process of its own, with empty caches and a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from publish import ROOT, Plain, text_of

GRACE_S = 5.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Ended:
    """A step that is over: what it left behind, or the reason why that is nothing."""

    seconds: float
    answer: Plain | None
    reason: str = ""
    started_at: float = 0.0  # time.time()


def run_step(words: Sequence[str], folder: Path, deadline_s: float, root: Path = ROOT) -> Ended:
    """A process with its caches in the folder, killed with its children at the deadline.

    Its stdout is its answer, in JSON. root: where it finds fagen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out, err = folder / "stdout", folder / "stderr"
    started, started_at = time.monotonic(), time.time()
    with out.open("wb") as answer, err.open("wb") as log:
        child = subprocess.Popen(
            words,
            stdout=answer,
            stderr=log,
            cwd=folder,  # Python looks there first
            env=environment(folder, root),
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
            _end(child, signal.SIGTERM)  # a tuner may have children in groups of their own to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
        finally:
            _end(child, signal.SIGKILL)
            child.wait()
    seconds = time.monotonic() - started
    if code is None:
        reason = f"It took more than {deadline_s:g} s."
        return Ended(seconds, None, reason, started_at)
    try:
        found = json.loads(out.read_text("utf-8"))
    except ValueError:
        said = _last_words(err, code) if code else "Its answer is no JSON."
        return Ended(seconds, None, said, started_at)
    if code != 0:
        return Ended(seconds, None, _last_words(err, code), started_at)
    if not isinstance(found, dict):
        return Ended(seconds, None, "Its answer is no JSON object.", started_at)
    return Ended(seconds, found, "", started_at)


def bare(work: Path) -> Path:
    """A copy of this fagen with which no record ships."""
    root = work / "bare"
    for part in ("fagen", "templates", "tuning_db"):
        left_out = shutil.ignore_patterns("__pycache__", "records" if part == "tuning_db" else "")
        shutil.copytree(ROOT / part, root / part, ignore=left_out)
    return root


def _end(child: subprocess.Popen[bytes], how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, how)


def environment(folder: Path, root: Path) -> dict[str, str]:
    """Every cache that a tuner or its compiler keeps, in a folder of its own."""
    caches = {
        "FAGEN_CACHE": "fagen",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "HELION_CACHE_DIR": "helion",
        "CUDA_CACHE_PATH": "cuda",
    }
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        **{name: str(folder / "cache" / word) for name, word in caches.items()},
        "FAGEN_DB": str(folder / "fagen.db"),
        "PYTHONPATH": path,
    }


def _last_words(err: Path, code: int) -> str:
    """The last line of what it said, without the folders of this machine."""
    lines = err.read_text("utf-8", errors="replace").strip().splitlines()
    said = re.sub(r"(/[\w.+-]+)+/", "", lines[-1].strip()) if lines else "it said nothing"
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{ended}: {said[:300]}"


def end_on_sigterm() -> None:
    """As Ctrl-C does, so that the step under way is killed with its children."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def workplace(given: Path | None) -> Iterator[Path]:
    """An empty folder: what a cache holds would make a start warm."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="tuners-") as made_here:
            yield Path(made_here)
        return
    given.mkdir(parents=True)
    yield given.resolve()


def write(path: Path, document: Plain) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text_of(document) + "\n", encoding="utf-8")
    os.replace(part, path)
