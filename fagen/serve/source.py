"""The generated source of a stored trial or of a shape, to be read. Runs and stores nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fagen import settings
from fagen import target as targets
from fagen.config import Config
from fagen.errors import BadConfig, NoKernel, NoSource
from fagen.generate.families import config_from_dict, family_of
from fagen.generate.program import Program, source_key
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


@dataclass(frozen=True)
class TriedSource:
    """A stored trial with the source that was tried, or with today's where that one is lost."""

    program: Program
    record: Record

    @property
    def changed(self) -> bool:
        """Whether it is another source than the one that was tried."""
        return self.record.program_key != self.program.key


def source_of_trial(trial_id: int, db: str | None) -> Shown:
    """Rendered anew from the trial's problem and config. Raises UnknownTrial."""
    with reading(db) as records:
        record = records.trial(trial_id)
    program = render(record.problem, record.config, _dialect())
    return Shown(program, record.target, "trial", record, record.verdict)


def tried_source(trial_id: int, db: str | None) -> TriedSource:
    """What is rendered now where that has the stored digest, else a module file that has it, else
    what is rendered now. Raises UnknownTrial, NoSource."""
    with reading(db) as records:
        record = records.trial(trial_id)
    if not record.program_key:
        raise NoSource(
            f"Trial {trial_id} never had a source: {_one_line(record.outcome.reason)}.",
            f"What its config gives today: fagen show {trial_id}",
        )
    try:
        # In the dialect that it was tried in, whichever Triton is installed here.
        today = render(record.problem, record.config, record.toolchain.triton_minor)
    except Exception as error:  # today's template need not take every config of before
        kept = _kept(record)
        if kept is None:
            raise NoSource(
                f"The config of trial {trial_id} can't be rendered any more:"
                f" {type(error).__name__}: {_one_line(str(error))}.",
                "Use the version of fagen that tried it.",
            ) from error
        return TriedSource(kept, record)
    if today.key == record.program_key:
        return TriedSource(today, record)
    return TriedSource(_kept(record) or today, record)


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


def _kept(record: Record) -> Program | None:
    """The Program of a module file whose text has the stored digest."""
    for path in filter(Path.is_file, _module_files(record)):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if source_key(text, path.stem) == record.program_key:
            return _of_text(record, text, path.stem)
    return None


def _module_files(record: Record) -> Iterator[Path]:
    """Where the trial's process wrote it, and where this user's cache has it: a database may come
    from another machine."""
    if record.outcome.built is not None:
        yield Path(record.outcome.built.module_path)
    key = record.program_key
    yield from sorted((settings.kernel_dir() / key[:2]).glob(f"*_{key[:8]}.py"))


def _of_text(record: Record, text: str, name: str) -> Program:
    family, knobs = family_of(record.config), record.config.knobs
    return Program(
        problem=record.problem,
        config=record.config,
        name=name,
        source=text,
        key=record.program_key,
        template_digest=record.outcome.template_digest,
        entries=family.entries(record.problem, knobs, name),
        limits=family.limits(record.problem, knobs),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "no reason is stored"


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
