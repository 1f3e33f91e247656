"""Time a command that needs no torch: ``python -m tools.bench_startup [--tries 15]``.

Each try is a process of its own, started as a user starts it. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from statistics import median

TARGET_S = 0.4
"""The longest time of ``zeroir show --help``, in seconds."""


def main() -> int:
    """Print the median and the range; 1 where the median misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=15)
    tries = parser.parse_args().tries
    command = [str(Path(sysconfig.get_path("scripts")) / "zeroir"), "show", "--help"]
    seconds: list[float] = []
    for _ in range(tries):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - start)
    found_s = median(seconds)
    print(f"zeroir show --help: {found_s:.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s")
    return int(found_s > TARGET_S)


if __name__ == "__main__":
    sys.exit(main())
