"""Errors of the user's code during training, as one sentence with the line where it failed."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from zeroir.errors import UserError

_NOT_THE_USERS: Final = (
    f"{Path(__file__).parents[2]}/",
    f"{Path(torch.__file__).parent}/",
    f"{sysconfig.get_paths()['purelib']}/",
    f"{sysconfig.get_paths()['stdlib']}/",
    "<",
)
"""Prefixes of the files of zeroir, torch and other libraries."""
_LOST_WORKER: Final = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<process>[\d, ]+)\) (?P<how>is killed by signal: [^.]*|[^.]*)"
)
"""Torch's message about workers that ended."""
_WORKERS_ERROR: Final = re.compile(
    r"Caught \w+ in DataLoader worker process .*?\n(?P<traceback>Original Traceback .*\n  [^\n]*\n)(?P<reason>\S.*)",
    re.DOTALL,
)
"""Torch's message about an exception in a worker: the line after the last frame starts its reason."""
_FRAME: Final = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)


@contextmanager
def in_users_code(what: str, when: str = "") -> Iterator[None]:
    """Run the user's code ``what``; its exceptions, and ``sys.exit``, become a UserError of one sentence.

    ``when`` follows "failed" in the sentence, and starts with a space.
    """
    try:
        yield
    except (UserError, StopIteration):
        raise
    except (Exception, SystemExit) as error:
        raise lost_worker(error) or UserError(sentence_on(what, error, when)) from error


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Raise UserError for the loss of a DataLoader's worker, which torch raises in whatever code runs at the time."""
    try:
        yield
    except RuntimeError as error:
        sentence = lost_worker(error)
        if sentence is None:
            raise
        raise sentence from error


def lost_worker(error: BaseException) -> UserError | None:
    """Return the sentence on a worker process of a DataLoader that was killed or ended itself.

    None for other errors.
    """
    found = _LOST_WORKER.match(str(error))
    if found is None:
        return None
    how = found["how"].replace("is killed by signal:", "was killed by the signal").rstrip(".")
    shared_memory = (
        "or raise the limit of shared memory (/dev/shm), " if "shared memory" in str(error) else ""
    )
    return UserError(
        f"The DataLoader's worker process {found['process']} {how}: use fewer workers if memory ran out, "
        f"{shared_memory}or set num_workers=0 to see its own error."
    )


def sentence_on(what: str, error: BaseException, when: str = "") -> str:
    """Return a sentence on an exception in the user's code, with its outermost line in that code.

    A DataLoader passes a worker's exception on with the text of its traceback, which then provides line and reason.
    """
    frames = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    message = " ".join(str(error).split())
    reason = type(error).__name__ + (f": {message}" if message else "")
    where = ""
    in_worker = _WORKERS_ERROR.match(str(error))
    if in_worker is not None:
        frames = [(file, int(line)) for file, line in _FRAME.findall(in_worker["traceback"])]
        reason = " ".join(in_worker["reason"].split())
        where = " in a worker"
    lines = [
        f"{Path(file).name}:{line}" for file, line in frames if not file.startswith(_NOT_THE_USERS)
    ]
    place = f" ({lines[0]})" if lines else ""
    return f"{what} failed{where}{when}{place}: {reason}"
