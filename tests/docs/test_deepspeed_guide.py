"""Both halves of the guide "From DeepSpeed" print the same losses and rates, the first with DeepSpeed itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs_blocks import ROOT, blocks_of
from tests.support.deepspeed_package import FOLDER, OWN_COLLECTIVES, needs_deepspeed
from tests.support.zygote import run_forked

GUIDE = ROOT / "docs" / "moving.md"
WITHOUT_OWN_COLLECTIVES = f"""\
import deepspeed

deepspeed.ops.__compatible_ops__["{OWN_COLLECTIVES}"] = False
"""


def printed(script: str, folder: Path, *packages: Path) -> list[str]:
    """The lines of two numbers that a script prints on two ranks; it runs in a new folder, with more packages."""
    folder.mkdir()
    path = [*map(str, packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    (folder / "script.py").write_text(script, encoding="utf-8")
    launch = ["--standalone", "--nproc-per-node=2", "script.py"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    if packages:
        # What has imported torch and zeroir may have looked for such packages already.
        result = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *launch],
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
    else:
        result = run_forked("torch.distributed.run", launch, folder, environment)
    assert result.returncode == 0, result.stderr
    return re.findall(r"^\d+\.\d+ \d+\.\d+$", result.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.dist
@needs_deepspeed
def test_deepspeed_prints_what_the_guide_promises(tmp_path: Path) -> None:
    section = GUIDE.read_text("utf-8").partition("\n## From DeepSpeed\n")[2]
    before, after = blocks_of("moving.md", section)
    expected = printed(WITHOUT_OWN_COLLECTIVES + before.text, tmp_path / "before", FOLDER)
    assert len(expected) == 3
    assert printed(after.text, tmp_path / "after") == expected
