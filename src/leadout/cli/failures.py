"""Every failure of a command ends here: one line on standard error and an exit code, or a traceback with --debug.

Codes: 2 what the user can change (recipe, data, disk, arguments), 1 a failed audit or gate, 70 an error of the program
itself (a script must not take a crash for a biased sampler), 130 Ctrl-C, 141 a reader that went away.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from types import TracebackType

import typer

from leadout.errors import LeadoutError

UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]
"""Base of the errors in arguments; typer exports only this subclass of it."""

_INTERNAL = 70
"""As in sysexits.h."""
_BROKEN_PIPE = 141
"""What shells report of a program that SIGPIPE ended."""


def run_guarded(command: Callable[[], None], debug: bool) -> int:
    """Run a command; returns the exit code. With `debug`, errors pass through as tracebacks."""
    try:
        command()
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort) as stop:
        return _say(str(stop) or "interrupted", 130)
    except typer.Exit as end:
        return end.exit_code
    except SystemExit as end:
        # No command of ours ends this way; a run must not look finished because some library called exit().
        if debug:
            raise
        return _say(f"error: something called exit({end.code!r}) in the middle of the command; see --debug", _INTERNAL)
    except BrokenPipeError:
        return _quiet_end()
    except UsageProblem as error:
        return _say(_usage(error), 2)
    except (LeadoutError, OSError) as error:
        if debug:
            raise
        return _say(_failure(error), error.exit_code if isinstance(error, LeadoutError) else 2)
    return 0


def show_internal_error(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """A `sys.excepthook` for errors of the program itself: one line, and the exit code of internal errors."""
    message = " ".join(str(error).split())
    described = f"{kind.__name__}: {message:.300}" if message else kind.__name__
    _say(f"error: internal error ({described}); run again with --debug for the traceback", _INTERNAL)
    raise SystemExit(_INTERNAL)


def _failure(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" while writing {error.filename}" if error.filename else ""
        return f"error: disk full{where}; free some space and run the same command again"
    return f"error: {error}"


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if context is not None else ""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"error: {message.rstrip('.')}{hint}"


def _say(message: str, code: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(" ".join(message.split()) + "\n")
    return code


def _quiet_end() -> int:
    """The reader of our output went away (``leadout … | head``); Python must not complain of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _BROKEN_PIPE
