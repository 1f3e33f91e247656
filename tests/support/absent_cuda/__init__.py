"""A CUDA device that is not there, for what Inductor compiles for one.

Inductor's code for a GPU has two parts, and neither needs one to be judged:

* Kernels, in Triton. Triton compiles them to binaries for any architecture (``compiling``), and its interpreter runs
  the same functions with NumPy (``interpreted_kernels``).
* A library in C++ that makes temporaries, calls torch's operators and launches the kernels. It is compiled with the
  headers of CUDA and linked with ``device.cpp``, which stands in for libcuda and libtorch_cuda: its tensors are on the
  CPU, its operators are those of the CPU, and a launch runs the kernel in the interpreter.

So a segment runs as it would on a GPU, but for the products and other operators of torch's own, and the roundings of a
GPU's elementary functions. ``judge`` compares it with eager kernels.

Triton and the headers are in a folder of their own, because Inductor behaves otherwise where it can import Triton.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

PACKAGES: Final = Path(sys.prefix) / "device"
"""Where ``make setup`` installs Triton and the headers of CUDA."""
