"""Whatever a script changes of random small modules counts at the next step, or is refused; nothing is ignored."""

from __future__ import annotations

import contextlib
import copy
import secrets
from random import Random
from types import ModuleType

import pytest
import torch
from torch import nn

import zeroir
from tests.api.random_modules import FEATURES, REFUSED, forget, module_of
from zeroir.errors import UserError
from zeroir.runtime.engine.engine import Engine

X = torch.linspace(-1, 1, 24).view(6, 4)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::zeroir.errors.ModelWarning"),
]


@pytest.fixture
def chance() -> Random:
    """Another one at each run; a failure shows its seed."""
    seed = secrets.randbelow(2**32)
    print(f"The seed is {seed}.")
    return Random(seed)


def compiled_engine(net: nn.Module, *, compile_again: bool) -> Engine:
    """An engine for a module that no step trains."""
    compiled = zeroir.compile(
        net, X, stage=0, lr=0.0, optimizer="sgd", evaluate=False, world_size=1
    )
    return compiled.engine(self_check=False, compile_again=compile_again)


def is_refused_after(change: str, engine: Engine, net: nn.Module, file: ModuleType) -> bool:
    """Change a module; whether the next step is refused. Else it must have the loss of eager PyTorch."""
    with contextlib.suppress(IndexError):  # there is nothing to delete
        exec(change, {"net": net, "f": file, **vars(file)})
    try:
        found = engine.step(X).loss
    except UserError:
        return True
    with engine.gathered() as module, torch.no_grad():
        expected = copy.deepcopy(module)(X).item()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7), (change, file.text)
    return False


def groups_of_features(chance: Random) -> list[list[str]]:
    """All features that programs have, up to four in a module."""
    features = sorted(FEATURES.keys() - REFUSED)
    chance.shuffle(features)
    return [features[start : start + 4] for start in range(0, len(features), 4)]


def test_no_change_is_ignored_where_programs_are_fixed(chance: Random) -> None:
    """Each change of each feature is made, beside other features; a module is changed until a step is refused."""
    for features in groups_of_features(chance):
        _, file, left = module_of(features)
        forget(file)
        chance.shuffle(left)
        while left:
            torch.manual_seed(0)
            net, file, _ = module_of(features)
            engine = compiled_engine(net, compile_again=False)
            while left and not is_refused_after(left.pop(), engine, net, file):
                pass
            engine.close(return_values=False)
            forget(file)


def test_changes_count_at_the_next_step(chance: Random) -> None:
    """A program is compiled again, up to three times for a module."""
    for features in groups_of_features(chance):
        torch.manual_seed(0)
        net, file, changes = module_of(features)
        engine = compiled_engine(net, compile_again=True)
        for change in chance.sample(changes, min(3, len(changes))):
            is_refused_after(change, engine, net, file)
        engine.close(return_values=False)
        forget(file)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_no_program_has_is_refused(name: str) -> None:
    net, file, _ = module_of([name])
    with pytest.raises(UserError):
        compiled_engine(net, compile_again=True)
    forget(file)
