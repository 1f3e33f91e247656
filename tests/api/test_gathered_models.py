"""Modules in hand and model files whose engines lend them: buffers, ties, modules in FP32, states of files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir
from zeroir.config.precision import FloatName, Precision
from zeroir.errors import ModelWarning, UserError
from zeroir.frontend.capture.precision import apply_precision

BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Tied weights, running statistics, and tensors that no training step reads."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.offset = torch.tensor([3.0])
        if float(self.first.bias.detach().sum()) > 1e9:  # A constructor that needs values.
            raise AssertionError

    def output(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.body(self.norm(self.first(x))))
        return output if self.training else output + self.table[1] * self.offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.output(x.to(self.first.weight.dtype)).float() - x).square().mean()


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_lent_module_computes_what_the_program_computes(precision: FloatName) -> None:
    module = Net()
    eager = copy.deepcopy(module)
    compiled = zeroir.compile(
        module,
        BATCH,
        stage=3,
        precision=Precision(dtype=precision, keep_fp32=("body.1",)),
        lr=0.1,
        optimizer="sgd",
    )
    engine = compiled.engine()
    engine.step(BATCH)
    with engine.gathered(masters=True) as gathered:
        eager.load_state_dict(gathered.state_dict())
    assert not eager.norm.get_buffer("running_mean").eq(0).all()
    apply_precision(eager, compiled.options.precision.dtype, ["body.1"])
    for is_training in (True, False):
        with engine.gathered() as gathered, torch.no_grad():
            assert isinstance(gathered, Net)
            gathered.train(is_training)
            eager.train(is_training)
            assert gathered.last.weight is gathered.first.weight
            assert gathered.body[1].weight.dtype is torch.float32
            assert torch.equal(gathered.table, torch.arange(4.0))
            if is_training:
                gathered.norm.momentum = eager.norm.momentum = 0.0
                gathered.norm.track_running_stats = False
            assert torch.equal(gathered(BATCH), eager(BATCH))


def test_parameters_of_other_units_are_not_lent() -> None:
    compiled = zeroir.compile(Net(), BATCH, stage=3, units="body.*", evaluate=False)
    engine = compiled.engine(self_check=False)
    with engine.gathered() as whole, engine.gathered(units="body.[12]") as gathered:
        hidden = torch.randn(3, 16)
        for layer in (1, 2):
            lent, expected = (each.get_submodule(f"body.{layer}") for each in (gathered, whole))
            assert torch.equal(lent(hidden), expected(hidden))
        assert torch.equal(gathered.get_buffer("table"), whole.get_buffer("table"))
        for used in (gathered.get_submodule("body.0"), gathered):
            with pytest.raises(UserError, match=r"is of unit (body\.0|root\S*), which .* add"):
                used(BATCH)
    with pytest.raises(UserError, match="whose block has ended"):
        gathered.get_submodule("body.0")(BATCH)
    with pytest.raises(UserError, match=r"No unit of the program has a name like body\.7"):
        engine.gathered(units=["body.7"]).__enter__()


@pytest.mark.slow
def test_a_forward_that_changes_buffers_of_a_lent_module_is_noted() -> None:
    engine = zeroir.compile(Net(), BATCH, stage=3).engine()
    with (
        pytest.warns(ModelWarning, match=r"changed the buffer 'norm.\w+' .* call eval\(\)"),
        engine.gathered() as gathered,
        torch.no_grad(),
    ):
        gathered(BATCH)
    with engine.gathered("norm") as norm:
        assert norm.get_buffer("num_batches_tracked") == 0


@pytest.mark.slow
def test_changes_are_named_as_the_user_knows_the_tensor() -> None:
    engine = zeroir.compile(Net(), BATCH, stage=3).engine()
    for name in ("first", "last"):
        with (
            pytest.raises(UserError, match=f"The block changed '{name}.weight' in place"),
            engine.gathered(name) as layer,
            torch.no_grad(),
        ):
            layer.get_parameter("weight").zero_()


class Hooked(nn.Module):
    """A hook and a function in an attribute that hold other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)
        gate = self.gate
        self.layer.register_forward_hook(lambda _, inputs, output: output * gate(inputs[0]))
        self.scaled: Callable[[Tensor], Tensor] = lambda x: self.layer(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return (self.scaled(x) - x).square().mean()


def test_functions_in_a_lent_module_hold_the_lent_module() -> None:
    module = Hooked()
    eager = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        expected = module(BATCH)
    engine = zeroir.compile(module, BATCH, stage=3, evaluate=False).engine()
    with engine.gathered() as gathered, torch.no_grad():
        assert all(torch.equal(value, eager[name]) for name, value in gathered.state_dict().items())
        assert torch.equal(gathered(BATCH), expected)


@pytest.mark.slow
def test_a_function_and_a_file_are_lent_as_they_are_built(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(8, 8)\n"
        "        self.register_buffer('mask', torch.rand(3))\n"
        "    def forward(self, x):\n"
        "        return (self.layer(x) - x).square().mean()\n"
        "def model():\n"
        "    return Net()\n"
        "def init(module):\n"
        "    if isinstance(module, nn.Linear):\n"
        "        nn.init.orthogonal_(module.weight)\n"
        "def batch():\n"
        "    return (torch.ones(6, 8),)\n"
    )
    from_file = zeroir.compile(str(path), stage=3).engine(seed=4)
    torch.manual_seed(4)
    expected = Net()
    from_function = zeroir.compile(Net, BATCH, stage=3).engine(seed=4)
    with from_function.gathered() as gathered:
        assert type(gathered) is Net
        assert torch.equal(gathered.first.weight, expected.first.weight)
    torch.manual_seed(4)
    nn.Linear(8, 8)
    mask = torch.rand(3)
    with from_file.gathered() as gathered:
        weight = gathered.get_parameter("layer.weight")
        assert torch.allclose(weight @ weight.t(), torch.eye(8), atol=1e-5)
        assert torch.equal(
            gathered.get_buffer("mask"), mask
        )  # drawn on rank 0, though nobody reads it


@pytest.mark.slow
def test_a_saved_program_takes_a_module_and_a_state(tmp_path: Path) -> None:
    source = Net()
    zeroir.compile(source, BATCH, stage=2).save(tmp_path / "net.zir")
    loaded = zeroir.load(tmp_path / "net.zir")
    state = {name: value.clone() for name, value in source.state_dict().items()}
    del state["last.weight"]  # As a file of safetensors has tied parameters: once.
    others = {"table": torch.arange(4.0), "offset": torch.tensor([3.0])}
    with pytest.raises(UserError, match=r"no 'table'.* no state_dict has it: pass a function"):
        loaded.engine(model=Net().to("meta"), state=state)
    engine = loaded.engine(model=Net().to("meta"), state={**state, **others})
    for name, value in engine.full_parameters().items():
        assert torch.equal(value, source.get_parameter(name)), name
    built = loaded.engine(model=Net, state=state)
    with built.gathered() as gathered:
        assert torch.equal(gathered.get_buffer("table"), others["table"])
    kept = Net()
    loaded.engine(model=kept, keep_module=True)
    assert not kept.first.weight.is_meta


@pytest.mark.slow
def test_two_loans_of_one_module_in_hand_do_not_touch_it() -> None:
    module = Net()
    engine = zeroir.compile(module, BATCH, stage=3, evaluate=False).engine()
    table = module.table
    with engine.gathered() as outer, engine.gathered("first") as inner:
        assert inner.get_parameter("weight") is not outer.get_parameter("first.weight")
        with (
            torch.no_grad(),
            pytest.warns(ModelWarning, match="buffer 'table'"),
            engine.gathered() as gathered,
        ):
            gathered.get_buffer("table").zero_()
    assert module.table is table
    assert torch.equal(table, torch.arange(4.0))
    assert module.first.weight.is_meta
