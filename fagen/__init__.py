"""fagen: a code-generating autotuner for exact attention.

    fagen tune --seq 8192 --head-dim 128
    kernel = fagen.get(seq=8192, head_dim=128); out = kernel(q, k, v)

Importing loads none of torch, triton, optuna or sqlalchemy, touches no device and opens no file.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fagen.problem import Features, Problem, Shape, make_problem
    from fagen.serve.kernel import Kernel
    from fagen.serve.library import get, why
    from fagen.target import Target, preset
    from fagen.tune.tuner import tune

__all__ = [
    "Features",
    "Kernel",
    "Problem",
    "Shape",
    "Target",
    "__version__",
    "get",
    "make_problem",
    "preset",
    "tune",
    "why",
]

_HOME = {
    "Features": "fagen.problem",
    "Problem": "fagen.problem",
    "Shape": "fagen.problem",
    "make_problem": "fagen.problem",
    "Target": "fagen.target",
    "preset": "fagen.target",
    "Kernel": "fagen.serve.kernel",
    "get": "fagen.serve.library",
    "why": "fagen.serve.library",
    "tune": "fagen.tune.tuner",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fagen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fagen")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0+checkout"
