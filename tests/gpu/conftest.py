"""tests/gpu needs a GPU. Without one it says loudly that nothing ran, or fails when told to."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest

from fagen.errors import NoDevice
from fagen.target import detect

_skipped: list[str] = []


@lru_cache(maxsize=1)
def why_no_gpu() -> str | None:
    try:
        detect()
    except NoDevice as error:
        return error.message
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, so that no fixture of a GPU test can run without a GPU."""
    reason = why_no_gpu()
    if reason is None:
        return
    if os.environ.get("FAGEN_REQUIRE_GPU") == "1":
        pytest.fail(f"FAGEN_REQUIRE_GPU=1, and {reason}", pytrace=False)
    _skipped.append(item.nodeid)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped:
        terminalreporter.section("NO GPU", sep="!", red=True, bold=True)
        terminalreporter.line(
            f"{len(_skipped)} tests of tests/gpu did NOT run: {why_no_gpu()}", red=True
        )
        terminalreporter.line("On a machine with a GPU: make test-gpu", red=True)
