"""Errors of the user's code during training, as one sentence with the line where it failed."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from zeroir.errors import UserError

_NOT_THE_USERS: Final = (
    f"{Path(__file__).parents[1]}/",
    f"{Path(torch.__file__).parent}/",
    f"{sysconfig.get_paths()['purelib']}/",
    f"{sysconfig.get_paths()['stdlib']}/",
    "<",
)
"""How the files of zeroir, torch and other libraries begin."""


@contextmanager
def in_users_code(what: str, when: str = "") -> Iterator[None]:
    """Run the user's code ``what``; its exceptions, and ``sys.exit``, become a UserError of one sentence.

    ``when`` follows "failed" in the sentence, and begins with a space.
    """
    try:
        yield
    except (UserError, StopIteration):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(sentence_on(what, error, when)) from error


def sentence_on(what: str, error: BaseException, when: str = "") -> str:
    """A sentence on an exception in the user's code, with its outermost line in that code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames[:1])
    message = " ".join(str(error).split())
    reason = type(error).__name__ + (f": {message}" if message else "")
    return f"{what} failed{when}{place}: {reason}"
