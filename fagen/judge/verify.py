"""The exactness gate: what a kernel must survive before its time counts.

A kernel passes when it is as good as attention in the same precision: errors against the float64
truth of at most twice the baseline's plus 1e-5. Nothing outside its tensors may be touched, every
output must be written, and finalists repeat bit for bit. A stricter gate has a higher number in
`outcome.GATE`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from fagen.judge import gradients, trial
from fagen.judge.arena import FAR_ELEMENTS
from fagen.judge.cases import Case, cases, target_cases
from fagen.judge.trial import TORCH_DTYPE, Prepared
from fagen.outcome import Check, Verdict
from fagen.problem import ITEM_BYTES, Problem

Launch = Callable[..., None]  # as `Runner.launch_poisoned`
Level = Literal["smoke", "quick", "full", "finalist"]

REPEATS = 10
FP16_MAX = 65504.0
FP32_LOG2_MAX = 127.0


class Gate:
    """Judges launches of one problem on one device.

    Inputs, truths and baselines are made once and kept. A launch that raises goes through
    to the caller; the gate stays usable, since every buffer is restored before each launch.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem = problem
        self.device = torch.device(device)
        self._kept: dict[Case, tuple[int, Prepared]] = {}
        self._far: Tensor | None = None
        self._sm_count = 0
        backward = problem.direction == "backward"
        self._prepare = gradients.prepare if backward else trial.prepare
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self._sm_count = properties.multi_processor_count

    def make_ready(self, tile: tuple[int, int]) -> None:
        """What the first kernel would wait for: the truths of the target shape, and what torch
        loads for them. Of the 1.2 s that all of it takes on an H200 0.8 s (bf16 B2 H16 N8192
        D128). A kernel of a larger tile has them made anew."""
        with self._on_device(), torch.no_grad():
            for case in target_cases(self.problem):
                self._prepared(case, max(tile))

    def check(
        self,
        launch: Launch,
        tile: tuple[int, int],
        limits: dict[str, range],
        *,
        level: Level,
        repeats: bool = True,
    ) -> Verdict:
        """smoke: one shrunken shape, ragged; quick: all of them; full: the target shape too;
        finalist: and bitwise repeats, if the kernel `repeats`. Only full and finalist say that a
        kernel is right.

        On a CPU, where the interpreter runs, quick takes a shorter list of the same kinds.
        """
        thorough = self.device.type != "cpu" or level != "quick"
        todo = cases(self.problem, tile, limits, thorough=thorough, sm_count=self._sm_count)
        if level == "smoke":
            todo = todo[:1]
        elif level != "quick":
            todo += target_cases(self.problem)
        with self._on_device(), torch.no_grad():
            ready = [self._prepared(case, max(tile)) for case in todo if self._fits(case)]
            found = _checks(ready, [one.run(launch) for one in ready])
            if level == "finalist" and repeats:
                found += self._repeats(launch, ready)
        return Verdict(tuple(_worth_keeping(found)), self._where())

    def _prepared(self, case: Case, gap: int) -> Prepared:
        """With at least `gap` rows of NaN around the inputs, as many as a tile may reach over."""
        made_for, ready = self._kept.get(case, (-1, None))
        if ready is None or made_for < gap:
            ready = self._prepare(case, self.problem, self.device, gap, self._home)
            self._kept[case] = gap, ready
        return ready

    def _fits(self, case: Case) -> bool:
        """Far cases need 4 GB (fp32: 9 GB) and are left out on a GPU without twice that free."""
        if not case.far or self._far is not None or self.device.type == "cpu":
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        return free > 2 * FAR_ELEMENTS * ITEM_BYTES[self.problem.shape.dtype]

    def _home(self) -> Tensor:
        """The buffer past 2**31 elements that the far cases share; most of it is never touched."""
        if self._far is None:
            dtype = TORCH_DTYPE[self.problem.shape.dtype]
            self._far = torch.empty(FAR_ELEMENTS, dtype=dtype, device=self.device)
        return self._far

    def _repeats(self, launch: Launch, ready: list[Prepared]) -> list[Check]:
        """Bitwise equal over ten runs: on the first shrunken case, on the one of many tiles, where
        some faults show in one run of many, and on the target shape."""
        found = []
        for one in ready:
            if one.case.name in ("ragged", "crowd", "target"):
                differing = float(one.differing(launch, REPEATS))
                found.append(Check(f"repeat[{one.case.name}]", differing, 0.0, one.detail))
        return found

    def _on_device(self) -> AbstractContextManager[Any]:
        """A launch goes to the current device's stream, and the caller's may be another."""
        if self.device.type == "cpu":
            return nullcontext()
        return torch.cuda.device(self.device)

    def _where(self) -> str:
        if self.device.type == "cpu":
            return "interpreter"
        return torch.cuda.get_device_name(self.device)


def why_inexact(problem: Problem, tau_log2: float) -> str | None:
    """Why conditional rescaling by this threshold can't be exact, before any run, or None.

    With the old maximum kept, P reaches 2**tau and its sum 2**tau * seq_kv.
    """
    if not tau_log2 >= 0:
        return f"A rescale threshold of {tau_log2} is negative."
    if problem.shape.dtype == "fp16" and tau_log2 >= 16 - 2**-11:
        return f"2**{tau_log2} is above {FP16_MAX:.0f}, the most that P in fp16 holds."
    keys = max(problem.shape.seq_kv, 1)
    if tau_log2 + keys.bit_length() > FP32_LOG2_MAX:
        return f"2**{tau_log2} summed over {keys} keys is more than fp32 holds."
    return None


def _checks(ready: list[Prepared], measured: list[Tensor]) -> list[Check]:
    # The one synchronisation of a whole check.
    numbers = torch.stack(measured).cpu().tolist()
    return [
        Check(f"{kind}[{one.case.name}]", error, budget, one.detail)
        for one, errors in zip(ready, numbers, strict=True)
        for kind, error, budget in zip(one.right.kinds, errors, one.budgets, strict=True)
    ]


def _worth_keeping(found: list[Check]) -> list[Check]:
    """Of each kind the check nearest its budget, and every one that failed."""
    kept: dict[str, Check] = {}
    for check in found:
        kind = check.name.partition("[")[0]
        if kind not in kept or _used(check) > _used(kept[kind]):
            kept[kind] = check
    failed = [c for c in found if not c.passed and c not in kept.values()]
    return [*kept.values(), *failed]


def _used(check: Check) -> float:
    return check.error / check.budget if check.budget > 0 else check.error * 1e30
