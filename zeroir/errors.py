"""The two kinds of failure: the user can mend one, we must mend the other.

A :class:`UserError` says in one sentence what was expected, what was found, where, and what to do; the command
line prints it without a traceback and exits with 2. An :class:`InternalError` is a defect of zeroir; it names the
part that broke and exits with 70 (``EX_SOFTWARE``).
"""

from __future__ import annotations

from typing import ClassVar


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
