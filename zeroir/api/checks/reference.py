"""N eager PyTorch replicas: the reference for the results of a compiled program.

The replicas share their parameters and each runs forward and backward in eager PyTorch on its own batch. Gradients
follow one rounding rule: summed in FP32 in rank order, rounded once to the gradient's dtype (on a mesh of two axes once
within each group and once over the groups), divided once in FP32 by loss scale × world size × micro-steps. If batches
have weights, the backward begins with loss scale × weight, and the divisor is loss scale × the sum of all weights. The
weight that a program gives to the one batch of a step is 1 or 0. The update is torch.optim's, fused, on FP32 master
weights; 8-bit states are rounded between updates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from zeroir.api.checks.replica_ranks import ReplicaRanks
from zeroir.config import CompileOptions
from zeroir.config.optimizer import OptimizerOptions
from zeroir.frontend.capture.loss_and_outputs import evaluated, loss_of
from zeroir.frontend.capture.module_tensors import put_back_buffers, substitute_buffers
from zeroir.frontend.capture.precision import (
    apply_precision,
    compute_dtype,
    is_converted,
    with_floats_cast,
)
from zeroir.frontend.lowering.parameter_groups import ParameterGroup, parameter_groups, states_of
from zeroir.frontend.lowering.units import inside_of
from zeroir.frontend.opaque.calls import run_as_opaque
from zeroir.frontend.source.source import ModelSource
from zeroir.ir.layout import Parameter
from zeroir.ir.mesh import VALUES_COMM
from zeroir.ir.optimizers.forms import StateForm
from zeroir.ir.program import Program
from zeroir.runtime.eight_bit.plain import WithRoundedStates
from zeroir.runtime.execution.seeds import site_seed
from zeroir.runtime.optimizers.catalogue import UPDATES
from zeroir.runtime.optimizers.plain import PlainOptimizer
from zeroir.runtime.training.lr_schedule import Scheduler
from zeroir.runtime.training.micro_batch_weights import BatchWeigher, weighing, weight_of
from zeroir.torch_ops import NeutralOps, neutral_ops
from zeroir.torch_ops.batches import Batch
from zeroir.torch_ops.conditions import tracing_conditions
from zeroir.torch_ops.opaque import opaque_modules

T = TypeVar("T")

_ALIGNMENT_NUMEL = 64
Seeds = Callable[[int, int, int], Tensor]
"""Maps (step, micro-step, rank) to the i64 seeds of that forward's random operators."""


class EagerReplicas:
    """The eager replicas. ``steps`` is for schedules; ``opaque`` names the modules whose code a program runs as it is.

    Their parameters have gradients of zeros where their code does not use them. If the code asks for the ranks, it
    ``sees_ranks``.
    """

    def __init__(
        self,
        source: ModelSource,
        options: CompileOptions,
        *,
        seed: int,
        seeds: Seeds,
        steps: int,
        opaque: Collection[str] = (),
        sees_ranks: bool = False,
    ) -> None:
        self._ranks = ReplicaRanks(options.world_size) if sees_ranks else None
        # The user's code makes each replica: a deep copy would lose hooks and other references to its tensors.
        self.replicas = [_replica(source, seed) for _ in range(options.world_size)]
        for replica in self.replicas:
            run_as_opaque(replica, opaque)
        self._opaque = tuple(map(inside_of, opaque))
        module = self.replicas[0]
        self._source = source
        self._options = options
        self._seeds = seeds
        self._steps = steps
        mesh = options.device_mesh
        self._groups = mesh.groups(mesh.axes[-1].name)
        self._step = 0
        self._scale = options.first_loss_scale
        self._weight_of = source.weight
        self._good_steps = 0
        self._hysteresis = options.loss_scale.hysteresis
        # torch's fused kernels compute the last elements of a tensor separately if its length is not a multiple of the
        # vector width, so each master is padded, as a flat is.
        self.masters = {
            name: _padded(parameter.detach())
            for name, parameter in module.named_parameters()
            if is_converted(parameter)
        }
        self._averages = {
            name: values.clone() for name, values in self.masters.items() if options.ema is not None
        }
        for replica in self.replicas:
            apply_precision(replica, options.precision.dtype, options.precision.keep_fp32)
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        for replica in self.replicas:
            for name, parameter in replica.named_parameters():
                if parameter.dtype == torch.float32:
                    parameter.data = self._master(name)
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizers: list[PlainOptimizer] = []
        self._scheduler: Scheduler | None = None
        self.norm: Tensor | None = None

    def step(
        self, batches: Sequence[Sequence[Batch]], clipped_by: Tensor | None = None
    ) -> list[float]:
        """Run one training step on ``batches[rank][micro_step]``, and return each rank's mean loss over micro-steps.

        Gradients are clipped by the norm ``clipped_by``, f32[], or by ``self.norm``, which is computed here, before
        clipping; it is None if no norm is needed.
        """
        self.norm = None
        losses = [torch.zeros(()) for _ in self.replicas]
        weights = [
            torch.tensor([self.weight(batch) for batch in own], dtype=torch.float32)
            for own in batches
        ]
        if isinstance(self._weight_of, BatchWeigher) and [*map(len, batches)] == [1]:
            weights = [own.sign() for own in weights]
        parts: list[list[Mapping[str, Tensor]]] = []
        for micro_step in range(self._options.micro_steps.count):
            computed = self._on_each(
                partial(
                    self._micro_step,
                    replica,
                    batches[rank][micro_step],
                    micro_step,
                    rank,
                    weights[rank][micro_step],
                )
                for rank, replica in enumerate(self.replicas)
            )
            for rank, (loss, _) in enumerate(computed):
                weight = weights[rank][micro_step]
                losses[rank] = losses[rank] + (loss * weight if weight else 0.0)
            parts.append([gradients for _, gradients in computed])
        own_weights = [_sum(list(own)) for own in weights]
        total = float(self._over_ranks(own_weights))
        if total:  # without data, everything stays as it is
            self._update(self._reduce(parts), total, clipped_by)
        self._step += 1
        return [float(loss / weight) for loss, weight in zip(losses, own_weights, strict=True)]

    def _gradients(self, replica: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in replica.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad
            elif parameter.requires_grad and name.startswith(self._opaque):
                yield name, torch.zeros_like(parameter)

    def weight(self, batch: Batch) -> float:
        """Return the weight of a batch, 1 if batches have none."""
        return 1.0 if self._weight_of is None else float(weight_of(self._weight_of, batch))

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """Return each rank's loss under ``eval()``, in FP32, without changing the replicas and their buffers."""
        return self._on_each(
            partial(self._evaluated, replica, batch, rank)
            for rank, (replica, batch) in enumerate(zip(self.replicas, batches, strict=True))
        )

    def _on_each(self, replicas: Iterable[Callable[[], T]]) -> list[T]:
        """Run a function of each replica; where the code asks for the ranks, all of them together."""
        functions = list(replicas)
        if self._ranks is None:
            return [function() for function in functions]
        with tracing_conditions():
            return self._ranks.run(functions)

    def _neutral_ops(self, seeds: Tensor) -> AbstractContextManager[NeutralOps]:
        return neutral_ops(seeds) if self._ranks is None else NeutralOps(seeds, ranks=self._ranks)

    def _evaluated(self, replica: nn.Module, batch: Batch, rank: int) -> float:
        is_training = {module: module.training for module in replica.modules()}
        copies = substitute_buffers(replica)
        inputs = with_floats_cast(batch, compute_dtype(self._options.precision.dtype))
        replica.eval()
        try:
            with torch.no_grad(), self._neutral_ops(self._seeds(self._step, 0, rank)):
                return float(evaluated(self._source, replica, inputs, ())[0].detach().float())
        finally:
            put_back_buffers(copies)
            for module, flag in is_training.items():
                module.training = flag

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name: FP32 masters of trained ones, and the others in their own dtype.

        Parameters without elements are left out.
        """
        return {
            name: self._master(name) if name in self._parameters else parameter.detach()
            for name, parameter in self.replicas[0].named_parameters()
            if parameter.numel()
        }

    def averages(self) -> dict[str, Tensor]:
        """Return the moving averages of the trained parameters by name; none without the option ``ema``."""
        return {
            name: average[: self._shapes[name].numel()].view(self._shapes[name])
            for name, average in self._averages.items()
            if name in self._parameters and self._shapes[name].numel()
        }

    def _master(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return self.masters[name][: shape.numel()].view(shape)

    def _micro_step(
        self, replica: nn.Module, batch: Batch, micro_step: int, rank: int, weight: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and the gradients of a batch; replicas may be one module, which keeps no gradients."""
        inputs = with_floats_cast(batch, compute_dtype(self._options.precision.dtype))
        with self._neutral_ops(self._seeds(self._step, micro_step, rank)):
            loss = loss_of(self._source, replica, inputs).float()
            torch.autograd.backward(loss, self._scale * weight)
        gradients = dict(self._gradients(replica))
        replica.zero_grad(set_to_none=True)
        return loss.detach(), gradients

    def _reduce(self, partial: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
        """Sum over ranks and micro-steps in the order of the stage."""
        names = list(partial[0][0])
        if len(partial) == 1:
            return {name: self._over_ranks([rank[name] for rank in partial[0]]) for name in names}
        ranks = range(len(self.replicas))
        steps = self._options.micro_steps
        adds_locally = steps.accumulate_locally or steps.is_step_interleaved
        if self._options.stage >= 2 and not adds_locally:
            return {
                name: _sum(
                    [
                        _sum([_sum([micro[r][name] for r in group]).float() for micro in partial])
                        for group in self._groups
                    ]
                )
                for name in names
            }
        return {
            name: self._over_ranks(
                [_sum([micro[rank][name].float() for micro in partial]) for rank in ranks]
            )
            for name in names
        }

    def _over_ranks(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum within each group of ranks, then over the groups."""
        return _sum([_sum([parts[rank] for rank in group]) for group in self._groups])

    def _update(
        self, gradients: Mapping[str, Tensor], total: float, clipped_by: Tensor | None
    ) -> None:
        if not self._optimizers:
            self._parameters = {name: nn.Parameter(self.masters[name]) for name in gradients}
            groups = parameter_groups(self._named_shapes(), self._options)
            self._optimizers = _make_optimizers(groups, self._parameters, self._shapes)
            if self._options.schedule is not None:
                settings = [group for each in self._optimizers for group in each.param_groups]
                self._scheduler = Scheduler(self._options.schedule, settings, self._steps)
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        scale = self._scale
        if self._options.precision.is_fp16:
            if self._options.has_dynamic_loss_scale:
                self._rescale(is_overflow=not is_finite)
            if not is_finite:
                return
        divisor = torch.tensor(scale * total, dtype=torch.float32)
        if self._options.clip is not None:
            squares = [gradient.double().square().sum() for gradient in gradients.values()]
            self.norm = (torch.stack(squares).sum().sqrt() / (scale * total)).float()
            norm = self.norm if clipped_by is None else clipped_by
            divisor /= (self._options.clip / (norm + 1e-6)).clamp(max=1.0)
        for name, parameter in self._parameters.items():
            gradient = gradients[name].float() / divisor
            is_padded = parameter.shape != gradient.shape
            parameter.grad = _padded(gradient) if is_padded else gradient
        for optimizer in self._optimizers:
            optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        if self._options.ema is not None:
            decay = self._options.ema
            for name in self._parameters:
                # As in torch.optim.swa_utils.get_ema_avg_fn.
                average = decay * self._averages[name] + (1 - decay) * self.masters[name]
                self._averages[name] = average
        with torch.no_grad():
            for replica in self.replicas:
                for name, parameter in replica.named_parameters():
                    if name in gradients and parameter.dtype != torch.float32:
                        parameter.copy_(self._master(name))

    def _named_shapes(self) -> Iterator[Parameter]:
        """Yield the trained parameters with all their names."""
        every_name = dict(self.replicas[0].named_parameters(remove_duplicate=False))
        for name in self._parameters:
            aliases = tuple(n for n, p in every_name.items() if p is every_name[name] and n != name)
            yield Parameter(name=name, shape=tuple(self._shapes[name]), aliases=aliases)

    def _rescale(self, *, is_overflow: bool) -> None:
        """Update the loss scale by DeepSpeed's dynamic loss scaling."""
        settings = self._options.loss_scale
        if not is_overflow:
            self._good_steps += 1
            if settings.consecutive_hysteresis:
                self._hysteresis = settings.hysteresis
            if self._good_steps >= settings.window:
                self._scale *= settings.factor
                self._good_steps = 0
                self._hysteresis = settings.hysteresis
            return
        self._good_steps = 0
        if self._hysteresis > 1:
            self._hysteresis -= 1
        else:
            self._scale = max(self._scale / settings.factor, settings.minimum)


def replicas_of(
    program: Program, source: ModelSource, options: CompileOptions, *, seed: int, steps: int
) -> EagerReplicas:
    """Return the replicas that compute what a program, logical or lowered, computes with this seed."""
    rng = program.buffer_by_name.get("rng")
    sites = 0 if rng is None else rng.numel

    def seeds(step: int, micro_step: int, rank: int) -> Tensor:
        return torch.tensor(
            [site_seed(seed, step, micro_step, rank, site) for site in range(sites)],
            dtype=torch.int64,
        )

    if program.weight is not None and source.weight is None:
        source = replace(source, weight=weighing(program))
    opaque = opaque_modules(program.segments)
    return EagerReplicas(
        source,
        options,
        seed=seed,
        seeds=seeds,
        steps=steps,
        opaque=opaque,
        sees_ranks=VALUES_COMM in program.comm_by_name,
    )


def _replica(source: ModelSource, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return source.model()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum in FP32, in order, and round once to the dtype of the parts."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _padded(tensor: Tensor) -> Tensor:
    numel = -(-tensor.numel() // _ALIGNMENT_NUMEL) * _ALIGNMENT_NUMEL
    padded = torch.zeros(numel, dtype=torch.float32)
    padded[: tensor.numel()] = tensor.flatten()
    return padded


def _make_optimizers(
    groups: Sequence[ParameterGroup],
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, torch.Size],
) -> list[PlainOptimizer]:
    """Make one torch optimizer for each group; those for whole parameters use the parameters' shapes.

    8-bit states are rounded after each step.
    """
    optimizers: list[PlainOptimizer] = []
    for group in groups:
        own = [parameters[name] for name in group.parameters]
        if group.options.algorithm.direction_dtype is not None:
            for name, parameter in zip(group.parameters, own, strict=True):
                parameter.data = parameter.data[: shapes[name].numel()].view(shapes[name])
        optimizer = _make_optimizer(own, group.options)
        if states_of(group.options).form is StateForm.EIGHT_BITS:
            optimizers.append(WithRoundedStates(optimizer))
        else:
            optimizers.append(optimizer)
    return optimizers


def _make_optimizer(parameters: list[nn.Parameter], options: OptimizerOptions) -> PlainOptimizer:
    algorithm = options.algorithm
    declaration = algorithm.declaration
    settings = {"lr": options.lr, **declaration.torch_settings(options.hyper)}
    plain = UPDATES[algorithm].plain
    if plain is not None:
        return plain(parameters, settings)
    assert declaration.torch is not None
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, declaration.torch.class_name)
    if declaration.whole is None:
        return make(parameters, fused=True, **settings)
    return make(parameters, **settings)
