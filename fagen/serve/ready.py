"""From a candidate to a kernel that may be called: rendered, loaded, and verified somewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from fagen.errors import (
    BadConfig,
    DatabaseError,
    FagenError,
    NoDevice,
    NotDuringCapture,
    VerificationFailed,
)
from fagen.generate.build import BuildFailed
from fagen.generate.families import family_of
from fagen.generate.program import Program, Sizes
from fagen.generate.render import render
from fagen.generate.space import why_invalid
from fagen.outcome import GATE, Check, Status, Verdict
from fagen.problem import Problem
from fagen.run import kernel as run_kernel
from fagen.serve.candidates import Candidate
from fagen.serve.place import Place
from fagen.serve.served import Chosen, Launch

if TYPE_CHECKING:
    from fagen.records import Records

log = logging.getLogger(__name__)


def fitting(place: Place, problem: Problem, candidate: Candidate) -> Program | None:
    """The candidate's Program, or None where its rules or limits leave this problem out."""
    if why_invalid(problem, place.target, candidate.config) is not None:
        return None
    program = render(problem, candidate.config, place.toolchain.triton_minor)
    return program if program.why_unfit(Sizes.of(problem)) is None else None


def make_ready(
    place: Place, candidate: Candidate, program: Program, records: Records | None
) -> Chosen:
    """Load on the place's device; verify what this gate has not passed there.

    Raises VerificationFailed, BuildFailed, NoDevice, NotDuringCapture, or what Triton raises.
    """
    verdict = known_verdict(place, candidate, program, records)
    if verdict is not None and not verdict.passed:
        raise VerificationFailed(f"{program.name} did not pass the gate earlier.")
    if place.device is None:
        return Chosen(candidate.origin, program, candidate.record, verdict)
    _refuse_capture(place)
    _refuse_broken(place)
    runner = run_kernel.load(program, place.target, place.device)
    prepare = runner.prepare
    if verdict is not None:
        return Chosen(candidate.origin, program, candidate.record, verdict, prepare)
    verdict = _verify(place, program, runner.launch_poisoned, records)
    notes = ("verified at first use",)
    return Chosen(candidate.origin, program, candidate.record, verdict, prepare, notes)


def known_verdict(
    place: Place, candidate: Candidate, program: Program, records: Records | None
) -> Verdict | None:
    """What today's gate said of this very source on this device under this toolchain."""
    record = candidate.record
    # A predicted row's verdict is the interpreter's, which says nothing of a device.
    if record is not None and record.status is Status.OK and record.verdict is not None:
        made = record.program_key, record.toolchain_key, record.device_key, record.exactness
        if made == (program.key, place.toolchain.key, place.device_key, GATE):
            return record.verdict
    if records is None:
        return None
    try:
        return records.verdict(program.key, place.device_key, place.toolchain.key)
    except DatabaseError as error:
        log.info("no verdict read: %s", error)
        return None


def is_candidates_fault(error: Exception) -> bool:
    """Whether the next candidate may do better: this one can't be built, loaded or trusted."""
    if isinstance(error, BuildFailed | BadConfig | VerificationFailed):
        return True
    if isinstance(error, FagenError) or "out of memory" in str(error).lower():
        return False
    return isinstance(error, RuntimeError) or type(error).__module__.startswith("triton.")


def give_up_on(
    place: Place,
    candidate: Candidate,
    program: Program,
    error: Exception,
    records: Records | None,
) -> None:
    """Say so. What was wrong or broke the device is not tried again by this device and toolchain.

    A row of another device, toolchain or source stays: this says nothing of it. So does one that
    could not be loaded for a reason of this machine, such as a missing C compiler.
    """
    log.warning("%s (%s) is left out: %s", candidate.config, candidate.origin, error)
    if records is None or not (_is_lasting(error) or _is_broken(place)):
        return
    keys = program.key, place.device_key, place.toolchain.key
    if not isinstance(error, VerificationFailed):  # the gate has stored its own verdict
        why = Check("usable", float("inf"), 0.0, str(error)[:600])
        failed = Verdict((why,), str(place.device))
        _store(lambda: records.save_verdict(*keys, failed))
    record = candidate.record
    if record is None or record.shipped:
        return
    if (record.program_key, record.device_key, record.toolchain_key) == keys:
        _store(lambda: records.quarantine(record.trial_id, str(error)))


def refuse_spoilt(place: Place, error: Exception) -> None:
    """After an illegal access no later CUDA call of this process works: blame nobody else."""
    if _is_broken(place):
        raise VerificationFailed(
            f"A kernel broke this process's CUDA context: {error}",
            "Start Python again; that kernel is left out from now on.",
        ) from error


def _verify(place: Place, program: Program, launch: Launch, records: Records | None) -> Verdict:
    from fagen.judge.verify import Gate

    assert place.device is not None
    log.warning(
        "%s has no verdict on %s with Triton %s under gate %s yet: verified now, once.",
        *(program.name, place.device, place.toolchain.triton, GATE.partition(":")[0]),
    )
    tile = family_of(program.config).tile(program.config.knobs)
    gate = Gate(program.problem, place.device)
    verdict = gate.check(launch, tile, program.limits, level="quick")
    if records is not None:
        keys = program.key, place.device_key, place.toolchain.key
        _store(lambda: records.save_verdict(*keys, verdict))
    if not verdict.passed:
        raise VerificationFailed(f"{program.name} failed the gate: {verdict.worst}.")
    return verdict


def _store(write: Callable[[], None]) -> None:
    # A database that can't be written must not stop a kernel that is right.
    try:
        write()
    except FagenError as error:
        log.info("not stored: %s", error)


def _is_lasting(error: Exception) -> bool:
    # A build that failed for want of a file or of room may work the next time.
    if isinstance(error, BuildFailed):
        return not isinstance(error.__cause__, OSError)
    return isinstance(error, VerificationFailed)


def _is_broken(place: Place) -> bool:
    """Whether every CUDA call of this process fails by now."""
    if place.device is None or place.device.type != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize(place.device)
    except RuntimeError:
        return True
    return False


def _refuse_broken(place: Place) -> None:
    # Before anything of ours runs: what another library broke is no kernel's fault.
    if _is_broken(place):
        raise NoDevice(
            f"CUDA calls on {place.device} fail already, after an earlier error of this process.",
            "Start Python again.",
        )


def _refuse_capture(place: Place) -> None:
    import torch

    on_gpu = place.device is not None and place.device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise NotDuringCapture(
            "A kernel can't be loaded or verified while a CUDA graph is captured.",
            "Call it once with such tensors before the capture.",
        )
