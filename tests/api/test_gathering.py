"""Losses and models that gather tensors of all ranks, as for contrastive learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.export import Dim

import zeroir
from tests.runtime.support import Ranks, require_success
from tests.support.captures import ROOT
from tests.support.lowering import codes
from zeroir.api.checks.check import check_model
from zeroir.api.compiled import CompiledProgram
from zeroir.api.search.search_space import regions
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.verify import verify

CONTRASTIVE = str(ROOT / "tests" / "support" / "models" / "contrastive.py")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_as_under_ddp(world_size: int, tmp_path: Path) -> None:
    ranks = Ranks(world_size, tmp_path, module="tests.api.gathering_workers")
    require_success(ranks.wait(timeout_s=300.0))


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "world_size": 3, "micro_steps": 2, "recompute": ("*",)},
        pytest.param(
            {"stage": 2, "world_size": 2, "precision": "bf16", "mean_over": "batches"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"stage": 3, "world_size": 2, "micro_steps": 4, "order": "layer=2", "bucket": 10**6},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"stage": 1, "world_size": 4, "precision": "fp16", "offload": "optimizer"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated")
def test_it_computes_what_eager_replicas_do(options: dict[str, object]) -> None:
    comparison = check_model(CONTRASTIVE, make_options(options), steps=2, seed=1)
    assert comparison.is_equal, str(comparison)
    assert comparison.tolerance == 0


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x)
        return y


Use = Callable[[Tensor], Tensor]


def loss_with(use: Use) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: use(model(x)).square().mean()


def compiled_with(use: Use) -> CompiledProgram:
    return zeroir.compile(Line(), torch.ones(4, 3), loss=loss_with(use), world_size=2)


def all_reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def reduced_with_gradient(x: Tensor) -> Tensor:
    y: Tensor = differentiable.all_reduce(x)  # type: ignore[no-untyped-call]
    return y


def waiting(x: Tensor) -> Tensor:
    dist.barrier()
    return x


def telling(x: Tensor) -> Tensor:
    dist.all_gather_object([None, None], len(x))
    return x


def deciding(x: Tensor) -> Tensor:
    return x if dist.get_rank() == 0 else 2 * x


def of_own_rank(x: Tensor) -> Tensor:
    parts = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return parts[dist.get_rank()]


def up_to_its_place(x: Tensor) -> Tensor:
    return x[: 1 + dist.get_rank()]


def of_another_size(x: Tensor) -> Tensor:
    parts = [torch.zeros_like(x[1:]) for _ in range(2)]
    dist.all_gather(parts, x)
    return parts[0]


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (all_reduced, r"calls torch\.distributed\.all_reduce, but a program has all_gather"),
        (reduced_with_gradient, r"calls torch\.distributed\.nn\.functional\.all_reduce, but"),
        (waiting, r"calls torch\.distributed\.barrier, but a program has"),
        (telling, r"calls torch\.distributed\.all_gather_object, but a program has"),
        (deciding, r"decides by the rank \(rank == 0\), while a program is the same on every"),
        (of_own_rank, r"decides by the rank \(rank\), while a program is the same on every rank"),
        (up_to_its_place, r"makes a tensor whose shape depends on the rank"),
        (of_another_size, r"gathers torch\.float32\[4, 2\] into torch\.float32\[3, 2\]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_program_has_is_refused_by_line(use: Use, sentence: str) -> None:
    world = distributed_c10d.GroupMember.WORLD
    with pytest.raises(UserError, match=rf"test_gathering\.py:\d+ {sentence}"):
        compiled_with(use)
    assert distributed_c10d.GroupMember.WORLD is world


def with_gradient(x: Tensor) -> Tensor:
    return torch.cat(differentiable.all_gather(x))  # type: ignore[no-untyped-call]


def gathered(x: Tensor) -> Tensor:
    return with_gradient(x) * dist.get_rank()


def test_a_tensor_of_any_size_is_not_gathered() -> None:
    loss, shapes = loss_with(gathered), (Dim("rows", max=8), 3)
    with pytest.raises(UserError, match=r"test_gathering\.py:\d+ gathers a tensor whose size"):
        zeroir.compile(Line(), torch.ones(4, 3), loss=loss, shapes=shapes, world_size=2)


def test_code_that_runs_as_it_is_does_not_wait_for_others() -> None:
    class Deciding(Line):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return all_reduced(y if bool(y.sum() > 0) else -y)

    model, loss = nn.Sequential(nn.Linear(3, 3), Deciding()), loss_with(Tensor.abs)
    with pytest.raises(UserError, match=r"test_gathering\.py:\d+ calls torch\.distributed\.all_r"):
        zeroir.compile(model, torch.ones(4, 3), loss=loss, world_size=2)


def test_a_program_is_for_the_ranks_that_it_gathers_of() -> None:
    made = compiled_with(gathered)
    with pytest.raises(UserError, match=r"compiled for 2: compile it again for 3"):
        made.specialise(world_size=3)
    with pytest.raises(UserError, match=r"is not possible on a mesh of two axes"):
        zeroir.compile(
            Line(), torch.ones(4, 3), loss=loss_with(gathered), mesh="replicate=1,shard=2"
        )
    other = verify(replace(made.program, mesh=made.logical.mesh), made.logical)
    assert "Z201" in codes(other)


def test_a_plan_keeps_to_one_axis() -> None:
    options = {"stage": 1, "world_size": 4}
    for use, meshes in ((gathered, 1), (torch.abs, 2)):
        made = zeroir.compile(Line(), torch.ones(4, 3), loss=loss_with(use), world_size=4)
        assert len(regions(make_options(options), made.logical)) == meshes


def test_one_rank_gathers_from_itself() -> None:
    model, x = Line(), torch.randn(4, 3)
    with torch.no_grad():
        expected = model(x).square().mean().item()

    made = zeroir.compile(model, x, loss=loss_with(with_gradient), world_size=1)
    engine = made.engine(self_check=False)
    assert engine.step(x).loss == expected
    with pytest.raises(UserError, match=r"engine\.eager\(\) is for other models"), engine.eager():
        pass
    engine.close()


def test_gathering_something_else_is_found() -> None:
    """A gradient must not come back to another rank, nor a feature from this one alone."""
    made = compiled_with(gathered)

    def changed(op: ops.Op) -> ops.Op:
        if isinstance(op, ops.ReduceScatter) and op.comm == "values":
            return replace(op, reduction=ops.Reduction.MAX)
        return op

    sections = tuple(
        replace(section, body=tuple(map(changed, section.body)))
        for section in made.program.sections
    )
    assert codes(verify(replace(made.program, sections=sections), made.logical)) == {"Z406"}
    assert codes(verify(replace(made.program, rank=None), made.logical)) >= {"Z008"}
