"""The conditions under which a model is traced, and eager PyTorch must run to compute the same results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import Tensor
from torch.nn.modules import transformer
from torch.utils import checkpoint


@contextlib.contextmanager
def tracing_conditions(
    checkpointing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Make a model take the same branches as when it is traced.

    * ``torch.compiler.is_compiling()`` is True: models check it before they read the values of tensors, and then use
      equivalent code that rounds differently. ``is_exporting()`` stays False: shapes are fixed, so attention may be
      causal where a model for any shape would make a mask.
    * Probability distributions do not validate their parameters, since they would read values.
    * Transformers do not compare a mask with a causal one; they use ``is_causal`` only.
    * Functions that a model compiles itself run eagerly.
    * Activation checkpoints only call their function, within ``checkpointing()``. The program decides which values are
      saved or recomputed, and a recomputation in the backward would run outside the forward's mode.
    """

    def call(function: Callable[..., object], _: object, *args: object) -> object:
        with checkpointing():
            return function(*args)

    def begin(*_: object, **__: object) -> Generator[None, None, None]:
        with checkpointing():
            yield

    with (
        mock.patch.object(torch.compiler, "_is_compiling_flag", True),
        mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
        mock.patch.object(transformer, "_detect_is_causal_mask", _is_declared_causal),
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", call),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", begin),
    ):
        yield


def _is_declared_causal(_: Tensor | None, is_causal: bool | None = None, __: object = None) -> bool:
    return is_causal is True
