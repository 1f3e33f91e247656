"""The engine: one rank of a program on this process's device. It initialises, steps, evaluates and shows its state."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroir.errors import GraphWarning, UserError
from zeroir.ir.program import Program
from zeroir.ir.spans import Span
from zeroir.runtime.checkpoint.background import PendingSave
from zeroir.runtime.checkpoint.checkpointer import Checkpointer, Running
from zeroir.runtime.checkpoint.loading import LoadedState
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT, Backend, Job
from zeroir.runtime.distributed.rank_position import RankPosition
from zeroir.runtime.engine.accumulation import Accumulation, MicroStepResult
from zeroir.runtime.engine.live_optimizer import LiveOptimizer
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.engine.recording import Recording
from zeroir.runtime.engine.results import Evaluation, StepResult
from zeroir.runtime.engine.values import ModelValues
from zeroir.runtime.execution.batch import inputs_of
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.memory.malloc import return_freed_memory
from zeroir.runtime.state import state as state_of_buffers
from zeroir.runtime.state.gathered_module import DeepCopy
from zeroir.runtime.state.module_values import Factory, StateSource
from zeroir.runtime.training.lr_schedule import Scheduler
from zeroir.runtime.training.micro_batch_weights import WeightFunction
from zeroir.runtime.training.not_finite import BadParameter, first_bad_parameter
from zeroir.torch_ops.batches import Batch


class Engine:
    """One rank of a program on this process's device.

    The default process group must exist (``rendezvous.join_job``), unless the program is for one rank or the backend
    is ``fake``. All ranks construct their engines and call their methods together, in one order. With ``cuda_graphs``
    sections are launched as CUDA graphs where possible; see ``cuda_graphs``. With ``self_check`` every distinct kernel
    is first compared with its operators; see ``self_check``. ``weight`` gives the weight of a batch where the program
    takes weights. ``accumulating`` makes the program for steps of several batches; the engine goes on with it when it
    first gets several. Buffers on disk are in a file without a name in ``disk_folder``, by default in the folder for
    temporary files; nothing is left of it when the process ends.

    Raises:
        UserError: where the programs of two ranks differ, the world size of the job is not the program's, or the result
            of a kernel differs from its operators'.
    """

    def __init__(
        self,
        program: Program,
        *,
        backend: Backend | None = None,
        device: torch.device | None = None,
        kernels: KernelBackend = KernelBackend.EAGER,
        seed: int = 0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        cuda_graphs: bool = False,
        self_check: bool = False,
        weight: WeightFunction | None = None,
        accumulating: Callable[[], Program] | None = None,
        disk_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.device = _with_index(device or torch.device("cpu"))
        settings = EngineSettings(
            backend=backend,
            kernels=kernels,
            seed=seed,
            timeout=timeout,
            cuda_graphs=cuda_graphs,
            self_check=self_check,
            weight=weight,
            disk_folder=None if disk_folder is None else Path(disk_folder),
        )
        self._accumulating = accumulating
        if self.device.type == "cpu":
            return_freed_memory()
        self.rank_program = RankProgram(program, self.device, settings, self.update)
        self._values = ModelValues(self.rank_program)
        self._recording = Recording(self.rank_program)
        self._accumulation = Accumulation(
            lambda batch: inputs_of(self.program, batch),
            self._micro_steps,
            lambda: self.program.interleaved,
        )
        self._last_result: StepResult | None = None
        self._checkpoints = Checkpointer(self.job, timeout)
        if cuda_graphs and self.device.type != "cuda" and self.rank == 0:
            warnings.warn(
                f"There are no CUDA graphs on the device {self.device}: ops are issued one by one.",
                GraphWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.world_size} on {self.device}"
        return f"<{type(self).__name__} of {where} after step {self.step_count}: {self.program.outline}>"

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
        """Training steps that ``step`` has carried out, skipped ones included."""
        return self.rank_program.step_count

    @property
    def program(self) -> Program:
        """The program that runs now."""
        return self.rank_program.program

    @property
    def job(self) -> Job:
        """The ranks that run it together."""
        return self.rank_program.job

    @property
    def optimizer(self) -> LiveOptimizer:
        """The settings of the optimizer groups; changes count from the next update. All ranks change them alike.

        Raises:
            UserError: where the program updates nothing.
        """
        return self.rank_program.optimizer

    def position(self) -> RankPosition:
        """Where this rank is in its program. Any thread may ask."""
        return self.rank_program.executor.position()

    def buffer(self, name: str) -> Tensor:
        """A buffer of this rank; it is a copy only where the buffer is on disk."""
        return self.rank_program.memory.read(name)

    def scheduler(self, steps: int | None = None) -> Scheduler:
        """The program's learning-rate schedule, which drives ``optimizer``: call its ``step`` after each step.

        ``steps`` is the number of steps of the run, for a schedule that names no total. The settings of step 1 are set
        at once.

        Raises:
            UserError: where the program has no schedule, or the schedule needs ``steps``.
        """
        schedule = self.program.option.get("schedule")
        if schedule is None:
            raise UserError(
                "The program was compiled without a schedule: compile it with one, or drive engine.optimizer with a "
                "scheduler of torch.optim.lr_scheduler."
            )
        return Scheduler(schedule, self.optimizer.param_groups, steps)

    def go_on_with(self, program: Program) -> None:
        """Go on with another program of the same model, such as one for other batches. All ranks call this together.

        Parameters, states, buffers of the model, the loss scale, the step count and the settings stay as they are. The
        new program takes several batches a step only if it was compiled for that.

        Raises:
            UserError: within a step; where the program has other parameters, states or buffers of the model, or is for
                another mesh.
        """
        self._accumulation.require_none("go_on_with")
        self._checkpoints.join()
        state_of_buffers.require_same_state(self.program, program)
        self._accumulating = None
        self.rank_program.replace(program)

    def _accumulate(self) -> None:
        """Go on with the program for accumulation."""
        assert self._accumulating is not None
        program = self._accumulating()
        self._accumulating = None
        self.rank_program.replace(program)

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
        """Give every buffer its value before step 1, from the module on rank 0. All ranks call this together.

        ``source`` is a function that builds the module under ``seed``, and only rank 0 calls it; or a module in hand,
        whose present values count. Its tensors become meta tensors of the same shape as their values move to the
        engine, on all ranks, unless ``keep_module`` says otherwise. Parameters and persistent buffers that ``state``
        has take their values from it. ``deep_copy`` and ``adapt`` make the modules that ``gathered`` lends; see
        ``gathered``.

        Raises:
            UserError: where the program was compiled from another module, the state lacks a tensor, or the values of a
                rank differ from those of rank 0. A note on an error says whether a module in hand has lost its values.
        """
        self._values.initialise(
            source, seed, state=state, keep_module=keep_module, deep_copy=deep_copy, adapt=adapt
        )

    def initialise_flats(self, values: Mapping[str, Tensor]) -> None:
        """Give buffers values by name; see ``state.initialise_flats``."""
        self._values.initialise_flats(values)

    @contextmanager
    def gathered(
        self, name: str = "", *, masters: bool = False, ema: bool = False
    ) -> Iterator[nn.Module]:
        """Lend a module of the model, or the whole, with the present values, for reading. All ranks call this together.

        ``name`` is as in ``named_modules``. The module is the user's class on this rank's device; its parameters have
        the dtypes that the program computes with, or FP32 with ``masters``, and with ``ema`` the values of the moving
        averages of ``--ema``. Its buffers have this rank's values. A module in hand is lent in the mode, training or
        evaluation, that the user left it in; another one as it is built. Parts of the model that are not lent stay on
        the meta device. At the end of the block the module's memory is freed, and every use of its tensors raises a
        UserError.

        Raises:
            UserError: where the model has no such module, the engine was initialised without a module, the program
                keeps no averages, or the block changed a parameter in place.
        """
        with self._values.gathered(name, masters=masters, ema=ema) as module:
            yield module

    def return_values(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Give the module in hand the present values back, whole on every rank. All ranks call this together.

        Its tensors get their own dtypes, FP32 masters where there are some, on ``device``, by default the CPU. The
        engine keeps its values.

        Raises:
            UserError: where the program was not compiled from this module.
        """
        self._values.return_to(module, device or torch.device("cpu"))

    def parameters(self, *, masters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its name, whole, one unit after the other, FP32 masters where there are some.

        Each tensor is a copy. Tied parameters come under their first name. All ranks iterate together, to the end, and
        do nothing else with the engine meanwhile.
        """
        return self._values.parameters(masters=masters)

    def full_parameters(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Every parameter by name, whole, FP32 where the program has masters. All ranks call this together.

        With ``ema`` these are the moving averages of ``--ema``; frozen parameters are themselves.

        Raises:
            UserError: with ``ema``, where the program keeps no averages.
        """
        return self._values.full_parameters(ema=ema)

    def full_state(self) -> dict[tuple[str, str], Tensor]:
        """Parameters, masters and optimizer states, whole, by (flat, quantity). All ranks call this together."""
        return self._values.full_state()

    def state_dict(
        self, *, rank0_only: bool = False, only_trained: bool = False
    ) -> dict[str, Tensor]:
        """What the module's ``state_dict`` would have: whole tensors on the CPU, copied. All ranks call this together.

        Parameters are FP32 where the program has masters. Tied ones stand under each of their names. With
        ``rank0_only`` the result is empty on the other ranks, with ``only_trained`` it lacks frozen parameters.
        """
        return self._values.state_dict(rank0_only=rank0_only, only_trained=only_trained)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Take over whole tensors by the names of the module; the optimizer's state stays. Every rank gives them alike.

        Moving averages begin with them before step 1. Returns the missing and the unknown names, as
        ``nn.Module.load_state_dict`` does.

        Raises:
            UserError: where a tensor has another shape, with ``strict`` where a name is missing or unknown; then
                nothing has changed. Within a step.
        """
        self._accumulation.require_none("load_state_dict")
        self._checkpoints.join()
        return self._values.load_state_dict(state_dict, is_strict=strict)

    def optimizer_state_dict(
        self, *, rank0_only: bool = False
    ) -> dict[str, dict[str, object] | list[dict[str, object]]]:
        """The optimizer's state by the names of parameters, whole, on the CPU. All ranks call this together.

        Its form is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, with torch's names of
        states. With ``rank0_only`` the result is empty on the other ranks.

        Raises:
            UserError: where the program updates nothing.
        """
        return self._values.optimizer_state_dict(rank0_only=rank0_only)

    def step(self, batch: Batch | list[Batch]) -> StepResult:
        """One training step on a batch, or on a list of batches, over which the gradient accumulates.

        A program that was compiled for accumulation takes any number of them, the same on every rank. One that runs its
        micro-batches unit by unit takes as many as it runs so, or a multiple.

        Raises:
            UserError: where the shape or dtype of a batch is not the compiled one, where the program was compiled for
                one batch and gets several, or where another rank is lost.
        """
        self._accumulation.require_none("step")
        self._checkpoints.report()
        batches: list[Batch] = batch if isinstance(batch, list) else [batch]
        if len(batches) > 1:
            for each in batches:  # before the first of them adds to the sums
                inputs_of(self.program, each)
            if self._accumulating is not None:
                self._accumulate()
        self.rank_program.allocate_once()
        (result,) = self.rank_program.executor.step([batches])
        self._last_result = StepResult(rank=result)
        return self._last_result

    def micro_step(self, batch: Batch, is_last: bool | None = None) -> MicroStepResult:
        """Add the gradient of one batch to those of the step; ``update`` ends the step.

        The last micro-step differs from the others: it reduces gradients, and may update parameters as they get ready.
        So a micro-step runs with the next call of ``micro_step`` or ``update``, which shows whether it was the last,
        unless ``is_last`` says so at once; the batch must stay as it is until then. Where the program runs groups of
        micro-batches unit by unit, a group runs when it is known of its last one. All ranks call this together.

        Raises:
            UserError: as ``step``; where the step's last micro-step has run already, or the step would end within a
                group.
        """
        self._checkpoints.report()
        return self._accumulation.micro_step(batch, is_last)

    def update(self) -> StepResult:
        """Update the parameters by the gradients of the micro-steps since the last update.

        Raises:
            UserError: as ``step``; where no micro-step precedes it, or the last one was said not to be the last.
        """
        self._accumulation.finish()
        (result,) = self.rank_program.executor.update()
        self._last_result = StepResult(rank=result)
        return self._last_result

    @property
    def last_result(self) -> StepResult | None:
        """The result of the last step, also where ``optimizer.step()`` took it; None before the first."""
        return self._last_result

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without loss scaling. Reading it waits for the device."""
        (scale,) = self.rank_program.executor.loss_scale()
        return scale

    def evaluate(self, batch: Batch) -> Evaluation:
        """Evaluate one batch of this rank as the model does under ``eval()``; training goes on as if it had not been.

        All ranks call it together, before the first step or between two steps.

        Raises:
            UserError: where the program has no section ``evaluate``, or the batch does not fit.
        """
        self._accumulation.require_none("evaluate")
        self.rank_program.allocate_once()
        (evaluation,) = self.rank_program.executor.evaluate([batch])
        return Evaluation(rank=evaluation)

    def average(self, value: float) -> float:
        """The mean of every rank's value, added in rank order. All ranks call this together."""
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
        """Save everything that training needs to go on to a new checkpoint at ``path``. All ranks call this together.

        With ``wait=False`` training goes on as soon as this rank's state is copied to memory of the host, and a thread
        writes it; a failure is raised by the next ``step``, ``save`` or ``close``, if not by the result's ``wait``. A
        save that is under way is finished first. ``metrics`` of rank 0 are kept with the checkpoint. ``shared`` of rank
        0 and ``state`` of each rank are trees of numbers, texts, lists, tuples, dictionaries, tensors and arrays, which
        ``load`` returns. Within a step its micro-steps so far are saved, too. With ``read_back`` the files are compared
        with their checksums before the save ends.

        Raises:
            UserError: where the checkpoint cannot be written, something is at ``path``, an earlier save failed, or the
                last micro-step waits for the next.
        """
        self._accumulation.require_known()
        return self._checkpoints.save(
            self._running,
            os.fspath(path),
            metrics=metrics or {},
            shared=shared,
            states=[state],
            wait=wait,
            read_back=read_back,
        )

    def load(self, path: str | os.PathLike[str], *, weights_only: bool = False) -> LoadedState:
        """Go on with a checkpoint, whatever the stage, mesh and precision that saved it. All ranks call this together.

        Parameters, moving averages, optimizer states, buffers of the model, loss scale, step count, settings of
        optimizer groups and seed come from it; an engine that was not initialised needs nothing else. Everything is
        checked first. Of the sums of a step that had begun an engine with another program takes none. ``weights_only``
        loads parameters, averages and buffers, and training begins anew. A CheckpointWarning on rank 0 names what the
        checkpoint lacks.

        Raises:
            UserError: where a file is damaged, or the checkpoint has other parameters, shapes, buffers or optimizers
                than the program; then the engine is as it was.
        """
        loaded = self._checkpoints.load(
            self._running,
            os.fspath(path),
            weights_only=weights_only,
            has_values=self._values.are_set,
            go_on_within=None if self._accumulating is None else self._running_within,
        )
        self._values.are_set = True
        self._accumulation.go_on(loaded.micro_steps)
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
        """What runs a checkpoint that was saved within a step: the program for steps of several batches."""
        self._accumulate()
        return self._running

    def first_bad_parameter(self) -> BadParameter | None:
        """The first parameter whose gradient is not finite, between the last micro-step and the update.

        None where there is none. An update that overlaps the backward has changed gradients by then: compile with
        ``overlap_update=False``. All ranks call this together.
        """
        with self.rank_program.between_sections():
            return first_bad_parameter(self.program, self.rank_program.memory, self.job)

    def record(self, step: int) -> None:
        """Record the beginning and end of every op of that step, counting from 1, for ``timelines``."""
        self._recording.record(step)

    def timelines(self) -> list[list[Span]] | None:
        """The recorded spans of every rank, on one clock; None on ranks other than 0. All ranks call this together."""
        return self._recording.timelines()

    def workspaces(self, step: Callable[[], object]) -> Mapping[str, int]:
        """The bytes that each segment takes beside its buffers during ``step``, which steps this engine; by digest."""
        return self._recording.workspaces(step)

    def finish(self) -> None:
        """Return when this rank's device has done all submitted work."""
        self.rank_program.executor.finish()

    def close(self) -> None:
        """Stop the streams and destroy the process groups, once the device has done all submitted work.

        A save under way is finished first. After a failure of a step this waits for nothing else, because a stream may
        hang in a collective with a lost peer. On a CUDA device the groups are then left to the end of the process, at
        which torch aborts them, since it would wait for their collectives before.

        Raises:
            UserError: where the last save failed, and nothing has raised its error yet.
        """
        try:
            self._checkpoints.close()
        finally:
            self.rank_program.close()

    def _micro_steps(self, batches: Sequence[Batch], is_last: bool) -> Sequence[Tensor]:
        if not is_last and self._accumulating is not None:
            self._accumulate()
        self.rank_program.allocate_once()
        (losses,) = self.rank_program.executor.micro_steps([batches], is_last=is_last)
        return losses.unbind()


def _with_index(device: torch.device) -> torch.device:
    """The device itself; for CUDA without an index the current one. Threads have current devices of their own."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
