"""Programs whose mutants are judged: what each one computes, to the bit, and whether a mutant computes the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.passes.numbers import initial
from tests.passes.test_gates import gate, gate_logical
from tests.runtime.workers_cases import weight_of_values
from tests.support.schedules import Case
from tests.verify.test_crossing import carried, crossing_micro_steps
from zeroir.api.compiling import compile_with
from zeroir.config import make_options
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.program import EVALUATE, SAVE, Program
from zeroir.ir.reports import Quantity
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.manager import apply
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_activations import OffloadActivations
from zeroir.passes.offload.offload_gradients import OffloadGradients
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.passes.offload.speculate_update import SpeculateUpdate
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.state.host_snapshot import SavedState
from zeroir.runtime.training.micro_batch_weights import WeightFunction
from zeroir.torch_ops.batches import Batch, flatten

STEPS = 2

OFFLOAD = (OffloadOptimizer(), OffloadGradients())

CASES: Mapping[str, Case] = {
    "stage 0": Case(stage=0, precision="bf16", micro_steps=2, clip=1.0, tied=True),
    "stage 1 in buckets": Case(stage=1, precision="bf16", bucket=10_000),
    "stage 2, tied": Case(stage=2, precision="fp16", micro_steps=2, clip=1.0, tied=True),
    "stage 2, tied sums": Case(stage=2, precision="bf16", micro_steps=2, tied=True, ranks=2),
    "stage 3": Case(stage=3, precision="fp16", clip=1.0, keep_fp32=True, distance=2),
    "stage 3, overlapped": Case(stage=3, precision="bf16", overlap_update=True),
    "stage 2, whole parameters": Case(stage=2, precision="bf16", optimizer="adafactor"),
    "stage 2, weighted": Case(stage=2, precision="bf16", micro_steps=2, is_weighted=True, clip=1.0),
    "stage 3, weighted, overlapped": Case(
        stage=3, precision="bf16", micro_steps=2, is_weighted=True, overlap_update=True
    ),
    "stage 3, in groups": Case(stage=3, precision="bf16", overlap_update=True, is_grouped=True),
    "stage 1, averaged": Case(stage=1, precision="fp16", ema=0.5),
    "stage 2, 8 bits": Case(stage=2, precision="fp16", has_codes=True, is_grouped=True),
    "stage 1, parameters on the host": Case(stage=1, clip=1.0, has_parameters_on_host=True),
    "stage 3, parameters on the host": Case(
        stage=3, precision="bf16", overlap_update=True, has_parameters_on_host=True
    ),
    "stage 3, updated on the host": Case(
        stage=3, precision="bf16", overlap_update=True, ema=0.5, offload=(OffloadOptimizer(),)
    ),
    "stage 1, updated on the host": Case(
        stage=1, keep_fp32=True, precision="fp16", clip=1.0, micro_steps=2, offload=OFFLOAD
    ),
    "stage 2, half updated on the host": Case(
        stage=2, clip=1.0, offload=(OffloadOptimizer(fraction=0.5), OffloadGradients())
    ),
    "stage 1, speculative": Case(
        stage=1,
        keep_fp32=True,
        precision="fp16",
        clip=8.0,  # below the norm of the first step alone
        micro_steps=2,
        is_grouped=True,
        offload=(OffloadOptimizer(), SpeculateUpdate()),
    ),
    "stage 3, speculative, averaged": Case(
        stage=3,
        ema=0.5,
        clip=20.5,  # below the norm of the second step alone
        offload=(*OFFLOAD, SpeculateUpdate()),
    ),
    "stage 0, gradients on the host": Case(
        stage=0, precision="bf16", tied=True, offload=(OffloadGradients(),)
    ),
    "stage 3, activations on the host": Case(
        stage=3,
        blocks=3,
        precision="bf16",
        micro_steps=2,
        tied=True,
        offload=(OffloadActivations(smallest=0),),
    ),
    "stage 3, paged": Case(
        stage=3,
        precision="bf16",
        clip=1.0,
        paging=PageOptimizer(device_bytes=6144, page_bytes=2048),
    ),
    "stage 3, unit by unit": Case(
        stage=3,
        precision="fp16",
        micro_steps=2,
        is_weighted=True,
        clip=1.0,
        order=OrderByLayer(micro_batches=2, whole_step=True),
        offload=(OffloadParameters(),),
    ),
    "stage 2, in groups of two": Case(
        stage=2,
        precision="bf16",
        micro_steps=4,
        tied=True,
        overlap_update=True,
        order=OrderByLayer(micro_batches=2),
        offload=(OffloadActivations(smallest=0),),
    ),
    # Shards of four pages, one of which rests in both memories.
    "stage 1, paged, overlapped": Case(
        stage=1,
        dim=48,
        overlap_update=True,
        paging=PageOptimizer(device_bytes=12_288, page_bytes=2048),
    ),
}
WRITTEN = ("hybrid", "paged", "offload", "evaluate", "carried", "crossing")
CAPTURED: Mapping[str, Mapping[str, object]] = {
    "captured, stage 2": {"stage": 2, "world_size": 2, "micro_steps": 2, "precision": "bf16"},
    "captured, muon": {"stage": 1, "world_size": 3, "optimizer": "muon", "ema": 0.9},
    "captured, shampoo": {"stage": 3, "world_size": 2, "optimizer": "shampoo", "precision": "fp16"},
    "captured, stage 3": {"stage": 3, "world_size": 2, "precision": "fp16", "clip": 0.5},
    "gathering, stage 3": {"stage": 3, "world_size": 3, "micro_steps": 2, "precision": "bf16"},
}
"""Options with which a model of everything that is easy to get wrong is compiled, or one that gathers tensors."""
SAVING = (
    "stage 0",
    "stage 2, tied",
    "stage 3, overlapped",
    "stage 1, averaged",
    "stage 3, parameters on the host",
    "stage 1, updated on the host",
    "stage 1, speculative",
    "stage 3, activations on the host",
    "stage 3, paged",
    *WRITTEN,
)
"""Those that ``save-state`` is applied to; captured programs save by themselves."""
_MODELS = "tests/support/models"


def _model(name: str) -> str:
    return f"{_MODELS}/{'contrastive' if name.startswith('gathering') else 'traps'}.py"


NAMES = (*CASES, *WRITTEN, *CAPTURED)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A schedule that is proved, its logical program, and the batches that it is trained on."""

    name: str
    scheduled: Program
    logical: Program
    batches: Sequence[Sequence[Sequence[Batch]]]

    def train(
        self, program: Program, schedule_seed: int, late_streams: Collection[str] = ()
    ) -> list[Tensor]:
        """Everything that a few steps, and evaluations between them, come to under one interleaving."""
        return self.train_on(
            Lockstep(
                program,
                schedule_seed=schedule_seed,
                weight=self.weight,
                late_streams=late_streams,
            )
        )

    @property
    def weight(self) -> WeightFunction | None:
        """The weight of a micro-batch."""
        return None if self.scheduled.weight is None else weight_of_values

    def train_on(self, lockstep: Lockstep) -> list[Tensor]:
        """Everything that a few steps, and evaluations between them, come to."""
        program = lockstep.program
        if self.name in CAPTURED:
            lockstep.initialise(load_model_file(_model(self.name)).model, seed=0)
        else:
            lockstep.initialise_flats(initial(program))
        found: list[Tensor] = []
        saved: list[SavedState] = []
        for number, batches in enumerate(self.batches):
            if EVALUATE in program.section_by_name:
                for evaluated in lockstep.evaluate([of_rank[0] for of_rank in batches]):
                    leaves = pytree.tree_leaves(evaluated.outputs)
                    found += [evaluated.loss, *(leaf for leaf in leaves if leaf is not None)]
            # What users change between steps counts.
            for group in lockstep.optimizer.param_groups:
                group["lr"] *= 0.5
            found += _stepped(lockstep, batches, is_apart=number % 2 == 1)
            if (scale := program.report_of.get(Quantity.LOSS_SCALE)) is not None:
                ranks = range(program.mesh.world_size)
                found += [lockstep.buffers(rank)[scale.buffer].clone() for rank in ranks]
            found += _contents(saved)
            # Copies may be under way during the next step.
            saved = lockstep.save_state() if SAVE in program.section_by_name else []
        found += _contents(saved)
        for rank in range(program.mesh.world_size):
            buffers = lockstep.buffers(rank)
            found += [buffers[binding.buffer] for binding in program.module_buffers]
        state = lockstep.full_state()
        return found + [state[key] for key in sorted(state)]

    def difference(
        self, mutant: Program, schedule_seed: int, late_streams: Collection[str] = ()
    ) -> str | None:
        """How the mutant differs from the schedule under one interleaving."""
        try:
            found = self.train(mutant, schedule_seed, late_streams)
        except Exception as error:  # noqa: BLE001 - whatever it is, no proved program may raise it
            return f"{type(error).__name__}: {error}"
        expected = _expected(self.name)
        if len(found) == len(expected) and all(map(is_equal, found, expected)):
            return None
        return "other numbers"


def _stepped(
    lockstep: Lockstep, batches: Sequence[Sequence[Batch]], *, is_apart: bool
) -> list[Tensor]:
    """Everything that a step reports, taken at once or, where ``is_apart``, one micro-step at a time."""
    group = lockstep.program.interleaved
    found: list[Tensor] = []
    if is_apart:
        count = len(batches[0])
        for start in range(0, count, group):
            groups = [of_rank[start : start + group] for of_rank in batches]
            found += lockstep.micro_steps(groups, is_last=start + group == count)
        results = lockstep.update()
    else:
        results = lockstep.step(batches)
    for result in results:
        for told in (
            result.loss,
            result.mean_loss,
            result.weight,
            result.is_skipped,
            result.grad_norm,
            result.is_redone,
        ):
            found.append(torch.tensor(math.nan) if told is None else torch.as_tensor(told))
    return found


def _contents(saved: Sequence[SavedState]) -> list[Tensor]:
    """What was saved, once the copies are done; another save may follow."""
    found: list[Tensor] = []
    for of_rank in saved:
        of_rank.wait()
        found += [of_rank.tensors[name].tensor.clone() for name in sorted(of_rank.tensors)]
        of_rank.release()
    return found


def is_equal(one: Tensor, other: Tensor) -> bool:
    # As bytes, because NaN differs from itself.
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@cache
def _expected(name: str) -> list[Tensor]:
    made = subject(name)
    return made.train(made.scheduled, 0)


@cache
def subject(name: str) -> Subject:
    """One of the programs, made once a process."""
    scheduled, logical = _programs(name)
    if name in SAVING:
        scheduled = apply(SaveState(), scheduled)
    return Subject(
        name=name, scheduled=scheduled, logical=logical, batches=_batches(name, scheduled)
    )


def _programs(name: str) -> tuple[Program, Program]:
    if name in CASES:
        case = CASES[name]
        # One of them has places, which are a claim too.
        planned = PlanMemory()(case.scheduled) if name == "stage 3" else case.scheduled
        return planned, case.logical
    if name in CAPTURED:
        made = compile_with(_model(name), make_options(CAPTURED[name]))
        return made.program, made.logical
    if name == "carried":
        case = Case(stage=3, precision="bf16")
        return carried(case.scheduled), case.logical
    if name == "crossing":
        case = Case(stage=3, precision="bf16", micro_steps=2, clip=1.0)
        return crossing_micro_steps(case.scheduled), case.logical
    return gate(name), gate_logical(name)


def _batches(name: str, program: Program) -> list[list[list[Batch]]]:
    """By step, rank and micro-step."""
    generator = torch.Generator().manual_seed(1)
    like: Mapping[str, Tensor] = (
        flatten(load_model_file(_model(name)).batch()).tensors if name in CAPTURED else {}
    )

    def drawn(path: str, shape: tuple[int, ...], at: int) -> Tensor:
        if path in like and not like[path].is_floating_point():
            return like[path].roll(at)
        return torch.randn(shape, generator=generator)

    micro_steps = int(program.options.texts.get("micro_steps", "1"))
    return [
        [
            [
                {b.path: drawn(b.path, b.shape, step + rank + micro) for b in program.inputs}
                for micro in range(micro_steps)
            ]
            for rank in range(program.mesh.world_size)
        ]
        for step in range(STEPS)
    ]
