"""What every test shares: folders of its own, and the rules of the two special test folders."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
INTERPRET = TESTS / "interpret"

# Test processes side by side have one core each. With a thread for every core in each of them,
# OpenMP's threads spin while they wait for ones that don't run: on two cores, plain attention of
# tests/test_repro.py took 64 s and more instead of 2 s. Read when torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden again instead of comparing with it",
    )


def pytest_configure(config: pytest.Config) -> None:
    asked = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    if not interpreting() and any(path.is_relative_to(INTERPRET) for path in asked):
        raise pytest.UsageError("Run: TRITON_INTERPRET=1 pytest tests/interpret")
    # A shell gives its background jobs an ignored SIGINT, and they pass it on to what they start:
    # the tests that send one would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """tests/interpret and the other tests never share a process.

    Triton decides at its import whether kernels are interpreted, for the life of the process.
    """
    if collection_path.is_dir():
        return True if collection_path == INTERPRET and not interpreting() else None
    outside = not collection_path.is_relative_to(INTERPRET)
    return True if interpreting() and outside else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Here and not in tests/gpu: whoever only shows what other processes ran reads this alone."""
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if report.nodeid.startswith("tests/gpu/")
    ]
    if skipped:
        reason = skipped[0].longrepr[2].removeprefix("Skipped: ")
        terminalreporter.section("NO GPU", sep="!", red=True, bold=True)
        terminalreporter.line(f"{len(skipped)} tests of tests/gpu did NOT run: {reason}", red=True)
        terminalreporter.line("On a machine with a GPU: make test-gpu", red=True)


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of generated kernels for the whole run: what was written once is not again."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_folders(kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's database or cache; child processes inherit this."""
    for name in [name for name in os.environ if name.startswith("FAGEN_")]:
        if name != "FAGEN_REQUIRE_GPU":
            monkeypatch.delenv(name)
    monkeypatch.setenv("FAGEN_CACHE", str(kernel_cache))
    monkeypatch.setenv("FAGEN_DB", str(tmp_path / "tuning.db"))


@pytest.fixture(autouse=True)
def _nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test is served does not hang on which records are shipped; a test may put some into
    `tuning_db.exchange.SHIPPED`. Child processes see those of the checkout."""
    from tuning_db import exchange

    monkeypatch.setattr(exchange, "SHIPPED", tmp_path / "records")
    exchange.shipped_rows.cache_clear()
    yield
    exchange.shipped_rows.cache_clear()
