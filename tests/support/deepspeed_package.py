"""DeepSpeed, which ``make setup`` installs beside the environment: other packages work otherwise where they see it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(sys.prefix, "peers")
"""On the path of those processes alone that run DeepSpeed."""

needs_deepspeed = pytest.mark.skipif(
    not (FOLDER.exists() or find_spec("deepspeed")), reason="DeepSpeed is not installed"
)

OWN_COLLECTIVES: Final = "deepspeed_shm_comm"
"""What DeepSpeed compiles for CPUs at first use, for minutes; where it is not compatible, gloo does the collectives."""
