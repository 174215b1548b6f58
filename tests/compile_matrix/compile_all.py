"""Compiles every kernel family for every architecture with the Triton of this environment.

Runs where there is no torch, no GPU and no pytest (`make test-matrix`). Prints each failure and
one line at the end; exits with 1 when a kernel does not compile or spills where it must not.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context

from fagen.config import Config
from fagen.generate.build import BuildFailed, build
from fagen.generate.families import FAMILIES, families_of
from fagen.generate.render import render
from fagen.generate.space import why_invalid
from fagen.problem import Problem, make_problem
from fagen.target import Target, preset, toolchain

# One device of each architecture; sm_120 has as much shared memory a block as sm_89.
ARCHITECTURES: dict[int, Target] = {
    80: preset("a100"),
    89: preset("l40s"),
    90: preset("h200"),
    100: preset("b200"),
    120: replace(preset("rtx4090"), name="sm_120", arch=120),
}

# The default config of each, and every seed of the first one on the architecture that has most.
# The last three forward ones are short: `slim` holds a whole row of keys.
PROBLEMS: tuple[Problem, ...] = (
    make_problem(8192, 128),
    make_problem(4096, 64, dtype="fp16", causal=True, causal_align="bottom_right"),
    make_problem(1000, 80, head_dim_v=64, heads=8, kv_heads=2, causal=True, layout="any"),
    make_problem(512, 128, causal=True),
    make_problem(256, 64, seq_kv=300, dtype="fp32", scale_sign="any", layout="any"),
    make_problem(8192, 128, direction="backward"),
    make_problem(4096, 64, dtype="fp16", causal=True, direction="backward"),
    make_problem(
        1000,
        80,
        head_dim_v=64,
        heads=8,
        kv_heads=2,
        causal=True,
        causal_align="bottom_right",
        layout="any",
        direction="backward",
    ),
)
EVERY_SEED = (90, PROBLEMS[0])

# Where the default config must not spill, with 16-bit dtypes and head dim 64 or 128. Not sm_120:
# 72 bytes there with tensor descriptors (Triton 3.6.0).
SPILL_FREE = {("flash", arch) for arch in (80, 89, 90, 100)}

# The kernels of Hopper are written to the last register: the first seeds of each head dim.
HOPPER = "flash_ws"
HOPPER_SEEDS = 2
HOPPER_PROBLEMS: tuple[Problem, ...] = tuple(
    make_problem(8192, dim, causal=causal)
    for dim in (64, 96, 128, 256)
    for causal in (False, True)
)
# The most bytes that they may spill, by head dim, and none of them in a loop. Measured over those
# seeds: 0, 32, 0 and 0 with Triton 3.6.0; 708, 144, 152 and 260 with 3.9.0, and with one product
# in flight at D96 244 to 324, with three slots and a causal mask 472.
HOPPER_SPILLS = {64: 0, 96: 32, 128: 0, 256: 32}
HOPPER_SPILLS_NEWEST = {64: 740, 96: 160, 128: 160, 256: 280}
ALONE_SPILLS_NEWEST = {2: 340, 3: 480}  # by slots
NEWEST_SINCE = (3, 8)


@dataclass(frozen=True)
class Case:
    arch: int
    problem: Problem
    config: Config
    most_spilled: int | None  # bytes; None: as many as it takes

    def __str__(self) -> str:
        return f"sm_{self.arch}, {self.problem}, {self.config}"


def cases() -> Iterator[Case]:
    for arch, target in ARCHITECTURES.items():
        for problem in PROBLEMS:
            for family in families_of(problem.direction):
                seeds = [Config(family.NAME, knobs) for knobs in family.seeds(problem, target)]
                legal = (c for c in seeds if why_invalid(problem, target, c) is None)
                wanted = None if (arch, problem) == EVERY_SEED else 1
                for place, config in enumerate(islice(legal, wanted)):
                    kept = place == 0 and _must_not_spill(arch, problem, config)
                    yield Case(arch, problem, config, 0 if kept else None)
    yield from _hopper_cases()


def _hopper_cases() -> Iterator[Case]:
    target, family = ARCHITECTURES[90], FAMILIES[HOPPER]
    newest = toolchain().triton_minor >= NEWEST_SINCE
    bounds = HOPPER_SPILLS_NEWEST if newest else HOPPER_SPILLS
    for problem in HOPPER_PROBLEMS:
        seeds = [Config(HOPPER, knobs) for knobs in family.seeds(problem, target)]
        legal = (c for c in seeds if why_invalid(problem, target, c) is None)
        for config in islice(legal, HOPPER_SEEDS):
            alone = newest and getattr(config.knobs, "in_flight", 2) == 1
            bound = (
                ALONE_SPILLS_NEWEST[config.knobs.slots]
                if alone
                else bounds[problem.shape.head_dim]
            )
            yield Case(90, problem, config, bound)


def _must_not_spill(arch: int, problem: Problem, config: Config) -> bool:
    plain = problem.shape.dtype != "fp32" and problem.shape.head_dim in (64, 128)
    return plain and (config.family, arch) in SPILL_FREE


def failure(case: Case) -> str | None:
    """What is wrong with a case, or None."""
    try:
        program = render(case.problem, case.config, toolchain().triton_minor)
        built = build(program, ARCHITECTURES[case.arch])
    except BuildFailed as error:
        return f"{case}: {error.status}: {error}"
    if case.most_spilled is not None and built.spill_bytes > case.most_spilled:
        return f"{case}: spills {built.spill_bytes} bytes, {case.most_spilled} may be"
    if case.most_spilled is not None:
        found = [f for kernel in built.kernels for f in kernel.findings if "in a loop" in f]
        if found:
            return f"{case}: {'; '.join(found)}"
    return None


def what_is_missing(chosen: list[Case]) -> list[str]:
    """Families that no problem reaches on an architecture of theirs: nothing would be checked."""
    seen = Counter((case.arch, case.config.family) for case in chosen)
    return [
        f"sm_{arch}: no config of {name}"
        for arch, target in ARCHITECTURES.items()
        for name, family in FAMILIES.items()
        if family.why_unsupported(_first(family.DIRECTION), target) is None
        and not seen[arch, name]
    ]


def _first(direction: str) -> Problem:
    return next(problem for problem in PROBLEMS if problem.direction == direction)


def main() -> int:
    if importlib.util.find_spec("torch") is not None:
        print("compile matrix: this environment has torch; run: make test-matrix")
        return 1
    start = time.monotonic()
    chosen = list(cases())
    failures = what_is_missing(chosen)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAGEN_CACHE"] = folder  # the children inherit it
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            failures += [found for found in pool.map(failure, chosen) if found is not None]
    for found in failures:
        print(found)
    archs = " ".join(f"sm_{arch}" for arch in ARCHITECTURES)
    print(
        f"compile matrix, Triton {toolchain().triton}: {len(chosen)} kernels of "
        f"{', '.join(FAMILIES)} for {archs}, {len(failures)} failed, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
