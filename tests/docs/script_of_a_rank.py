"""Runs a script as a rank: ``python -m tests.docs.script_of_a_rank SCRIPT.PY``."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
