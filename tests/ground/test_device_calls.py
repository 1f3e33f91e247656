"""Only the drivers of devices call ``torch.cuda``, so that everything else runs on a device that is not there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.sources import nodes

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "runtime/device/cuda_driver.py",
    "runtime/device/pinned_memory.py",
    # These ask how many devices this machine has, or keep the state of torch's global generators.
    "zeroir/config/meshes.py",
    "zeroir/torch_ops/globals.py",
}


def test_nothing_else_calls_torch_cuda() -> None:
    folders = [ROOT / "runtime", ROOT / "passes", *(ROOT / "zeroir").iterdir()]
    found: set[str] = set()
    for folder in folders:
        if folder.is_symlink():
            continue
        for path in (
            folder.rglob("*.py") if folder.is_dir() else [folder] * (folder.suffix == ".py")
        ):
            # Few files have to be parsed.
            for node in nodes(path) if "cuda" in path.read_text("utf-8") else ():
                match node:
                    case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                        found.add(str(path.relative_to(ROOT)))
                    case ast.ImportFrom(module=str(module)) if module.startswith("torch.cuda"):
                        found.add(str(path.relative_to(ROOT)))
    assert found == ALLOWED
