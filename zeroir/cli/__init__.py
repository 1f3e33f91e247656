"""The command line. ``main`` maps every failure to one sentence and an exit code."""

from __future__ import annotations

import gc
import os
import sys

from zeroir.cli.streams import open_standard_streams
from zeroir.runtime.orphans import end_with_agent

__all__ = ["main"]


def main() -> None:
    """The entry point: exit 0 on success, 1 on a finding, 2 on a user's error, 70 on ours, 130 on Ctrl-C."""
    open_standard_streams()
    end_with_agent()
    # A connection that breaks is told in a sentence; torch would print a trace of C++ frames before it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
