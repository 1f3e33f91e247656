"""A short job of several real ranks that saves after every step."""

from __future__ import annotations

from pathlib import Path

import zeroir
from tests.support.zygote import run_forked
from tools.checkpoints import model as tiny_model


def saved_checkpoints(folder: Path, *, world_size: int, steps: int) -> None:
    """Train the tiny model in FP16 at stage 2, and save to ``folder``, which must not exist, after every step."""
    program = folder.with_name("saving.zir")
    zeroir.compile(tiny_model.__file__, stage=2, world_size=world_size, precision="fp16").save(
        program
    )
    options = {
        "--nproc": str(world_size),
        "--steps": str(steps),
        "--save": str(folder),
        "--save-every": "1",
        "--model": str(tiny_model.__file__),
    }
    arguments = [word for pair in options.items() for word in pair]
    ended = run_forked(
        "zeroir",
        ["run", str(program), *arguments, "--no-self-check"],
        folder.parent,
        {"OMP_NUM_THREADS": "1"},
    )
    if ended.returncode != 0:
        raise RuntimeError(f"The job that saves failed: {ended.stderr}")
