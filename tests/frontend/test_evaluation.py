"""The capture under ``eval()``: what it takes from the model, and what it leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zeroir
from tests.support.captures import ROOT
from tests.support.evaluating import model as source
from zeroir.errors import ModelWarning, UserError
from zeroir.frontend.capture.capture import capture
from zeroir.frontend.capture.captured_graph import CapturedGraph, InputKind
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.program import EVALUATE, LAST_MICRO_STEP, SAVE, UPDATE

BATCH = torch.arange(8.0).view(2, 4)


@dataclass(frozen=True)
class Found:
    loss: Tensor
    hidden: Tensor


class Net(nn.Module):
    """Returns a dict, with dropout, batch norm, and a counter that also evaluations advance."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.kept = nn.Dropout(0.5)
        self.dropped = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Mapping[str, object]:
        self.calls += 1.0
        hidden = self.dropped(self.kept(self.norm(self.linear(x))))
        return {"loss": hidden.square().mean(), "hidden": hidden, "note": "a text"}


def graph_of(path: Path) -> CapturedGraph:
    found = capture(load_model_file(str(path)), "fp32", ()).evaluation
    assert found is not None
    return found.joint


def test_it_is_the_model_under_eval() -> None:
    joint = graph_of(Path(source.__file__))
    operators = [node.op for node in joint.nodes]
    assert not any("dropout" in op for op in operators)
    assert not any(node.is_backward for node in joint.nodes)
    assert not joint.gradients
    assert not joint.mutations
    used = {ref for node in joint.nodes for ref in node.refs()}
    parameters = {
        item.name
        for item in joint.inputs
        if item.kind is InputKind.PARAMETER and item.value in used
    }
    assert "calibration.weight" in parameters, "what only eval() uses"
    assert [output.path for output, _ in joint.outputs] == [
        "['logits']",
        "['best'](0)",
        "['best'](1)[0]",
        "['loss']",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        Path(source.__file__),
        pytest.param(ROOT / "tests/support/models/llama.py", marks=pytest.mark.slow),
        pytest.param(ROOT / "tests/support/models/gpt2.py", marks=pytest.mark.slow),
    ],
    ids=lambda path: path.stem,
)
def test_equal_blocks_are_traced_once_with_the_same_result(path: Path) -> None:
    file = load_model_file(str(path))
    reused = capture(file, "fp32", (), fewest_equal_calls=2).evaluation
    traced = capture(file, "fp32", (), fewest_equal_calls=10**6).evaluation
    assert reused is not None
    assert traced is not None
    assert reused.reused_blocks
    assert not traced.reused_blocks

    def computation(joint: CapturedGraph) -> CapturedGraph:
        return replace(joint, nodes=tuple(replace(n, origin=None, source="") for n in joint.nodes))

    assert computation(reused.joint) == computation(traced.joint)


@pytest.mark.slow
def test_the_users_module_stays_as_it_is() -> None:
    module = Net()
    module.kept.eval()
    compiled = zeroir.compile(
        module, BATCH, stage=0, world_size=1, evaluate=zeroir.Evaluate(outputs=("hidden",))
    )
    assert [m.training for m in module.modules()] == [True, True, True, False, True]
    engine = compiled.engine()
    evaluation = engine.evaluate(BATCH)
    assert isinstance(evaluation.outputs, dict)
    (hidden,) = evaluation.outputs.values()
    assert evaluation.loss == float(hidden.square().mean())
    engine.close()


@pytest.mark.slow
def test_it_begins_before_training_and_goes_on_between_steps() -> None:
    module, twin = Net(), Net()
    twin.load_state_dict(module.state_dict())
    for net in (module, twin):
        net.dropped.p = net.kept.p = 0.0
    engine = zeroir.compile(module, BATCH, stage=3, world_size=1, optimizer="sgd").engine()
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3, fused=True)
    for _ in range(3):
        expected = twin.eval()(BATCH)["loss"].detach()
        assert engine.evaluate(BATCH).loss == float(expected)
        loss = twin.train()(BATCH)["loss"]
        assert engine.step(BATCH).loss == float(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(engine.buffer("buffer.calls")) == 3.0, "evaluations do not count"
    engine.close()


@pytest.mark.slow
def test_outputs_keep_their_structure() -> None:
    def loss(module: nn.Module, x: object) -> tuple[Tensor, Found]:
        hidden = module(x)["hidden"]
        return hidden.sum(), Found(loss=hidden.sum(), hidden=hidden[0])

    engine = zeroir.compile(Net(), BATCH, loss=loss, stage=1, world_size=1).engine()
    outputs = engine.evaluate(BATCH).outputs
    assert isinstance(outputs, SimpleNamespace)
    assert outputs.hidden.shape == (4,)
    assert float(outputs.loss) == engine.evaluate(BATCH).loss
    engine.close()


def test_without_outputs_there_are_none() -> None:
    engine = zeroir.compile(Net(), BATCH, stage=0, world_size=1).engine()
    assert engine.evaluate(BATCH).outputs is None
    engine.close()


def test_an_unknown_output_is_refused() -> None:
    with pytest.raises(UserError, match=r"no output called logits; it returns a dict of loss"):
        zeroir.compile(Net(), BATCH, evaluate=zeroir.Evaluate(outputs=("logits",)), world_size=1)
    with pytest.raises(UserError, match="returns no output called logits; it returns a tensor"):
        zeroir.compile(
            Net(),
            BATCH,
            loss=lambda net, x: net(x)["loss"],
            evaluate=zeroir.Evaluate(outputs=("logits",)),
            world_size=1,
        )
    with pytest.raises(UserError, match="--outputs hidden needs evaluations"):
        zeroir.compile(
            Net(), BATCH, evaluate=zeroir.Evaluate(is_on=False, outputs=("hidden",)), world_size=1
        )


class NoEval(Net):
    def train(self, mode: bool = True) -> NoEval:
        if not mode:
            raise RuntimeError("it only trains")
        super().train(mode)
        return self


class Draws(Net):
    def forward(self, x: Tensor) -> Mapping[str, object]:
        return super().forward(x if self.training else x[x > 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"), [(NoEval, "it only trains"), (Draws, "uses the values of a tensor")]
)
def test_a_model_that_only_trains_cannot_be_evaluated(model: type[Net], reason: str) -> None:
    with pytest.warns(ModelWarning, match=rf"cannot be captured under eval\(\): .*{reason}"):
        compiled = zeroir.compile(model(), BATCH, stage=0, world_size=1)
    assert EVALUATE not in compiled.program.section_by_name
    engine = compiled.engine()
    with pytest.raises(UserError, match=r"could not be captured under eval\(\)"):
        engine.evaluate(BATCH)
    engine.step(BATCH)
    engine.close()


def test_outputs_that_are_no_tensors_leave_evaluations_out() -> None:
    def loss(module: nn.Module, x: object) -> tuple[Tensor, object]:
        found = module(x)
        return found["loss"], {"note": found["note"]}

    with pytest.warns(ModelWarning, match=r"a str at \['note'\]: return tensors"):
        zeroir.compile(Net(), BATCH, loss=loss, stage=0, world_size=1)


def test_no_evaluate_leaves_it_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = zeroir.compile(Net(), BATCH, stage=0, world_size=1, evaluate=False)
    assert [s.name for s in compiled.program.sections] == [LAST_MICRO_STEP, UPDATE, SAVE]
    assert compiled.program.eval_loss is None
    engine = compiled.engine()
    with pytest.raises(UserError, match="compiled with --no-evaluate"):
        engine.evaluate(BATCH)
    engine.close()


class RandomEval(nn.Module):
    """More random numbers are drawn under eval() than in training, and another constant is used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        if self.training:
            return F.dropout(h, 0.5).mean()
        h = h * torch.tensor([4.0, 3.0, 2.0, 1.0])
        return F.dropout(F.dropout(h, 0.5), 0.5).mean()


def test_seeds_and_constants_of_both_captures() -> None:
    program = zeroir.compile(RandomEval(), BATCH, stage=0, world_size=1).program
    assert program.buffer_by_name["rng"].numel == 2
    constants = [b for b in program.module_buffers if b.data is not None]
    assert len({b.data for b in constants}) == len(constants) == 2


class Shared(nn.Module):
    """Yields views, parts of parameters, buffers that it changes, constants and one tensor twice."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.head = nn.Linear(4, 4)
        self.register_buffer("kept", torch.arange(4.0))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, object]]:
        kept: list[Tensor] = []
        h = x
        for block in self.blocks:
            h = torch.relu(block(h))
            kept.append(h)
        self.kept += 1.0
        weight = self.head.weight
        return self.head(h).square().mean(), {
            "one": h,
            "other": h,
            "kept": kept,
            "parameter": weight,
            "part": weight[1:],
            "turned": kept[0].t()[1:3],
            "same everywhere": x[:1].expand(5, 4),
            "buffer": self.kept,
            "number": h.sum(),
            "mask": h > 0,
            "half": h.half(),
            "constant": torch.ones(3),
            "input": x,
        }


@pytest.mark.slow
def test_any_tensor_can_be_an_output() -> None:
    def loss(module: nn.Module, x: object) -> object:
        return module(x)

    module, twin = Shared(), Shared()
    twin.load_state_dict(module.state_dict())
    engine = zeroir.compile(module, BATCH, loss=loss, stage=3, world_size=1).engine()
    evaluation = engine.evaluate(BATCH)
    with torch.no_grad():
        expected_loss, expected = twin.eval()(BATCH)
    assert evaluation.loss == float(expected_loss)
    assert isinstance(evaluation.outputs, dict)
    assert list(evaluation.outputs) == list(expected)
    own = pytree.tree_leaves(evaluation.outputs)
    for value, wanted in zip(own, pytree.tree_leaves(expected), strict=True):
        assert value.dtype is wanted.dtype
        assert torch.equal(value, wanted)
    assert torch.equal(engine.buffer("buffer.kept"), torch.arange(4.0))
    engine.close()


@pytest.mark.slow
def test_no_evaluation_in_the_middle_of_a_step() -> None:
    engine = zeroir.compile(
        Shared(), BATCH, loss=first, stage=3, world_size=1, micro_steps=2
    ).engine()
    before = engine.evaluate(BATCH).loss
    engine.micro_step(BATCH)
    with pytest.raises(UserError, match=r"call update\(\) before evaluate\(\)"):
        engine.evaluate(BATCH)
    engine.update()
    engine.step([BATCH, BATCH, BATCH])
    assert engine.evaluate(BATCH).loss < before
    engine.close()


def first(module: nn.Module, x: object) -> object:
    return module(x)[0]


@pytest.mark.slow
def test_evaluations_go_on_where_a_program_begins_to_accumulate() -> None:
    engine = zeroir.compile(Shared(), BATCH, loss=first, stage=3, world_size=1).engine()
    before = engine.evaluate(BATCH).loss
    engine.step([BATCH, BATCH])
    assert engine.evaluate(BATCH).loss < before
    engine.close()


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table(x)
        return rows.square().mean()


def test_a_failure_names_the_evaluation() -> None:
    good, bad = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 9])
    engine = zeroir.compile(Lookup(), good, stage=0, world_size=1).engine()
    engine.step(good)
    with pytest.raises(
        UserError, match=r"does not suit the model: .* in evaluate:\d+ .* after step 1"
    ):
        engine.evaluate(bad)
    engine.close()
