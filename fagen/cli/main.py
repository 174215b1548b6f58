"""The command line's entry: finds the command, and turns every error into a line and a code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from importlib import import_module
from typing import Any

import click

from fagen import settings
from fagen.errors import BadSetting, FagenError
from fagen.tune.signals import Terminated, terminable

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143  # 128 and the number of SIGINT, SIGTERM
EXIT_BUG = 70  # EX_SOFTWARE: an error that fagen did not expect
COMMANDS = {
    "tune": "fagen.cli.tune",
    "why": "fagen.cli.why",
    "show": "fagen.cli.show",
    "repro": "fagen.cli.repro",
    "bench": "fagen.cli.bench",
    "bench-tuner": "fagen.cli.bench_tuner",
    "doctor": "fagen.cli.doctor",
    "db": "fagen.cli.db",
}


class LazyGroup(click.Group):
    """Imports a command's module when it is asked for, so that --help stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name]).command
        return command


def _show_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        import fagen

        click.echo(f"fagen {fagen.__version__}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 99},
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 70 a bug in fagen, 130/143 interrupted. "
    "With --json, errors leave stdout empty.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Generate, check, time and keep the fastest exact attention kernel for a shape.

    \b
    Example:
      fagen tune --seq 8192 --head-dim 128
      fagen db list
    """
    _start_logging()


def main(args: list[str] | None = None) -> int:
    """Run one command. Returns the exit code; never raises for what a user can meet."""
    _hold_standard_files()
    code = 0
    try:
        with terminable():
            code = _run(sys.argv[1:] if args is None else args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has had enough, as in `fagen db list | head -1`
        _drop_stdout()
    except OSError as error:
        _drop_stdout()
        return _fail(_io_error(error), 1)
    return code


def _run(args: list[str]) -> int:
    # Not cli.main(): it ends a broken pipe with 1 and prints a traceback for a full disk.
    try:
        with cli.make_context("fagen", args) as context:
            cli.invoke(context)
        return 0
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except FagenError as error:
        _trace()
        return _fail(str(error), error.exit_code)
    except Terminated:
        return _fail("Terminated.", EXIT_TERMINATED)
    except (KeyboardInterrupt, click.Abort):
        return _fail("Interrupted.", EXIT_INTERRUPTED)
    except OSError:
        raise
    except Exception as error:  # the last line of defence: one line, and how to see more
        _trace()
        return _fail(_bug(error), EXIT_BUG)


def _io_error(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return f"Can't write the result: {error.strerror or error}."


def _bug(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else "no message"
    return f"{type(error).__name__}: {first} (set FAGEN_DEBUG=1 for the traceback)"


def _trace() -> None:
    if settings.debug():
        traceback.print_exc()


def _fail(line: str, code: int) -> int:
    click.echo(f"fagen: {line}", err=True)
    return code


def _start_logging() -> None:
    level: Any = logging.getLevelNamesMapping().get(settings.log_level())
    if level is None:
        raise BadSetting(
            f"FAGEN_LOG is {settings.log_level().lower()!r}.",
            "Use debug, info, warning or error.",
        )
    logging.basicConfig(format="fagen: %(levelname)s: %(message)s")
    logging.getLogger("fagen").setLevel(level)


def _hold_standard_files() -> None:
    # With a closed stdout the next file opened, say the database, would be file 1.
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that the terminal can't show is no error
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    # Python flushes stdout once more at exit, and would report the same error again.
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
