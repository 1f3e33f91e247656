"""``zeroir run stage3.zir --steps 5``, but on rank 1 with the arguments that are given here in place of the program."""

import os
import runpy
import sys

arguments = sys.argv[1:] if os.environ["RANK"] == "1" else ["stage3.zir"]
sys.argv = ["zeroir", "run", *arguments, "--steps", "5"]
runpy.run_module("zeroir", run_name="__main__", alter_sys=True)
