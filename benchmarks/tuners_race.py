"""Kernels that tuners chose, held against the truth and raced; a part of benchmarks/tuners.py.

python benchmarks/tuners_race.py JOB.json check NAME       one of them, in a process of its own
python benchmarks/tuners_race.py JOB.json race NAME...     all of them and torch's, in turns

The job says which config each tuner chose; none is tuned here. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from publish import check, samples, times
from torch import Tensor

import fagen
from fagen.judge.cases import target_cases
from fagen.judge.measure import LaunchSet, MeasurePolicy, one_line, race
from fagen.judge.peers import draw_inputs, peer_launch, peers
from fagen.judge.trial import KINDS, Right, prepare
from fagen.outcome import Check, Timing, Verdict
from fagen.problem import Problem, make_problem
from fagen.report.bench import ratio
from fagen.target import detect

ROUNDS = 21
GUARD = 128  # rows around the inputs of a check

Plain = dict[str, Any]
Inputs = tuple[Tensor, ...]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(name: str, job: Plain) -> Attend:
    """What a tuner chose, as a call that allocates its output. Raises where it is not there."""
    config = job["chosen"][name]
    if name == "fagen":
        kernel = fagen.get(make_problem(**job["words"]), db=job["db"], on_miss="raise")
        if kernel.config.to_dict() != config:
            raise RuntimeError(f"fagen.get serves {kernel.config}, which is not what was chosen.")
        return kernel
    if name == "helion":
        import tuners_helion

        return tuners_helion.attention(tuners_helion.configured(config), job["causal"])
    import tuners_triton

    return tuners_triton.attention(job["triton"][name], config)


def verdict(attend: Attend, problem: Problem, device: torch.device) -> Verdict:
    """The gate's cases of the problem's own shape, and its budgets for the output.

    All contestants get dense inputs and are judged by O alone: Helion's kernel has no LSE and is
    compiled for this one shape, so the gate's small shapes would judge other kernels.
    """
    found: list[Check] = []
    with torch.no_grad():
        for case in target_cases(problem):
            dense = replace(case, layout="tight")
            one = prepare(dense, problem, device, GUARD, _no_far_case)
            o = attend(*(guarded.view.contiguous() for guarded in one.inputs))
            right = one.right
            assert isinstance(right, Right)
            errors = right.errors(right.picked(o), right.lse)
            for kind, error, budget in zip(KINDS[:2], errors, one.budgets, strict=False):
                found.append(Check(f"{kind}[{case.name}]", float(error), budget, one.detail))
    return Verdict(tuple(found), str(device))


def raced(job: Plain, names: Sequence[str], device: torch.device, l2_bytes: int) -> Plain:
    """Kernel times in turns. times_fagen: of same rounds, above 1 is slower than fagen's."""
    problem, policy = make_problem(**job["words"]), MeasurePolicy()
    count = policy.input_sets(problem, l2_bytes)
    with torch.no_grad():
        sets = [draw_inputs(problem, device, seed) for seed in range(count)]
        found, missing = peers(problem, device, job["peers"], sets[0])
        launches, failed = _launches(job, names, sets)
        launches |= {name: peer_launch(peer, problem, sets) for name, peer in found.items()}
        timings = race(launches, policy, ROUNDS, device=device, sets=count, failed=failed)
    ours = timings.get("fagen")
    return {
        "policy": {"name": policy.name, "l2": policy.l2, "input_sets": count, "rounds": ROUNDS},
        "rows": {name: _row(timing, ours, problem) for name, timing in timings.items()},
        "missing": {**missing, **failed},
    }


def _row(timing: Timing, ours: Timing | None, problem: Problem) -> Plain:
    beside = None if ours is None else [float(f"{n:.6g}") for n in ratio(timing, ours)]
    return {**times(timing, problem), "times_fagen": beside, **samples(timing)}


def _launches(
    job: Plain, names: Sequence[str], sets: list[Inputs]
) -> tuple[dict[str, LaunchSet], dict[str, str]]:
    """The kernels that can be launched, and why the others can't."""
    launches, failed = {}, {}
    for name in names:
        try:
            launches[name] = _launch(attention(name, job), sets)
        except Exception as error:  # other people's code
            failed[name] = one_line(error)
    return launches, failed


def _launch(attend: Attend, sets: list[Inputs]) -> LaunchSet:
    attend(*sets[0])  # compiles, and makes what these tensors need, before a graph is captured

    def launch(number: int) -> None:
        attend(*sets[number])

    return launch


def _no_far_case() -> Tensor:
    raise AssertionError("the cases of the problem's own shape need no far buffer")


def main(words: Sequence[str]) -> Plain:
    path, step, *names = words
    job = json.loads(Path(path).read_text("utf-8"))
    target, device = detect(), torch.device("cuda", torch.cuda.current_device())
    if step == "race":
        return raced(job, names, device, target.l2_bytes)
    found = verdict(attention(names[0], job), make_problem(**job["words"]), device)
    return {"passed": found.passed, "checks": [check(one) for one in found.checks]}


if __name__ == "__main__":
    answer_to, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    print(json.dumps(main(sys.argv[1:])), file=answer_to)
