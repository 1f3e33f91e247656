"""The model as a function that a tracer can trace: from the tensors of a batch and the seeds to loss and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from zeroir.frontend._torch_private import (
    Function,
    is_traced,
    operators_of_trace,
    tensors_replaced,
    whole_where_different,
)
from zeroir.frontend._torch_sizes import has_dims
from zeroir.frontend.capture.blocks.calls import UnrecordableError
from zeroir.frontend.capture.blocks.recording import ForwardRecorder, ForwardRecording
from zeroir.frontend.capture.blocks.reuse import ReusePlan
from zeroir.frontend.capture.captured_graph import OutputName
from zeroir.frontend.capture.gradient_hooks import ParameterHooks
from zeroir.frontend.capture.loss_and_outputs import evaluated, loss_of
from zeroir.frontend.capture.module_tensors import substitute_buffers, write_back_buffers
from zeroir.frontend.capture.node_origins import OriginTracker
from zeroir.frontend.capture.outside_tensors import OutsideTensors
from zeroir.frontend.capture.precision import with_floats_cast
from zeroir.frontend.capture.python_state import PythonState
from zeroir.frontend.lowering.units import find_units
from zeroir.frontend.source.outside_reads import OutsideReads
from zeroir.frontend.source.source import ModelSource, capitalised
from zeroir.frontend.watch.stored_tensors import StoredObject, StorePlace, stored_values
from zeroir.frontend.watch.values_to_store import value_to_store
from zeroir.ir.reports import Storing
from zeroir.torch_ops._torch_distributed import ranks_seen
from zeroir.torch_ops.batches import with_tensors
from zeroir.torch_ops.devices import READING
from zeroir.torch_ops.neutral import NeutralOps
from zeroir.torch_ops.ranks import TracedRanks


class LossStep(nn.Module):
    """The model as a function from the tensors of a batch, the seeds and the rank, i64, to the loss, an FP32 scalar.

    While it is ``evaluating``, the model runs under ``eval()`` and without gradients, and its outputs follow the loss.
    Tensors that the code stores at the places ``stores`` are outputs, too, and ``stored`` is what it stored there in
    the last forward; ``places`` are all where it stored any, and ``replaced`` names the buffers that it replaced by
    other tensors. ``output_names`` are those of the last forward. With ``stores_values`` code may store what it reads
    of tensors, and ``has_values`` says that it has read something.

    Each forward of the model starts from the Python state ``state``. With a ``plan`` the recorded forward is repeated,
    and the model's code does not run. ``blocks`` names the repeated blocks, ``sites`` counts the calls of dropout and
    of random operators in the model's last forward, and ``tracker`` has the place in the model of each node of that
    forward. ``ranks`` are those that it may ask for. ``outside`` are the tensors of the user's code that a step may
    use, and ``reads`` the files and variables of the environment that it has read. ``line`` is ``file:line`` of the
    function whose result is the loss, and ``place`` is that line, or the model's name if the line is unknown.
    """

    PREFIX = "model."

    def __init__(
        self,
        model: nn.Module,
        source: ModelSource,
        example: object,
        dtype: torch.dtype,
        hooks: ParameterHooks,
        state: PythonState,
        ranks: TracedRanks,
        opaque: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.ranks = ranks
        # Tracked frames end at this file, because it calls the model.
        self.tracker = OriginTracker(folder=source.folder, stop=__file__)
        self.tracker.install(model, opaque)
        # Calls of opaque modules differ, each by the module whose code runs.
        self.blocks = () if opaque else tuple(find_units(model, None).labels)
        for name in self.blocks:
            # Directly around the forward: all other hooks of the block run outside the recorded call.
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, name))
            block.register_forward_hook(partial(self._leave, name), prepend=True)
        self.model = model
        self.line = source.line_of_loss(model)
        self.place = self.line or capitalised(source.names.model)
        self.sites = 0
        self.plan: ReusePlan | None = None
        self.state = state
        self.outside = OutsideTensors()
        self.reads = OutsideReads()
        self.output_names: tuple[OutputName, ...] = ()
        self.stores: tuple[StorePlace, ...] = ()
        self.stored: tuple[StoredObject, ...] = ()
        self.places: frozenset[StorePlace] = frozenset()
        self.replaced: frozenset[str] = frozenset()
        self.stores_values = True
        self.has_values = False
        self._is_evaluating = False
        self._outputs: tuple[str, ...] = ()
        self._source = source
        self._example = example
        self._dtype = dtype
        self._hooks = hooks
        self._recorder: ForwardRecorder | None = None

    @contextmanager
    def evaluating(self, outputs: Sequence[str]) -> Iterator[None]:
        """Within the block the step is an evaluation with the outputs of these names, or with all of a loss function's.

        Afterwards the training flag of every module is restored.

        Raises:
            Exception: any error of the model's own ``eval()``.
        """
        training, stores = self.state, self.stores
        training.restore()
        try:
            self.model.eval()
            self.state = PythonState.of(self.model, training.code)
            self._is_evaluating, self._outputs, self.stores = True, tuple(outputs), ()
            yield
        finally:
            self._is_evaluating = False
            self.plan = None
            self.state, self.stores = training, stores
            training.restore()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the loss and the outputs, from the tensors of a batch, then the seeds and the rank."""
        *tensors, seeds, rank = inputs
        if not self._is_evaluating:
            # The parameters are now tensors of the tracer, which have no hooks.
            self._hooks.attach(self.model)
        with (
            operators_of_trace(has_dims(tensors)),
            torch.set_grad_enabled(not self._is_evaluating),
            self.reads.noting(),
        ):
            if self.plan is not None:
                return self.plan.repeat(
                    [*inputs, *self._model_tensors().values()], seeds, self.tracker
                )
            self.ranks.begin(rank)
            with (
                ranks_seen(self.ranks),
                NeutralOps(seeds, self._around, self.ranks) as neutral,
            ):
                return self._results(tensors, neutral)

    def _around(self, func: Function) -> Function:
        storable = self._storable(func) if self.stores_values and func in READING else func
        return self.tracker.around(whole_where_different(storable))

    def _storable(self, func: Function) -> Function:
        """Return a function that reads values of a tensor, or what stands for them where the tensor has none."""

        def call(tensor: Tensor, *args: object, **kwargs: object) -> object:
            try:
                return func(tensor, *args, **kwargs)
            except Exception:
                if not is_traced(tensor):
                    raise
                self.has_values = True
                return value_to_store(func, tensor, *args, **kwargs)

        return call

    def record(self, inputs: Sequence[Tensor]) -> ForwardRecording:
        """Run the model once, without changing its buffers, and return the recorded calls.

        Raises:
            UnrecordableError: if the calls cannot be repeated.
            Exception: any error of the model or of torch.
        """
        *tensors, seeds, rank = inputs
        # As in a trace, tied parameters are different tensors.
        own = {
            name: torch.empty_like(tensor).requires_grad_(tensor.requires_grad)
            for name, tensor in self._model_tensors().items()
        }
        operators = operators_of_trace(has_dims(tensors))
        has_grad = torch.set_grad_enabled(not self._is_evaluating)
        neutral_ops = NeutralOps(seeds, whole_where_different, self.ranks)
        self.ranks.begin(rank)
        seen = ranks_seen(self.ranks)
        with tensors_replaced(self, own), operators, has_grad, seen, neutral_ops as neutral:
            recorder = ForwardRecorder(
                neutral, self.tracker, [*inputs, *self._model_tensors().values()]
            )
            self._recorder = recorder
            try:
                with recorder.autograd_functions(), recorder:
                    results = self._results(tensors, neutral)
            finally:
                self._recorder = None
        if self.ranks.is_asked:
            raise UnrecordableError("the model asks for the ranks")
        return recorder.recording(results)

    def _model_tensors(self) -> dict[str, Tensor]:
        """Return the model's present parameters and buffers by each of their names."""
        return {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }

    def _enter(self, block: str, _: nn.Module, __: object) -> None:
        if self._recorder is not None:
            self._recorder.enter(block)

    def _leave(self, block: str, _: nn.Module, __: object, ___: object) -> None:
        if self._recorder is not None:
            self._recorder.leave(block)

    def checkpointing(self) -> AbstractContextManager[None]:
        """Return the context in which the model's code runs under an activation checkpoint."""
        return self.tracker.checkpoint()

    def _results(self, tensors: Sequence[Tensor], neutral: NeutralOps) -> tuple[Tensor, ...]:
        self.tracker.restart()
        self.state.restore()
        copies = substitute_buffers(self.model)
        remaining = iter(tensors)
        example = with_tensors(self._example, lambda _: next(remaining))
        batch = with_floats_cast(example, self._dtype)
        if self._is_evaluating:
            # The model may enable gradients itself.
            value, returned = evaluated(self._source, self.model, batch, self._outputs)
            loss, outputs = value.detach(), tuple((path, x.detach()) for path, x in returned)
        else:
            loss, outputs = loss_of(self._source, self.model, batch), ()
        self.places = frozenset(self.state.stores())
        moment = Storing.EVALUATION if self._is_evaluating else Storing.STEP
        self.stored, stored = stored_values(self.stores, self.state.containers, moment)
        # Copies, because the model may return a parameter itself.
        made = [output for _, output in outputs] + [tensor.detach() for tensor in stored]
        results = (loss.float().clone(), *(output.clone() for output in made))
        self.output_names = (
            *(OutputName(path) for path, _ in outputs),
            *(name for value in self.stored for name in value.names),
        )
        self.replaced = write_back_buffers(copies)
        self.sites = neutral.sites
        return results
