"""Program -> machine code and what it uses. Needs Triton, no GPU: a Target is enough."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from fagen import settings
from fagen.errors import CacheError
from fagen.generate import lint
from fagen.generate.program import Entry, Program, below_header
from fagen.outcome import Built, KernelFacts, Status
from fagen.target import Target

log = logging.getLogger(__name__)

# Triton 3.9 warns while this is unset. Fused multiply-add is what the templates count on:
# one FFMA for s * scale - m.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class BuildFailed(Exception):
    """A candidate that does not compile, or needs more than the target has. Becomes a row."""

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


def build(program: Program, target: Target) -> Built:
    """Compile every entry kernel for the target. Raises BuildFailed."""
    path = write_module(program)
    facts: list[KernelFacts] = []
    for entry in program.entries:
        compiled = compile_entry(program, entry, target)
        shared = int(compiled.metadata.shared)
        if shared > target.shared_bytes:
            raise BuildFailed(
                f"{entry.function} needs {shared} bytes of shared memory, a block of "
                f"{target.name} has {target.shared_bytes}.",
                Status.OUT_OF_RESOURCES,
            )
        facts.append(lint.facts_of(compiled.asm, entry.function, shared))
    return Built(str(path), tuple(facts))


def compile_entry(program: Program, entry: Entry, target: Target) -> Any:
    """Triton's CompiledKernel of one entry, from its disk cache when it is there."""
    import triton
    from triton.backends.compiler import GPUTarget

    module = load_module(program)
    function = getattr(module, entry.function, None)
    if function is None:
        raise BuildFailed(f"{program.name} has no function {entry.function}.", Status.BUILD_ERROR)
    _give_triton_a_folder()
    try:
        return triton.compile(
            _source(function, entry),
            target=GPUTarget("cuda", target.arch, 32),
            options=entry.options,
        )
    except Exception as error:  # the compiler raises many kinds: each costs this candidate alone
        raise BuildFailed(_reason(error, entry), _status(error)) from error


def _give_triton_a_folder() -> None:
    # Triton writes below the home directory, and fails where that is missing or read-only.
    from triton import knobs

    if "TRITON_CACHE_DIR" not in os.environ and not settings.can_be_written(Path(knobs.cache.dir)):
        knobs.cache.dir = str(settings.kernel_dir().parent / "triton")


def _source(function: Any, entry: Entry) -> Any:
    if entry.dialect == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    else:
        from triton.compiler import ASTSource

    types = {arg.name: _typed(arg.type, entry) for arg in entry.args}
    constants = {p.name: p.default for p in function.params if p.is_constexpr}
    names = function.arg_names
    if [n for n in names if n not in constants] != list(types):
        raise TypeError(f"{entry.function} takes {names}, its family declares {list(types)}")
    places = {name: i for i, name in enumerate(names)}
    divisible = {
        (places[arg.name],): [["tt.divisibility", arg.divisible]]
        for arg in entry.args
        if arg.divisible > 1
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    at = {(places[name],): value for name, value in constants.items()}
    return ASTSource(function, signature, at, divisible)


def _typed(word: str, entry: Entry) -> str:
    """Gluon's descriptors name the layout that their tiles have in shared memory."""
    if entry.dialect != "gluon" or not word.startswith("tensordesc"):
        return word
    from fagen.generate.descriptors import shared_layout

    return f"{word[:-1]},{shared_layout(word)!r}>"


def _status(error: Exception) -> Status:
    from triton.runtime.autotuner import OutOfResources

    return Status.OUT_OF_RESOURCES if isinstance(error, OutOfResources) else Status.BUILD_ERROR


def _reason(error: Exception, entry: Entry) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return f"{entry.function}: {type(cause).__name__}: {' '.join(lines)[:600]}"


def load_module(program: Program) -> ModuleType:
    """The generated module, imported from its file once a process.

    Triton reads a function's source from its file: text that was only executed can't be compiled.
    """
    name = f"fagen_generated.{program.name}"
    found = sys.modules.get(name)
    if found is not None:
        return found
    path = write_module(program)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise BuildFailed(
            f"{path}: {type(error).__name__}: {error}", Status.BUILD_ERROR
        ) from error
    return module


def write_module(program: Program) -> Path:
    """The module's file, written in one step. A file that holds other text is put right."""
    folder = settings.kernel_dir() / program.key[:2]
    path = folder / f"{program.name}.py"
    try:
        if path.exists():
            held = path.read_text(encoding="utf-8", errors="replace")
            if held == program.source:
                return path
            # Another version of fagen may say other words above the same text.
            if below_header(held) != below_header(program.source):
                log.warning("%s was changed or cut short; it is written again", path)
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            file.write(program.source)
        Path(file.name).replace(path)
    except OSError as error:
        raise CacheError(
            f"Can't write {path}: {error.strerror}.", "Set FAGEN_CACHE to a folder with space."
        ) from error
    log.debug("generated %s", path)
    return path
