"""The command line. ``main`` maps every failure to one sentence and an exit code."""

from __future__ import annotations

import gc
import os
import sys

from zeroir.cli.standard_streams import open_standard_streams
from zeroir.runtime.distributed.parent_process import end_with_agent

__all__ = ["main"]


def main() -> None:
    """Run the command line: exit 0 on success, 1 on a finding, 2 on wrong input, 70 on a defect, 130 on Ctrl-C."""
    open_standard_streams()
    end_with_agent()
    # A sentence reports a broken connection; torch would print a trace of C++ frames before it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        # This import takes long enough to be interrupted, and the collector would find no garbage in it.
        gc.disable()
        from zeroir.cli.app import run_command
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
    gc.freeze()
    gc.enable()
    exit_code = run_command(sys.argv[1:])
    # The process ends, so a last collection of garbage would be wasted.
    gc.freeze()
    sys.exit(exit_code)
