"""A rank that joins a job under watch: ``join patience_s silence_s``.

After a while ``stop …`` freezes it, ``hold …`` holds the interpreter's lock for longer than that silence, and
``leave …`` ends the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from typing import NoReturn

from zeroir.errors import UserError
from zeroir.runtime.distributed import heartbeat, rendezvous


def give_up(why: str) -> NoReturn:
    print(why, file=sys.stderr, flush=True)
    os._exit(2)


def main() -> None:
    what, patience_s, silence_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    timing = heartbeat.HeartbeatTiming(interval_s=0.05, silence_s=silence_s)
    with heartbeat.watched(rendezvous.read_launch_environment(), give_up, timing):
        if what == "stop":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "hold":
            time.sleep(0.5)
            ctypes.PyDLL(None).sleep(int(3 * silence_s))
        if what == "leave":
            time.sleep(0.5)
            os._exit(0)
        try:
            rendezvous.join_job(patience=timedelta(seconds=patience_s))
        except UserError as error:
            give_up(str(error))
        print("joined", flush=True)
        rendezvous.leave_job()


if __name__ == "__main__":
    main()
