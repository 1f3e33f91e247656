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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

MEMORY_REMEDY: Final = "use more ranks, a higher stage, a lower precision or a smaller batch"
"""The remedy if memory runs out."""

_NO_MEMORY: Final = re.compile(
    r"can(?:no|')t allocate memory|out of memory|bad_alloc|failed to map segment", re.IGNORECASE
)
"""The messages of torch, the C++ library and the dynamic loader if memory runs out."""


class ZeroirError(Exception):
    """The base class of all errors that zeroir raises deliberately."""

    exit_code: ClassVar[int] = 70


class UserError(ZeroirError):
    """A mistake that the user can correct: a wrong file, option, batch or environment."""

    exit_code: ClassVar[int] = 2


class BatchError(UserError):
    """A batch is not valid, or not one that the program was compiled for."""


class Remainders(NamedTuple):
    """The dims whose remainders, when they are divided by ``modulus``, may decide what the code at ``line`` does."""

    dims: tuple[str, ...]
    modulus: int
    line: str


class ShapesError(UserError):
    """A model, or an option, does not take all the shapes that the dims of its batches allow.

    ``dims`` are the names of those that it does not take, empty if they are not known. ``remainders`` are
    those that may decide, if any. ``module`` names the innermost module whose code does not take them, empty for the
    model itself, if there is one.
    """

    def __init__(
        self,
        sentence: str,
        dims: Iterable[str] = (),
        remainders: Remainders | None = None,
        module: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.dims = frozenset(dims)
        self.remainders = remainders
        self.module = module


class ChangedCodeError(UserError):
    """The code or an object that a program was compiled from has changed.

    ``change`` says what, without a full stop. ``may_compile`` is whether a program that is compiled now takes the
    parameters and states over. ``numbers`` names numbers that changed, which another program may follow; with
    ``is_of_numbers`` nothing else changed. ``is_of_training`` is whether only which parameters are trained has changed.
    """

    def __init__(
        self,
        change: str,
        remedy: str,
        *,
        may_compile: bool,
        is_of_numbers: bool = False,
        numbers: frozenset[str] = frozenset(),
        is_of_training: bool = False,
    ) -> None:
        super().__init__(f"{change}, and the program goes on with that: {remedy}.")
        self.change = change
        self.may_compile = may_compile
        self.is_of_numbers = is_of_numbers
        self.numbers = numbers
        self.is_of_training = is_of_training


class DamagedCheckpointError(UserError):
    """A checkpoint is not what was saved; an earlier one may be."""


class KernelWarning(UserWarning):
    """Segments run with other kernels than requested; results are as exact, but the step may be slower."""


class GraphWarning(UserWarning):
    """Sections run op by op instead of as CUDA graphs; results are equal, but the step may be slower."""


class ModelWarning(UserWarning):
    """A model's code does something that its program does differently, or leaves out."""


class CheckpointWarning(UserWarning):
    """A checkpoint lacks something, which starts anew, or contains something that is ignored."""


class OffloadWarning(UserWarning):
    """An option that moves something out of device memory has no effect on this program."""


class InternalError(ZeroirError):
    """A defect of zeroir itself, for instance a pass that produced an invalid program."""

    exit_code: ClassVar[int] = 70


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, the system or torch means that the host or a device is out of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def explain_device_assert(error: BaseException, place: str) -> str | None:
    """Return the message for an error of torch, raised in a place, if a kernel on a GPU refused a value; else None.

    A GPU reports it when the host next waits for it, whatever op that is in.
    """
    if "device-side assert" not in str(error):
        return None
    return (
        "The batch does not suit the model: a kernel on the GPU refused a value, such as an index beyond a table, "
        f"{place} or in an op before it. Run the same batch on the CPU or with CUDA_LAUNCH_BLOCKING=1 to see which; "
        "this process cannot use the GPU any more."
    )


_REFUSED_PATHS: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE),
        *(errno.EMFILE, errno.ENFILE),
    }
)
"""The system's errors about a path that zeroir used correctly; a missing file is not among them."""


def explain_path(error: BaseException) -> str | None:
    """Return the message for a system error about a path, if the user can fix it; None for other errors."""
    if (
        not isinstance(error, OSError)
        or error.filename is None
        or error.errno not in _REFUSED_PATHS
    ):
        return None
    return f"'{os.fsdecode(error.filename)}' cannot be used: {error.strerror}."


@contextlib.contextmanager
def memory_for(what: str, remedy: str = MEMORY_REMEDY) -> Iterator[None]:
    """Convert a lack of memory in the body to a UserError; ``what`` names the use of the memory."""
    try:
        yield
    except ZeroirError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"There is not enough memory for {what}: {remedy}.") from error


def leave_reason(sentence: str) -> None:
    """Record why this process ends where torchrun, if it started the process, reads the root cause of its summary.

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
"""Control characters, which a terminal interprets instead of showing them."""


def printable(text: str) -> str:
    r"""Return a text from any source with its control characters written as ``\x1b``; lines and tabs remain."""
    return OBEYED.sub(_escaped, text)


def _escaped(character: re.Match[str]) -> str:
    is_layout = character[0] in "\n\t"
    return character[0] if is_layout else character[0].encode("unicode_escape").decode()
