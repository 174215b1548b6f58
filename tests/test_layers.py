"""Imports go down one way, and each third-party library has its room (docs/architecture.md)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Which rooms each room may import from, itself included.
MAY_IMPORT: dict[str, set[str]] = {
    "words": {"words"},
    "generate": {"words", "generate"},
    "run": {"words", "generate", "run"},
    "judge": {"words", "generate", "run", "judge"},
    "database": {"database"},
    "store": {"words", "store", "database"},
    "tune": {"words", "generate", "run", "judge", "store", "tune"},
    "serve": {"words", "generate", "run", "judge", "store", "serve"},
    "show": {"words", "generate", "run", "judge", "store", "tune", "serve", "show", "door"},
    "door": {"words", "generate", "run", "judge", "store", "tune", "serve", "show", "door"},
}
WORDS = {"errors", "settings", "keys", "problem", "target", "driver", "config", "outcome"}
SHOW = {"report", "cli", "doctor", "analysis", "rerun", "testing"}

# Module, or package with a dot at its end -> the third-party libraries that it may import.
LIBRARIES: dict[str, set[str]] = {
    "fagen.settings": {"platformdirs"},
    "fagen.generate.render": {"jinja2"},
    "fagen.generate.build": {"triton"},
    "fagen.generate.descriptors": {"triton"},
    "fagen.run.": {"torch", "triton"},
    "fagen.judge.": {"torch"},
    "fagen.judge.peers.packages": {"fa3_fwd_interface", "flash_attn"},  # optional
    "fagen.tune.search": {"optuna"},
    "fagen.tune.sampler": {"optuna", "numpy"},
    "fagen.tune.worker": {"torch"},  # the child that owns the GPU
    "fagen.serve.": {"torch"},
    "fagen.doctor": {"torch"},  # asks whether torch can use the GPU
    "fagen.report": {"rich"},
    "fagen.report.plot": {"matplotlib"},  # optional
    "fagen.cli.": {"click", "rich"},
    "tuning_db.": {"sqlalchemy", "alembic"},
}


def room_of(module: str) -> str:
    """The room of a dotted module name."""
    parts = module.split(".")
    if parts[0] == "tuning_db":
        return "database"
    name = parts[1] if len(parts) > 1 else ""
    if name in WORDS:
        return "words"
    if name == "records":
        return "store"
    if name in SHOW:
        return "show"
    return name if name in MAY_IMPORT else "door"


def broken_imports(module: str, source: str) -> list[str]:
    """Each import of a module that its room does not allow, as a sentence."""
    room, broken = room_of(module), []
    for name, for_types in _imports(ast.parse(source)):
        top = name.split(".")[0]
        if top in ("fagen", "tuning_db"):
            if room_of(name) not in MAY_IMPORT[room]:
                broken.append(f"{module} ({room}) imports {name} ({room_of(name)})")
        elif not for_types and top not in sys.stdlib_module_names | _libraries(module):
            broken.append(f"{module} imports {top}")
    return broken


def _libraries(module: str) -> set[str]:
    allowed: set[str] = set()
    for place, names in LIBRARIES.items():
        package = place.endswith(".") and f"{module}.".startswith(place)
        allowed |= names if package or module == place else set()
    return allowed


def _imports(tree: ast.AST, for_types: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported name, inside functions too, and whether it is there for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, for_types
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", for_types
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _imports(ast.Module(node.body, []), True)
            yield from _imports(ast.Module(node.orelse, []), for_types)
        else:
            yield from _imports(node, for_types)


def modules(root: Path) -> dict[str, Path]:
    """Dotted names of all modules of both packages; a package is the name of its folder."""
    found = {}
    for package in ("fagen", "tuning_db"):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_imports_go_down_and_libraries_stay_in_their_rooms(root: Path) -> None:
    broken = [
        sentence
        for module, path in modules(root).items()
        for sentence in broken_imports(module, path.read_text())
    ]
    assert broken == []


def test_every_room_of_the_table_has_modules(root: Path) -> None:
    assert {room_of(module) for module in modules(root)} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("module", "source", "culprit"),
    [
        ("fagen.problem", "import fagen.generate.render", "fagen.generate.render"),
        ("fagen.problem", "def f():\n    import torch", "torch"),
        ("fagen.generate.space", "from fagen.tune import tuner", "fagen.tune.tuner"),
        ("fagen.generate.space", "from fagen import report", "fagen.report"),
        ("fagen.run.kernel", "from fagen.judge.verify import Gate", "fagen.judge.verify.Gate"),
        ("fagen.judge.measure", "import triton.testing", "triton"),
        ("fagen.tune.tuner", "from optuna import create_study", "optuna"),
        ("fagen.tune.tuner", "from fagen.serve.library import get", "fagen.serve.library.get"),
        ("fagen.serve.library", "from fagen.tune.tuner import tune", "fagen.tune.tuner.tune"),
        ("fagen.records", "import sqlalchemy", "sqlalchemy"),
        ("tuning_db.store", "from fagen.problem import Problem", "fagen.problem.Problem"),
        ("fagen.cli.main", "try:\n    import pandas\nexcept ImportError:\n    pass", "pandas"),
    ],
)
def test_a_planted_import_is_found(module: str, source: str, culprit: str) -> None:
    [sentence] = broken_imports(module, source)
    assert f" imports {culprit}" in sentence


def test_an_import_for_types_alone_may_name_any_library() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    assert broken_imports("fagen.problem", source) == []
    assert broken_imports("fagen.problem", source + "\nelse:\n    import torch") != []
