"""The generated source of a stored trial or of a shape, to be read. Runs and stores nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fagen import target as targets
from fagen.config import Config
from fagen.errors import BadConfig, NoKernel
from fagen.generate.families import config_from_dict
from fagen.generate.program import Program
from fagen.generate.render import render
from fagen.generate.space import why_invalid
from fagen.outcome import Verdict
from fagen.problem import Problem
from fagen.records import Record
from fagen.serve.database import reading
from fagen.serve.library import why
from fagen.target import Target


@dataclass(frozen=True)
class Shown:
    """A source with what is known of it. `stored_key`: the digest that the trial's source had."""

    program: Program
    target: Target
    origin: str
    record: Record | None = None
    verdict: Verdict | None = None

    @property
    def changed(self) -> bool:
        """Whether fagen emits another source now than when the trial ran."""
        return self.record is not None and self.record.program_key != self.program.key


def source_of_trial(trial_id: int, db: str | None) -> Shown:
    """Rendered anew from the trial's problem and config. Raises UnknownTrial."""
    with reading(db) as records:
        record = records.trial(trial_id)
    program = render(record.problem, record.config, _dialect())
    return Shown(program, record.target, "trial", record, record.verdict)


def source_of_problem(
    problem: Problem, target: Target, config: str | None, db: str | None
) -> Shown:
    """Of the config given as JSON, or of what `get` would choose. Raises BadConfig, NoKernel."""
    if config is not None:
        return Shown(
            render(problem, _parsed(config, problem, target), _dialect()), target, "given"
        )
    found = why(problem, target=target, db=db)
    if found.program is None:
        raise NoKernel(f"No kernel for {problem} on {target.name}.", found.next_step)
    return Shown(found.program, target, str(found.origin), found.record, found.verdict)


def _parsed(text: str, problem: Problem, target: Target) -> Config:
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise BadConfig(f"The config is no JSON: {error}.", _EXAMPLE) from None
    if not isinstance(plain, dict):
        raise BadConfig("The config must be a JSON object.", _EXAMPLE)
    config = config_from_dict(plain)
    broken = why_invalid(problem, target, config)
    if broken is not None:
        raise BadConfig(f"{config} breaks a rule for {problem} on {target.name}: {broken}")
    return config


_EXAMPLE = """Say --config '{"family": "flash", "knobs": {"block_m": 128}}'."""


def _dialect() -> tuple[int, int]:
    return targets.toolchain().triton_minor
