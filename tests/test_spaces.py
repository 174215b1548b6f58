"""benchmarks/spaces.py: every config of a space, in two passes, and further where it stopped."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fagen.config import Config
from fagen.generate.families import config_from_dict
from fagen.generate.space import SearchSpace
from fagen.outcome import Seconds, Status
from fagen.records import Records
from fagen.target import preset
from fagen.tune.place import Place
from fakes import FakeBuilder, FakeWorker, Policy, render_fake


@pytest.fixture
def spaces(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("spaces", root / "benchmarks/spaces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "spaces", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["d128-full", "d256-causal"])
def test_a_space_keeps_every_config_with_the_held_values(spaces: ModuleType, name: str) -> None:
    space = spaces.SPACES[name]
    whole = SearchSpace.of(space.problem, preset("h200"))
    left = spaces.held(whole, space.held)
    kept = {
        c
        for c in whole.configs
        if all(getattr(c.knobs, k) in v for k, v in space.held.get(c.family, {}).items())
    }
    assert set(left.configs) == kept
    assert 300 <= len(kept) < len(whole.configs)
    assert left.seeds and set(left.seeds) <= kept


def test_two_passes_each_in_its_own_order_and_none_is_lost_when_time_is_up(
    spaces: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = spaces.SPACES["d256-causal"]
    few = SearchSpace.of(space.problem, preset("h200")).configs[::400]
    worker = FakeWorker()

    @contextmanager
    def staff(place: Place, renders: Any) -> Iterator[tuple[Any, Any]]:
        yield (worker,), FakeBuilder()

    monkeypatch.setattr(spaces, "render", lambda p, c, triton_minor=None: render_fake(p, c))
    monkeypatch.setattr(spaces, "staff", staff)
    monkeypatch.setattr(spaces, "policy_of", lambda place: Policy())
    place = Place(preset("h200"), "cuda:0", str(tmp_path))
    monkeypatch.setattr(spaces, "place_of", lambda *_: place)
    monkeypatch.setattr(spaces, "held", lambda found, held: replace(found, configs=few))
    db = str(tmp_path / "s.db")

    spaces.measure(space, db, 0.0)  # no time at all
    assert worker.tried == []
    spaces.measure(space, db, 60.0)
    first, second = worker.tried[: len(few)], worker.tried[len(few) :]
    assert sorted(map(str, first)) == sorted(map(str, second)) == sorted(map(str, few))
    assert first != second
    spaces.measure(space, db, 60.0)
    assert len(worker.tried) == 2 * len(few)
    with Records.open(db, "read", config_from_dict) as records:
        rows = records.trials(problem=space.problem)
        counts: Counter[Config] = Counter(row.config for row in rows)
        assert set(counts.values()) == {2} and set(counts) == set(few)
        assert {row.status for row in rows} == {Status.OK}
        assert all(isinstance(row.outcome.seconds, Seconds) for row in rows)
        states = [run.state for run in records.runs(problem=space.problem)]
        assert states == ["finished", "finished", "interrupted"]
