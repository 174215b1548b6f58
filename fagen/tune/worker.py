"""The main loop of a child process: `python -m fagen.tune.worker ROLE JOBS REPLIES LIFELINE`.

Roles: `build` compiles, `gpu` times and verifies on one device, `interpret` verifies on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from fagen.generate.program import Program
from fagen.outcome import Status, Timing, Verdict
from fagen.tune.children import Raised, Reply
from fagen.tune.jobs import (
    BuildJob,
    BuildReply,
    Confirm,
    InterpretJob,
    Prepare,
    Race,
    RaceReply,
    Tried,
    TryProgram,
)

if TYPE_CHECKING:
    import torch

    from fagen.judge.measure import Bar
    from fagen.judge.peers import Peer
    from fagen.judge.verify import Gate, Level
    from fagen.problem import Problem
    from fagen.run.kernel import Runner

    Tensors = tuple[torch.Tensor, ...]

Handlers = dict[type[Any], Callable[[Any], Any]]

# After one of these every later CUDA call of the process fails, so the process must be replaced.
STICKY = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|unspecified launch failure"
    r"|launch (failure|timed out)|device-side assert|hardware stack error|invalid program counter"
    r"|invalid address space|unknown error|CUDA_ERROR_(ILLEGAL|MISALIGNED|LAUNCH|ASSERT)",
    re.IGNORECASE,
)
BUILD_NICENESS = 5
RESOURCES = re.compile(r"out of memory|out of resource|too many resources", re.IGNORECASE)


def main(arguments: list[str]) -> None:
    """Greet, then one reply a job until the parent closes its end."""
    role, *fds = arguments
    job_end, reply_end, life_end = map(int, fds)
    die_with_parent(life_end)
    jobs, replies = Connection(job_end, writable=False), Connection(reply_end, readable=False)
    handlers = _HANDLERS[role]()
    replies.send(Reply(None))
    with contextlib.suppress(EOFError):
        while True:
            serve_one(jobs, replies, handlers)


def serve_one(jobs: Connection, replies: Connection, handlers: Handlers) -> None:
    job = jobs.recv()
    try:
        value = handlers[type(job)](job)
    except Exception as error:  # told to the parent, which decides what it means
        replies.send(Raised(type(error).__name__, _short(error)))
        return
    replies.send(Reply(value, last=isinstance(value, Tried) and is_spoilt(value)))


def die_with_parent(life_end: int) -> None:
    """When the parent's end of the pipe closes, kill this process and all that it started."""

    def watch() -> None:
        while os.read(life_end, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    _have_the_kernel_kill(life_end)
    threading.Thread(target=watch, daemon=True).start()  # for a parent that is gone by now, too


def _have_the_kernel_kill(life_end: int) -> None:
    # A thread of a stopped process, or of one that holds Python's lock in a compiler, never runs.
    import fcntl

    with contextlib.suppress(AttributeError, OSError):  # Linux alone has F_SETSIG
        fcntl.fcntl(life_end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_end, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(life_end, fcntl.F_SETFL, os.O_ASYNC)


def failure(error: BaseException) -> Tried:
    """A row's status and reason for what a candidate raised on the device."""
    text = _short(error)
    if type(error).__name__ in ("OutOfMemoryError", "OutOfResources") or RESOURCES.search(text):
        return Tried(Status.OUT_OF_RESOURCES, text)
    return Tried(Status.CRASHED, text)


def is_spoilt(tried: Tried) -> bool:
    """Whether a CUDA error left the process useless for every later candidate."""
    return tried.status == Status.CRASHED and STICKY.search(tried.reason) is not None


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:600] or type(error).__name__


def _build_role() -> Handlers:
    # The builds fill every core, and what limits a run is the process on the GPU.
    os.nice(BUILD_NICENESS)
    from fagen.generate.build import BuildFailed, build  # imports Triton once for all jobs

    def run(job: BuildJob) -> BuildReply:
        try:
            return BuildReply(build(job.program, job.target))
        except BuildFailed as failed:
            if isinstance(
                failed.__cause__, OSError
            ):  # no room, no ptxas: not the candidate's fault
                raise failed.__cause__ from None
            return BuildReply(None, failed.status, _short(failed))

    return {BuildJob: run}


def _gpu_role() -> Handlers:
    import fagen.judge.measure
    import fagen.judge.peers
    import fagen.judge.verify
    import fagen.run.kernel  # noqa: F401  (the slow imports, before the greeting)

    bench = Bench()
    return {
        Prepare: bench.prepare,
        TryProgram: bench.try_program,
        Confirm: bench.confirm,
        Race: bench.race,
    }


def _interpret_role() -> Handlers:
    import torch

    from fagen.judge.verify import Gate
    from fagen.run.kernel import load

    torch.set_num_threads(1)
    gates: dict[Problem, Gate] = {}

    def run(job: InterpretJob) -> Tried:
        problem = job.program.problem
        if problem not in gates:
            gates[problem] = Gate(problem, torch.device("cpu"))
        runner = load(job.program, job.target, "cpu")
        tile = _tile(job.program)
        verdict = gates[problem].check(
            runner.launch_poisoned, tile, job.program.limits, level="quick"
        )
        if verdict.passed:
            return Tried(Status.PREDICTED, "", verdict)
        return Tried(Status.WRONG_RESULT, _why_wrong(verdict), verdict)

    return {InterpretJob: run}


_HANDLERS: dict[str, Callable[[], Handlers]] = {
    "build": _build_role,
    "gpu": _gpu_role,
    "interpret": _interpret_role,
}


def _tile(program: Program) -> tuple[int, int]:
    from fagen.generate.families import family_of

    return family_of(program.config).tile(program.config.knobs)


def _why_wrong(verdict: Verdict) -> str:
    worst = verdict.worst
    if worst is None:
        return "no check was made"
    failed = sum(not check.passed for check in verdict.checks)
    return (
        f"{worst.name}: error {worst.error:.3g} over budget {worst.budget:.3g}"
        f" ({failed} of {len(verdict.checks)} checks failed)"
    )


class Bench:
    """One device with the inputs, truth and baseline of one problem."""

    def prepare(self, job: Prepare) -> None:
        import torch

        from fagen.judge.verify import Gate

        self._job = job
        self._device = torch.device(job.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._gate = Gate(job.problem, self._device)
        self._sets = [
            _tensors(job.problem, self._device, seed)
            for seed in range(job.policy.input_sets(job.problem, job.target.l2_bytes))
        ]
        self._scale = job.problem.shape.head_dim**-0.5
        self._best: Bar | None = None
        self._passed: dict[str, Verdict] = {}  # by the program's key, at level "full"
        self._make_ready()
        # What is here by now stays. A collection after each candidate took 80 ms of looking
        # through the 180000 objects of torch and Triton, of the 320 ms that a slow one takes.
        gc.freeze()

    def _make_ready(self) -> None:
        """While the first kernels are still being built."""
        from fagen.generate.families import family_of
        from fagen.generate.space import seeds_of
        from fagen.run.launch import start_driver

        start_driver(self._device)
        for default in seeds_of(self._job.problem, self._job.target)[:1]:
            self._gate.make_ready(family_of(default).tile(default.knobs))

    def try_program(self, job: TryProgram) -> Tried:
        return _guarded(lambda: self._timed(job.program))

    def confirm(self, job: Confirm) -> Tried:
        tried = _guarded(lambda: self._verified(job.program, self._load(job.program), job.level))
        if tried.status != Status.OK:  # others may have looked slow beside it
            self._best = None
        return tried

    def race(self, job: Race) -> RaceReply:
        from fagen.judge.measure import race
        from fagen.judge.peers import FUSED, peers

        found, missing = peers(self._job.problem, self._device, FUSED)
        contestants = {p.key: self._launches(self._load(p)) for p in job.programs}
        contestants |= {name: self._peer_launches(peer) for name, peer in found.items()}
        failed: dict[str, str] = {}
        timings = race(
            contestants,
            self._job.policy,
            job.rounds,
            device=self._device,
            sets=len(self._sets),
            failed=failed,
            rivals=tuple(p.key for p in job.programs) if job.leaving else (),
        )
        keys = {program.key for program in job.programs}
        return RaceReply(
            {name: timing for name, timing in timings.items() if name in keys},
            {name: timing for name, timing in timings.items() if name not in keys},
            missing | {name: why for name, why in failed.items() if name not in keys},
            {key: Tried(Status.CRASHED, why) for key, why in failed.items() if key in keys},
        )

    def _timed(self, program: Program) -> Tried:
        from fagen.judge.measure import Bar, impossible

        job = self._job
        runner = self._load(program)
        tried = self._verified(program, runner, "smoke")
        if tried.status != Status.OK:
            return tried
        began = time.perf_counter()
        launches, best = self._launches(runner), self._best
        timing, lost_to_us = self._measured(launches)
        took = time.perf_counter() - began
        if lost_to_us is not None:
            ratio = min(timing.samples_us) / lost_to_us
            reason = f"{ratio:.2f}x the time of the fastest by then: not checked any further"
            return Tried(Status.SLOWER, reason, timing=timing, time_s=took)
        tried = replace(self._verified(program, runner, "full"), time_s=took)
        if tried.status != Status.OK:
            return tried
        doubt = impossible(job.problem, job.target, timing.median_us, job.policy)
        if doubt is not None:
            return replace(tried, status=Status.CRASHED, reason=f"no usable time: {doubt}")
        if best is None or timing.median_us < best.us:
            sets = len(self._sets)
            self._best = Bar(timing.median_us, launches, job.policy, self._device, sets=sets)
        return replace(tried, timing=timing)

    def _measured(self, launches: Callable[[int], None]) -> tuple[Timing, float | None]:
        """The time, and what the fastest takes where this one is lost to it."""
        from fagen.judge.measure import LOST, is_lost, measure

        policy, sets, best = self._job.policy, len(self._sets), self._best
        if best is None:
            return measure(launches, policy, self._device, sets=sets), None
        timing = measure(launches, policy, self._device, sets=sets, give_up_us=best.us)
        samples = timing.samples_us
        if len(samples) == policy.samples:
            return timing, None
        if len(samples) < len(LOST):  # by more than any device drifts
            return timing, best.us
        best_us = best.now_us()
        if is_lost(samples, best_us):
            return timing, best_us
        return measure(launches, policy, self._device, sets=sets), None

    def _verified(self, program: Program, runner: Runner, level: Level) -> Tried:
        from fagen.generate.families import repeats

        launch = runner.launch_poisoned
        if level == "full" and program.key in self._passed:  # timed once more
            return Tried(Status.OK, "", self._passed[program.key])
        verdict = self._gate.check(
            launch,
            _tile(program),
            program.limits,
            level=level,
            repeats=repeats(program.config),
        )
        if verdict.passed:
            if level == "full":
                self._passed[program.key] = verdict
            return Tried(Status.OK, "", verdict)
        return Tried(Status.WRONG_RESULT, _why_wrong(verdict), verdict)

    def _load(self, program: Program) -> Runner:
        from fagen.run.kernel import load

        return load(program, self._job.target, self._device)

    def _launches(self, runner: Runner) -> Callable[[int], None]:
        return lambda i: runner.launch(*self._sets[i], self._scale)

    def _peer_launches(self, peer: Peer) -> Callable[[int], None]:
        from fagen.judge.peers import peer_launch

        problem = self._job.problem
        places = (0, 1, 2, 5) if problem.direction == "backward" else (0, 1, 2)  # q, k, v and g
        given = [tuple(one[place] for place in places) for one in self._sets]
        return peer_launch(peer, problem, given)


def _tensors(problem: Problem, device: torch.device, seed: int) -> Tensors:
    """A launch's inputs, q, k, v and g from a normal distribution, and room for its outputs."""
    import torch

    s = problem.shape
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dice = torch.Generator(device).manual_seed(seed)
    dtype = dtypes[s.dtype]

    def draw(heads: int, rows: int, columns: int) -> torch.Tensor:
        # Rows as far apart as layout class aligned16 promises, where columns don't fill 16 bytes.
        step = 16 // dtype.itemsize if problem.layout == "aligned16" else 1
        size = (s.batch, heads, rows, -(-columns // step) * step)
        return torch.randn(size, generator=dice, device=device, dtype=dtype)[..., :columns]

    q = draw(s.heads_q, s.seq_q, s.head_dim)
    k = draw(s.heads_kv, s.seq_kv, s.head_dim)
    v = draw(s.heads_kv, s.seq_kv, s.head_dim_v)
    o = torch.empty(s.batch, s.heads_q, s.seq_q, s.head_dim_v, device=device, dtype=dtype)
    lse = torch.empty(s.batch, s.heads_q, s.seq_q, device=device, dtype=torch.float32)
    if problem.direction == "forward":
        return q, k, v, o, lse
    # As a forward pass leaves them, near enough: how much power a launch draws, and so its time,
    # hangs on what it multiplies. The log of n exponentials of normal numbers is log n + 1/2.
    lse.copy_(_visible(problem, device).clamp_min(1).log() + 0.5)
    o.copy_(torch.randn(o.shape, generator=dice, device=device) / s.seq_kv**0.5)
    g = draw(s.heads_q, s.seq_q, s.head_dim_v)
    return (
        q,
        k,
        v,
        o,
        lse,
        g,
        *(torch.empty(x.shape, device=device, dtype=dtype) for x in (q, k, v)),
    )


def _visible(problem: Problem, device: torch.device) -> torch.Tensor:
    """How many keys each query row sees."""
    import torch

    s, causal = problem.shape, problem.features.causal
    if causal == "none":
        return torch.full((s.seq_q,), s.seq_kv, device=device)
    shift = s.seq_kv - s.seq_q if causal == "bottom_right" else 0
    return (torch.arange(s.seq_q, device=device) + 1 + shift).clamp(0, s.seq_kv)


def _guarded(run: Callable[[], Tried]) -> Tried:
    """What a candidate raises becomes its row, and its memory is freed before the next one."""
    import torch

    try:
        return run()
    except Exception as error:
        return failure(error)
    finally:
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a spoilt context can't free; it ends anyway
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
