"""The states of global generators, there and back through the JSON of a checkpoint."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from zeroir.checkpoint.state_tree import decode, encode
from zeroir.errors import UserError
from zeroir.runtime.checkpoint.torch_trees import TorchTensors
from zeroir.runtime.training.random_states import (
    RandomStates,
    random_states,
    seed_generators,
    set_random_states,
)


def draws() -> list[float]:
    """Numbers of all generators; a normal draw leaves a second number behind in Python's and numpy's."""
    return [random.gauss(), np.random.randn(), *torch.randn(3).tolist(), random.random()]


def through_a_checkpoint(states: RandomStates) -> RandomStates:
    codec = TorchTensors()
    tree, arrays = encode(states, codec=codec)
    decoded = decode(tree, lambda name: arrays[name].data, codec=codec)
    assert isinstance(decoded, dict)
    return decoded


def test_generators_go_on() -> None:
    seed_generators(7)
    draws()
    states = through_a_checkpoint(random_states())
    expected = [draws() for _ in range(3)]
    seed_generators(8)
    set_random_states(states)
    assert [draws() for _ in range(3)] == expected


def test_seeds_decide_all_numbers() -> None:
    seed_generators(2**63 - 1)
    first = draws()
    seed_generators(2**62)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    seed_generators(2**63 - 1)
    assert draws() == first


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_state_that_lacks_or_changes_a_generator(name: str) -> None:
    states = dict(random_states())
    others: tuple[object, ...] = (
        ("MT1", np.zeros(3, np.uint32), 0),
        (),
        [],
        None,
        "MT19937",
        {},
        2**70,
    )
    for other in others:
        states[name] = other
        with pytest.raises(UserError, match="saved by another version"):
            set_random_states(states)
    del states[name]
    with pytest.raises(UserError, match="saved by another version"):
        set_random_states(states)
