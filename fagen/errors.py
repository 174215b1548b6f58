"""Every error that fagen raises on purpose: what happened, and what to do next.

A candidate kernel that fails is data (`Outcome`), never one of these.
"""

from typing import ClassVar


class FagenError(Exception):
    """Base class. `exit_code` is what the command line returns; `next_step` says what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}".strip()


class BadProblem(FagenError, ValueError):
    """The shape or its features make no attention problem."""

    exit_code = 2


class BadInput(FagenError, ValueError):
    """Tensors that a kernel can't take: rank, dtype, device or shape."""

    exit_code = 2


class BadConfig(FagenError, ValueError):
    """A family, knob or knob value that fagen does not know, or a config that breaks a rule."""

    exit_code = 2


class BadSetting(FagenError, ValueError):
    """An environment variable or option with a value that can't be used."""

    exit_code = 2


class UnknownTarget(FagenError, ValueError):
    """A target name that is no preset."""

    exit_code = 2


class NoDevice(FagenError, RuntimeError):
    """A GPU is needed and there is none that this process can use."""


class NoKernel(FagenError, LookupError):
    """Nothing is known for this shape and the caller asked not to fall back."""


class NoValidConfig(FagenError):
    """A tuning run ended without one right kernel."""


class NoTriton(FagenError, ImportError):
    """Triton is missing, or its version is one that fagen does not speak."""


class MissingPackage(FagenError, ImportError):
    """An optional package is needed for what was asked, and is not installed."""


class DeviceBusy(FagenError):
    """Another tuner holds the GPU."""


class DatabaseError(FagenError):
    """The tuning database can't be opened, read or written."""


class UnknownTrial(FagenError, LookupError):
    """An id that is in no table."""


class NoSource(FagenError, LookupError):
    """A trial whose source was never made, and can't be made now."""


class CacheError(FagenError, OSError):
    """Generated files can't be written, or the folder belongs to somebody else."""


class VerificationFailed(FagenError, RuntimeError):
    """A kernel that had no verdict yet did not pass the gate at its first use."""


class NotDuringCapture(FagenError, RuntimeError):
    """A kernel would have to be loaded or verified while a CUDA graph is captured."""


class MeasureError(FagenError):
    """A time that can't be: NaN, infinite, zero or negative. Never taken for a fast kernel."""


class WorkerDied(FagenError):
    """A child process ended, or was killed at its deadline. Becomes a row."""

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Interrupted(FagenError):
    """A tuning run was stopped by Ctrl-C; `result` (a TuneResult) is what is stored until then."""

    exit_code = 130

    def __init__(self, message: str, next_step: str = "", *, result: object = None) -> None:
        super().__init__(message, next_step)
        self.result = result


class TerminatedRun(Interrupted):
    """The same by SIGTERM."""

    exit_code = 143
