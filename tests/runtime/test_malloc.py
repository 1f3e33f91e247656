"""Freed memory is the process's own during training, and the kernel's before it; judged by the kernel's page faults."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys
import torch
from zeroir.runtime import malloc

torch.set_num_threads(1)
SIZES = (8 << 20, 3 << 20, 512 << 10)

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        blocks = [torch.empty(size, dtype=torch.uint8).fill_(1) for size in SIZES]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

accepted = [malloc.return_freed_memory()]
returned = faults(10)
accepted.append(malloc.keep_freed_memory())
faults(8)
print(json.dumps([accepted, returned, faults(10), sum(SIZES)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_training_reuses_pages_and_what_comes_before_gives_them_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    accepted, returned, kept, size_bytes = json.loads(done.stdout)
    assert accepted == [True, True]
    # A fault may bring in a huge page of 2 MiB at most.
    assert returned >= 10 * size_bytes / (2 << 20)
    assert kept < returned / 10
