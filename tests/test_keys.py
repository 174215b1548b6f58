"""Keys never change: rows that were stored under them must be found again by every later version.

tests/assets/frozen_keys.json is only ever added to. A key that differs from it is a bug in the
code, not in the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fagen.config import Config
from fagen.generate.families import FAMILIES
from fagen.keys import KEY_HEX, key_of
from fagen.problem import Features, Problem, Shape, make_problem
from fagen.target import PRESETS, Toolchain, preset

PROBLEMS: dict[str, Problem] = {
    "bf16 8192 D128": make_problem(8192, 128),
    "bf16 8192 D128 causal": make_problem(8192, 128, causal=True),
    "bf16 8192 D128 causal bottom-right": make_problem(
        8192, 128, causal=True, causal_align="bottom_right"
    ),
    "fp16 1024 D64 B4 H32/8": make_problem(1024, 64, batch=4, heads=32, kv_heads=8, dtype="fp16"),
    "fp32 100x333 D80/96": make_problem(100, 80, seq_kv=333, head_dim_v=96, dtype="fp32"),
    "bf16 0x17 D1": make_problem(0, 1, seq_kv=17),
    "bf16 8192 D128 any strides": make_problem(8192, 128, layout="any"),
    "bf16 8192 D128 any scale": make_problem(8192, 128, scale_sign="any"),
}
TOOLCHAINS: dict[str, Toolchain] = {
    "3.6.0": Toolchain("3.6.0", "12.8.93"),
    "3.7.1": Toolchain("3.7.1", "12.9.86", torch="2.13.0", driver="580.95"),
    "3.9.0": Toolchain("3.9.0", "13.1.80"),
}


def changed(family: str, **knobs: Any) -> Config:
    return Config(family, FAMILIES[family].Knobs(**knobs))


def configs() -> dict[str, Config]:
    defaults = {f"{name} default": changed(name) for name in FAMILIES}
    return defaults | {
        "flash 64x32w4s2": changed("flash", block_m=64, block_n=32, num_warps=4, num_stages=2),
        "flash tma": changed("flash", loads="tma"),
        "flash rotate_s tau 8": changed(
            "flash", loop="rotate_s", rescale_tau=8.0, rescale_skip="branch"
        ),
        "flash longest_first": changed("flash", mask="longest_first", order="heads_first"),
    }


def keys() -> dict[str, str]:
    """Every key that is frozen, by a name that says what it is of."""
    found: dict[str, str] = {}
    for name, problem in PROBLEMS.items():
        found[f"problem {name}"] = problem.key
        found[f"class {name}"] = problem.class_key
        found[f"bucket {name}"] = problem.bucket_key
    found |= {f"device {name}": target.device_key for name, target in PRESETS.items()}
    found |= {f"toolchain {name}": chain.key for name, chain in TOOLCHAINS.items()}
    found |= {f"config {name}": config.key for name, config in configs().items()}
    return found


@pytest.fixture(scope="module")
def frozen(root: Path) -> dict[str, str]:
    plain: dict[str, str] = json.loads((root / "tests/assets/frozen_keys.json").read_text())
    return plain


def test_frozen_keys_have_not_changed(frozen: dict[str, str]) -> None:
    now = keys()
    assert {name: now.get(name) for name in frozen} == frozen


def test_every_kind_of_key_is_frozen(frozen: dict[str, str]) -> None:
    assert set(keys()) == set(frozen)
    assert len(frozen) >= 20
    assert all(len(key) == KEY_HEX for key in frozen.values())


def test_torch_and_driver_are_no_part_of_the_toolchain_key() -> None:
    plain = TOOLCHAINS["3.7.1"]
    assert replace(plain, torch="2.14.1", driver="600.1").key == plain.key
    assert replace(plain, ptxas="13.0.0").key != plain.key


@dataclass(frozen=True)
class _Inner:
    depth: int = 1


@dataclass(frozen=True)
class _Before:
    size: int
    inner: _Inner = field(default_factory=_Inner)


def test_a_new_field_with_a_default_leaves_old_keys_alone() -> None:
    after = make_dataclass(
        "After",
        [("size", int), ("inner", _Inner, field(default_factory=_Inner)), ("new", str, "absent")],
        frozen=True,
    )
    assert key_of(after(3)) == key_of(_Before(3))
    assert key_of(after(3, new="present")) != key_of(_Before(3))
    assert key_of(_Before(3, _Inner(2))) != key_of(_Before(3))


OTHER_SHAPE = Shape(3, 24, 8, 4096, 2048, 96, 80, "fp16")


# C01
@pytest.mark.parametrize("name", [f.name for f in fields(Shape)])
def test_every_size_is_part_of_the_problem_key(name: str) -> None:
    plain = PROBLEMS["bf16 8192 D128"]
    shape = replace(plain.shape, **{name: getattr(OTHER_SHAPE, name)})
    assert replace(plain, shape=shape).key != plain.key


# C01
@pytest.mark.parametrize(
    "other",
    [
        {"features": Features(causal="top_left")},
        {"features": Features(causal="bottom_right")},
        {"features": Features(scale="any")},
        {"direction": "backward"},
        {"layout": "any"},
    ],
    ids=str,
)
def test_whatever_is_not_a_size_is_part_of_problem_and_class_key(other: dict[str, Any]) -> None:
    plain = PROBLEMS["bf16 8192 D128"]
    assert replace(plain, **other).key != plain.key
    assert replace(plain, **other).class_key != plain.class_key


# C01
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_knob_is_part_of_the_config_key(family: str) -> None:
    declared = fields(FAMILIES[family].Knobs)
    keys_of_one_change = [
        changed(family, **{knob.name: value}).key
        for knob in declared
        for value in knob.metadata["choices"]
        if value != knob.default
    ]
    assert keys_of_one_change
    assert len({changed(family).key, *keys_of_one_change}) == len(keys_of_one_change) + 1


def test_a_part_of_a_card_is_another_device() -> None:
    whole = preset("h200")
    assert replace(whole, mig="1g.18gb", sm_count=16).device_key != whole.device_key
    assert replace(whole, mig="1g.18gb").device_key != whole.device_key
