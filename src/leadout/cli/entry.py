"""The `leadout` program: imports the commands, which takes a moment, so that Ctrl-C ends even that in one line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program."""
    try:
        from leadout.cli.main import run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
