"""tests/gpu needs a GPU. Without one it is skipped, as tests/conftest.py says loudly, or fails
when told to."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest

from fagen.errors import NoDevice
from fagen.target import detect


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
    pytest.skip(reason)
