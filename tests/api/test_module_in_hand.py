"""Compiling a module in hand or a function: as the file, and the user's module stays as it is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import zeroir
from tests.api import in_hand_workers as workers
from tests.api.small_net import BATCH, Net, compiled, made, unchanged
from tests.runtime.support import Ranks, require_success
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import UserError


@pytest.mark.slow
@pytest.mark.dist
def test_three_ranks_train_a_module_in_hand_as_its_file_bit_for_bit(tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path, module="tests.api.in_hand_workers")
    require_success(ranks.wait())


Gradients = tuple[Tensor, ...] | Tensor


@pytest.mark.slow
def test_a_file_with_a_loss_function_and_constants_equals_eager_replicas(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(workers.FILE)
    given = {"stage": 3, "world_size": 3, "precision": "bf16", "mean_over": "batches"}
    options = make_options(given)
    comparison = check_model(str(path), options, steps=2, seed=0)
    assert comparison.is_equal, str(comparison)
    assert comparison.tolerance == 0


def held_in_a_closure(net: Net) -> None:
    original = net.forward
    net.forward = lambda x: original(x) * 2  # type: ignore[method-assign]
    net.first.register_forward_hook(lambda _, __, output: output + net.second.bias)
    net.second.register_forward_hook(lambda _, __, output, own=net: output * own.first.bias)


def in_one_storage(net: Net) -> None:
    storage = torch.randn(128)
    net.first.weight.data = storage[:64].view(8, 8)
    net.second.weight.data = storage[64:].view(8, 8)


def pruned(net: Net) -> None:
    apply: Callable[..., object] = prune.l1_unstructured
    apply(net.first, "weight", 0.3)


def with_hook_of_a_gradient(net: Net) -> None:
    register: Callable[..., object] = net.first.weight.register_hook
    register(lambda gradient: gradient * 0.5)


def with_hook_of_loading(net: Net) -> None:
    register: Callable[..., object] = net.register_load_state_dict_post_hook
    register(unchanged)


def doubled(_: nn.Module, given: Gradients, __: Gradients) -> tuple[Tensor]:
    assert isinstance(given, tuple)
    return (given[0] * 2,)


HONOURED: dict[str, Callable[[Net], object]] = {
    "nothing": unchanged,
    "weight norm": lambda net: parametrizations.weight_norm(net.first),
    "spectral norm": lambda net: parametrizations.spectral_norm(net.first),
    "orthogonal": lambda net: parametrizations.orthogonal(net.first),
    "pruned": pruned,
    "submodule in evaluation mode": lambda net: net.norm.eval(),
    "frozen": lambda net: net.first.requires_grad_(False),
    "frozen buffer": lambda net: net.register_buffer("copy", net.first.weight.data),
    "pre-hook": lambda net: net.first.register_forward_pre_hook(lambda _, args: (args[0] * 3,)),
    "hook of a gradient": with_hook_of_a_gradient,
    "backward hook": lambda net: net.second.register_full_backward_hook(doubled),
    "closures": held_in_a_closure,
    "one storage": in_one_storage,
    "gradients": lambda net: net(*BATCH).backward(),
    "compiled": lambda net: net.compile(),
    "compiled part": lambda net: setattr(net, "first", torch.compile(net.first)),
    "generator": lambda net: setattr(net, "generator", torch.Generator()),
    "hook of loading": with_hook_of_loading,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HONOURED)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_module_in_hand_trains_as_in_eager_pytorch_and_stays_as_it_is(what: str) -> None:
    net = made(HONOURED[what])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in net.named_modules()}
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    program = compiled(net)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, module in net.named_modules():
        assert all(vars(module)[key] is value for key, value in attributes[name].items())
    for name, parameter in net.named_parameters():
        assert parameter.grad is gradients[name]
        assert not parameter.is_meta
    engine = program.engine(keep_module=True, self_check=False)
    losses = [engine.step(BATCH).loss for _ in range(3)]
    found = engine.full_parameters()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = []
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(*BATCH)
            torch.autograd.backward(loss)
            optimizer.step()
            expected.append(loss.item())
    assert losses == expected
    for name, parameter in net.named_parameters():
        assert torch.equal(found[name], parameter), name


@pytest.mark.slow
def test_a_compiled_module_is_compiled_from_its_own_code() -> None:
    text = compiled(made(unchanged)).text()
    wrapped: object = torch.compile(made(unchanged))
    assert isinstance(wrapped, nn.Module)
    assert compiled(wrapped).text() == text


@pytest.mark.slow
def test_a_module_in_the_memory_of_another_parameter_is_tied() -> None:
    net = made(lambda net: setattr(net.second, "weight", nn.Parameter(net.first.weight.data)))
    tied = made(lambda net: setattr(net.second, "weight", net.first.weight))
    sentence = "parameters first.weight and second.weight are different objects in the same memory"
    with pytest.warns(UserWarning, match=sentence):
        program = compiled(net)
    assert program.text() == compiled(tied).text()
    engines = [each.engine(self_check=False) for each in (program, compiled(tied))]
    losses = [[engine.step(BATCH).loss for _ in range(3)] for engine in engines]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_callers_modes_do_not_matter_but_autocast_is_refused() -> None:
    text = compiled(made(unchanged)).text()
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        net = made(unchanged)
        with mode:
            assert compiled(net).text() == text
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UserError, match=r"compiled within torch.autocast\('cpu'\)"),
    ):
        compiled(made(unchanged))


@cache
def positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


@pytest.mark.slow
def test_functions_with_a_cache_keep_no_tensor_of_the_trace() -> None:
    positions(3)
    net = made(
        lambda net: net.first.register_forward_hook(lambda _, __, output: output + positions(8))
    )
    losses = [compiled(net).engine(keep_module=True).step(BATCH).loss for _ in range(2)]
    assert type(positions(8)) is Tensor
    assert losses == [net(*BATCH).item()] * 2


LAST = {"output": torch.zeros(3)}


@pytest.mark.filterwarnings("ignore:The model's forward stores")
@pytest.mark.slow
@pytest.mark.parametrize("is_traceable", [True, False])
def test_the_users_variables_stay_as_they_are(is_traceable: bool) -> None:
    first = latest = torch.ones(2)
    outputs: list[Tensor] = []

    def note(_: nn.Module, __: object, output: Tensor) -> None:
        nonlocal latest
        LAST["output"] = latest = output
        outputs[:] = [output]
        if not is_traceable:
            raise RuntimeError("at the end")

    before = LAST["output"]
    net = made(lambda net: net.second.register_forward_hook(note))
    with contextlib.nullcontext() if is_traceable else pytest.raises(UserError, match="at the end"):
        compiled(net)
    assert LAST["output"] is before
    assert latest is first
    assert outputs == []


def test_a_module_in_evaluation_mode_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match="The module Net is in evaluation mode"):
        compiled(made(lambda net: net.eval()))


@pytest.mark.slow
def test_parameters_in_another_dtype_than_the_programs_give_a_warning() -> None:
    batch, loss = (torch.ones(4, 8),), lambda module, batch: module(*batch).sum()
    net = nn.Linear(8, 1).bfloat16()
    with pytest.warns(UserWarning, match="Linear has parameters in bfloat16, such as weight"):
        zeroir.compile(net, batch, loss=loss, world_size=1, evaluate=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zeroir.compile(net, batch, loss=loss, precision="bf16", world_size=1, evaluate=False)
        zeroir.compile(
            nn.Linear(8, 1), batch, loss=loss, precision="bf16", world_size=1, evaluate=False
        )


@pytest.mark.slow
def test_a_program_without_a_file_runs_with_a_module_alone(tmp_path: Path) -> None:
    path = tmp_path / "net.zir"
    net = made(unchanged)
    program = compiled(net)
    assert repr(program).startswith("<CompiledProgram of the module Net: stage 3")
    program.save(path)
    loaded = zeroir.load(path)
    with pytest.raises(UserError, match="compiled from the module Net, not from a model file"):
        loaded.engine()
    engine = loaded.engine(model=net, self_check=False, keep_module=True)
    assert engine.step(BATCH).loss == program.engine(self_check=False).step(BATCH).loss
    for wrong, sentence in {
        "names": (nn.Linear(8, 8), "has no parameter or buffer"),
        "shapes": (made(lambda net: setattr(net, "first", nn.Linear(8, 9))), "has the shape"),
        "dtypes": (
            made(lambda net: net.norm.half()),
            "has the dtype torch.float16, but the program was compiled with torch.float32",
        ),
    }.values():
        with pytest.raises(UserError, match=sentence):
            loaded.engine(model=wrong, self_check=False)


def test_a_module_in_hand_is_planned_as_well() -> None:
    net = made(unchanged)
    plan = zeroir.plan(net, "cpu-local", batch=BATCH, world_size=1, most_tried=5)
    assert plan.compiled.engine(self_check=False).step(BATCH).loss > 0


@pytest.mark.slow
def test_constants_of_a_batch_are_a_part_of_the_program() -> None:
    module = workers.make_module()
    batch = workers.example(0, 0)
    mean = zeroir.MicroSteps(mean_over="batches")
    compiled = zeroir.compile(
        module, batch, loss=workers.loss, world_size=1, micro_steps=mean, evaluate=False
    )
    engine = compiled.engine(self_check=False)
    engine.step(batch)
    sentence = "The batch's 'smoothing' is 0.5, but the program was compiled for the constant 0.125"
    wrong = workers.Sample(batch.tokens, batch.labels, 0.5, batch.weights)
    with pytest.raises(UserError, match=sentence):
        engine.step(wrong)
    tensor = workers.Sample(batch.tokens, batch.labels, 0.125, (torch.ones(11), torch.ones(1)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"'weights.1' is float32\[1\], but .* constant None"):
        engine.step(tensor)
    fields = {"tokens": batch.tokens, "labels": batch.labels, "smoothing": 0.125}
    with pytest.raises(UserError, match=r"The batch has no 'weights.1'"):
        engine.step(fields)
    more = {**fields, "weights": batch.weights, "mask": None}
    with pytest.raises(UserError, match="The batch has a 'mask', which the program was not"):
        engine.step(more)
    engine.step({**fields, "weights": batch.weights})


@pytest.mark.slow
def test_a_loss_function_may_call_the_module_as_it_likes() -> None:
    net = made(unchanged)

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(module(batch["x"]) + module(batch["x"] * 2), batch["y"])

    batch = {"x": BATCH[0], "y": torch.tensor(0.5)}
    engine = zeroir.compile(
        net, batch, loss=loss, world_size=1, optimizer="sgd", lr=0.1, evaluate=False
    ).engine(self_check=False, keep_module=True)
    losses = [engine.step(batch).loss for _ in range(2)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for found in losses:
        optimizer.zero_grad()
        value = loss(net, batch)
        torch.autograd.backward(value)
        optimizer.step()
        assert found == value.item()
    with contextlib.suppress(UserError):
        engine.close()
