"""A child of the tuner in which candidates act: what each does is in its source, as statements.

`fagen.tune.worker` with roles of its own and no torch; everything else of a child is the real one.
A file of the name of a moment ("starting-gpu", "preparing-gpu", "starting-build") in the folder
ACTING kills the process at that moment: once, or every time where the file is not empty.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fagen.generate.build import BuildFailed
from fagen.generate.program import Program
from fagen.outcome import Built, Check, KernelFacts, Status, Timing, Verdict
from fagen.tune import worker
from fagen.tune.jobs import (
    BuildJob,
    BuildReply,
    Confirm,
    Prepare,
    Race,
    RaceReply,
    Tried,
    TryProgram,
)

WORDS = {
    "BuildFailed": BuildFailed,
    "FAILED": Verdict((Check("o_max[ragged]", 0.9, 0.002),), "fake device"),
    "Path": Path,
    "Status": Status,
    "Tried": Tried,
    "os": os,
    "signal": signal,
    "subprocess": subprocess,
    "sys": sys,
    "time": time,
}


def acted(program: Program, where: str) -> Any:
    """What the statements leave as `value`."""
    words = dict(WORDS)
    exec(json.loads(program.source)[where], words)
    return words.get("value")


def told_to_die(moment: str) -> None:
    path = Path(os.environ["ACTING"]) / moment
    if path.exists():
        if not path.read_text():
            path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def build_role() -> worker.Handlers:
    told_to_die("starting-build")

    def run(job: BuildJob) -> BuildReply:
        try:
            acted(job.program, "build")
        except BuildFailed as failed:
            return BuildReply(None, failed.status, str(failed))
        return BuildReply(Built("acting.py", (KernelFacts(job.program.name, 65536, 128, 0),)))

    return {BuildJob: run}


class Device:
    """Spoilt by the first sticky error, like a CUDA context: then nothing works any more."""

    def __init__(self) -> None:
        told_to_die("starting-gpu")
        self.prepared = False
        self.spoilt: Tried | None = None

    def prepare(self, job: Prepare) -> None:
        told_to_die("preparing-gpu")
        self.prepared = True

    def try_program(self, job: TryProgram) -> Tried:
        return self.tried(job.program, "device")

    def confirm(self, job: Confirm) -> Tried:
        return self.tried(job.program, "confirm")

    def tried(self, program: Program, where: str) -> Tried:
        assert self.prepared
        if self.spoilt is not None:
            return self.spoilt
        try:
            reply: Tried = acted(program, where) or right(program)
        except Exception as error:
            reply = worker.failure(error)
        self.spoilt = reply if worker.is_spoilt(reply) else None
        return reply

    def race(self, job: Race) -> RaceReply:
        return RaceReply(
            {p.key: Timing((us_of(p),) * job.rounds, "fake timer") for p in job.programs}
        )


def right(program: Program) -> Tried:
    """Verified by this very process: `where` tells which candidates shared one."""
    verdict = Verdict((Check("o_max[ragged]", 0.001, 0.002),), f"process {os.getpid()}")
    return Tried(Status.OK, "", verdict, Timing((us_of(program),) * 5, "fake timer"))


def us_of(program: Program) -> float:
    return float(json.loads(program.source)["us"])


def device_role() -> worker.Handlers:
    device = Device()
    return {
        Prepare: device.prepare,
        TryProgram: device.try_program,
        Confirm: device.confirm,
        Race: device.race,
    }


if __name__ == "__main__":
    worker._HANDLERS.update(build=build_role, gpu=device_role)
    worker.main(sys.argv[1:])
