"""The weight of a batch that follows from its loss: for which losses there is one, and what it counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from zeroir.errors import ModelWarning, UserError
from zeroir.ir.program import Program, Weighing
from zeroir.runtime.training.micro_batch_weights import weighing
from zeroir.verify import verify

pytestmark = pytest.mark.slow

CLASSES = 5
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, 4)
        self.line = nn.Linear(4, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.line(self.words(words))
        return logits


def batch(rows: int = 2, length: int = 3) -> Batch:
    words = torch.arange(rows * length).view(rows, length) % CLASSES
    return {"words": words, "labels": torch.where(words == 1, -100, words)}


def entropy(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    loss: Tensor = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)  # type: ignore[arg-type]
    return loss


def of_labels(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model(batch["words"]), batch["labels"])


def smoothed(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model(batch["words"]), batch["labels"], label_smoothing=0.1) / 2


def of_padding(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model(batch["words"]), batch["words"], ignore_index=0)


def by_hand(model: nn.Module, batch: Batch) -> Tensor:
    total = entropy(model(batch["words"]), batch["labels"], reduction="sum")
    mean: Tensor = total / (batch["labels"] != -100).sum()
    return mean


def masked(model: nn.Module, batch: Batch) -> Tensor:
    mask = batch["labels"] > 2
    mean: Tensor = (model(batch["words"]).square().sum(-1) * mask).sum() / mask.sum()
    return mean


def next_words(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model(batch["words"][:, :-1]), batch["words"][:, 1:])


def one_a_row(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model(batch["words"]).mean(1), batch["first"])


def squared(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["words"])
    return F.mse_loss(logits, torch.zeros(()).expand_as(logits))


def with_another_term(model: nn.Module, batch: Batch) -> Tensor:
    more: Tensor = model(batch["words"]).square().mean()
    return of_labels(model, batch) + more


def scaled_by_a_mean(model: nn.Module, batch: Batch) -> Tensor:
    mask = batch["labels"] > 2
    each = model(batch["words"]).square().sum(-1)
    mean: Tensor = (each * mask / each.mean()).sum() / mask.sum()
    return mean


def of_weighted_classes(model: nn.Module, batch: Batch) -> Tensor:
    weights = torch.linspace(0.5, 1, CLASSES)
    return entropy(model(batch["words"]), batch["labels"], weight=weights)


def compiled(loss: Loss, example: Batch | None = None, **options: object) -> Program:
    example = batch() if example is None else example
    choices = {"world_size": 1, "evaluate": False, **options}
    return zeroir.compile(Model(), example, loss=loss, **choices).program  # type: ignore[arg-type]


def weight_of(program: Program, example: Batch) -> float:
    function = weighing(program)
    assert function is not None
    weight = function(example)
    assert isinstance(weight, Tensor)
    return float(weight)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(of_labels, 9), (smoothed, 9), (of_padding, 9), (by_hand, 9), (masked, 4)],
)
def test_batches_weigh_what_their_loss_counts(loss: Loss, expected: int) -> None:
    example = batch(4, 3)
    assert weight_of(compiled(loss, example), example) == expected


def test_where_batches_count_alike_no_weight_travels() -> None:
    """Labels that an embedding looks up are not negative; others are watched."""
    first = torch.zeros(2, dtype=torch.long)
    for loss in (next_words, squared):
        program = compiled(loss)
        assert program.weight is None
        assert program.weighing is None
    program = compiled(one_a_row, {**batch(), "first": first})
    assert program.weight is None
    assert program.weighing is not None
    assert compiled(one_a_row, {**batch(), "first": first - 100}).weight is not None


def test_a_batch_that_the_example_did_not_show_is_warned_of() -> None:
    example = {**batch(), "first": torch.zeros(2, dtype=torch.long)}
    compiled = zeroir.compile(Model(), example, loss=one_a_row, world_size=1, evaluate=False)
    engine = compiled.engine()
    engine.step(example)
    other = {**example, "first": torch.tensor([1, -100])}
    with pytest.warns(ModelWarning, match="Batches have different numbers of labels"):
        engine.step(other)
    engine.step(example)  # It is said once.
    engine.close()


@pytest.mark.parametrize(("loss", "expected"), [(next_words, 4), (squared, 8 * CLASSES)])
def test_sizes_that_depend_on_dims_weigh(loss: Loss, expected: int) -> None:
    rows, length = Dim("rows", max=8), Dim("length", min=2, max=16)
    example = {"words": batch()["words"]}
    program = compiled(loss, example, shapes={"words": (rows, length)})
    assert weight_of(program, {"words": batch(4, 2)["words"]}) == expected


def test_the_option_says_otherwise() -> None:
    assert compiled(of_labels, micro_steps=zeroir.MicroSteps(mean_over="batches")).weight is None
    example = batch()
    assert (
        weight_of(
            compiled(next_words, micro_steps=zeroir.MicroSteps(mean_over="elements")), example
        )
        == 4
    )
    with pytest.raises(UserError, match="contradict each other: leave one of them out"):
        zeroir.compile(
            Model(),
            batch(),
            loss=of_labels,
            weight=lambda _: 1.0,
            micro_steps=zeroir.MicroSteps(mean_over="batches"),
        )
    with pytest.raises(UserError, match="and this one is not: give batches a weight"):
        compiled(with_another_term, micro_steps=zeroir.MicroSteps(mean_over="elements"))


def test_a_given_weight_wins() -> None:
    program = zeroir.compile(
        Model(), batch(), loss=of_labels, weight=lambda _: 3.0, world_size=1
    ).program
    assert program.weight is not None
    assert program.weighing is None


@pytest.mark.parametrize("loss", [with_another_term, scaled_by_a_mean, of_weighted_classes])
def test_a_loss_of_several_means_has_no_weight_and_says_so(loss: Loss) -> None:
    with pytest.warns(ModelWarning, match="The mean over the job is that of its batches' losses"):
        assert compiled(loss).weight is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(loss, micro_steps=zeroir.MicroSteps(mean_over="batches")).weight is None


def test_weights_of_fp16_are_at_most_1() -> None:
    """They multiply the gradients, which overflow at 65,504."""
    example = batch(4, 3)
    assert weight_of(compiled(of_labels, example, precision="fp16"), example) == 9 / 16


def test_summaries_say_what_counts() -> None:
    def line(loss: Loss) -> str:
        text = str(zeroir.compile(Model(), batch(), loss=loss, world_size=1))
        return next(line for line in text.splitlines() if line.startswith("weight"))

    counted = (
        "weight        of a batch is the number of labels that its loss counts (ignore index -100)"
    )
    assert line(of_labels) == counted
    assert line(masked) == "weight        of a batch is the sum over it that its loss is divided by"


def test_weights_that_are_computed_otherwise_are_refused() -> None:
    program = compiled(of_labels)
    segment = program.weighing_segment
    assert segment is not None

    def codes(changed: Program) -> set[str]:
        return {finding.code for finding in verify(changed, reference=program).findings}

    assert not codes(program)
    other = Weighing(segment=segment.name, arguments=("input.words",))
    assert codes(replace(program, weighing=other)) == {"Z406"}
    none = Weighing(segment=segment.name)
    assert "Z008" in codes(replace(program, weighing=none))
    undone = replace(segment, outputs=(segment.outputs[0] - 1,))
    segments = (*(each for each in program.segments if each is not segment), undone)
    assert "Z008" in codes(replace(program, segments=segments))
    assert "Z001" in codes(replace(program, weighing=Weighing(segment="missing")))
