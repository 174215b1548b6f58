"""A database with trials in it, and the command line in a process of its own."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from fagen.config import Config
from fagen.generate.families import config_from_dict
from fagen.generate.render import render
from fagen.generate.space import seeds_of
from fagen.outcome import GATE, Built, Check, KernelFacts, Outcome, Status, Timing, Verdict
from fagen.problem import make_problem
from fagen.records import Plan, Records
from fagen.target import Target, preset, toolchain


def fagen(*words: str, env: dict[str, str] | None = None, **more: Any):
    """Run `python -m fagen`; stderr is captured, stdout too unless told otherwise."""
    given = {"stdout": subprocess.PIPE, "text": True, **more}
    return subprocess.run(
        [sys.executable, "-m", "fagen", *words],
        env={**os.environ, **(env or {})},
        stderr=subprocess.PIPE,
        check=False,
        **given,
    )


def write_trials(trials: list[dict[str, Any]], db: str | None = None) -> list[int]:
    """One run each with one trial of these words of `_write`. Returns the trials' ids."""
    with Records.open(db, "write", config_from_dict) as records:
        return [_write(records, **trial) for trial in trials]


def _write(
    records: Records,
    *,
    status: Status = Status.OK,
    seq: int = 64,
    us: float = 12.5,
    reason: str = "",
    error: float = 0.25,
    target: Target | None = None,
    findings: tuple[str, ...] = (),
    head_dim: int = 16,
    config: Config | None = None,
    source_key: str | None = None,
    module_path: str = "kernel.py",
) -> int:
    """source_key: another one than the config's source has now."""
    problem, target = make_problem(seq, head_dim), target or preset("h200")
    config = config or seeds_of(problem, preset("h200"))[0]
    program = render(problem, config, toolchain().triton_minor)
    outcome = Outcome(
        config,
        status,
        reason,
        program.key if source_key is None else source_key,
        program.template_digest,
        built=Built(module_path, (KernelFacts(program.name, 1024, 64, 0, findings),)),
        verdict=Verdict((Check("o_max", error, 0.5),), target.name),
        timing=Timing((us,), "test") if status is Status.OK else None,
    )
    run_id = records.begin_run(
        problem, target, toolchain(), Plan("test", GATE, "test", 0, None, None)
    )
    trial_id = records.save(run_id, outcome)
    records.finish_run(run_id)
    return trial_id


def run_script(
    script: str, folder: Path, root: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    """What `fagen repro` wrote, in a folder of its own, where no database is or can be found."""
    for path in folder.glob("tuning.db*"):
        path.unlink()
    own = folder / "own"
    own.mkdir()
    (own / "script.py").write_text(script, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "FAGEN_DB"}
    done = subprocess.run(
        [sys.executable, "script.py", *words],
        cwd=own,
        env={**env, "PYTHONPATH": str(root), "XDG_DATA_HOME": str(own)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [path.name for path in own.iterdir()] == ["script.py"]
    return done


def rows_of(db: Path, statement: str) -> list[Any]:
    """Run SQL on a database file behind everybody's back."""
    with closing(sqlite3.connect(db)) as connection, connection:
        return connection.execute(statement).fetchall()
