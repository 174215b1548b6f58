"""benchmarks/call_time.py: every contestant is sampled once a round, in turns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def call_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = root / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("call_time", folder / "call_time.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "call_time", module)
    spec.loader.exec_module(module)
    return module


def test_samples_are_interleaved_and_the_device_is_waited_for(call_time: ModuleType) -> None:
    now, story = [0.0], []

    def taking(name: str, us: float) -> Callable[[], None]:
        def call() -> None:
            story.append(name)
            now[0] += us * 1e-6

        return call

    samples = call_time.interleaved(
        {"a": taking("a", 2.0), "b": taking("b", 3.0)},
        calls=2,
        rounds=3,
        settle=lambda: story.append("|"),
        clock=lambda: now[0],
    )
    assert "".join(story) == "|aa|bb" + "|aa|bb" + "|bb|aa" + "|aa|bb"
    assert samples["a"] == pytest.approx([2.0] * 3)
    assert samples["b"] == pytest.approx([3.0] * 3)
