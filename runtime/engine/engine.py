"""The engine: one rank of a program on this process's device.

It initialises, steps, evaluates and exposes its state.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor, nn

from zeroir.config import options_of
from zeroir.errors import CheckpointWarning, GraphWarning, UserError
from zeroir.ir.program import Program
from zeroir.ir.reports import Storing
from zeroir.ir.spans import Span
from zeroir.ir.text.html import facts_html
from zeroir.memory.curve import peak_text
from zeroir.runtime.checkpoint.background import PendingSave
from zeroir.runtime.checkpoint.checkpointer import Checkpointer, Running
from zeroir.runtime.checkpoint.loading import LoadedState
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT, Job
from zeroir.runtime.device.driver import driver
from zeroir.runtime.distributed.rank_position import RankPosition
from zeroir.runtime.engine.accumulation import MicroStepResult
from zeroir.runtime.engine.code_follower import Compile, CompileEagerly
from zeroir.runtime.engine.live_optimizer import LiveOptimizer
from zeroir.runtime.engine.model_values import ModelValues
from zeroir.runtime.engine.opened_program import EngineSettings, reason_without_graphs
from zeroir.runtime.engine.present_programs import PresentPrograms
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.engine.recording import Recording
from zeroir.runtime.engine.results import Evaluation, StepResult
from zeroir.runtime.engine.signatures import Signatures
from zeroir.runtime.engine.training_steps import TrainingSteps
from zeroir.runtime.engine.watched_code import CompiledAgain, WatchedCode
from zeroir.runtime.engine.watched_modules import WatchedModules
from zeroir.runtime.memory.malloc import return_freed_memory
from zeroir.runtime.publishing.receiver import Receiver, file_of
from zeroir.runtime.state.gathered_module import DeepCopy
from zeroir.runtime.state.initial_module import Factory, StateSource
from zeroir.runtime.training.lr_schedule import Scheduler
from zeroir.runtime.training.not_finite import BadParameter, first_bad_parameter
from zeroir.torch_ops.batches import Batch
from zeroir.torch_ops.frozen_modules import users_module
from zeroir.torch_ops.returned import last_returned, returned_kept


class FitProgram(Protocol):
    """Makes an engine go on with a program that takes certain batches. All ranks call it together."""

    def __call__(self, engine: Engine, batches: Sequence[Batch], *, is_evaluation: bool) -> None:
        """Consider the batches of a step, a micro-step or an evaluation of this rank."""


class Engine:
    """One rank of a program on this process's device.

    The default process group must exist (``rendezvous.join_job``), unless the program is for one rank or the backend is
    ``fake``. All ranks construct their engines and call their methods together, in the same order. ``accumulating``
    compiles the program for steps of several batches; the engine switches to it at the first such step.

    Raises:
        UserError: where the programs of two ranks differ, the world size of the job is not the program's, or the result
            of a kernel differs from its operators'.
    """

    def __init__(
        self,
        program: Program,
        settings: EngineSettings = EngineSettings(),  # noqa: B008 - it is frozen
        *,
        device: torch.device | None = None,
        accumulating: Callable[[], Program] | None = None,
    ) -> None:
        self.device = _with_index(device or torch.device("cpu"))
        running = CompiledAgain(program=program, code=None, accumulating=accumulating)
        if self.device.type == "cpu":
            return_freed_memory()
        self.rank_program = RankProgram(program, self.device, settings, self.update, self._keep)
        self._values = ModelValues(self.rank_program)
        self._recording = Recording(self.rank_program)
        self._programs = PresentPrograms(running, self.rank_program, self._values, self.go_on_among)
        self._steps = TrainingSteps(self.rank_program, self._programs)
        self._checkpoints = Checkpointer(self.job, settings.timeout)
        no_graphs = reason_without_graphs(program, self.device) if settings.cuda_graphs else None
        if no_graphs is not None and self.rank == 0:
            warnings.warn(f"{no_graphs}: ops are issued one by one.", GraphWarning, stacklevel=2)

    def __repr__(self) -> str:
        memory = peak_text(self.program)
        return f"<{type(self).__name__} of {self._place}: {self.program.outline}; {memory}>"

    def _repr_html_(self) -> str:
        """Return the same facts, as a notebook shows them."""
        facts = {
            "engine": self._place,
            "program": self.program.outline,
            "memory": peak_text(self.program),
        }
        return facts_html(facts.items())

    @property
    def _place(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size} on {self.device} after step {self.step_count}"
        )

    @property
    def rank(self) -> int:
        """This process's rank in the mesh."""
        return self.job.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return self.program.mesh.world_size

    @property
    def step_count(self) -> int:
        """The number of training steps done by ``step``, including skipped ones."""
        return self.rank_program.step_count

    @property
    def program(self) -> Program:
        """The program that runs at present."""
        return self.rank_program.program

    def takes(self, batch: Batch) -> bool:
        """Return whether steps take batches of these sizes; other differences are for the step to refuse.

        Each rank asks for itself.
        """
        return self._programs.signatures.takes(batch)

    @property
    def job(self) -> Job:
        """The ranks that run the program together."""
        return self.rank_program.job

    @property
    def signatures(self) -> Signatures:
        """The programs of the present state of the user's code."""
        return self._programs.signatures

    @property
    def optimizer(self) -> LiveOptimizer:
        """The settings of the optimizer groups; changes apply from the next update on.

        All ranks must make the same changes.

        Raises:
            UserError: where the program updates nothing.
        """
        return self.rank_program.optimizer

    def position(self) -> RankPosition:
        """Return the position of this rank in its program. Any thread may call it."""
        return self.rank_program.executor.position()

    def buffer(self, name: str) -> Tensor:
        """Return a buffer of this rank; it is a copy only where the buffer is on disk."""
        return self.rank_program.memory.read(name)

    def scheduler(self, steps: int | None = None) -> Scheduler:
        """Return the program's learning-rate schedule, which drives ``optimizer``: call its ``step`` after each step.

        ``steps`` is the number of steps of the run, for a schedule without a total of its own. The settings of step 1
        are set immediately.

        Raises:
            UserError: where the program has no schedule, or the schedule needs ``steps``.
        """
        schedule = options_of(self.program).schedule
        if schedule is None:
            raise UserError(
                "The program was compiled without a schedule: compile it with one, or drive engine.optimizer with a "
                "scheduler of torch.optim.lr_scheduler."
            )
        self._programs.scheduler = Scheduler(schedule, self.optimizer.param_groups, steps)
        return self._programs.scheduler

    def go_on_with(self, program: Program, watch: WatchedCode | None = None) -> None:
        """Switch to another program of the same model, such as one for other batches. All ranks call this together.

        Parameters, states, buffers of the model, the loss scale, the step count and the settings are kept, and within a
        step the sums of its micro-steps so far. Which parameters are trained, and where values lie, may differ: states
        of parameters that are not trained now wait in host memory. The new program takes several batches a step only if
        it was compiled for that. ``watch`` is the ``watch`` of the compiled program; without it the program is taken as
        compiled from the present state of the user's code.

        Raises:
            UserError: where the program has other parameters or other states of them, or is for another mesh; where it
                counts the steps of parameters together that were not trained together; within a step, where it has
                other sums, or a micro-step has not run yet; without ``watch``, where the present program reads tensors
                outside the module.
        """
        if watch is None and self._programs.reads_tensors:
            raise UserError(
                "The program reads tensors outside the module: call go_on_with(compiled.program, compiled.watch), so "
                "that the next one reads them, too."
            )
        self.go_on_among(Signatures(CompiledAgain(program=program, code=watch)))

    def go_on_among(self, signatures: Signatures) -> None:
        """Switch to a program of these, as ``go_on_with`` does, and to others of them where batches need these.

        All ranks call this together.
        """
        self._steps.accumulation.require_none_waiting("go_on_with")
        self._checkpoints.join()
        self._programs.change_to(signatures, signatures.base)

    def follow(
        self, code: WatchedCode, signatures: Signatures, compile_again: Compile | None = None
    ) -> None:
        """Follow the user's code and tensors that the program was compiled from, which is one of ``signatures``.

        Before each micro-step and evaluation the present values of the tensors are read, and changed settings of the
        script's optimizers apply to ``optimizer``. Where something else changed, ``compile_again`` returns the program
        to go on with; without it such a change is an error.

        Raises:
            UserError: where the code appends tensors to a list in each micro-step, of which the program runs several at
                once.
        """
        if code.appends and self.program.interleaved > 1:
            raise UserError(
                "The model's code appends a tensor to a list in each micro-step, but the program runs "
                f"{self.program.interleaved} of them unit by unit: compile it without --order layer, or store the "
                "tensor under a key."
            )
        self._programs.follow(code, signatures, compile_again)

    def compile_eagerly_with(self, compile_eagerly: CompileEagerly) -> None:
        """Let ``eager`` run what this function compiles."""
        self._programs.compile_eagerly_with(compile_eagerly)

    def compile_changes_with(self, compile_again: Compile) -> None:
        """Go on with what this function compiles after a change of the user's code; it keeps programs itself."""
        self._programs.compile_changes_with(compile_again)

    def _keep(self, moment: Storing, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors where the user's code would store them."""
        self._programs.keep(moment, tensors)

    def fit_batches_with(self, fit: FitProgram) -> None:
        """Call this function before batches of steps, micro-steps and evaluations are checked."""
        self._steps.fit = lambda batches, is_evaluation: fit(
            self, batches, is_evaluation=is_evaluation
        )

    def initialise(
        self,
        source: Factory | nn.Module,
        seed: int = 0,
        *,
        state: StateSource | None = None,
        keep_module: bool = False,
        deep_copy: DeepCopy = copy.deepcopy,
        adapt: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """Initialise every buffer from the module on rank 0. All ranks call this together.

        ``source`` is a function that builds the module under ``seed``, which only rank 0 calls; or a module whose
        present values are used. As its values move to the engine, the module's tensors become meta tensors of the same
        shape on all ranks, unless ``keep_module`` is True. Parameters and persistent buffers that ``state`` has are
        taken from it. ``deep_copy`` and ``adapt`` create the modules that ``gathered`` yields.

        Raises:
            UserError: where the program was compiled from another module, the state lacks a tensor, or the values of a
                rank differ from those of rank 0. A note on an error says whether the given module has lost its values.
        """
        self._values.initialise(
            source, seed, state=state, keep_module=keep_module, deep_copy=deep_copy, adapt=adapt
        )

    def initialise_flats(self, values: Mapping[str, Tensor]) -> None:
        """Initialise buffers from ``values`` by name, as ``state.initialise_flats`` does."""
        self._values.initialise_flats(values)

    @contextmanager
    def detect_anomaly(self) -> Iterator[None]:
        """Within the block, let steps find the first NaN that forward or backward makes.

        The step in which it is made ends with a UserError on all ranks. It names the line, the operator and the unit,
        and the ranges of what the operator computed from. The step has updated the parameters by then: go on from a
        checkpoint. Steps take longer, since every segment's arguments are copied. All ranks call this together.
        """
        with self._steps.anomalies.detected():
            yield

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within the block, let steps run the user's code as it is, in eager PyTorch.

        Then ``print``, ``breakpoint()`` and profiler ranges in forward and in the loss do what they say, once for each
        micro-step, and losses, gradients and updates have the bits of the program. A step needs memory for all
        parameters, twice, and for the activations that autograd saves. Evaluations belong outside the block. An
        exception in the code ends the step with a UserError on all ranks, and the step has changed nothing but buffers
        of the module. All ranks call this together, between two steps.

        Raises:
            UserError: where the engine was not made from a module in this process. Within a step.
        """
        self._steps.accumulation.require_none("eager")
        eager, present = self._programs.eager(), self.signatures
        self.go_on_among(eager)
        try:
            with self._steps.failures.expected():
                yield
        finally:
            if not self.rank_program.executor.has_failed:
                self._steps.accumulation.require_none("the end of engine.eager")
                self.go_on_among(present)

    @contextmanager
    def gathered(
        self,
        name: str = "",
        *,
        units: Sequence[str] | None = None,
        masters: bool = False,
        ema: bool = False,
    ) -> Iterator[nn.Module]:
        """Yield a module of the model, or the whole model, with the present values, for reading.

        All ranks call this together.

        ``name`` is as in ``named_modules``. The module has the user's class and is on this rank's device; its
        parameters have the dtypes that the program computes with, or FP32 with ``masters``, and with ``ema`` the values
        of the moving averages of ``--ema``. Its buffers have this rank's values. A module that was passed to
        ``initialise`` keeps its mode, training or evaluation; one built by a function has the mode in which it was
        built. Other parts of the model are on the meta device. At the end of the block the module's memory is freed,
        and every use of its tensors raises UserError.

        ``units`` are patterns of names of units, as in ``fnmatch``, such as ``model.layers.3``. With it parameters of
        other units are not gathered, and their use raises UserError; buffers are lent all the same.

        Raises:
            UserError: where the model has no such module or unit, the engine was initialised without a module, the
                program keeps no averages, or the block changed a parameter in place.
        """
        with self._values.gathered(name, units, masters=masters, ema=ema) as module:
            yield module

    def publish(
        self,
        address: str | os.PathLike[str] | Receiver,
        *,
        receivers: int | None = None,
        masters: bool = False,
        ema: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> int:
        """Hand the present weights to processes that infer, each with a ``Receiver`` of this address.

        All ranks call this together, between two steps. Parameters and persistent buffers, those of rank 0, have their
        names in the module's ``state_dict``; parameters have the dtypes that the program computes with, or FP32 with
        ``masters``, and with ``ema`` the values of the moving averages. At most one flat buffer of a unit is gathered
        at a time.

        The path of a file, such as ``/dev/shm/policy.safetensors``, is for any number of receivers that see the file of
        rank 0's machine. The new version takes the place of the one before when it is whole, and nobody waits. The file
        remains after the job.

        A ``Receiver`` stands for its address, such as one in this process that updates a copy of the module for
        generating; that is to be a file's, because who publishes at a port waits for its receivers.

        ``host:port`` is a free port of rank 0's machine. This waits until as many ``receivers`` as are given, by
        default one, ask for new weights, and broadcasts each flat to them. ``timeout`` bounds the wait for a receiver.

        Returns:
            The version: 1 more than the one before at this address.

        Raises:
            UserError: on all ranks, where the weights cannot be written, or receivers do not come or are lost, which
                it names; for a receiver at a port. Receivers then keep the version that they have, and training may go
                on.
        """
        return self._values.publish(
            file_of(address) if isinstance(address, Receiver) else address,
            receivers=receivers,
            masters=masters,
            ema=ema,
            timeout=timeout,
        )

    def return_values(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Write the present values back to the user's module, unsharded on every rank. All ranks call this together.

        Its tensors keep their own dtypes, get FP32 master weights where there are any, and are on ``device``, by
        default the CPU. The engine keeps its values.

        Raises:
            UserError: where the program was not compiled from this module.
        """
        self._values.return_to(module, device or torch.device("cpu"))

    def parameters(self, *, masters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters with their names, unsharded, unit by unit, as FP32 master weights where there are any.

        Each tensor is a copy. Tied parameters come once, under their first name. All ranks iterate together, to the
        end, and do nothing else with the engine meanwhile.
        """
        return self._values.parameters(masters=masters)

    def full_parameters(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return all parameters by name, unsharded, FP32 where the program has master weights.

        All ranks call this together.

        With ``ema`` these are the moving averages of ``--ema``; frozen parameters have no average and are returned
        themselves.

        Raises:
            UserError: with ``ema``, where the program keeps no averages.
        """
        return self._values.full_parameters(ema=ema)

    def full_state(self) -> dict[tuple[str, str], Tensor]:
        """Return parameters, master weights and states, unsharded, by (flat, quantity).

        All ranks call this together.
        """
        return self._values.full_state()

    def state_dict(
        self, *, rank0_only: bool = False, only_trained: bool = False
    ) -> dict[str, Tensor]:
        """Return the module's ``state_dict``: unsharded copies of tensors on the CPU. All ranks call this together.

        Parameters are FP32 where the program has master weights. Tied ones appear under each of their names. With
        ``rank0_only`` the result is empty on the other ranks; with ``only_trained`` it lacks frozen parameters.
        """
        return self._values.state_dict(rank0_only=rank0_only, only_trained=only_trained)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load unsharded tensors by the module's names; the optimizer's state is kept. Every rank passes the same.

        Moving averages restart from them as before step 1.

        Returns:
            The missing and the unknown names, as ``nn.Module.load_state_dict`` does.

        Raises:
            UserError: where a tensor has another shape, or with ``strict`` where a name is missing or unknown; then
                nothing has changed. Within a step.
        """
        self._steps.accumulation.require_none("load_state_dict")
        self._checkpoints.join()
        return self._values.load_state_dict(state_dict, is_strict=strict)

    def update_frozen(
        self,
        name: str = "frozen",
        values: Mapping[str, Tensor] | nn.Module | None = None,
        *,
        ema: float = 0.0,
        source: str = "",
        averages: bool = False,
        buffers: bool = False,
    ) -> None:
        """Change the values of a frozen module, such as a teacher. All ranks call this together, between two steps.

        ``name`` is that of a module of ``compile(frozen=...)``, of a part of one, or of a frozen submodule of the
        model. With ``values``, its state dict or a module like it, it gets these, on every rank the same. Otherwise its
        parameters become ``ema * own + (1 - ema) * other``, as ``own.lerp_(other, 1 - ema)`` computes it; by default
        they become the others. The others are the parameters with the same names in the module ``source``, by default
        the model itself: its FP32 master weights where there are some, or with ``averages`` the moving averages of
        ``--ema``. Buffers, such as running statistics, are the module's own, unless ``buffers`` is True, which copies
        those of this rank. A rank changes what it holds, and parameters are gathered only where the two modules lie
        differently.

        Raises:
            UserError: where the program has no such frozen module, a name is missing or a shape differs; where an
                average is to be kept in 16 bits. Then nothing has changed. Within a step.
        """
        self._steps.accumulation.require_none("update_frozen")
        if values is None:
            if not 0 <= ema <= 1:
                raise UserError(f"ema is {ema}, but should be from 0, which copies, to 1.")
            self._values.follow(name, source, decay=ema, averages=averages, buffers=buffers)
            return
        if ema or source or averages or buffers:
            raise UserError(
                "update_frozen sets the given values, or follows a module of the program: leave out either the values, "
                "or ema=, source=, averages= and buffers=."
            )
        given = values.state_dict() if isinstance(values, nn.Module) else values
        self._values.set_frozen(name, given)

    def optimizer_state_dict(
        self, *, rank0_only: bool = False
    ) -> dict[str, dict[str, object] | list[dict[str, object]]]:
        """Return the optimizer's state by parameter name, unsharded, on the CPU. All ranks call this together.

        It has the form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, with torch's names of
        states. With ``rank0_only`` the result is empty on the other ranks. A CheckpointWarning on rank 0 says that it
        lacks the states of parameters that are frozen now.

        Raises:
            UserError: where the program updates nothing.
        """
        self._warn_of_waiting("The state dict of the optimizer lacks the states")
        return self._values.optimizer_state_dict(rank0_only=rank0_only)

    def step(self, batch: Batch | list[Batch], *, outputs: bool = False) -> StepResult:
        """Run one training step on a batch, or on a list of batches over which the gradient accumulates.

        With ``outputs`` the result has what the code returns for the last batch beside the loss, which is computed and
        kept in such steps alone; the first one compiles a program for them.

        A program compiled for accumulation takes any number of them, the same on every rank. A program that runs its
        micro-batches unit by unit takes a multiple of their number.

        Raises:
            UserError: where the shape or dtype of a batch differs from the compiled one, where the program was compiled
                for one batch and gets several, where something changed that the program depends on and does not
                follow, or where another rank is lost. With ``outputs``, where the engine was not made from a module in
                this process.
        """
        if outputs:
            model = self._users_model("engine.step(outputs=True) runs the program of")
            with returned_kept(users_module(model)):
                return replace(self.step(batch), kept=(last_returned(users_module(model)),))
        self._steps.accumulation.require_none("step")
        self._checkpoints.report()
        return self._steps.step(batch if isinstance(batch, list) else [batch])

    def micro_step(self, batch: Batch, is_last: bool | None = None) -> MicroStepResult:
        """Add the gradient of one batch to those of the step; ``update`` ends the step.

        The last micro-step differs from the others: it reduces gradients, and may update parameters as soon as they are
        ready. So a micro-step runs with the next call of ``micro_step`` or ``update``, which shows whether it was the
        last, unless ``is_last`` is given; the batch must not change until then. Where the program runs groups of
        micro-batches unit by unit, a group runs once this is known of its last one. All ranks call this together.

        Raises:
            UserError: as ``step``; where the step's last micro-step has already run, or the step would end within a
                group.
        """
        self._checkpoints.report()
        return self._steps.micro_step(batch, is_last)

    def update(self) -> StepResult:
        """Update the parameters with the gradients of the micro-steps since the last update.

        Raises:
            UserError: as ``step``; where no micro-step precedes it, or the last one was declared not to be the last.
        """
        return self._steps.update()

    def gradients(self, *patterns: str) -> dict[str, Tensor]:
        """Return the gradients of the step's loss for the parameters of these names, before clipping, unsharded.

        Call it between ``micro_step`` and ``update``: it runs the last micro-step, which waits. ``patterns`` are those
        of names, as in ``fnmatch``; without any all gradients are returned. The tensors are f32, copies of the
        parameters' shapes on this rank's device. All ranks call this together.

        Raises:
            UserError: where the update overlaps with the backward, as it does by default; where there is no micro-step
                before, or a pattern has no trained parameter.
        """
        return self._steps.gradients(patterns)

    def gradient_norms(self, *patterns: str) -> dict[str, float]:
        """Return the L2 norm of the gradient of each parameter of these names, as ``gradients`` does.

        No rank gathers a gradient.
        """
        return self._steps.gradient_norms(patterns)

    @property
    def last_result(self) -> StepResult | None:
        """The result of the last step, including one by ``optimizer.step()``; None before the first."""
        return self._steps.last_result

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without loss scaling. Reading it synchronizes with the device."""
        return self._steps.loss_scale

    def evaluate(self, batch: Batch) -> Evaluation:
        """Evaluate one batch of this rank with the model in ``eval()`` mode; this does not affect training.

        All ranks call it together, before the first step or between two steps.

        Raises:
            UserError: where the program has no section ``evaluate``, or the batch does not fit.
        """
        return self._steps.evaluate(batch)

    def watch(self, pattern: str, *patterns: str) -> WatchedModules:
        """Return a mapping that has what modules return, by their names, after each of the following steps.

        The patterns are those of names in ``named_modules``, as in ``fnmatch``, such as ``blocks.*.mlp``. The next step
        or evaluation compiles a program that keeps these tensors of its last micro-batch, and needs memory for them;
        after the mapping's ``close``, or the end of its ``with`` block, the engine goes on with the earlier program.
        All ranks call this together.

        Raises:
            UserError: where a pattern has no module, or the engine was not made from a module in this process.
        """
        model = self._users_model("engine.watch looks into")
        return WatchedModules(model, (pattern, *patterns))

    def _users_model(self, what: str) -> nn.Module:
        model = self._programs.model
        if model is None:
            raise UserError(
                f"{what} the module that zeroir.compile was given, and the engine was made from a file."
            )
        return model

    def average(self, value: float) -> float:
        """Return the mean of every rank's value, added in rank order. All ranks call this together."""
        return self.job.average(value)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        metrics: Mapping[str, float] | None = None,
        shared: object = None,
        state: object = None,
        wait: bool = True,
        read_back: bool = False,
    ) -> PendingSave:
        """Save everything that training needs to continue to a new checkpoint at ``path``.

        All ranks call this together.

        With ``wait=False`` training continues as soon as this rank's state is copied to host memory, and a thread
        writes it; a failure is raised by the result's ``wait``, or else by the next ``step``, ``save`` or ``close``. A
        previous save is finished first. ``metrics`` of rank 0 are stored in the checkpoint. ``shared`` of rank 0 and
        ``state`` of each rank are trees of numbers, texts, lists, tuples, dictionaries, tensors and arrays, which
        ``load`` returns. Within a step its micro-steps so far are saved as well. With ``read_back`` the files are
        compared with their checksums before the save ends.

        Raises:
            UserError: where the checkpoint cannot be written, ``path`` exists, an earlier save failed, or the
                last micro-step waits for the next.
        """
        self._steps.accumulation.require_known()
        self._warn_of_waiting(f"The checkpoint '{path}' lacks the optimizer states and FP32 copies")
        return self._checkpoints.save(
            self._running,
            os.fspath(path),
            metrics=metrics or {},
            shared=shared,
            states=[state],
            wait=wait,
            read_back=read_back,
        )

    def _warn_of_waiting(self, what_lacks: str) -> None:
        waiting = sorted(self._values.waiting_parameters)
        if waiting and self.rank == 0:
            warnings.warn(
                f"{what_lacks} of {len(waiting)} parameters that are frozen now, such as {waiting[0]}: trained again "
                "after a load, they begin with new ones.",
                CheckpointWarning,
                stacklevel=3,
            )

    def load(self, path: str | os.PathLike[str], *, weights_only: bool = False) -> LoadedState:
        """Load a checkpoint, whatever the stage, mesh and precision that saved it. All ranks call this together.

        It sets parameters, moving averages, optimizer states, buffers of the model, loss scale, step count, settings of
        optimizer groups and seed; the engine need not be initialised before. Everything is checked first. The sums of
        an unfinished step are loaded only by an engine with the same program. ``weights_only`` loads parameters,
        averages and buffers, and training starts over. A CheckpointWarning on rank 0 names what the checkpoint lacks.

        Raises:
            UserError: where a file is damaged, or the checkpoint has other parameters, shapes, buffers or optimizers
                than the program; then the engine is unchanged.
        """
        loaded = self._checkpoints.load(
            self._running,
            os.fspath(path),
            weights_only=weights_only,
            has_values=self._values.are_set,
            go_on_within=None
            if self.signatures.running.accumulating is None
            else self._running_within,
        )
        self._values.are_set = True
        self._values.forget_waiting()
        self._steps.accumulation.go_on(loaded.micro_steps)
        return loaded

    @property
    def _running(self) -> Running:
        return Running(
            program=self.program,
            memories=[self.rank_program.memory],
            executor=self.rank_program.executor,
            optimizer=self.rank_program.optimizer_if_any,
            facts=self._values.facts,
            others=self._values.others,
        )

    def _running_within(self) -> Running:
        """Return the ranks of this process, with the program for steps of several batches."""
        self._programs.accumulate()
        return self._running

    def first_bad_parameter(self) -> BadParameter | None:
        """Return the first parameter whose gradient is not finite, between the last micro-step and the update.

        Return None where there is none. An update that overlaps the backward has changed gradients by then: compile
        with ``overlap_update=False``. All ranks call this together.
        """
        with self.rank_program.between_sections():
            return first_bad_parameter(self.program, self.rank_program.memory, self.job)

    def record(self, step: int) -> None:
        """Record the start and end of every op of that step, counted from 1, for ``timelines``."""
        self._recording.record(step)

    def timelines(self) -> list[list[Span]] | None:
        """Return the recorded spans of every rank, on one clock; None on ranks other than 0.

        All ranks call this together.
        """
        return self._recording.timelines()

    def workspaces(self, step: Callable[[], object]) -> Mapping[str, int]:
        """Return the bytes that each segment uses beside its buffers during ``step``, which steps this engine.

        By digest.
        """
        return self._recording.workspaces(step)

    def finish(self) -> None:
        """Wait until this rank's device has done all submitted work."""
        self.rank_program.executor.finish()

    def close(self, *, return_values: bool = True) -> None:
        """Stop the streams and destroy the process groups, once the device has done all submitted work.

        The current save is finished first. The user's module whose values the engine took gets the present ones back,
        whole on every rank, as by ``return_values``; not so with ``return_values=False``, after a failed step, or while
        an exception is handled, because other ranks may be elsewhere then. The script's own optimizer updates again
        from then on, with new states. All ranks call this together.

        After a failed step this waits for nothing else, because a stream may hang in a collective with a lost peer. On
        a CUDA device the groups then remain until the process ends and torch aborts them, because destroying them would
        wait for their collectives.

        Raises:
            UserError: where the last save failed and its error was not raised before.
        """
        try:
            self._checkpoints.close()
            has_failed = self.rank_program.executor.has_failed or sys.exc_info()[1] is not None
            if return_values and not has_failed:
                self._values.give_back()
        finally:
            self._programs.close()
            self._values.close()
            self.rank_program.close()


def _with_index(device: torch.device) -> torch.device:
    """Return the device with an index: for CUDA without one the current device, which differs between threads."""
    return torch.device("cuda", driver().current_device()) if str(device) == "cuda" else device
