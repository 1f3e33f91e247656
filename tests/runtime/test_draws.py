"""Draws that are carried out later leave the same numbers and the same states as those that are carried out at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroir.runtime.draws import Draw, Draws, advance

UNIFORM, NORMAL = torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default
EXPONENTIAL = torch.ops.aten.exponential_.default


class Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that operators fill with random numbers of a distribution."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel: int = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in (UNIFORM, NORMAL):
            assert isinstance(args[0], Tensor)
            self.numel += args[0].numel()
        return func(*args, **(kwargs or {}))


def fill(function: torch._ops.OpOverload, numel: int, dtype: torch.dtype) -> Draw:
    return Draw(
        function=function,
        run=lambda generator: function(torch.empty(numel, dtype=dtype), generator=generator),
        dtype=dtype,
        filled_numel=numel,
    )


DRAWN = st.tuples(
    st.sampled_from([UNIFORM, NORMAL, EXPONENTIAL]),
    st.sampled_from([1, 7, 15, 16, 17, 100, 4096, 70_001]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)


@given(st.lists(DRAWN, min_size=1, max_size=5), st.integers(0, 2**40))
def test_passing_over_draws_leads_to_the_state_that_drawing_does(
    drawn: list[tuple[torch._ops.OpOverload, int, torch.dtype]], seed: int
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draws = Draws()
        draws.begin()
        for function, numel, dtype in drawn:
            draws.postpone(draws.now(), fill(function, numel, dtype))
            assert torch.initial_seed() == seed
        draws.settle(draws.now())
        found = torch.get_rng_state()
        torch.manual_seed(seed)
        for function, numel, dtype in drawn:
            function(torch.empty(numel, dtype=dtype))
        assert torch.equal(found, torch.get_rng_state())


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (UNIFORM, torch.float32),
        (UNIFORM, torch.float64),
        (UNIFORM, torch.bfloat16),
        (NORMAL, torch.float32),
        (NORMAL, torch.float64),
    ],
)
def test_passing_over_draws_nothing_but_to_learn_what_it_costs(
    function: torch._ops.OpOverload, dtype: torch.dtype
) -> None:
    """So it is with torch 2.13; where this fails, torch draws in another way, and initialising takes longer."""
    with torch.random.fork_rng(devices=[]), Filled() as filled:
        draws = Draws()
        draws.begin()
        for _ in range(3):
            draws.postpone(draws.now(), fill(function, 1 << 20, dtype))
        draws.settle(draws.now())
    assert 0 < filled.numel < 1 << 16


@pytest.mark.parametrize("words", [0, 1, 2, 623, 624, 625, 1 << 17])
def test_a_generator_moves_on_by_words(words: int) -> None:
    moved, drawn = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    advance(moved, words)
    torch.empty(words, dtype=torch.uint8).random_(generator=drawn)
    assert torch.equal(moved.get_state(), drawn.get_state())


def _restore_after_a_draw(draws: Draws) -> None:
    saved = torch.get_rng_state()
    draws.postpone(draws.now(), fill(NORMAL, 100, torch.float32))
    torch.set_rng_state(saved)


def _seed_for_a_while(draws: Draws) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        draws.postpone(draws.now(), fill(NORMAL, 100, torch.float32))


@pytest.mark.parametrize("interlude", [_restore_after_a_draw, _seed_for_a_while])
def test_a_state_that_is_set_again_stands_for_what_it_was(
    interlude: Callable[[Draws], None],
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        draws = Draws()
        draws.begin()
        draws.postpone(draws.now(), fill(UNIFORM, 300, torch.float32))
        interlude(draws)
        draws.postpone(draws.now(), fill(UNIFORM, 50, torch.float32))
        draws.settle(draws.now())
        expected = torch.Generator().manual_seed(5)
        for numel in (300, 50):
            torch.empty(numel).uniform_(generator=expected)
        assert torch.equal(torch.get_rng_state(), expected.get_state())


def test_a_state_of_unknown_origin_is_refused() -> None:
    stranger = torch.Generator().manual_seed(1)
    torch.empty(10).uniform_(generator=stranger)
    with torch.random.fork_rng(devices=[]):
        for is_strict in (True, False):
            draws = Draws(is_strict=is_strict)
            draws.begin()
            torch.set_rng_state(stranger.get_state())
            if not is_strict:
                draws.settle(draws.now())
                assert torch.equal(torch.get_rng_state(), stranger.get_state())
                continue
            with pytest.raises(RuntimeError, match="not known"):
                draws.now()
            torch.manual_seed(0)
