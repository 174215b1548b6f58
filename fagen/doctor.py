"""What this machine can do, in plain words. Looks at everything, changes nothing lasting."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fagen import settings, target
from fagen.errors import FagenError, NoDevice
from fagen.records import Records
from fagen.serve.database import location

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """`note`: something works in part only; `bad`: tuning can't work until `next_step` is done."""

    name: str
    state: State
    text: str
    next_step: str = ""


def examine(db: str | None = None) -> list[Finding]:
    """Every finding, in the order that a person would look."""
    looks: dict[str, Callable[[], Finding]] = {
        "torch": _torch,
        "gpu": _gpu,
        "triton": _triton,
        "ptxas": _ptxas,
        "compiler": _compiler,
        "database": partial(_database, db),
        "cache": _cache,
    }
    findings = [_guarded(name, look) for name, look in looks.items()]
    findings.append(_summary(findings))
    return [*findings, *_settings()]


def can_tune(findings: list[Finding]) -> bool:
    """Whether `fagen tune` works here; offline counts."""
    return all(finding.state != "bad" for finding in findings)


def _guarded(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except FagenError as error:
        return Finding(name, "bad", error.message, error.next_step)


def _torch() -> Finding:
    found = target.torch_build()
    if found is None:
        return Finding("torch", "bad", "not installed.", "Install torch 2.11 or newer.")
    version, cuda = found
    if cuda is None:
        return Finding("torch", "note", f"{version}, built without CUDA.")
    why = _why_no_cuda()
    if why is not None:
        step = "Install a torch for this driver, or a newer driver."
        return Finding("torch", "bad", f"{version} can't use the GPU: {why}", step)
    return Finding("torch", "ok", f"{version}, built for CUDA {cuda}.")


def _why_no_cuda() -> str | None:
    """Why torch can't use a GPU that the driver sees."""
    try:
        target.detect()
    except NoDevice:
        return None
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return None


def _gpu() -> Finding:
    try:
        return Finding("gpu", "ok", f"{target.detect()}.")
    except NoDevice as error:
        offline = "Tuning works offline for a named target; nothing is timed."
        return Finding("gpu", "note", f"{error.message} {offline}")


def _triton() -> Finding:
    low, high = target.TRITON_RANGE
    span = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
    return Finding("triton", "ok", f"{target.toolchain().triton}; checked range {span}.")


def _ptxas() -> Finding:
    version = target.toolchain().ptxas
    if not version:
        return Finding("ptxas", "bad", "not found in the Triton package.", "Install triton again.")
    return Finding("ptxas", "ok", f"{version}, from the Triton package.")


def _compiler() -> Finding:
    named = os.environ.get("CC", "")
    found = next(filter(None, map(shutil.which, filter(None, (named, "cc", "gcc", "clang")))), "")
    if found:
        return Finding("compiler", "ok", f"{found}.")
    text = "no C compiler; Triton needs one to launch its first kernel on a GPU."
    try:
        target.detect()
    except NoDevice:
        return Finding("compiler", "note", f"{text} Offline tuning does without.")
    return Finding("compiler", "bad", text, "Install gcc or clang, or set CC.")


def _database(db: str | None) -> Finding:
    facts, where = Records.describe(db), location(db)
    if "://" not in where and not os.access(_nearest(Path(where)), os.W_OK):
        return Finding(
            "database", "bad", f"{facts} It can't be written.", "Name another: FAGEN_DB."
        )
    return Finding("database", "ok", facts)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _cache() -> Finding:
    folder = settings.kernel_dir()
    if not os.access(folder, os.W_OK):
        return Finding(
            *("cache", "bad", f"{folder} can't be written."),
            next_step="Set FAGEN_CACHE to a folder that you can write.",
        )
    return Finding("cache", "ok", f"{folder} can be written.")


def _summary(findings: list[Finding]) -> Finding:
    if not can_tune(findings):
        bad = ", ".join(f.name for f in findings if f.state == "bad")
        return Finding("tuning", "bad", f"does not work yet: {bad}.")
    timed = any(f.name == "gpu" and f.state == "ok" for f in findings)
    if timed:
        return Finding("tuning", "ok", "works, with timing.")
    return Finding("tuning", "note", "works offline; timing needs a GPU.")


def _settings() -> Iterator[Finding]:
    for name in settings.VARIABLES:
        held = os.environ.get(name)
        yield Finding(name, "ok", "not set." if held is None else f"set to {held!r}.")
