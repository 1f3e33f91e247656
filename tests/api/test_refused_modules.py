"""Modules, hooks and arguments that a program would not honour are refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import zeroir
from tests.api.small_net import BATCH, Net, compiled, made, unchanged
from zeroir.errors import UserError

ACTIVATIONS: list[Tensor] = []


class Recorder:
    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, _: nn.Module, __: object, output: Tensor) -> None:
        self.outputs.append(output)

    def note(self, _: nn.Module, __: object, output: Tensor) -> None:
        self.outputs.append(output)


def counted_by_a_hook(net: Net) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    net.first.register_forward_hook(count)


def counted_by_one_of_two_hooks(net: Net) -> None:
    def counting(step: int) -> Callable[..., Tensor]:
        calls = 0

        def hook(_: nn.Module, __: object, output: Tensor) -> Tensor:
            nonlocal calls
            calls += step
            return output * (1 + calls)

        return hook

    net.first.register_forward_hook(counting(1))
    net.second.register_forward_hook(counting(0))


def gradients_in_a_list(net: Net) -> None:
    gradients: list[object] = []
    net.first.register_full_backward_hook(lambda _, __, given: gradients.append(given))


def parameter_gradients_in_a_list(net: Net) -> None:
    norms: list[Tensor] = []
    register: Callable[..., object] = net.first.weight.register_hook
    register(lambda gradient: norms.append(gradient.norm()))


def hooked_after_the_gradient(net: Net) -> None:
    register: Callable[..., object] = net.first.weight.register_post_accumulate_grad_hook
    register(unchanged)


class Doubling(Tensor):
    """May compute something else than a tensor."""

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


REFUSED: dict[str, tuple[Callable[[Net], object], str]] = {
    "one of two hooks of one name that counts": (
        counted_by_one_of_two_hooks,
        r"changes hook:calls and computes something else .*: --opaque PATTERN with its name",
    ),
    "hook that counts": (counted_by_a_hook, "changes count:calls at every call"),
    "backward hook with a list": (
        gradients_in_a_list,
        r"changes <lambda>:gradients at every call.*: --opaque PATTERN with its name",
    ),
    "hook of a gradient with a list": (parameter_gradients_in_a_list, "changes <lambda>:norms"),
    "hook after the gradient": (
        hooked_after_the_gradient,
        r"parameter first\.weight of the model has a hook of register_post_accumulate_grad_hook",
    ),
    "deprecated backward hook": (
        lambda net: net.first.register_backward_hook(lambda *_: None),
        "module first of the model has a hook of register_backward_hook",
    ),
    "part of another parameter": (
        lambda net: setattr(net.second, "bias", nn.Parameter(net.first.weight.data[0])),
        r"parameters first\.weight and second\.bias of the model share memory",
    ),
    "batch norm over ranks": (
        lambda net: setattr(net, "norm", nn.SyncBatchNorm(8)),
        "module norm of the model is a SyncBatchNorm",
    ),
    "replicated part": (
        lambda net: setattr(net, "first", nn.DataParallel(net.first)),
        r"module first of the model is a DataParallel, .* pass the module in it, \.module",
    ),
    "scripted part": (
        lambda net: setattr(net, "first", torch.jit.script(net.first)),
        "module first of the model is TorchScript",
    ),
    "sparse buffer": (
        lambda net: net.register_buffer("mask", torch.eye(8).to_sparse()),
        "buffer mask of the model is of layout sparse_coo",
    ),
    "subclass of tensor": (
        lambda net: net.register_buffer("mask", torch.ones(8).as_subclass(Doubling)),
        "buffer mask of the model is a Doubling",
    ),
    "frozen subclass of tensor": (
        lambda net: setattr(
            net.first,
            "weight",
            nn.Parameter(torch.ones(8, 8).as_subclass(Doubling), requires_grad=False),
        ),
        r"parameter first\.weight of the model is a Doubling, .*; zeroir\.quantize_frozen\(model\) stores frozen",
    ),
    "lazy": (
        lambda net: setattr(net, "first", nn.LazyLinear(8)),
        r"parameter first\.weight of the model has no shape yet",
    ),
    "frozen": (lambda net: net.requires_grad_(False), "module Net has no trainable parameter"),
    "lock": (
        lambda net: setattr(net, "lock", threading.Lock()),
        "module Net cannot be copied, .* pass a function that makes it instead",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_a_program_would_not_honour_is_refused_by_name(what: str) -> None:
    change, sentence = REFUSED[what]
    net = made(change)
    keys = {name: set(vars(module)) for name, module in net.named_modules()}
    ACTIVATIONS.clear()
    with pytest.raises(UserError, match=sentence) as caught:
        compiled(net)
    assert "\n" not in str(caught.value)
    assert ACTIVATIONS == []
    assert keys == {name: set(vars(module)) for name, module in net.named_modules()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hooks_of_every_kind_store_what_they_see() -> None:
    recorder = Recorder()
    net = Net()
    net.first.register_forward_hook(lambda _, __, out: ACTIVATIONS.append(out))
    net.first.register_forward_hook(recorder)
    net.first.register_forward_hook(recorder.note)
    ACTIVATIONS.clear()
    engine = compiled(net).engine(self_check=False)
    assert ACTIVATIONS == recorder.outputs == []
    engine.step(BATCH)
    assert len(ACTIVATIONS) == 1
    assert len(recorder.outputs) == 2
    assert torch.equal(ACTIVATIONS[0], recorder.outputs[1])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_a_sharded_parameter(net: Net) -> nn.Module:
    mesh = device_mesh.init_device_mesh("cpu", (1,))
    net.first.weight = nn.Parameter(distribute_tensor(net.first.weight, mesh, [Shard(0)]))
    return net


def with_a_sharded_module(net: Net) -> nn.Module:
    fully_shard(net.first)
    return net


DISTRIBUTED: dict[str, tuple[Callable[[Net], nn.Module], str]] = {
    "DDP": (DistributedDataParallel, r"The model is a DistributedDataParallel, .*, \.module"),
    "FSDP": (with_a_sharded_module, "module first of the model is a FSDPModule, .* before fully_s"),
    "DTensor": (with_a_sharded_parameter, r"parameter first\.weight .* sharded already"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("what", DISTRIBUTED)
def test_a_module_that_is_distributed_already_is_refused(what: str) -> None:
    change, sentence = DISTRIBUTED[what]
    with pytest.raises(UserError, match=sentence):
        compiled(change(made(unchanged)))


def test_hooks_for_all_modules_are_refused() -> None:
    net = made(unchanged)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UserError, match="is registered for all modules of this process"):
            compiled(net)
    finally:
        handle.remove()


def test_a_loss_function_that_uses_another_module_is_refused() -> None:
    net, other = made(unchanged), nn.Linear(8, 1)

    def loss(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
        value: Tensor = module(*batch) + other(*batch).mean()
        return value

    with pytest.raises(
        UserError, match=r"no parameter of the model. A second module may have an engine of its own"
    ):
        zeroir.compile(net, BATCH, loss=loss, world_size=1)


def test_statistics_of_another_module_change_in_no_program() -> None:
    """What the sentence says can be done is possible."""
    net, other = nn.Linear(8, 1), nn.BatchNorm1d(1).requires_grad_(False)
    x = torch.randn(4, 8)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = other(module(batch)).square().mean()
        return value

    with pytest.raises(
        UserError, match=r"changes a tensor .* give its norms track_running_stats=False"
    ):
        zeroir.compile(net, x, loss=loss, world_size=1)
    other.track_running_stats = False
    engine = zeroir.compile(net, x, loss=loss, world_size=1).engine(self_check=False)
    with torch.no_grad(), engine.gathered() as lent:
        expected = loss(lent, x).item()
    assert engine.step(x).loss == pytest.approx(expected, rel=1e-5)
    other.track_running_stats = True
    zeroir.compile(
        nn.Linear(8, 1),
        x,
        loss=lambda module, batch: other(module(batch)).square().mean(),
        frozen={"other": other},
        world_size=1,
    ).engine(self_check=False).step(x)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((3,), "must be the path of a model file, a torch.nn.Module or a function .* not int"),
        ((made(unchanged),), "is traced with an example batch of one rank, and none is given"),
        ((made(unchanged), (3,)), "The example batch has no tensor"),
        ((made(unchanged), (torch.ones(4, 7),)), "model's forward cannot be traced"),
        ((lambda: 3, BATCH), r"<lambda>\(\) returned int; it must return a torch.nn.Module"),
        ((lambda: 1 // 0, BATCH), r"<lambda>\(\) failed at .*test_refused_modules.py:\d+: ZeroDiv"),
        (("model.py", BATCH), "batch= has no effect on a model file: define `batch` in model.py"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        zeroir.compile(*arguments, world_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda *_: None, r"<lambda>\(\) must return the loss: .* it returned NoneType"),
        (lambda module, batch: ({}, module(*batch), 3), r"<lambda>\(\) must return the loss"),
        (lambda *_: 1 // 0, r"<lambda>\(\) cannot be traced at .*test_refused_modules"),
    ],
)
def test_a_bad_loss_function_is_refused(loss: Callable[..., object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        zeroir.compile(made(unchanged), BATCH, loss=loss, world_size=1)


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), nn.functional.mse_loss, lambda output: output],
    ids=["module", "F", "one"],
)
def test_a_loss_that_is_no_function_of_module_and_batch_is_refused(
    loss: Callable[..., object],
) -> None:
    with pytest.raises(UserError, match=r"loss=.* is not a function of the module and a batch"):
        zeroir.compile(nn.Linear(2, 2), torch.ones(1, 2), loss=loss)
    with pytest.raises(UserError, match=r"weight=.*<lambda> is not a function of a batch: define"):
        zeroir.compile(nn.Linear(2, 2), torch.ones(1, 2), weight=lambda: 1.0)


def test_a_step_that_would_train_nothing_is_refused() -> None:
    net = nn.Linear(8, 1)
    x = torch.randn(4, 8)
    engine = zeroir.compile(
        net, x, loss=lambda module, x: module(x).square().mean(), world_size=1
    ).engine(self_check=False)
    net.requires_grad_(False)
    with pytest.raises(UserError, match=r"no parameter requires a gradient any more, as after"):
        engine.step(x)
    net.requires_grad_(True)
    engine.step(x)
    engine.close()
