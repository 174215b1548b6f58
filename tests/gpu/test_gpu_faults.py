"""One run of the tuner on the device, in which half of the candidates do their worst."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from acting import MARK, killing, left_over
from fagen.config import Config
from fagen.generate.families import config_from_dict, flash
from fagen.generate.program import Program
from fagen.generate.render import render
from fagen.generate.space import SearchSpace, why_invalid
from fagen.outcome import Status
from fagen.problem import Problem, make_problem
from fagen.records import Record, Records
from fagen.target import Target, toolchain
from fagen.tune.ledger import Ledger
from fagen.tune.plan import Plan
from fagen.tune.pool import BuildPool, builder_count
from fagen.tune.proxies import GpuWorker
from fagen.tune.result import TuneResult
from fagen.tune.tuner import run
from gpu_fixtures import QUICK, here
from mutations import ENDLESS_LOOP, MUTATIONS, WILD_STORE, edited

if TYPE_CHECKING:
    import pytest

PROBLEM = make_problem(1024, 64, heads=4)
CANDIDATES = 40
BUDGET_S = 115.0
REFUSED_BY_PTXAS = (
    r"    m_i = tl.full",
    '    tl.inline_asm_elementwise("no.such.thing $0, $1;", "=r,r", [seq_q], tl.int32, False, 1)\n'
    "    m_i = tl.full",
)
# What the module does when it is loaded, in a child of that role alone.
ON_LOAD = "import triton.language as tl\nimport sys\nif sys.argv[1] == '{0}':\n    {1}\n"
NO_MEMORY = "import torch; torch.empty(1 << 50, dtype=torch.int8, device='cuda')"
VICTIM = (
    "import os, pathlib, time; pathlib.Path({0!r}).write_text(str(os.getpid())); time.sleep(600)"
)


@dataclass(frozen=True)
class Fault:
    """What is done to the programs of `count` candidates, and what their rows must say."""

    what: str
    count: int
    plant: Callable[[Program, Path], Program]
    status: Status
    reason: str


def _text(what: str, old: str, new: str) -> Callable[[Program, Path], Program]:
    return lambda program, flag: edited(program, what, old, new)


def _on_load(what: str, role: str, statement: str) -> Callable[[Program, Path], Program]:
    def plant(program: Program, flag: Path) -> Program:
        lines = ON_LOAD.format(role, statement.format(str(flag)))
        return edited(program, what, "import triton.language as tl\n", lines.replace("\\", r"\\"))

    return plant


def _many_stages(program: Program, flag: Path) -> Program:
    return replace(program, entries=tuple(replace(e, num_stages=24) for e in program.entries))


def _wrong() -> list[Fault]:
    names = ("sum not divided", "LSE in log2", "rescale forgotten", "maximum not subtracted")
    planted = {m.name: m for m in MUTATIONS["flash"]}
    return [
        Fault(name, 1, _text(name, m.old, m.new), Status.WRONG_RESULT, "over budget")
        for name, m in ((name, planted[name]) for name in names)
    ]


FAULTS = [
    Fault("hang", 2, _text("hang", *ENDLESS_LOOP), Status.TIMED_OUT, "gpu .*deadline"),
    Fault("wild", 2, _text("wild", *WILD_STORE), Status.CRASHED, "illegal memory access"),
    *_wrong(),
    Fault("ptxas", 3, _text("ptxas", *REFUSED_BY_PTXAS), Status.BUILD_ERROR, "(?i)ptxas"),
    Fault("shared", 3, _many_stages, Status.OUT_OF_RESOURCES, "bytes of shared memory"),
    Fault(
        "memory",
        3,
        _on_load("memory", "gpu", NO_MEMORY),
        Status.OUT_OF_RESOURCES,
        "CUDA out of memory",
    ),
    Fault(
        "abort",
        2,
        _on_load("abort", "build", "import os; os.abort()"),
        Status.BUILD_ERROR,
        "build .*SIGABRT",
    ),
    Fault("killed", 1, _on_load("killed", "gpu", VICTIM), Status.CRASHED, "gpu .*SIGKILL"),
]


def candidates(target: Target) -> tuple[Config, ...]:
    """Small tiles, which no compiler spills, each with a source of its own."""
    choices = product(
        (32, 64),
        (1, 2, 3, 4),
        ("pointer", "tma"),
        ("plain", "rotate_s"),
        ("split", "every_tile"),
        ("tiles_first", "heads_first"),
    )
    sources: dict[str, Config] = {}
    for block_n, stages, loads, loop, mask, order in choices:
        knobs = flash.Knobs(64, block_n, 4, stages, loads, loop, mask, order=order)
        config = Config("flash", knobs)
        if why_invalid(PROBLEM, target, config) is None:
            sources.setdefault(rendered(config).key, config)
    found = tuple(sources.values())
    return tuple(found[i * len(found) // CANDIDATES] for i in range(CANDIDATES))


def rendered(config: Config) -> Program:
    return render(PROBLEM, config, toolchain().triton_minor)


def faulty_ones(configs: tuple[Config, ...]) -> dict[Config, Fault]:
    """Every second candidate; the first, which is the default, is right."""
    faults = [fault for fault in FAULTS for _ in range(fault.count)]
    return dict(zip(configs[1::2], faults, strict=True))


def plan_of(records: Records, target: Target, flag: Path) -> Plan:
    configs = candidates(target)
    faulty = faulty_ones(configs)

    def render_with_faults(problem: Problem, config: Config) -> Program:
        program = rendered(config)
        return faulty[config].plant(program, flag) if config in faulty else program

    return Plan(
        problem=PROBLEM,
        target=target,
        space=SearchSpace(PROBLEM, target, configs, configs[:1], {}),
        ledger=Ledger(records, PROBLEM, target, toolchain()),
        workers=(GpuWorker("cuda:0"),),
        builder=BuildPool(target, builder_count()),
        render=render_with_faults,
        policy=replace(QUICK, samples=1),  # nothing is called slower: each is checked in full
        timed=True,
        trials=CANDIDATES,
        timeout_s=BUDGET_S,
    )


def assert_each_fault_cost_its_row(rows: list[Record], plan: Plan, result: TuneResult) -> None:
    configs = plan.space.configs
    faulty = faulty_ones(configs)
    assert result.state == "finished" and result.seconds < BUDGET_S
    assert Counter(row.config for row in rows) == Counter(configs)
    for row in rows:
        fault = faulty.get(row.config)
        status, reason = (Status.OK, "^$") if fault is None else (fault.status, fault.reason)
        assert row.status is status, (row.config, fault, row.outcome.reason)
        assert re.search(reason, row.outcome.reason), (fault, row.outcome.reason)
        assert (row.median_us is not None) == (fault is None)
    assert result.winner is not None and result.winner.config not in faulty
    raced = [f for f in result.finals if f.kind == "program"]
    assert raced and not result.note


# T02, T03
def test_twenty_faults_in_one_run_cost_a_row_each_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fagen.tune.proxies.TRY_LIMIT_S", 6.0)
    monkeypatch.setattr("fagen.tune.proxies.FIRST_LIMIT_S", 15.0)
    monkeypatch.setattr("fagen.tune.plan.RACE_SHARE", 0.1)
    monkeypatch.setenv(MARK, str(tmp_path))
    assert sum(fault.count for fault in FAULTS) == 20
    with Records.open(str(tmp_path / "t.db"), "write", config_from_dict) as records:
        plan = plan_of(records, here(), tmp_path / "victim")
        with killing(tmp_path / "victim") as killed:
            result = run(plan)
        assert len(killed) == 1
        assert left_over(tmp_path) == {}
        assert_each_fault_cost_its_row(records.trials(), plan, result)
