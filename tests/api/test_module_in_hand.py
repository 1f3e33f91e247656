"""Compiling a module in hand or a function: as the file, and the user's module stays as it is."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

import zeroir
from tests.api import in_hand_workers as workers
from tests.runtime.support import COMPILING_SOURCES, Ranks, require_success
from zeroir.api.check import check_model
from zeroir.config import make_options
from zeroir.errors import UserError


@pytest.mark.slow
@pytest.mark.dist
def test_three_ranks_train_a_module_in_hand_as_its_file_bit_for_bit(tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path, module="tests.api.in_hand_workers", sources=COMPILING_SOURCES)
    require_success(ranks.wait())


Gradients = tuple[Tensor, ...] | Tensor


@pytest.mark.slow
def test_a_file_with_a_loss_function_and_constants_equals_eager_replicas(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(workers.FILE)
    options = make_options({"stage": 3, "world_size": 3, "precision": "bf16"})
    comparison = check_model(str(path), options, steps=2, seed=0)
    assert comparison.is_equal, str(comparison)
    assert comparison.tolerance == 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.second(torch.tanh(self.first(x))))
        return y.square().mean() * self.scale


def made(change: Callable[[Net], object]) -> Net:
    torch.manual_seed(0)
    net = Net()
    change(net)
    return net


def unchanged(_: Net) -> None:
    """Change nothing."""


BATCH = (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)


def compiled(net: nn.Module) -> zeroir.CompiledProgram:
    return zeroir.compile(net, BATCH, world_size=1, optimizer="sgd", lr=0.1)


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
    """Computes something else than a tensor."""

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise NotImplementedError


REFUSED: dict[str, tuple[Callable[[Net], object], str]] = {
    "hook with a list": (
        lambda net: net.first.register_forward_hook(lambda _, __, out: ACTIVATIONS.append(out)),
        "changes test_module_in_hand.py:ACTIVATIONS at every call",
    ),
    "hook that counts": (counted_by_a_hook, "changes count:calls at every call"),
    "hook that is an object": (
        lambda net: net.first.register_forward_hook(Recorder()),
        r"changes Recorder\.outputs at every call",
    ),
    "hook that is a method": (
        lambda net: net.first.register_forward_hook(Recorder().note),
        r"changes Recorder\.outputs at every call",
    ),
    "backward hook with a list": (gradients_in_a_list, "changes <lambda>:gradients at every call"),
    "hook of a gradient with a list": (
        parameter_gradients_in_a_list,
        "changes <lambda>:norms at every call",
    ),
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
    "DTensor": (
        with_a_sharded_parameter,
        r"parameter first\.weight .* sharded already \(DTensor\)",
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("what", DISTRIBUTED)
def test_a_module_that_is_distributed_already_is_refused(what: str) -> None:
    change, sentence = DISTRIBUTED[what]
    with pytest.raises(UserError, match=sentence):
        compiled(change(made(unchanged)))


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

    with pytest.raises(UserError, match="requires a gradient and is no parameter"):
        zeroir.compile(net, BATCH, loss=loss, world_size=1)


def test_a_module_in_evaluation_mode_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match="The module Net is in evaluation mode"):
        compiled(made(lambda net: net.eval()))


@pytest.mark.slow
def test_parameters_in_another_dtype_than_the_programs_give_a_warning() -> None:
    batch, loss = (torch.ones(4, 8),), lambda module, batch: module(*batch).sum()
    net = nn.Linear(8, 1).bfloat16()
    with pytest.warns(
        UserWarning, match="Linear has parameters in bfloat16, such as weight, .* --precision bf16"
    ):
        zeroir.compile(net, batch, loss=loss, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zeroir.compile(net, batch, loss=loss, precision="bf16", world_size=1)
        zeroir.compile(nn.Linear(8, 1), batch, loss=loss, precision="bf16", world_size=1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((3,), "must be the path of a model file, a torch.nn.Module or a function .* not int"),
        ((made(unchanged),), "is traced with an example batch of one rank, and none is given"),
        ((made(unchanged), (3,)), "The example batch has no tensor"),
        ((made(unchanged), (torch.ones(4, 7),)), "model's forward cannot be traced"),
        ((lambda: 3, BATCH), r"<lambda>\(\) returned int; it must return a torch.nn.Module"),
        ((lambda: 1 // 0, BATCH), r"<lambda>\(\) failed at .*test_module_in_hand.py:\d+: ZeroDiv"),
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
        (lambda module, batch: (module(*batch), {}, 3), r"<lambda>\(\) must return the loss"),
        (lambda *_: 1 // 0, r"<lambda>\(\) cannot be traced at .*test_module_in_hand"),
    ],
)
def test_a_bad_loss_function_is_refused(loss: Callable[..., object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        zeroir.compile(made(unchanged), BATCH, loss=loss, world_size=1)


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
    engine = zeroir.compile(module, batch, loss=workers.loss, world_size=1).engine(self_check=False)
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
    engine = zeroir.compile(net, batch, loss=loss, world_size=1, optimizer="sgd", lr=0.1).engine(
        self_check=False, keep_module=True
    )
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
