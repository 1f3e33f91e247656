"""The two kinds of errors: mistakes in the input, and defects of zeroir.

A :class:`UserError` names in one sentence the expected and the actual input, its place, and a remedy; the command line
prints it without a traceback and exits with 2. An :class:`InternalError` is a defect of zeroir; it names the part that
failed and exits with 70 (``EX_SOFTWARE``).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

MEMORY_REMEDY: Final = "use more ranks, a higher stage, a lower precision or a smaller batch"
"""The remedy if memory runs out."""

_NO_MEMORY: Final = re.compile(
    r"can(?:no|')t allocate memory|out of memory|bad_alloc|failed to map segment", re.IGNORECASE
)
"""The messages of torch, the C++ library and the dynamic loader if memory runs out."""


class ZeroirError(Exception):
    """Base of every error that zeroir raises on purpose."""

    exit_code: ClassVar[int] = 70


class UserError(ZeroirError):
    """A mistake that the user can correct: a wrong file, option, batch or environment."""

    exit_code: ClassVar[int] = 2


class BatchError(UserError):
    """A batch is none, or is none that the program was compiled for."""


class DamagedCheckpointError(UserError):
    """A checkpoint is not what was saved; an earlier one may be."""


class KernelWarning(UserWarning):
    """Segments run with other kernels than requested; results are equally exact, but the step may be slower."""


class GraphWarning(UserWarning):
    """Sections run op by op instead of as CUDA graphs; results are equal, but the step may be slower."""


class ModelWarning(UserWarning):
    """A model's code does something that its program does differently, or leaves out."""


class CheckpointWarning(UserWarning):
    """A checkpoint lacks something that begins anew, or has something that is left out."""


class OffloadWarning(UserWarning):
    """An option that moves something out of device memory moves nothing of this program."""


class InternalError(ZeroirError):
    """A defect of zeroir itself, for instance a pass that produced an invalid program."""

    exit_code: ClassVar[int] = 70


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, the system or torch means that the host or a device has no memory left."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


_REFUSED_PATHS: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE),
        *(errno.EMFILE, errno.ENFILE),
    }
)
"""What the system answers to a path that zeroir has used rightly; that there is no such file is not among it."""


def explain_path(error: BaseException) -> str | None:
    """The sentence for an error of the system about a path, where the user can mend it; None for other errors."""
    if (
        not isinstance(error, OSError)
        or error.filename is None
        or error.errno not in _REFUSED_PATHS
    ):
        return None
    return f"'{os.fsdecode(error.filename)}' cannot be used: {error.strerror}."


@contextlib.contextmanager
def memory_for(what: str, remedy: str = MEMORY_REMEDY) -> Iterator[None]:
    """Turn a lack of memory in the body into a UserError; ``what`` names the use of the memory."""
    try:
        yield
    except ZeroirError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"There is not enough memory for {what}: {remedy}.") from error


def leave_reason(sentence: str) -> None:
    """Leave why this process ends where torchrun, if it started the process, takes the root cause of its summary from.

    The form is that of ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        whole = Path(f"{path}.part")
        whole.write_text(json.dumps({"message": {"message": sentence, "extraInfo": extra}}))
        whole.replace(path)


OBEYED: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""The characters that a terminal obeys instead of showing them."""


def printable(text: str) -> str:
    r"""A text whose parts may come from any file, with such characters written as ``\x1b``; lines and tabs remain."""
    return OBEYED.sub(_escaped, text)


def _escaped(character: re.Match[str]) -> str:
    is_layout = character[0] in "\n\t"
    return character[0] if is_layout else character[0].encode("unicode_escape").decode()
