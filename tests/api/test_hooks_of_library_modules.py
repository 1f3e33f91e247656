"""Hooks that the user put on modules whose classes are a library's: their globals are looked at, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zeroir

SEEN: list[object] = []


def remember(*arguments: object) -> None:
    SEEN.append(len(arguments))


class Remembering:
    """A hook that is an object."""

    def __call__(self, *arguments: object) -> None:
        SEEN.append(len(arguments))

    def method(self, *arguments: object) -> None:
        SEEN.append(len(arguments))


def remember_gradient(gradient: Tensor) -> None:
    SEEN.append(gradient.dim())


def register_on(parameter: Tensor) -> object:
    register: Callable[[Callable[[Tensor], None]], object] = parameter.register_hook
    return register(remember_gradient)


REGISTERED: dict[str, Callable[[nn.Linear], object]] = {
    "function": lambda line: line.register_forward_hook(remember),
    "partial": lambda line: line.register_forward_pre_hook(partial(remember, 1)),
    "object": lambda line: line.register_forward_hook(Remembering()),
    "method": lambda line: line.register_full_backward_hook(Remembering().method),
    "of a parameter": lambda line: register_on(line.weight),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REGISTERED)
def test_a_hook_that_fills_a_list_of_its_file_is_refused(kind: str) -> None:
    line = nn.Linear(4, 1)
    REGISTERED[kind](line)
    with pytest.raises(zeroir.UserError, match=r"changes test_hooks_of_library_modules\.py:SEEN"):
        zeroir.compile(nn.Sequential(line, nn.Flatten(0)), torch.ones(1, 4), world_size=1)
    assert SEEN == []
