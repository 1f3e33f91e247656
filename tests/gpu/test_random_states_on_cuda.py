"""The generator of a GPU goes on from a checkpoint's state, as those on the host do."""

from __future__ import annotations

import pytest
import torch

from zeroir.runtime.training.random_states import random_states, seed_generators, set_random_states

pytestmark = pytest.mark.gpu


def test_the_generator_of_a_gpu_goes_on() -> None:
    device = torch.device("cuda", 0)
    seed_generators(7)
    torch.randn(5, device=device)
    states = random_states(device)
    expected = [torch.randn(5, device=device).tolist() for _ in range(2)]
    seed_generators(8)
    assert torch.randn(5, device=device).tolist() != expected[0]
    set_random_states(states, device)
    assert [torch.randn(5, device=device).tolist() for _ in range(2)] == expected
