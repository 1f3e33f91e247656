"""A module in hand gives its values to the engine, tensor by tensor, and its memory with them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.runtime.constructors import Mlp
from tests.runtime.support import Ranks, lowered, random_batches, require_success
from tests.support.programs import mlp
from zeroir.errors import ModelWarning, UserError
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.state import initial_values

MODULE = "tests.runtime.gathered_workers"
DIM = 16


def engine_for(precision: str = "fp32", stage: int = 3) -> Engine:
    return Engine(lowered(mlp(dim=DIM, precision=precision), stage, 1))


def on_meta() -> Mlp:
    with torch.device("meta"):
        return Mlp(dim=DIM)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def require_values(engine: Engine, expected: dict[str, Tensor]) -> None:
    found = engine.full_parameters()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.float()), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_takes_the_present_values_and_the_memory(stage: int, precision: str) -> None:
    module = Mlp(dim=DIM)
    module.pre.requires_grad_(False)
    module.post.weight.grad = torch.zeros_like(module.post.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    parameters = list(module.parameters())
    shapes = [parameter.shape for parameter in parameters]
    expected = values_of(module)
    engine = engine_for(precision, stage)
    engine.initialise(module)
    require_values(engine, expected)
    # The objects are the same, so an optimizer does not keep the old memory alive.
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert all(p.is_meta and isinstance(p, nn.Parameter) for p in parameters)
    assert optimizer.param_groups[0]["params"][0].is_meta
    assert [parameter.shape for parameter in parameters] == shapes
    assert not module.pre.weight.requires_grad
    assert module.post.weight.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        assert all(parameter.grad is None for parameter in parameters)
    engine.step(random_batches(1, 1)[0][0])


def test_a_kept_module_stays_as_it_is() -> None:
    module = Mlp(dim=DIM)
    expected = values_of(module)
    first, second = engine_for(), engine_for()
    first.initialise(module, keep_module=True)
    second.initialise(module, keep_module=True)
    for engine in (first, second):
        require_values(engine, expected)
    assert all(torch.equal(p, expected[name]) for name, p in module.named_parameters())


def test_a_freed_module_has_no_values_for_another_engine() -> None:
    module = Mlp(dim=DIM)
    engine_for().initialise(module)
    with pytest.raises(UserError, match=r"'pre.weight' is on the meta device.*keep_module=True"):
        engine_for().initialise(module)


def test_tensors_of_any_form_are_freed() -> None:
    """Transposed, of another dtype, with two names, and with a weak reference, which torch does not let us swap."""
    module = Mlp(dim=DIM).double()
    module.post.weight = nn.Parameter(torch.randn(DIM, 6).t())
    module.register_parameter("first", module.get_parameter("pre.weight"))
    reference = weakref.ref(module.blocks[0].weight)
    expected = values_of(module)
    storages = [weakref.ref(p.untyped_storage()) for p in module.parameters()]
    engine = engine_for()
    del expected["first"]
    expected["pre.weight"] = module.pre.weight.detach().clone()
    engine.initialise(module)
    require_values(engine, expected)
    assert all(p.is_meta for p in module.parameters())
    assert module.get_parameter("first") is module.pre.weight
    gc.collect()
    assert reference() is None
    assert [storage() for storage in storages] == [None] * len(storages)


def test_a_state_gives_a_meta_module_its_values(tmp_path: Path) -> None:
    source = Mlp(dim=DIM)
    expected = values_of(source)
    save_file(expected, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for state in (expected, file.get_tensor):
            engine = engine_for("bf16")
            engine.initialise(on_meta(), state=state)
            require_values(engine, expected)
            built = engine_for("bf16")
            built.initialise(lambda: Mlp(dim=DIM), state=state)
            require_values(built, expected)


def test_a_state_has_precedence_and_may_lack_what_the_module_has() -> None:
    module = Mlp(dim=DIM)
    expected = values_of(module)
    expected["post.weight"] = torch.randn(6, DIM)
    engine = engine_for()
    engine.initialise(module, state={"post.weight": expected["post.weight"], "more": torch.ones(3)})
    require_values(engine, expected)


@pytest.mark.slow
def test_values_of_a_state_live_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "_BATCH_NUMEL", 1)
    values = values_of(Mlp(dim=DIM))
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def state(name: str) -> Tensor:
        gc.collect()
        alive.append(sum(reference() is not None for reference in given))
        value = values[name].clone()
        given.append(weakref.ref(value))
        return value

    engine = engine_for()
    engine.initialise(on_meta(), state=state)
    require_values(engine, values)
    assert len(alive) == len(values)
    assert max(alive) == 0


def test_a_file_is_not_a_state(tmp_path: Path) -> None:
    module = Mlp(dim=DIM)
    save_file(values_of(module), tmp_path / "model.safetensors")
    with (
        safe_open(tmp_path / "model.safetensors", "pt") as file,
        pytest.raises(UserError, match=r"state= is of type safe_open; pass .* get_tensor"),
    ):
        engine_for().initialise(module, state=file)


def test_wrong_states_are_named() -> None:
    values = values_of(Mlp(dim=DIM))
    renamed = {name.replace("post", "pots"): value for name, value in values.items()}
    with pytest.raises(UserError, match=r"The state has no 'post.weight'.*like it are pots.weight"):
        engine_for().initialise(on_meta(), state=renamed)
    with pytest.raises(UserError, match=r"The state has no 'post.weight': KeyError: 'post.weight'"):
        engine_for().initialise(on_meta(), state=renamed.__getitem__)
    wide = {**values, "pre.weight": torch.zeros(DIM, 7)}
    with pytest.raises(UserError, match=r"state's 'pre.weight' .* \[16, 7\].*shape \[16, 6\]"):
        engine_for().initialise(on_meta(), state=wide)


def test_a_failure_says_what_it_leaves_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Mlp(dim=DIM)
    with pytest.raises(UserError) as unchanged:
        Engine(lowered(mlp(dim=8), 3, 1)).initialise(module)
    assert not getattr(unchanged.value, "__notes__", [])
    assert not any(p.is_meta for p in module.parameters())
    monkeypatch.setattr(initial_values, "_BATCH_NUMEL", 1)
    values = values_of(module)
    del values["post.weight"]
    with pytest.raises(UserError, match=r"'post\.weight'") as half:
        engine_for().initialise(module, state=values.__getitem__)
    assert "not whole any more" in half.value.__notes__[0]
    assert module.pre.weight.is_meta
    assert not module.post.weight.is_meta


def test_memory_that_cannot_be_freed_tensor_by_tensor_is_named() -> None:
    module = Mlp(dim=DIM)
    expected = values_of(module)
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    start = 0
    for parameter in module.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    engine = engine_for()
    with pytest.warns(
        ModelWarning, match=r"'pre.weight' and 'blocks.0.weight' .* share 4\d+ bytes"
    ):
        engine.initialise(module)
    require_values(engine, expected)


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_never_holds_two_copies(tmp_path: Path) -> None:
    """The peak of the process with an engine and a module of 100 MB, as the kernel counts it."""

    def peak_bytes(scenario: str) -> tuple[int, int]:
        ((code, out, err),) = Ranks(1, tmp_path, "peak", scenario, module=MODULE).wait()
        assert code == 0, err
        growth, held = map(int, out.split())
        return growth, held

    model_bytes = 24 * 4 * 1024**2
    (freed, held), (kept, _) = peak_bytes("freed"), peak_bytes("kept")
    assert kept - freed > 0.8 * model_bytes
    assert freed < held


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("scenario", ["values", "failing-state"])
def test_rank_0_gives_the_values(tmp_path: Path, scenario: str) -> None:
    require_success(Ranks(3, tmp_path, scenario, module=MODULE).wait())
