"""What `fagen.get` serves from tuning databases: through the gate once more, and raced in turns.

python benchmarks/served.py --seq 8192 --head-dim 128 seed0.db seed1.db --out FILE.json

In a process that tuned nothing: each database's winner is taken by `fagen.get`, must come from a
tuned row, passes the gate's finalist level on inputs made here, answers one call on fresh inputs
within the gate's budget, and is timed by kernel (CUDA graph) in rounds with the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from publish import ROOT, commit, text_of

import fagen
from fagen.generate.families import family_of
from fagen.generate.render import render
from fagen.judge.measure import MeasurePolicy, race
from fagen.judge.reference import baseline, truth
from fagen.judge.verify import Gate
from fagen.outcome import Timing
from fagen.problem import Problem
from fagen.run.kernel import Runner, load
from fagen.target import detect, toolchain

ROUNDS = 21
DEVICE = torch.device("cuda:0")


def main() -> None:
    asked = _options()
    words = {"seq": asked.seq, "head_dim": asked.head_dim, "causal": asked.causal}
    # By file name: where a database lay is nobody's business.
    kernels = {Path(db).name: fagen.get(**words, db=db) for db in asked.databases}
    problem = next(iter(kernels.values())).problem
    rows = {db: _row(kernel, problem) for db, kernel in kernels.items()}
    timings = _raced(kernels, problem)
    medians = [timing.median_us for timing in timings.values()]
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/served.py " + " ".join(asked.words),
        "commit": commit(ROOT, asked.commit, asked.clean),
        "device": detect().name,
        "versions": {"torch": torch.__version__, "triton": toolchain().triton},
        "problem": problem.to_dict(),
        "policy": MeasurePolicy().name,
        "slowest_over_fastest": max(medians) / min(medians),
        "served": {db: {**rows[db], **_times(timings[db])} for db in kernels},
    }
    asked.out.write_text(text_of(found) + "\n")
    for db, row in found["served"].items():
        print(db, row["origin"], row["config"], f"{row['median_us']:.1f} us", row["passed"])
    print(f"slowest over fastest: {found['slowest_over_fastest']:.4f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("databases", nargs="+")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="where git can't tell: the commit of this checkout")
    parser.add_argument("--clean", type=lambda said: said == "yes", help="yes or no")
    asked = parser.parse_args()
    asked.words = [f"--seq {asked.seq} --head-dim {asked.head_dim}"]
    asked.words += ["--causal"] if asked.causal else []
    return asked


def _row(kernel: fagen.Kernel, problem: Problem) -> dict[str, Any]:
    """Where it came from, the gate's verdict on it now, and one call on fresh inputs."""
    runner = _runner(kernel, problem)
    verdict = Gate(problem, DEVICE).check(
        runner.launch_poisoned,
        family_of(kernel.config).tile(kernel.config.knobs),
        runner.program.limits,
        level="finalist",
    )
    error, budget = _fresh(kernel, problem)
    return {
        "origin": kernel.origin,
        "config": str(kernel.config),
        "source": runner.program.key,
        "passed": verdict.passed and error <= budget,
        "checks": [[c.name, c.error, c.budget] for c in verdict.checks],
        "fresh_call": {"error": error, "budget": budget},
    }


def _fresh(kernel: fagen.Kernel, problem: Problem) -> tuple[float, float]:
    """Largest error of a call as a user makes it, and what the gate allows it."""
    q, k, v = _inputs(problem, seed=2**31 - 1)
    scale = problem.shape.head_dim**-0.5
    right = truth(q, k, v, problem.features, scale)[0]
    plain = baseline(q, k, v, problem.features, scale)[0]
    error = (kernel(q, k, v).double() - right).abs().max().item()
    return error, 2 * (plain.double() - right).abs().max().item() + 1e-5


def _raced(kernels: dict[str, fagen.Kernel], problem: Problem) -> dict[str, Timing]:
    policy = MeasurePolicy()
    sets = [
        _inputs(problem, seed) for seed in range(policy.input_sets(problem, detect().l2_bytes))
    ]
    contestants = {db: _launches(kernel, problem, sets) for db, kernel in kernels.items()}
    return race(contestants, policy, ROUNDS, device=DEVICE, sets=len(sets))


def _launches(
    kernel: fagen.Kernel, problem: Problem, sets: list[tuple[torch.Tensor, ...]]
) -> Callable[[int], None]:
    runner = _runner(kernel, problem)
    q = sets[0][0]
    o = torch.empty(*q.shape[:3], problem.shape.head_dim_v, device=DEVICE, dtype=q.dtype)
    lse = torch.empty(q.shape[:3], device=DEVICE)
    scale = problem.shape.head_dim**-0.5

    def launch(i: int) -> None:
        q, k, v = sets[i]
        runner.launch(q, k, v, o, lse, scale)

    return launch


def _runner(kernel: fagen.Kernel, problem: Problem) -> Runner:
    program = render(problem, kernel.config, toolchain().triton_minor)
    return load(program, detect(), DEVICE)


def _inputs(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = problem.shape
    dice = torch.Generator(DEVICE).manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[s.dtype]

    def draw(heads: int, rows: int, columns: int) -> torch.Tensor:
        size = (s.batch, heads, rows, columns)
        return torch.randn(size, generator=dice, device=DEVICE, dtype=dtype)

    return (
        draw(s.heads_q, s.seq_q, s.head_dim),
        draw(s.heads_kv, s.seq_kv, s.head_dim),
        draw(s.heads_kv, s.seq_kv, s.head_dim_v),
    )


def _times(timing: Timing) -> dict[str, Any]:
    return {"median_us": timing.median_us, "samples_us": list(timing.samples_us)}


if __name__ == "__main__":
    main()
