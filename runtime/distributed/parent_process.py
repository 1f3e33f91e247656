"""Ends a rank whose agent has died: otherwise it would train forever, and Ctrl-C could not stop it."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""From <linux/prctl.h>."""


def end_with_agent() -> None:
    """Make Linux kill this process when the torchrun agent that started it dies, even by ``kill -9``.

    On other systems, and where another process is between the agent and the rank, the heartbeat ends the rank, because
    the agent hosts the job's store. A process that torchrun did not start may outlive its parent, such as a shell.
    """
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The agent died before the call above took effect.
        os.kill(os.getpid(), signal.SIGKILL)
