"""No rank outlives the agent that started it: one that did would train for ever, and nobody could stop it by Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""From <linux/prctl.h>."""


def end_with_agent() -> None:
    """Have Linux kill this process when the agent of torchrun that started it dies, by ``kill -9`` as well.

    Elsewhere, and where a process stands between the agent and the rank, the heartbeat ends the rank: the agent keeps
    the job's store. A process that torchrun did not start may outlive its parent, such as a shell.
    """
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The agent died before the kernel knew whose death to tell.
        os.kill(os.getpid(), signal.SIGKILL)
