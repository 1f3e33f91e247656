"""Common models: traced, they equal eager PyTorch; sharded, they equal eager replicas."""

from pathlib import Path

import pytest

from tests.support.eager import assert_equals_eager, traced
from tests.support.lowering import proved_for
from zeroir.api.checks.check import check_model
from zeroir.config import CompileOptions, make_options
from zeroir.frontend import load_model_file
from zeroir.ir.segments.segment import Ref, Segment
from zeroir.runtime.execution.lockstep import Lockstep

MODELS = Path(__file__).parents[1] / "support" / "models"
NAMES = ["bert", "convnet", "gpt2", "llama", "t5", "translator", "vit"]
RANKS = 3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_micro_step_equals_eager_pytorch(name: str, precision: str) -> None:
    assert_equals_eager(MODELS / f"{name}.py", precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "precision"),
    [*((name, 3, "fp32") for name in NAMES), ("convnet", 2, "fp16")],
)
def test_training_equals_eager_replicas(name: str, stage: int, precision: str) -> None:
    options = make_options({"stage": stage, "world_size": 3, "precision": precision})
    comparison = check_model(str(MODELS / f"{name}.py"), options, steps=2, seed=0)
    assert comparison.is_equal, str(comparison)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_training_in_bf16_equals_eager_replicas(name: str) -> None:
    test_training_equals_eager_replicas(name, 1, "bf16")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "llama", "t5")]
)
def test_every_stage_trains_and_with_the_same_losses(name: str) -> None:
    path = MODELS / f"{name}.py"
    model_file = load_model_file(str(path))
    logical = traced(path, world_size=RANKS, lr=0.003)
    batches = [[model_file.batch()]] * RANKS
    losses: list[list[float]] = []
    for stage in range(4):
        lockstep = Lockstep(proved_for(logical, options_of(stage)), seed=0, schedule_seed=stage)
        lockstep.initialise(model_file.model, 0)
        losses.append([float(lockstep.step(batches)[0].loss) for _ in range(6)])
    assert all(each == losses[0] for each in losses)
    assert losses[0][-1] < losses[0][0] - 0.05


def options_of(stage: int) -> CompileOptions:
    return make_options({"stage": stage, "world_size": RANKS, "lr": 0.003})


@pytest.mark.slow
@pytest.mark.parametrize("units", ["model.layers.*", "class:LlamaMLP", "min:4000"])
def test_units_of_a_foreign_model(units: str) -> None:
    options = make_options({"world_size": 3, "units": units})
    comparison = check_model(str(MODELS / "llama.py"), options, steps=1, seed=0)
    assert comparison.is_equal, str(comparison)


@pytest.mark.slow
def test_attention_of_grouped_heads_stays_grouped_and_causal_without_a_mask() -> None:
    program = traced(MODELS / "llama.py")
    layer = program.segment_by_name["llama_decoder_layer.forward"]
    (node,) = [node for node in layer.nodes if node.op == "zeroir.attention.default"]
    q, k, v, mask, is_causal, _ = node.args
    assert [shape(layer, each) for each in (q, k, v)] == [(2, 4, 12, 8), *[(2, 2, 12, 8)] * 2]
    assert (mask, is_causal) == (None, True)
    layers = {segment.name for segment in program.segments if "layer" in segment.name}
    assert layers == {f"llama_decoder_layer.{kind}" for kind in ("forward", "backward", "evaluate")}


def shape(segment: Segment, arg: object) -> tuple[int, ...]:
    assert isinstance(arg, Ref)
    kind = segment.types()[arg.index]
    assert kind is not None
    return kind.shape
