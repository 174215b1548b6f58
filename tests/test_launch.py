"""Launches without Triton's binder: what each known C function is given, and when none is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fagen.generate.program import Arg, Entry
from fagen.run import launch as launching
from fagen.run.arguments import TENSORS, Settled, extents_of, numbers_of, sizes_of
from fagen.run.launch import Direct, ThroughTriton, launchable
from fagen.run.maps import MOST_MAPS, Maps, Missing

ARGS = (
    Arg("q_desc", "tensordesc<bf16[1,1,64,64]>"),
    Arg("k_desc", "tensordesc<bf16[1,1,32,64]>"),
    Arg("o_desc1", "tensordesc<bf16[1,1,16,64]>"),
    Arg("V", "*bf16", 16),
    Arg("LSE", "*fp32", 16),
    Arg("scale_log2", "fp32"),
    Arg("seq_q", "i32"),
    Arg("stride_vh", "i64"),
    Arg("counter", "*i32"),
)
ENTRY = Entry("attend", ARGS, 4, 1)
CONSTANTS = [64, "layout"]
Q, K, V = (torch.zeros(1, 4, 8, 64, dtype=torch.bfloat16) for _ in range(3))
V = V.transpose(1, 2).contiguous().transpose(1, 2)  # the heads of a row lie side by side
O, LSE, COUNTER = torch.zeros_like(Q), torch.zeros(1, 4, 8), torch.zeros(1, dtype=torch.int32)
HELD = (Q, K, V, O, LSE, COUNTER)


@dataclass
class Function:
    """Stands for a C function: it has no Python code of its own to look into."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    fails: bool = False

    def __call__(self, *args: Any) -> None:
        if self.fails:
            raise TypeError("function takes exactly 71 arguments")
        self.calls.append(args)


def wrapped(launcher: Function) -> Callable[..., None]:
    """As Triton wraps it where a kernel takes descriptors; it must be called with objects."""

    def inner(*args: Any) -> None:
        raise AssertionError(f"{launcher} was called by way of Triton's wrapper")

    return inner


@dataclass
class FakeKernel:
    """The parts of a CompiledKernel that a launch uses."""

    function_called: Function
    annotated: bool = False
    scratch: int = 0
    metas: list[Any] | None = None
    through: list[tuple[Any, ...]] = field(default_factory=list)
    function: int = 77
    packed_metadata: tuple[int, int, int] = (4, 1, 1000)

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(tensordesc_meta=[META] * 3 if self.metas is None else self.metas)

    @property
    def run(self) -> Any:
        newer = {"arg_annotations": ["a"], "kernel_signature": b"s", "gsan_enabled": False}
        return SimpleNamespace(
            launch=wrapped(self.function_called),
            global_scratch_size=self.scratch,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
            **(newer if self.annotated else {}),
        )

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self.through.append((grid, *args))


META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 9, 64]}


def fill(address: int, *rest: Any) -> tuple[Any, ...]:
    """Stands for the encoder of tensor maps."""
    return ("map", address, *rest)


@pytest.fixture(autouse=True, params=["fill_tma_descriptor", "fill_tma_descriptor_tiled"])
def encoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder of tensor maps, as Triton 3.6 and as later ones call it."""
    active = SimpleNamespace(utils=SimpleNamespace(**{request.param: fill}))
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    from triton import knobs

    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(knobs, "runtime", runtime)
    return runtime


def settled() -> Settled:
    sizes = sizes_of(Q, K, V)
    places = {name: place for place, name in enumerate((*TENSORS["forward"], "counter"))}
    numbers = numbers_of((Q, K, V), sizes)
    return Settled((2, 3, 4), numbers, places, extents_of((Q, K, V), sizes))


def made(kernel: FakeKernel) -> Any:
    return launchable(kernel, ENTRY, CONSTANTS, torch.device("cpu"))


def expected_values() -> list[Any]:
    dense = [1, 4, 8, 64], [16, 512, 64, 1]  # a stride over one batch is any aligned number
    encoded = [3, 2, 9, [1, 1, 9, 64], *dense, 0]
    described = [
        value
        for tensor in (Q, K, O)
        for value in (("map", tensor.data_ptr(), *encoded), *dense[0], *dense[1])
    ]
    rest = [V.data_ptr(), LSE.data_ptr(), 0.5, 8, V.stride(1), COUNTER.data_ptr(), *CONSTANTS]
    return [*described, *rest]


def test_the_function_of_triton_3_6_takes_each_argument_by_itself() -> None:
    function = Function()
    kernel = made(FakeKernel(function))
    assert isinstance(kernel, Direct) and kernel.path == "direct"
    function.calls.clear()
    kernel.bind(settled())(HELD, 0.5, 99)
    [call] = function.calls
    assert call[:5] == (2, 3, 4, 99, 77)
    assert call[5:7] == (False, False)
    # scratch twice, launch options, metadata and two hooks
    assert call[7:13] == (None, None, (4, 1, 1000), None, None, None)
    assert list(call[13:]) == expected_values()


def test_the_function_of_triton_3_7_to_3_9_takes_a_signature_and_a_list() -> None:
    function = Function()
    kernel = made(FakeKernel(function, annotated=True))
    assert isinstance(kernel, Direct)
    function.calls.clear()
    kernel.bind(settled())(HELD, 0.5, 99)
    [call] = function.calls
    assert call[:5] == (2, 3, 4, 99, 77)
    assert call[5:13] == (False, False, (4, 1, 1000), None, None, None, None, None)
    assert call[13:15] == (["a"], b"s")
    assert list(call[15]) == expected_values()


@pytest.mark.parametrize("annotated", [False, True])
def test_it_is_tried_with_a_grid_of_no_blocks_when_it_is_loaded(annotated: bool) -> None:
    function = Function()
    made(FakeKernel(function, annotated))
    [trial] = function.calls
    assert trial[:3] == (0, 0, 0)
    values = trial[15] if annotated else trial[13:]
    assert len(values) == len(expected_values())


@pytest.mark.parametrize(
    "kernel",
    [
        FakeKernel(Function(fails=True)),
        FakeKernel(Function(), scratch=128),
        FakeKernel(Function(), metas=[]),
        FakeKernel(Function(), metas=[META, None, META]),
        FakeKernel(Function(), metas=[{**META, "fp4_padded": True}] * 3),
        FakeKernel(Function(), metas=[{**META, "is_im2col": True}] * 3),
    ],
)
def test_what_is_not_known_goes_through_triton(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_descriptor", lambda tensor, extent, block: (tensor, block))
    kernel.through.clear()
    found = made(kernel)
    assert isinstance(found, ThroughTriton) and found.path == "triton"
    found.bind(settled())(HELD, 0.5, 99)
    [(grid, *values)] = kernel.through
    assert grid == (2, 3, 4)
    blocks = [[1, 1, 64, 64], [1, 1, 32, 64], [1, 1, 16, 64]]
    for (tensor, block), held, due in zip(values[:3], (Q, K, O), blocks, strict=True):
        assert tensor is held and block == due
    assert values[3] is V and values[4] is LSE and values[8] is COUNTER
    assert values[5:8] == [0.5, 8, V.stride(1)]
    assert values[9:] == CONSTANTS


def test_a_launcher_whose_function_is_python_is_not_called() -> None:
    kernel = FakeKernel(Function())
    launcher = kernel.run
    launcher.launch = lambda *args: None
    odd = SimpleNamespace(run=launcher, function=1, packed_metadata=())
    with pytest.raises(Missing, match="no C function"):
        launching.send_to(odd)


def test_an_unknown_way_to_encode_maps_goes_through_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor_otherwise=fill))
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    assert isinstance(made(FakeKernel(Function())), ThroughTriton)


def test_launch_hooks_are_honoured(
    hooks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_descriptor", lambda tensor, extent, block: tensor)
    function = Function()
    fake = FakeKernel(function)
    step = made(fake).bind(settled())
    function.calls.clear()
    chain = SimpleNamespace(calls=[])
    for enter, leave, through in (
        (None, None, 0),
        (chain, chain, 0),
        (SimpleNamespace(calls=[print]), chain, 1),
        (None, SimpleNamespace(calls=[print]), 1),
        (print, None, 1),
    ):
        hooks.launch_enter_hook, hooks.launch_exit_hook = enter, leave
        fake.through.clear()
        function.calls.clear()
        step(HELD, 0.5, 99)
        assert (len(fake.through), len(function.calls)) == (through, 1 - through)


def test_maps_are_encoded_once_for_each_address_and_few_are_kept() -> None:
    asked: list[int] = []

    def encode(address: int) -> int:
        asked.append(address)
        return -address

    maps = Maps(encode)
    assert [maps[5], maps[7], maps[5]] == [-5, -7, -5]
    assert asked == [5, 7]
    for address in range(1000):
        assert maps[address] == -address
        assert len(maps) <= MOST_MAPS


def test_an_argument_that_nothing_stands_for_is_an_error() -> None:
    entry = Entry("attend", (Arg("nonsense", "i32"),), 4, 1)
    with pytest.raises(KeyError, match="nonsense"):
        ThroughTriton(entry.args, lambda grid, values: None).bind(settled())
