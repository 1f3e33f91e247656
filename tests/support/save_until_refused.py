"""Save checkpoints to a folder until the disk refuses one: ``python -m tests.support.save_until_refused FOLDER USER``.

The last line of the output is the refusal, those before are what is then in the folder. Whatever is a checkpoint there
has been read and is whole. USER is the number of the user who saves, from the second checkpoint on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.checkpoint_files import save_checkpoint
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.reading import read_manifest, verify_all
from zeroir.errors import UserError

_NUMEL = 30_000
"""About 360 kB for each checkpoint of two ranks."""


def main(root: str, user: int) -> str:
    """The refusal."""
    folder = CheckpointFolder(root=root)
    try:
        for step in range(1, 20):
            with folder.lock():
                save_checkpoint(folder.next_path(step), step=step, numel=_NUMEL)
            if user != os.getuid():
                os.setuid(user)
    except UserError as error:
        for listed in folder.list():
            verify_all(listed.path, read_manifest(listed.path))
        return str(error)
    raise AssertionError("no disk refused anything")


if __name__ == "__main__":
    refusal = main(sys.argv[1], int(sys.argv[2]))
    for entry in sorted(Path(sys.argv[1]).iterdir()):
        print(entry.name)
    print(refusal)
