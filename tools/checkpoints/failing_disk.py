"""Save to a disk of which every operation fails once, and look what is left.

    LD_PRELOAD=recorder.so python -m tools.checkpoints.failing_disk FOLDER

An engine of one rank saves checkpoints. Once for each operation of a save and each error, that operation fails. With
ENOSPC the disk stays full until the save has ended. A save must then end with one sentence that names the path, or
be whole; whatever is visible is whole, also what was saved before; and the next save succeeds. What is wrong is
printed, and then the number of failures. Where it saves in the background, the error must come with the next step.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zeroir
from tools.checkpoints import model as tiny_model
from tools.checkpoints.recorder import Recorder
from zeroir.checkpoint.damage import verify_checkpoint
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine

ERRORS: Final = (errno.ENOSPC, errno.EACCES, errno.EIO)


def problems(
    engine: Engine, recorder: Recorder, folder: CheckpointFolder, number: int, error: int
) -> Iterator[str]:
    """Save while the operation with this number fails; sentences on what is wrong."""
    before = [listed.path for listed in folder.list()]
    path = folder.next_path(engine.step_count)
    sentence = None
    recorder.fail(number, error)
    try:
        if number % 2 == 0:
            engine.save(path)
        else:
            pending = engine.save(path, wait=False)
            while not pending.is_done:
                time.sleep(0.001)
            engine.step(tiny_model.batch())
    except UserError as failure:
        sentence = str(failure)
    finally:
        recorder.fail(-1, 0)
    visible = [listed.path for listed in folder.list()]
    if sentence is None and path not in visible:
        yield f"{path} is not there, and nothing says why"
    if sentence is not None and (folder.root not in sentence or "\n" in sentence):
        yield f"it says: {sentence}"
    if not set(before) <= set(visible):
        yield f"lost: {set(before) - set(visible)}"
    for each in visible:
        for damage in verify_checkpoint(each).damages:
            yield f"half visible: {damage.sentence}"


def main() -> int:
    """Let every operation fail."""
    root = Path(sys.argv[1]).resolve()
    recorder = Recorder()
    recorder.start(root, root.with_suffix(".log"))
    folder = CheckpointFolder(root=str(root / "checkpoints"))
    engine = zeroir.compile(tiny_model.__file__, stage=1, world_size=1).engine()
    count = 0
    is_wrong = False
    refusals: list[UserError] = []
    with folder.lock() as held:
        engine.save(held.next_path(0))
        engine.step(tiny_model.batch())
        recorder.fail(-1, 0)
        engine.save(folder.next_path(engine.step_count))
        operations = recorder.count()
        for error in ERRORS:
            for number in range(operations):
                engine.step(tiny_model.batch())
                for problem in problems(engine, recorder, folder, number, error):
                    is_wrong = True
                    print(f"operation {number}, {errno.errorcode[error]}: {problem}")
                count += 1
                held.retain(3, verified=folder.list()[0].path, refused=refusals.append)
        engine.step(tiny_model.batch())
        engine.save(folder.next_path(engine.step_count))
    engine.close()
    for refusal in refusals:
        is_wrong = True
        print(f"refused: {refusal}")
    print(f"{count} failures")
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
