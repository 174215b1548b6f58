"""The wheel holds what an installed fagen needs, and works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

TIMEOUT_S = 240


def run(*words: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Standard output of a child process that must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, (
        f"{words} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def checkout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the sdist is made of: building leaves the real tree alone."""
    copy = tmp_path_factory.mktemp("copy") / "fagen"
    left_out = shutil.ignore_patterns("__pycache__", ".*_cache", ".venv*", ".git", "build", "dist")
    shutil.copytree(root, copy, ignore=left_out)
    # There may be no shipped record yet; an empty line is skipped when they are read.
    (copy / "tuning_db/records/planted.jsonl").write_text("\n", encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`sdist`, the `wheel` made from it, and the wheel made from the checkout (`direct`)."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    run(*build, out, checkout, cwd=out)
    run(*build, out / "direct", "--wheel", checkout, cwd=out)
    return {
        "sdist": next(out.glob("*.tar.gz")),
        "wheel": next(out.glob("*.whl")),
        "direct": next((out / "direct").glob("*.whl")),
    }


def members(archive: Path) -> set[str]:
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


def sources(root: Path, folder: str, pattern: str) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for path in (root / folder).rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_from_the_sdist_equals_wheel_from_the_checkout(built: dict[str, Path]) -> None:
    assert members(built["wheel"]) == members(built["direct"])


def test_wheel_holds_code_templates_migrations_and_shipped_records(
    built: dict[str, Path], checkout: Path
) -> None:
    wanted = sources(checkout, "fagen", "*.py") | sources(checkout, "tuning_db", "*.py")
    wanted |= sources(checkout, "tuning_db", "*.jsonl") | sources(checkout, "tuning_db", "*.mako")
    templates = sources(checkout, "templates", "*.j2")
    assert len(templates) >= 3
    assert any("/migrations/versions/" in name for name in wanted)
    assert "tuning_db/records/planted.jsonl" in wanted
    wanted |= {f"fagen/{name}" for name in templates} | {"fagen/py.typed", "tuning_db/py.typed"}
    assert wanted - members(built["wheel"]) == set()


def test_wheel_installs_two_top_level_names(built: dict[str, Path]) -> None:
    tops = {name.split("/")[0] for name in members(built["wheel"])}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fagen", "tuning_db"}


def test_sdist_can_be_tested_and_has_no_build_products(built: dict[str, Path]) -> None:
    names = members(built["sdist"])
    wanted = {"Makefile", ".ci/run", "requirements-cpu.txt", "LICENSE", "templates/flash.py.j2"}
    assert wanted | {"tests/conftest.py", "docs/generate.py", "tuning_db/store.py"} <= names
    assert "fagen/templates/flash.py.j2" not in names
    assert [n for n in names if "__pycache__" in n or n.startswith((".venv", "shared"))] == []


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to all that is installed here but fagen: a fresh environment without downloads."""
    folder = tmp_path_factory.mktemp("dependencies")
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(installed).iterdir():
            if not path.name.lstrip("_").startswith(("fagen", "tuning_db", "editable")):
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def fresh(
    built: dict[str, Path], dependencies: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The programs of a fresh environment with the wheel in it, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "--no-input"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", built["wheel"], cwd=folder)
    [site] = folder.glob("**/site-packages")
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return programs


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has no checkout on the path."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return env | {"HOME": str(tmp_path)}


def test_installed_fagen_is_the_wheel(
    fresh: Path, outside: dict[str, str], tmp_path: Path
) -> None:
    asked = "import fagen, tuning_db; print(fagen.__file__, tuning_db.__file__)"
    for path in run(fresh / "python", "-c", asked, cwd=tmp_path, env=outside).split():
        assert Path(path).is_relative_to(fresh.parent)


def test_installed_command_names_its_version(
    fresh: Path, outside: dict[str, str], tmp_path: Path, built: dict[str, Path]
) -> None:
    version = built["wheel"].name.split("-")[1]
    assert run(fresh / "fagen", "--version", cwd=tmp_path, env=outside) == f"fagen {version}\n"
    assert "tune" in run(fresh / "fagen", "--help", cwd=tmp_path, env=outside)


def test_installed_package_makes_a_problem(
    fresh: Path, outside: dict[str, str], tmp_path: Path
) -> None:
    asked = "import fagen; print(fagen.make_problem(8192, 128, causal=True))"
    shown = run(fresh / "python", "-c", asked, cwd=tmp_path, env=outside)
    assert shown == "forward bf16 B1 H16 N8192 D128 causal\n"


def test_installed_command_generates_a_kernel(
    fresh: Path, outside: dict[str, str], tmp_path: Path
) -> None:
    shape = ["--seq", "128", "--head-dim", "64", "--target", "h200"]
    outside["FAGEN_DB"] = ""
    shown = run(fresh / "fagen", "show", *shape, cwd=tmp_path, env=outside)
    assert "@gluon.jit" in shown  # the default on Hopper is flash_ws
    compile(shown, "shown", "exec")


def test_checkout_runs_without_being_installed(
    checkout: Path, dependencies: Path, outside: dict[str, str]
) -> None:
    env = outside | {"PYTHONPATH": str(dependencies), "PYTHONDONTWRITEBYTECODE": "1"}
    # -S leaves the site-packages of this environment out, and fagen's own metadata with them.
    python = [sys.executable, "-S", "-m", "fagen"]
    assert "tune" in run(*python, "--help", cwd=checkout, env=env)
    assert run(*python, "--version", cwd=checkout, env=env) == "fagen 0+checkout\n"
