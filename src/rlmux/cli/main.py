"""The entry point: runs a command and turns every error that a user can cause into one line and an exit code.

words ──▶ commands.app ──▶ a command ──▶ its exit code
                                    └──▶ an error: one line on stderr and a code of exit_codes.py
"""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import typer

from rlmux.cli import output
from rlmux.cli.exit_codes import FAILED, INTERRUPTED, MISTAKE
from rlmux.core.errors import RlmuxError, UserError

_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk that is full, fails or cannot be written."""
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Typer's own complaints about the words of a command line. Typer exports its children only."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run one command line (the process's own by default) and exit."""
    output.open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as behind a script's `&`; `kill -INT` ends it all the same
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run_command_line(words))


def run_command_line(words: Sequence[str] | None = None) -> int:
    """The exit code of one command line."""
    from rlmux.cli.commands import app

    try:
        code = app(args=words, prog_name="rlmux", standalone_mode=False)
    except _UsageError as error:
        return _print_error(_usage_line(error), MISTAKE)
    except UserError as error:
        return _print_error(str(error), MISTAKE)
    except RlmuxError as error:
        return _print_error(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone (`| head`)
        output.abandon(sys.stdout, sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno not in _STORAGE:
            raise
        complaint = None if error.filename else output.complaint_about_stdout(has_failed=True)
        return _print_error(complaint or f"{error.filename or 'a file'} cannot be written: {error.strerror}", FAILED)
    return _flushed(code if isinstance(code, int) else 0)


def _flushed(code: int) -> int:
    """The exit code, once all is printed: not 0 where the reader has gone, or stdout cannot be written."""
    complaint = output.complaint_about_stdout()
    return code if complaint is None else _print_error(complaint, code or FAILED)


def _usage_line(error: Exception) -> str:
    message = str(error.format_message())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "rlmux"
    return f"{message.rstrip('.')}; try: {path} --help"


def _print_error(text: str, code: int) -> int:
    with suppress(OSError):  # the reader may have gone
        print("rlmux: " + " ".join(text.split()), file=sys.stderr, flush=True)
    return code
