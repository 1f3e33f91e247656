"""A whole step as one opaque call: the user's code computes loss and gradients in eager PyTorch, with a program's bits.

The call gets the parameters and buffers of the model, the tensors of a batch and the seeds of the random operators. Its
forward keeps what autograd saves until the backward, so the code runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import torch
from torch import Tensor, nn

from zeroir.errors import UserError, ZeroirError
from zeroir.frontend._torch_private import function_modes
from zeroir.frontend.capture.loss_and_outputs import loss_of
from zeroir.frontend.capture.precision import fp32_casts
from zeroir.frontend.opaque.calls import seeded_as_opaque
from zeroir.frontend.opaque.eager_forward import (
    OwnTensor,
    gradients_of,
    own_tensors,
    present_tensors,
    tensors_swapped,
)
from zeroir.frontend.source.source import ModelSource, capitalised
from zeroir.frontend.source.source_lines import line_of_call
from zeroir.torch_ops.batches import flatten, with_tensors
from zeroir.torch_ops.neutral import NeutralOps, neutral_ops
from zeroir.torch_ops.opaque import opaque, register_call

Present = Callable[[], list[Tensor]]
"""Returns the tensors that are in a module now."""

_NUMBERS: Final = count()


@dataclass(slots=True)
class EagerLoss:
    """A loss function that calls the step of ``source`` as one operator; ``build`` makes the module that is traced.

    ``held`` maps each name of the tensors of the model whose values an engine has to the first name of the tensor;
    others are where the user's code left them.
    ``sites`` is the number of random operators of the step. ``opaque`` are the modules whose random numbers depend on
    one seed, and ``keep_fp32`` patterns of those that keep FP32 in a program of the dtype ``precision``.
    """

    source: ModelSource
    held: Mapping[str, str]
    sites: int
    opaque: tuple[str, ...]
    precision: torch.dtype
    keep_fp32: tuple[str, ...]
    word: str = field(default_factory=lambda: f"eager_step_{next(_NUMBERS)}")
    _traced: nn.Module | None = None

    def build(self) -> nn.Module:
        """Return the module of the source."""
        self._traced = self.source.build()
        return self._traced

    def __call__(self, _: nn.Module, batch: object) -> Tensor:
        """Return the loss, in a trace."""
        assert self._traced is not None
        # In a trace each name of a tied parameter has a tensor of its own.
        by_name: dict[str, OwnTensor] = {}
        for each in own_tensors(self._traced):
            name = next((self.held[n] for n in each.names if n in self.held), None)
            if name is not None:
                known = by_name.get(name, replace(each, names=()))
                by_name[name] = replace(each, names=(*known.names, *each.names))
        own = tuple(by_name.values())
        tensors = present_tensors(self._traced, own)
        neutral = next(mode for mode in reversed(function_modes()) if isinstance(mode, NeutralOps))
        seeds = [neutral.seed() for _ in range(max(self.sites, 1))]
        inputs = [*tensors, *flatten(batch).tensors.values(), *seeds]
        buffers = [i for i, each in enumerate(own) if not each.is_parameter]
        step = EagerStep(
            loss=self,
            kind=self.word,
            own=own,
            trained=tuple(i for i, x in enumerate(inputs) if x.requires_grad),
            buffers=tuple(buffers),
            changed=tuple((tuple(tensors[i].shape), tensors[i].dtype) for i in buffers),
        )
        register_call(self.word, step)
        # The backward reads the values from before the call.
        given = [x.clone() if i in buffers else x for i, x in enumerate(inputs)]
        results: list[Tensor] = opaque(given, seeds[0], [], self.word)
        result, *after = results
        for number, value in zip(buffers, after, strict=True):
            tensors[number].copy_(value)
        return result


@dataclass(slots=True, kw_only=True)
class EagerStep:
    """The call of ``EagerLoss``, as ``torch_ops.opaque.OpaqueCall``.

    ``own`` are the tensors of the model, first among the inputs, with ``buffers`` among them, whose shapes and dtypes
    are ``changed``; they are results after the loss.
    """

    loss: EagerLoss
    kind: str
    own: tuple[OwnTensor, ...]
    trained: tuple[int, ...]
    buffers: tuple[int, ...]
    changed: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    path: str = ""
    own_code: str = ""
    reason: str = ""
    workspaces: tuple[int, int] | None = None
    is_measured: bool = False
    differentiated: tuple[int, ...] = (0,)
    _graphs: dict[int, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)
    _failure: UserError | None = None

    def line_here(self) -> str:
        """Return ``file:line`` of the user's code that runs in this thread; empty if there is none."""
        return line_of_call()

    def take_failure(self) -> UserError | None:
        """Return, and forget, the failure of the code since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def on(self, _: nn.Module) -> EagerStep:
        """Return the call itself: its code is that of the module in hand."""
        return self

    def empty_results(self, _: Sequence[Tensor], __: Sequence[int]) -> list[Tensor]:
        """Return tensors like the results, for a trace."""
        return [
            torch.empty(()),
            *(torch.empty(shape, dtype=dtype) for shape, dtype in self.changed),
        ]

    def run(self, inputs: Sequence[Tensor], seed: int, _: Sequence[int]) -> list[Tensor]:
        """Run the user's code, and return the loss and the buffers; after a failure the loss is 0."""
        if self._failure is None:
            try:
                return self._loss_and_buffers(inputs, seed)
            except UserError as error:
                self._fail(error)
        none = inputs[0].new_zeros((), dtype=torch.float32)
        return [none, *(inputs[i].clone() for i in self.buffers)]

    def _fail(self, error: UserError) -> None:
        self._failure = error
        self._graphs.clear()

    def _loss_and_buffers(self, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
        # What the program gathered for the forward may be elsewhere in the backward.
        with torch.inference_mode(mode=False), torch.enable_grad():
            leaves = [x.detach().clone() for x in inputs]
            for number in self.trained:
                leaves[number].requires_grad_()
            # Buffers that the code changes are no leaves.
            own = leaves[: len(self.own)]
            versions = [x._version for x in leaves]
            with self._within(leaves) as (model, batch, present), self._failures("failed"):
                loss = loss_of(self.loss.source, model, batch).float()
                after = present()
        for number, (now, before) in enumerate(zip(after, own, strict=True)):
            is_changed = now is not before or now._version != versions[number]
            if is_changed and number not in self.buffers:
                place = self.loss.source.line_of_loss(model) or "The code"
                raise UserError(
                    f"{place} changes the model's parameter {self.own[number].names[0]} in place during forward, which "
                    "only the optimizer may do."
                )
        self._graphs[seed] = loss, leaves
        return [loss.detach().clone(), *(after[i].detach().clone() for i in self.buffers)]

    def gradients(
        self, gradients: Sequence[Tensor], inputs: Sequence[Tensor], seed: int, _: Sequence[int]
    ) -> list[Tensor]:
        """Return the gradients of the trained parameters; after a failure they are 0."""
        if self._failure is None:
            try:
                return self._gradients(gradients, seed)
            except UserError as error:
                self._fail(error)
        return [torch.zeros_like(inputs[i]) for i in self.trained]

    def _gradients(self, gradients: Sequence[Tensor], seed: int) -> list[Tensor]:
        loss, leaves = self._graphs.pop(seed)
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            self._within(leaves),
            self._failures("failed in the backward"),
        ):
            return gradients_of(leaves, [loss], gradients, self.trained)

    @contextmanager
    def _failures(self, how: str) -> Iterator[None]:
        """Say where the user's code failed within the block."""
        source = self.loss.source
        try:
            yield
        except (ZeroirError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or "no message"
            raise UserError(
                f"{capitalised(source.place_of(error))} {how}: {type(error).__name__}: {reason}"
            ) from error

    @contextmanager
    def _within(self, leaves: Sequence[Tensor]) -> Iterator[tuple[nn.Module, object, Present]]:
        """Put tensors into the user's module within the block, and yield that, the batch, and what is there then."""
        loss, count = self.loss, len(self.own)
        model = loss.source.model()
        sites = max(loss.sites, 1)
        tensors = iter(leaves[count:-sites])
        batch = with_tensors(loss.source.batch(), lambda _: next(tensors))
        with ExitStack() as stack:
            present = stack.enter_context(tensors_swapped(model, self.own, leaves[:count]))
            stack.enter_context(fp32_casts(model, loss.precision, loss.keep_fp32))
            stack.enter_context(seeded_as_opaque(model, loss.opaque))
            stack.enter_context(neutral_ops(torch.cat(list(leaves[-sites:])).cpu()))
            yield model, batch, present
