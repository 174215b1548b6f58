"""The NVIDIA tools that Triton's wheel brings: a cubin as text, and what ptxas says of PTX."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

LIMIT_S = 60.0

_TARGET = re.compile(r"^\.target\s+(sm_\w+)", re.MULTILINE)
# "ptxas info    : (C7511) Potential Performance Loss: ... in the function 'name'"
_REMARK = re.compile(
    r"\((?P<code>C\d+)\)\s*(?:Potential Performance Loss:\s*)?"
    r"(?P<text>.*?)\.?(?:\s+in (?:the )?function '.*)?$",
    re.MULTILINE,
)


class ToolFailed(Exception):
    """A tool is missing, fails or takes too long: says which one and why. Becomes a finding."""


@dataclass(frozen=True)
class Remark:
    """One numbered remark of ptxas, e.g. C7511, without the function's name."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


def listing(cubin: bytes) -> str:
    """Resource usage and machine code, as text. Raises ToolFailed."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("cuobjdump", "-res-usage", "-sass", file.name).stdout


def remarks(ptx: str) -> tuple[Remark, ...]:
    """What ptxas remarks while it compiles a PTX text once more, for the target that it names.

    Triton runs ptxas too, but shows what it printed only when it fails. Takes 0.1 to 0.6 s for a
    plain kernel and 1 s for a warp-specialised one. Raises ToolFailed.
    """
    target = _TARGET.search(ptx)
    if target is None:
        raise ToolFailed("ptxas not asked: the PTX names no target")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        words = ("-v", f"--gpu-name={target[1]}", str(source), "-o", f"{source}.cubin")
        try:
            done = _run("ptxas", *words)
        except ToolFailed:
            # Triton 3.9 compiles for Hopper with this one, and its PTX is too new for the other.
            done = _run("ptxas-blackwell", *words)
    return remarks_in(done.stderr)


def remarks_in(log: str) -> tuple[Remark, ...]:
    """The numbered remarks of what ptxas printed, each once."""
    found = (Remark(m["code"], " ".join(m["text"].split())) for m in _REMARK.finditer(log))
    return tuple(dict.fromkeys(found))


def _run(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            [_folder() / tool, *words], capture_output=True, text=True, timeout=LIMIT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolFailed(f"{tool}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolFailed(f"{tool}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done


@lru_cache(maxsize=1)
def _folder() -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("triton is not installed")
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin"
