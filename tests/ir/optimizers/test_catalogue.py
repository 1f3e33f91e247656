"""What optimizers declare fits together, and is what torch has."""

from __future__ import annotations

import inspect
from math import prod
from typing import Any, get_args

import pytest
import torch

from zeroir.config.optimizer import OptimizerOptions
from zeroir.ir.optimizers.catalogue import OPTIONS, OWN_STATES, Algorithm, OptimizerName
from zeroir.ir.optimizers.settings import Setting
from zeroir.runtime.optimizers.catalogue import UPDATES, ElementUpdate, WholeUpdate

EACH = pytest.mark.parametrize("algorithm", Algorithm)


def test_type_checkers_and_the_runtime_know_every_optimizer() -> None:
    assert get_args(OptimizerName) == tuple(map(str, Algorithm))
    assert list(UPDATES) == list(Algorithm)


@EACH
def test_the_runtime_updates_what_is_declared(algorithm: Algorithm) -> None:
    is_whole = algorithm.declaration.whole is not None
    assert isinstance(UPDATES[algorithm], WholeUpdate if is_whole else ElementUpdate)
    has_reference = UPDATES[algorithm].plain is not None
    assert has_reference is (algorithm.declaration.torch is None)


@EACH
def test_settings_and_states_are_those_of_torch(algorithm: Algorithm) -> None:
    declaration = algorithm.declaration
    if declaration.torch is None:
        pytest.skip("torch does not have it")
    kind: Any = getattr(torch.optim, declaration.torch.class_name)
    parameter = torch.ones(3, 5, requires_grad=True)
    hyper = [n for s in declaration.settings for n in s.numbers(s.default)]
    settings = declaration.torch_settings(hyper)
    optimizer = kind([parameter], **settings)
    known = inspect.signature(kind).parameters
    for setting in declaration.settings:
        for key, index in setting.torch_places:
            default = known[key].default
            of_torch = default if index is None or default is None else default[index]
            # torch has no momentum by default, and computes eps from the dtype where it is None.
            if algorithm is not Algorithm.MOMENTUM and of_torch is not None:
                assert of_torch == (setting.default if index is None else hyper_of(setting, index))
    optimizer.param_groups[0]["lr"] = 1e-3
    parameter.grad = torch.ones(3, 5)
    optimizer.step()
    kept = dict(optimizer.state[parameter])
    assert ("step" in kept) is declaration.torch.counts_steps
    kept.pop("step", None)
    own = declaration.own_state
    parts = () if own is None else own.parts((3, 5))
    wanted: dict[str, tuple[int, ...]] = {state.name: (3, 5) for state in declaration.states}
    wanted |= {part.name: part.shape for part in parts}
    # Without momentum torch keeps None.
    shapes = {name: tuple(value.shape) for name, value in kept.items() if value is not None}
    assert shapes == wanted


def hyper_of(setting: Setting, index: int) -> object:
    return setting.default[index] if isinstance(setting.default, tuple) else setting.default


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_one_type_and_one_range(name: str) -> None:
    option = OPTIONS[name]
    for setting in option.settings.values():
        assert (type(setting.default), setting.limits, setting.choices) == (
            option.kind,
            option.limits,
            option.choices,
        )
        assert all(map(setting.allows, setting.numbers(setting.default)))
        assert setting.effect
    assert name in OptimizerOptions.rows()


@pytest.mark.parametrize("quantity", OWN_STATES)
def test_parts_of_a_matrix_have_as_many_elements_as_estimates_count(quantity: str) -> None:
    state = OWN_STATES[quantity]
    numel = sum(prod(part.shape) for part in state.parts((1000, 1000)))
    assert round(numel / 1000**2) == state.numbers


@EACH
def test_a_step_reads_one_thing_of_whole_parameters_beside_directions(algorithm: Algorithm) -> None:
    """The op has one operand for it."""
    whole = algorithm.declaration.whole
    if whole is not None and whole.own_state is not None:
        assert not (whole.reads_parameters and whole.own_state.is_sharded)
