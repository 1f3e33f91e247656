"""Whatever a script changes of random small modules counts at the next step, or is refused; nothing is ignored."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import zeroir
from tests.api.random_modules import FEATURES, REFUSED, forget, module_of
from tests.support.examples import examples
from zeroir.errors import ModelWarning, UserError

X = torch.linspace(-1, 1, 24).view(6, 4)

features_of = st.lists(st.sampled_from(sorted(FEATURES)), min_size=1, max_size=4)
changed = st.lists(st.integers(0, 10**6), min_size=1, max_size=4)


def require_nothing_ignored(features: list[str], drawn: list[int], *, compile_again: bool) -> int:
    """Return how many steps after changes computed as eager PyTorch does; the others were refused."""
    torch.manual_seed(0)
    net, file, changes = module_of(features)
    count = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ModelWarning)
            try:
                compiled = zeroir.compile(net, X, lr=0.0, optimizer="sgd", world_size=1)
            except UserError:
                assert not REFUSED.isdisjoint(features)
                return 0
            assert REFUSED.isdisjoint(features)
            engine = compiled.engine(self_check=False, compile_again=compile_again)
            for number in drawn:
                change = changes[number % len(changes)]
                note(change)
                try:
                    exec(change, {"net": net, "f": file, **vars(file)})
                except IndexError:  # there is nothing to delete
                    continue
                try:
                    found = engine.step(X).loss
                except UserError as error:
                    note(str(error))
                    continue
                with engine.gathered() as module, torch.no_grad():
                    expected = copy.deepcopy(module)(X).item()
                assert found == pytest.approx(expected, rel=1e-5, abs=1e-7), (change, file.text)
                count += 1
            engine.close(return_values=False)
    finally:
        forget(file)
    return count


@pytest.mark.slow
@given(features=features_of, drawn=changed)
@examples(200)
def test_no_change_is_ignored_where_programs_are_fixed(
    features: list[str], drawn: list[int]
) -> None:
    require_nothing_ignored(features, drawn, compile_again=False)


@pytest.mark.slow
@given(features=features_of, drawn=changed)
@examples(40)
def test_changes_count_at_the_next_step(features: list[str], drawn: list[int]) -> None:
    require_nothing_ignored(features, drawn, compile_again=True)
