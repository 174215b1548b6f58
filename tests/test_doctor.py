"""`fagen doctor`: what it says when something is missing, and when all is well."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from fagen import doctor, target
from fagen.cli.main import main
from fagen.errors import NoDevice, NoTriton
from fagen.target import Toolchain, preset
from store_rows import copy_of_v1, sql
from tuning_db import Store


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine where all is well: an H200, CUDA, Triton, a compiler."""
    monkeypatch.setattr(target, "detect", lambda *_: preset("h200"))
    monkeypatch.setattr(target, "torch_build", lambda: ("2.13.0", "13.0"))
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr(target, "toolchain", lambda: Toolchain("3.7.1", "12.8.93"))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("FAGEN_DB")
    monkeypatch.setenv("XDG_DATA_HOME", os.environ["FAGEN_CACHE"])


def no_gpu(*_: object):
    raise NoDevice("No GPU: no CUDA device is visible.")


def found(name: str) -> doctor.Finding:
    return next(f for f in doctor.examine() if f.name == name)


def test_all_is_well():
    findings = doctor.examine()
    assert {f.state for f in findings} == {"ok"}
    assert doctor.can_tune(findings)
    assert found("tuning").text == "works, with timing."
    assert "NVIDIA H200 (sm_90, 132 SMs)" in found("gpu").text


def test_without_a_gpu_tuning_works_offline_and_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "detect", no_gpu)
    monkeypatch.setattr(target, "torch_build", lambda: ("2.13.0+cpu", None))
    assert (found("gpu").state, found("torch").state) == ("note", "note")
    assert "without CUDA" in found("torch").text
    assert found("tuning") == doctor.Finding(
        "tuning", "note", "works offline; timing needs a GPU."
    )
    assert main(["doctor"]) == 0


def test_a_torch_that_cant_use_the_gpu_is_bad_and_says_why(monkeypatch: pytest.MonkeyPatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\n.")

    monkeypatch.setattr("torch.cuda.init", init)
    assert (
        found("torch").state == "bad" and "too old (found version 12020)." in found("torch").text
    )
    assert main(["doctor"]) == 1
    monkeypatch.setattr(target, "detect", no_gpu)
    assert found("torch").state == "ok"


def test_a_missing_torch_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "torch_build", lambda: None)
    assert (found("torch").state, found("tuning").state) == ("bad", "bad")
    assert main(["doctor"]) == 1


def test_a_triton_of_an_unknown_version_is_bad_and_its_cure_is_named(
    monkeypatch: pytest.MonkeyPatch,
):
    def toolchain():
        raise NoTriton("Triton 4.0.0 is outside 3.6 to 3.9.", "Install one of those.")

    monkeypatch.setattr(target, "toolchain", toolchain)
    assert (found("triton").state, found("triton").next_step) == ("bad", "Install one of those.")


def test_a_missing_compiler_is_bad_only_where_kernels_are_launched(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert found("compiler").state == "bad"
    monkeypatch.setattr(target, "detect", no_gpu)
    assert found("compiler").state == "note"


def test_a_missing_ptxas_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "toolchain", lambda: Toolchain("3.7.1", ""))
    assert found("ptxas").state == "bad"


def test_a_cache_that_cant_be_made_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "file" / "below"))
    assert found("cache").state == "bad" and "FAGEN_CACHE" in found("cache").next_step


def test_a_database_that_is_none_is_bad_and_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    path = tmp_path / "text.db"
    path.write_text("hello")
    monkeypatch.setenv("FAGEN_DB", str(path))
    assert found("database").state == "bad" and str(path) in found("database").text
    assert path.read_text() == "hello"


def test_a_database_that_is_not_there_yet_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("FAGEN_DB", str(tmp_path / "none.db"))
    assert found("database").state == "ok" and "fagen tune makes it" in found("database").text
    assert list(Path(tmp_path).glob("none.db*")) == []


def test_an_older_database_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = copy_of_v1(tmp_path)
    before = path.read_bytes()
    monkeypatch.setenv("FAGEN_DB", str(path))
    assert found("database").state == "ok"
    assert "schema version 1" in found("database").text
    assert "next fagen tune migrates it" in found("database").text
    assert path.read_bytes() == before


def test_a_database_that_lacks_a_column_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "t.db"
    Store(path, "write").close()
    monkeypatch.setenv("FAGEN_DB", str(path))
    assert found("database").state == "ok"
    sql(path, "ALTER TABLE trial DROP COLUMN seconds")
    assert found("database").state == "bad"
    assert "trial has no column seconds" in found("database").text
    sql(path, "DROP TABLE verdict")
    assert main(["db", "check"]) == 1


def test_settings_that_are_set_are_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAGEN_LOG", "debug")
    assert found("FAGEN_LOG").text == "set to 'debug'."
    assert found("FAGEN_ANY_TRITON").text == "not set."


def test_torch_build_says_none_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert target.torch_build() is None


def test_a_database_that_cant_be_written_is_bad(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: place != Path("/nonexistent"))
    assert found("database").state == "ok"
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: False)
    assert found("database").state == "bad" and "FAGEN_DB" in found("database").next_step
