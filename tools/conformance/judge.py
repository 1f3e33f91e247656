"""Judge one sample: compile a small model around it, run a step of the program, and compare with plain autograd.

The model has three units, so that the sample reads its operands from the memory that all temporary buffers share, and
another unit reads its results from there:

    first    adds to each tensor a parameter of its shape, all zeros
    middle   the sample's own call
    last     the loss: every output times other weights, added up

With SGD at a rate of 1 the step leaves minus the gradient in the parameters that were zero, so that one step shows
loss and gradients to the bit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tools.conformance.samples import OTHERWISE_DERIVED, UNDEFINED, Sample
from zeroir.config import make_options
from zeroir.errors import InternalError, UserError
from zeroir.frontend.lowering.tracing import trace_model
from zeroir.frontend.source.module_source import source_of
from zeroir.ir.program import Program
from zeroir.passes.pipelines import lower_with_proof
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.seeds import site_seed
from zeroir.torch_ops import neutral_ops
from zeroir.verify import VerificationError

RELATIVE = 1e-4
"""The allowed difference between an operator of zeroir and plain autograd, relative to the largest element."""


class SampleOutcome(StrEnum):
    """The outcome of a sample."""

    RIGHT = "right"
    CLOSE = "close"
    DRAWN = "drawn"
    WRONG = "wrong"
    REFUSED = "refused"
    CRASHED = "crashed"
    SKIPPED = "skipped"


OUTCOMES = {
    SampleOutcome.RIGHT: "loss, gradients and buffers are those of plain autograd, bit for bit",
    SampleOutcome.CLOSE: "within 1e-4: zeroir's own operators, bit for bit as eager PyTorch computes them, and "
    "derivatives for which torch chooses among formulas by looking at the values",
    SampleOutcome.DRAWN: "bit for bit those of eager PyTorch with the program's seeds: random numbers are the "
    "program's own",
    SampleOutcome.WRONG: "something else",
    SampleOutcome.REFUSED: "no program, and a sentence that says why",
    SampleOutcome.CRASHED: "any other exception, or more memory or time than a sample may take",
    SampleOutcome.SKIPPED: "plain autograd has no answer: the call fails, or nothing of it can be added up to a loss",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleVerdict:
    """An outcome, and the reason for it."""

    outcome: SampleOutcome
    why: str = ""


class UnanswerableError(Exception):
    """Plain autograd itself gives no result."""


class FirstUnit(nn.Module):
    """Turns the model's inputs into activations."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))
        self.added = nn.ParameterDict(
            {
                str(i): nn.Parameter(torch.zeros(tensor.shape))
                for i, tensor in enumerate(tensors)
                if tensor.dtype == torch.float32 and tensor.numel()
            }
        )

    def forward(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """The tensors, each plus a parameter of zeros."""
        return [self._computed(i, tensor) for i, tensor in enumerate(tensors)]

    def _computed(self, i: int, tensor: Tensor) -> Tensor:
        if str(i) in self.added:
            added: Tensor = self.added[str(i)]
            return tensor + added
        zero = (
            self.zero if tensor.is_floating_point() or tensor.is_complex() else self.zero.detach()
        )
        if tensor.dtype == torch.bool:
            return tensor ^ zero.bool()
        return tensor + zero.to(tensor.dtype)


class MiddleUnit(nn.Module):
    """The sample's call."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample
        self.one = nn.Parameter(torch.ones(()))
        self.module = None if sample.make is None else sample.make()

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """The call's results as activations."""
        returned = self.sample.call(self.module, tuple(tensors))
        results = [x for x in pytree.tree_leaves(returned) if isinstance(x, Tensor)]
        if not results:
            raise UnanswerableError("the call yields no tensor")
        results = [torch.view_as_real(x) if x.is_complex() else x for x in results]
        return [x.float() * self.one if x.dtype != torch.float64 else x * self.one for x in results]


class LastUnit(nn.Module):
    """The loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, results: list[Tensor]) -> Tensor:
        """Every result times other weights."""
        loss: Tensor = self.bias
        for x in results:
            weights = torch.arange(1, x.numel() + 1, dtype=torch.float32) / max(x.numel(), 1)
            loss = loss + (x.float() * weights.view(x.shape)).sum()
        return loss


class ThreeUnitModel(nn.Module):
    """The three units."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.unit_first = FirstUnit(sample.tensors)
        self.unit_middle = MiddleUnit(sample)
        self.unit_last = LastUnit()

    def forward(self, *tensors: Tensor) -> Tensor:
        """The loss."""
        operands = tensors[: len(self.unit_middle.sample.tensors)]
        loss: Tensor = self.unit_last(self.unit_middle(self.unit_first(operands)))
        return loss


def judge(sample: Sample) -> SampleVerdict:
    """Compile, run and compare one sample."""
    if sample.name in UNDEFINED:
        return SampleVerdict(
            outcome=SampleOutcome.SKIPPED, why="the values are what memory happens to hold"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = _eager(sample, None)
        except Exception as error:  # noqa: BLE001 - whatever a call raises
            return SampleVerdict(outcome=SampleOutcome.SKIPPED, why=_said(error))
        try:
            compiled, seeds = _stepped(sample)
        except (InternalError, VerificationError) as error:
            return SampleVerdict(outcome=SampleOutcome.CRASHED, why=_said(error))
        except UserError as error:
            return SampleVerdict(outcome=SampleOutcome.REFUSED, why=str(error))
        except Exception as error:  # noqa: BLE001 - none is expected
            return SampleVerdict(outcome=SampleOutcome.CRASHED, why=_said(error))
        difference = _difference(compiled, plain)
        if difference is None:
            return SampleVerdict(outcome=SampleOutcome.RIGHT)
        far = _difference(compiled, plain, RELATIVE)
        if sample.name in OTHERWISE_DERIVED and far is None:
            return SampleVerdict(outcome=SampleOutcome.CLOSE)
        neutral = _eager(sample, seeds)
        if _difference(compiled, neutral) is not None:
            return SampleVerdict(outcome=SampleOutcome.WRONG, why=difference)
        if len(seeds):
            return SampleVerdict(outcome=SampleOutcome.DRAWN)
        if far is not None:
            return SampleVerdict(outcome=SampleOutcome.WRONG, why=far)
        return SampleVerdict(outcome=SampleOutcome.CLOSE)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _eager(sample: Sample, seeds: Tensor | None) -> dict[str, Tensor]:
    """Loss, parameters after the step, and buffers; ``seeds`` make torch's operators ours."""
    torch.manual_seed(0)
    model = ThreeUnitModel(sample)
    torch.manual_seed(1)
    if seeds is None:
        loss = model(*batch_of(sample))
    else:
        with neutral_ops(seeds):
            loss = model(*batch_of(sample))
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    optimizer.step()
    values = {"the loss": loss.detach()}
    values.update((f"the parameter {n}", p.detach()) for n, p in model.named_parameters())
    values.update((f"the buffer {n}", b) for n, b in model.named_buffers())
    return values


def _stepped(sample: Sample) -> tuple[dict[str, Tensor], Tensor]:
    """The same of the compiled program, and the seeds that it drew with."""
    program = _compiled(sample)
    try:
        engine = Engine(program, EngineSettings(self_check=True))
    except UserError as error:
        raise InternalError(f"a program that was compiled does not run: {error}") from error
    try:
        engine.initialise(lambda: ThreeUnitModel(sample), 0)
        loss = engine.step(batch_of(sample)).loss
        values = {"the loss": torch.tensor(loss)}
        values.update(
            (f"the parameter {name}", value) for name, value in engine.full_parameters().items()
        )
        for binding in program.module_buffers:
            if binding.data is None:
                value = engine.buffer(binding.buffer).view(binding.shape).clone()
                values[f"the buffer {binding.name}"] = value
    finally:
        engine.close()
    rng = program.buffer_by_name.get("rng")
    sites = range(0 if rng is None else rng.numel)
    return values, torch.tensor([site_seed(0, 0, 0, 0, i) for i in sites], dtype=torch.int64)


def _compiled(sample: Sample) -> Program:
    # What cannot be traced is to be seen.
    given = {"units": "unit_*", "opaque": "none"}
    options = make_options({"stage": 3, "world_size": 1, "optimizer": "sgd", "lr": 1.0, **given})

    def build() -> nn.Module:
        return ThreeUnitModel(sample)

    source = source_of(build, batch_of(sample), None, None)
    return lower_with_proof(trace_model(source, options).program, options).program


def batch_of(sample: Sample) -> tuple[Tensor, ...]:
    """The sample's tensors, dense; a batch has one at least."""
    return tuple(x.contiguous() for x in sample.tensors) or (torch.zeros(1),)


def _difference(
    actual: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 0.0
) -> str | None:
    """The first value that differs, and by how much; NaN equals NaN."""
    for name, value in actual.items():
        if name not in wanted:
            continue
        reference = wanted[name].to(value.dtype).reshape(value.shape)
        is_equal = (value == reference) | (value.isnan() & reference.isnan())
        if tolerance:
            is_equal |= reference.isnan()  # Torch's own formula may meet one more NaN on its way.
        if bool(is_equal.all()):
            continue
        gap = float((value.double() - reference.double()).abs()[~is_equal].max())
        largest = float(reference.double().abs().nan_to_num(0, 0, 0).max()) or 1.0
        if not gap <= tolerance * largest:
            return f"{name} differs by {gap:.3g}, where the largest is {largest:.3g}"
    return None
