"""The two kinds of failure: the user can mend one, we must mend the other.

A :class:`UserError` says in one sentence what was expected, what was found, where, and what to do; the command
line prints it without a traceback and exits with 2. An :class:`InternalError` is a defect of zeroir; it names the
part that broke and exits with 70 (``EX_SOFTWARE``).
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from typing import ClassVar, Final

MEMORY_REMEDY: Final = "use more ranks, a higher stage, a lower precision or a smaller batch"
"""What to do where memory runs out."""

_NO_MEMORY: Final = re.compile(
    r"can(?:no|')t allocate memory|out of memory|bad_alloc|failed to map segment", re.IGNORECASE
)
"""How torch, the C++ library and the dynamic loader say so, in the text of errors of other kinds."""


class ZeroirError(Exception):
    """Base of every error that zeroir raises on purpose."""

    exit_code: ClassVar[int] = 70


class UserError(ZeroirError):
    """Something the user can mend: a wrong file, option, batch or environment."""

    exit_code: ClassVar[int] = 2


class KernelWarning(UserWarning):
    """Segments run with other kernels than were asked for; the numbers are as good, the step may be slower."""


class GraphWarning(UserWarning):
    """Sections run op by op that were to be CUDA graphs; the numbers are the same, the step may be slower."""


class ModelWarning(UserWarning):
    """A model's code does something that its program does not, or does otherwise."""


class InternalError(ZeroirError):
    """A defect of zeroir itself, for instance a pass that produced an invalid program."""

    exit_code: ClassVar[int] = 70


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, the system or torch means that there is no memory left, on the host or a device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """A body that takes memory for what the plural names; a UserError says so where there is not enough."""
    try:
        yield
    except ZeroirError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"There is not enough memory for {what}: {MEMORY_REMEDY}.") from error
