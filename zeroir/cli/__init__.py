"""The command line. ``main`` maps every failure to one sentence and an exit code."""

from __future__ import annotations

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """The entry point: exit 0 on success, 1 on a finding, 2 on a user's error, 70 on ours, 130 on Ctrl-C."""
    try:
        # Long enough to be interrupted in, and modules are no garbage to look for meanwhile.
        gc.disable()
        from zeroir.cli.app import run_command
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
    gc.freeze()
    gc.enable()
    exit_code = run_command(sys.argv[1:])
    # All that is left goes with the process, which need not look through it before it ends.
    gc.freeze()
    sys.exit(exit_code)
