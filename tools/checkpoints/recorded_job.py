"""A rank of a job whose file operations are recorded, with a mark for each checkpoint that it reports as durable.

    LD_PRELOAD=recorder.so python -m tools.checkpoints.recorded_job ROOT LOG ARGUMENTS...

The arguments are those of ``zeroir``.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from tools.checkpoints.recorder import Recorder
from zeroir.cli import main


class MarkingStream(io.StringIO):
    """An output of which each line with a saved checkpoint becomes a mark of the log."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def write(self, text: str) -> int:
        """Mark the lines."""
        for line in text.splitlines():
            if '"saved"' in line:
                self._recorder.mark(line)
        return len(text)


if __name__ == "__main__":
    _, root, log, *arguments = sys.argv
    recorder = Recorder()
    recorder.start(Path(root), Path(log))
    sys.stdout = MarkingStream(recorder)
    sys.argv = ["zeroir", *arguments]
    main()
