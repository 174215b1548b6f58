"""Every path and environment variable that fagen reads. There are at most eight variables."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

from fagen.errors import CacheError

log = logging.getLogger(__name__)

VARIABLES: dict[str, str] = {
    "FAGEN_DB": "Database: a path or an SQLAlchemy URL. Default: the user's data directory.",
    "FAGEN_CACHE": "Folder of generated kernels. Default: the user's cache directory.",
    "FAGEN_LOG": "Log level on stderr: debug, info, warning (default), error.",
    "FAGEN_DEBUG": "1: show tracebacks instead of one-line errors.",
    "FAGEN_ANY_TRITON": "1: accept a Triton version that fagen was not checked with.",
    "FAGEN_REQUIRE_GPU": "1: tests that need a GPU fail instead of being skipped.",
}


def database_setting() -> str | None:
    """What FAGEN_DB says, or None when the default file is meant."""
    return os.environ.get("FAGEN_DB") or None


def default_database_path() -> Path:
    """`fagen/tuning.db` in the user's data directory; the folder may not exist yet."""
    import platformdirs

    home = _home_folder(platformdirs.user_data_path)
    return (home if home is not None else _private_folder()) / "fagen" / "tuning.db"


def kernel_dir() -> Path:
    """The folder of generated modules, made if missing: mode 0700 and the user's own.

    Where the user's cache directory can't be written, a folder that only this process has.
    Raises CacheError when a folder named by FAGEN_CACHE can't be made, or when the folder belongs
    to somebody else.
    """
    named = os.environ.get("FAGEN_CACHE")
    if named:
        return _own_folder(Path(named) / "kernels")
    import platformdirs

    home = _home_folder(platformdirs.user_cache_path)
    if home is not None and can_be_written(home / "fagen" / "kernels"):
        return _own_folder(home / "fagen" / "kernels")
    return _own_folder(_private_folder() / "fagen" / "kernels")


def can_be_written(folder: Path) -> bool:
    """Whether this user may make files there, once the folder itself is made."""
    while not folder.is_dir():
        if folder.exists() or folder == folder.parent:
            return False
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def lock_dir() -> Path:
    """Where tuners of one user exclude each other, whatever FAGEN_CACHE, HOME and TMPDIR say.

    Raises CacheError when it belongs to somebody else.
    """
    shared = Path("/tmp")
    temporary = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    user = os.getuid() if hasattr(os, "getuid") else ""
    return _own_folder(temporary / f"fagen-locks-{user}")


def template_dir() -> Path:
    """The Jinja templates: beside the package when installed, in the checkout otherwise."""
    package = Path(__file__).resolve().parent
    for folder in (package / "templates", package.parent / "templates"):
        if folder.is_dir():
            return folder
    raise CacheError("The kernel templates are missing.", "Install fagen again.")


def log_level() -> str:
    return os.environ.get("FAGEN_LOG", "warning").upper()


def debug() -> bool:
    return os.environ.get("FAGEN_DEBUG", "") == "1"


def any_triton() -> bool:
    return os.environ.get("FAGEN_ANY_TRITON", "") == "1"


def _home_folder(ask: object) -> Path | None:
    """A platformdirs folder, or None when this user has no home that could hold it."""
    try:
        home = Path.home()
        folder: Path = ask()  # type: ignore[operator]
    except (RuntimeError, OSError, KeyError):
        return None
    if not home.is_dir() or str(home) == "/":
        named = os.environ.get("XDG_CACHE_HOME") or os.environ.get("XDG_DATA_HOME")
        return folder if named else None
    return folder


@lru_cache(maxsize=1)
def _private_folder() -> Path:
    # A process without a home must not share a predictable folder with other users.
    folder = Path(tempfile.mkdtemp(prefix="fagen-"))
    log.warning("no home directory that can be written: files of this process go to %s", folder)
    return folder


def _own_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise CacheError(
            f"Can't make the folder {folder}: {error.strerror}.",
            "Set FAGEN_CACHE to a folder that you can write.",
        ) from error
    if hasattr(os, "getuid") and facts.st_uid != os.getuid():
        raise CacheError(
            f"The folder {folder} belongs to another user.",
            "Set FAGEN_CACHE to a folder of your own.",
        )
    if stat.S_IMODE(facts.st_mode) & 0o022:
        raise CacheError(
            f"The folder {folder} can be written by others.", f"Run: chmod 700 {folder}"
        )
    return folder
