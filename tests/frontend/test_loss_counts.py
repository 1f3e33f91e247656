"""What losses of many forms are the mean over: a table of weights, and training as one process with all data."""

from __future__ import annotations

import warnings
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from tests.frontend.test_loss_weight import CLASSES, Batch, Loss, Model, batch, entropy, weight_of
from zeroir.errors import ModelWarning
from zeroir.ir.program import Program

pytestmark = pytest.mark.slow

EVEN: Final = "all batches count alike"
NOTED: Final = "a note says that batches count alike"


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model(batch["words"]), batch["labels"], reduction="none")


def counted(batch: Batch) -> Tensor:
    return batch["labels"].flatten() != -100


def at_least_1(model: nn.Module, batch: Batch) -> Tensor:
    return losses_of(model, batch).sum() / counted(batch).sum().clamp(min=1)


def with_epsilon(model: nn.Module, batch: Batch) -> Tensor:
    mask = counted(batch).float()
    return (losses_of(model, batch) * mask).sum() / (mask.sum() + 1e-8)


def with_a_larger_addend(model: nn.Module, batch: Batch) -> Tensor:
    return losses_of(model, batch).sum() / (counted(batch).sum() + 1)


def at_least_8(model: nn.Module, batch: Batch) -> Tensor:
    return losses_of(model, batch).sum() / counted(batch).sum().clamp(min=8)


def of_nonzero(model: nn.Module, batch: Batch) -> Tensor:
    return losses_of(model, batch).sum() / torch.count_nonzero(batch["words"])


def of_two_sums(model: nn.Module, batch: Batch) -> Tensor:
    each = losses_of(model, batch)
    return (each.sum() + 0.5 * each.square().sum()) / counted(batch).sum()


def with_penalty(model: nn.Module, batch: Batch) -> Tensor:
    loss = entropy(model(batch["words"]), batch["labels"])
    norms = [p.square().sum() for p in model.parameters()]
    return loss + 0.01 * torch.stack(norms).sum()


def scaled_by_a_parameter(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Model)
    scale = model.line.bias[0]
    return at_least_1(model, batch) / scale.exp() + scale


def divided_by_the_mean_mask(model: nn.Module, batch: Batch) -> Tensor:
    mask = counted(batch).float()
    return (losses_of(model, batch) * mask).mean() / mask.mean()


def multiplied_by_the_inverse(model: nn.Module, batch: Batch) -> Tensor:
    return losses_of(model, batch).sum() * (1 / counted(batch).sum())


def of_divided_elements(model: nn.Module, batch: Batch) -> Tensor:
    return (losses_of(model, batch) / counted(batch).sum()).sum()


def of_confident_words(model: nn.Module, batch: Batch) -> Tensor:
    chances = model(batch["words"]).softmax(-1).max(-1).values
    mask = chances > 0.2
    mean: Tensor = (chances * mask).sum() / mask.sum()
    return mean


def of_classes_with_weights(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model(batch["words"]), batch["words"], weight=torch.linspace(0.5, 1, CLASSES))


def of_stacked_means(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["words"])
    both = [entropy(logits, batch["labels"]), entropy(2 * logits, batch["labels"])]
    return torch.stack(both).mean()


def of_a_vector(model: nn.Module, batch: Batch) -> Tensor:
    """Aten has another operator for a mean over given dimensions."""
    mean: Tensor = model(batch["words"]).square().flatten().mean(0)
    return mean


def of_one_row(model: nn.Module, batch: Batch) -> Tensor:
    total = model(batch["words"]).square().sum()
    mean: Tensor = total / batch["words"].shape[0]
    return mean


def of_pairs(model: nn.Module, batch: Batch) -> Tensor:
    """The labels are positions: none is ignored."""
    hidden = model(batch["words"]).mean(1)
    return F.cross_entropy(hidden @ hidden.T, torch.arange(hidden.shape[0]))


def of_own_labels(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["words"])
    return entropy(logits, logits.detach().argmax(-1))


def of_chosen_labels(model: nn.Module, batch: Batch) -> Tensor:
    """The model computes which labels count, so the example shows nothing."""
    labels = torch.where(batch["words"] > 1, batch["words"], -100)
    return entropy(model(batch["words"]), labels)


def of_nonzero_fractions(model: nn.Module, batch: Batch) -> Tensor:
    """A cast that loses fractions decides what counts."""
    kept = batch["fractions"].long() != 0
    return (losses_of(model, batch) * kept.flatten()).sum() / kept.sum()


def compiled(loss: Loss, example: Batch, **options: object) -> Program:
    choices = {"world_size": 1, "evaluate": False, **options}
    return zeroir.compile(Model(), example, loss=loss, **choices).program  # type: ignore[arg-type]


EXAMPLE: Final = {**batch(4, 3), "fractions": torch.tensor([[0.5, 1.0, 2.5]]).expand(4, 3)}


# The words of the example are 0 1 2 3 4 0 1 2 3 4 0 1, and the labels are the same without the three of 1.
def of_rolled_words(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model(batch["words"]), batch["words"].roll(1, 1))


TABLE: tuple[tuple[Loss, float | str], ...] = (
    (at_least_1, 9),
    (with_epsilon, 9),
    (with_a_larger_addend, NOTED),
    (at_least_8, NOTED),
    (of_nonzero, 9),
    (of_two_sums, 9),
    (with_penalty, 9),
    (scaled_by_a_parameter, 9),
    (divided_by_the_mean_mask, NOTED),
    (multiplied_by_the_inverse, NOTED),
    (of_divided_elements, NOTED),
    (of_confident_words, NOTED),
    (of_classes_with_weights, NOTED),
    (of_stacked_means, NOTED),
    (of_a_vector, EVEN),
    (of_one_row, EVEN),
    (of_pairs, EVEN),
    (of_own_labels, EVEN),
    (of_rolled_words, EVEN),
    (of_chosen_labels, 6),
    (of_nonzero_fractions, 8),
)


@pytest.mark.parametrize(("loss", "expected"), TABLE, ids=[loss.__name__ for loss, _ in TABLE])
def test_a_loss_has_its_weight_or_its_note(loss: Loss, expected: float | str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        program = compiled(loss, EXAMPLE)
    notes = [str(each.message) for each in caught if "mean over the job" in str(each.message)]
    assert len(notes) == (expected == NOTED)
    assert (program.weight is not None) == isinstance(expected, int)
    if isinstance(expected, int):
        assert weight_of(program, EXAMPLE) == expected


WITH_DIMS: tuple[tuple[Loss, float | str], ...] = (
    (of_a_vector, 8 * CLASSES),
    (of_one_row, 4),
    (of_pairs, 4),
    (at_least_1, 6),
    (of_stacked_means, NOTED),
)


@pytest.mark.parametrize(("loss", "expected"), WITH_DIMS, ids=[f.__name__ for f, _ in WITH_DIMS])
def test_with_dims_sizes_weigh(loss: Loss, expected: int | str) -> None:
    rows, length = Dim("rows", min=2, max=8), Dim("length", min=2, max=16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        program = compiled(loss, batch(), shapes=dict.fromkeys(batch(), (rows, length)))
    assert any("mean over the job" in str(each.message) for each in caught) == (expected == NOTED)
    if expected != NOTED:
        assert weight_of(program, batch(4, 2)) == expected


def micro_batch(number: int) -> Batch:
    """Return a batch of which few or no labels count."""
    words = torch.arange(6).view(2, 3) * (number + 1) % CLASSES
    return {"words": words, "labels": torch.where(words < number, -100, words)}


@pytest.mark.parametrize(
    "loss", [at_least_1, with_epsilon, of_two_sums, with_penalty, scaled_by_a_parameter]
)
def test_micro_batches_train_as_all_of_their_data_at_once(loss: Loss) -> None:
    batches = [micro_batch(number) for number in (2, 0, 4, 6)]
    counts = [int(counted(each).sum()) for each in batches]
    assert len(set(counts)) > 2
    assert min(counts) == 0
    torch.manual_seed(0)
    model = Model()
    expected = Model()
    expected.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    engine = zeroir.compile(
        model, batches[0], loss=loss, optimizer="sgd", lr=0.5, micro_steps=len(batches)
    ).engine()
    everything = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
    for _ in range(3):
        of_all = loss(expected, everything)
        optimizer.zero_grad()
        of_all.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.testing.assert_close(
            engine.step(batches).mean_loss, of_all.item(), rtol=1e-5, atol=1e-6
        )
    for name, value in engine.full_parameters().items():
        torch.testing.assert_close(value, expected.get_parameter(name).detach())
    engine.close()
