"""The conditions under which a model is traced, and under which eager PyTorch must run to compute the same."""

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
    """Take the branches that a model takes while it is traced.

    * ``torch.compiler.is_compiling()`` says yes: models ask it before they look at the values of tensors, and do
      something else that is as right but rounds differently. ``is_exporting()`` does not: shapes are what they are, so
      attention may be called causal where a model for any shape would make a mask.
    * Probability distributions do not check their parameters, for which they would look at their values.
    * Transformers take a mask for causal where they are told so, and do not compare it with one that is.
    * What a model compiles for itself runs eagerly, as the rest of it.
    * Activation checkpoints just call their function. What is saved and what is recomputed is the program's to say,
      and a recomputation in the backward would not run under the mode that the forward ran under. What runs under one
      runs within ``checkpointing()``.
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
        mock.patch.object(transformer, "_detect_is_causal_mask", _is_said_to_be_causal),
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", call),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", begin),
    ):
        yield


def _is_said_to_be_causal(
    _: Tensor | None, is_causal: bool | None = None, __: object = None
) -> bool:
    return is_causal is True
