"""Saving and loading the state of an engine: a thread writes checkpoints, one at a time; a load blocks training."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
from pydantic import JsonValue
from torch import Tensor

from zeroir import __version__
from zeroir.checkpoint.manifest import Manifest, OpenStep, Origin
from zeroir.checkpoint.reading import read_manifest
from zeroir.checkpoint.state_tree import StoredArray, encode
from zeroir.errors import CheckpointWarning, UserError
from zeroir.ir.buffers import Space
from zeroir.ir.program import MICRO_STEP, SAVE, Program, why_not_save
from zeroir.runtime.checkpoint.background import BackgroundWriter, PendingSave
from zeroir.runtime.checkpoint.compatibility import require_loadable
from zeroir.runtime.checkpoint.groups import (
    require_groups,
    restore_groups,
    stored_groups,
)
from zeroir.runtime.checkpoint.loading import (
    LOADING,
    SHARED,
    LoadedState,
    fill_kept_scalars,
    fill_memory,
    fill_open_step,
    rank_state,
    read_together,
    require_open_step,
    shared_state,
    verify_share,
)
from zeroir.runtime.checkpoint.mapping import StoredParameters
from zeroir.runtime.checkpoint.model_facts import ModelFacts
from zeroir.runtime.checkpoint.rounds import Rounds, RoundsAlone, open_rounds
from zeroir.runtime.checkpoint.saving import SAVING, Leader, RankSave, save_in_rounds
from zeroir.runtime.checkpoint.snapshots import SnapshotMaker, with_unread
from zeroir.runtime.checkpoint.torch_trees import TorchTensors
from zeroir.runtime.comm.job import Backend, Job, digest
from zeroir.runtime.engine.live_optimizer import LiveOptimizer
from zeroir.runtime.execution.executor import StepExecutor
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.host_snapshot import SavedState


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The state that a save reads and a load fills: the ranks of this process, and the settings of their optimizer.

    ``facts`` describes the model, if there is one; only rank 0 calls it. ``others`` are the values of the model's
    tensors that the program does not hold.
    """

    program: Program
    memories: Sequence[RankMemory]
    executor: StepExecutor
    optimizer: LiveOptimizer | None
    facts: Callable[[], ModelFacts]
    others: Mapping[str, Tensor] = field(default_factory=dict)


class Checkpointer:
    """Saves and loads the state of the ranks of this process. All processes of the job call each method together.

    ``timeout`` is the timeout of the job's collectives.
    """

    def __init__(self, job: Job, timeout: timedelta) -> None:
        self._job = job
        self._timeout = timeout
        self._rounds: Rounds | None = None
        self._writer = BackgroundWriter()
        self._digested: tuple[Program, str] | None = None

    def save(
        self,
        running: Running,
        path: str,
        *,
        metrics: Mapping[str, float],
        shared: object,
        states: Sequence[object],
        wait: bool,
        read_back: bool,
    ) -> PendingSave:
        """Save a checkpoint, as ``Engine.save`` describes; ``states`` has one state for each rank of this process.

        A program with state on disk does not copy it, so training always waits for the save.
        """
        if self._job.backend is Backend.FAKE:
            raise UserError(
                "The backend fake simulates the other ranks, so there is nothing to save of them."
            )
        if not wait and SAVE not in running.program.section_by_name:
            wait = any(b.is_persistent and b.space is Space.DISK for b in running.program.buffers)
            if not wait:
                raise UserError(why_not_save(running.program))
        self._writer.join()
        rounds = self._open_rounds()
        makers: list[SnapshotMaker] = []
        save: Callable[[], str]
        try:
            # Only rank 0's shared state is saved.
            shared_json, shared_arrays = encode(
                shared if self._job.rank == 0 else None, prefix=SHARED, codec=TorchTensors()
            )
            own_states = [encode(state, codec=TorchTensors()) for state in states]
            leader = self._leader(running, path, metrics, shared_json)
            makers += _snapshot_makers(running, is_copied=not wait)
            save = partial(
                self._write,
                rounds,
                leader,
                makers,
                own_states,
                shared_arrays,
                read_back=read_back,
                is_awaited=wait,
            )
        except Exception as error:  # noqa: BLE001 - the other ranks learn of it in the first round
            save = partial(_fail, rounds, error)
        pending = self._writer.begin(path, partial(_releasing, makers, save))
        if wait:
            pending.wait()
        return pending

    def _leader(
        self, running: Running, path: str, metrics: Mapping[str, float], shared: JsonValue
    ) -> Leader:
        """Return rank 0's part of the checkpoint; on other ranks it lacks the facts of the model."""
        executor, optimizer = running.executor, running.optimizer
        facts = running.facts() if self._job.rank == 0 else ModelFacts()
        base = Manifest(
            step=executor.step_count,
            seed=executor.seed,
            origin=self._origin(running.program),
            metrics=_numbers(metrics),
            groups=() if optimizer is None else stored_groups(optimizer),
            shared=shared,
            config=facts.config,
            config_owner=facts.config_owner,
        )
        return Leader(
            target=path,
            program=running.program,
            base=base,
            facts=facts,
            unread=facts.unread(running.others),
            micro_steps=executor.micro_steps_done or None,
        )

    def _write(
        self,
        rounds: Rounds,
        leader: Leader,
        makers: Sequence[SnapshotMaker],
        states: Sequence[tuple[JsonValue, Mapping[str, StoredArray]]],
        shared: Mapping[str, StoredArray],
        *,
        read_back: bool,
        is_awaited: bool,
    ) -> str:
        """Write the checkpoint in the writer's thread, and return its path."""

        def take() -> list[RankSave]:
            return [
                RankSave(
                    rank=maker.rank,
                    # Only rank 0 knows the model, so it writes the tensors that its program does not hold.
                    snapshot=with_unread(maker.snapshot(), leader.unread),
                    state=state,
                    arrays={**arrays, **shared} if maker.rank == 0 else arrays,
                    is_awaited=is_awaited,
                )
                for maker, (state, arrays) in zip(makers, states, strict=True)
            ]

        path = save_in_rounds(rounds, take, leader)
        if read_back:
            rounds.hold(SAVING, partial(self._read_back, path))
        return path

    def _read_back(self, path: str) -> bytes:
        """Compare this rank's share of the bytes on disk with their checksums."""
        try:
            manifest = read_manifest(path)
            verify_share(path, manifest, self._job.rank, self._world_size, from_disk=True)
        except UserError as error:
            raise UserError(f"What was just saved cannot be read back: {error}") from error
        return b""

    def load(
        self,
        running: Running,
        path: str,
        *,
        weights_only: bool,
        has_values: bool,
        go_on_within: Callable[[], Running] | None = None,
    ) -> LoadedState:
        """Load a checkpoint, as ``Engine.load`` describes.

        ``go_on_within`` prepares the engine for a checkpoint that was saved between the micro-steps of a step.
        """
        self._writer.join()
        rounds = self._open_rounds()

        def require(manifest: Manifest) -> list[str]:
            """Check that the program can load the checkpoint; return sentences on what starts over."""
            stored = StoredParameters(manifest, path, weights_only=weights_only)
            if running.optimizer is not None and not weights_only:
                require_groups(path, manifest.groups, running.optimizer)
            return require_loadable(
                running.program, stored, weights_only=weights_only, has_values=has_values
            )

        manifest = read_together(rounds, path, require)
        notes: list[str] = []
        states: list[object] = [None, None]

        def verify() -> bytes:
            notes.extend(require(manifest))
            verify_share(path, manifest, self._job.rank, self._world_size)
            if not weights_only:
                own_rank = running.memories[0].rank
                states[:] = shared_state(path, manifest), rank_state(path, manifest, own_rank)
            return b""

        rounds.hold(LOADING, verify)
        if manifest.open_step is not None and go_on_within is not None and not weights_only:
            running = go_on_within()
        program, executor = running.program, running.executor
        open_step, note = (None, None) if weights_only else self._open_step(program, manifest)
        notes += [] if note is None else [note]
        if open_step is not None:
            own_ranks = [memory.rank for memory in running.memories]
            rounds.hold(LOADING, partial(require_open_step, program, path, open_step, own_ranks))
        stored = StoredParameters(manifest, path, weights_only=weights_only)
        sums: list[float] = []

        def fill() -> bytes:
            for memory in running.memories:
                fill_memory(program, memory, stored)
                memory.allocate()
                if not weights_only:
                    fill_kept_scalars(program, memory, manifest)
            return b""

        def fill_sums(step: OpenStep) -> bytes:
            sums.extend(fill_open_step(memory, path, manifest, step) for memory in running.memories)
            return b""

        with executor.entered(), executor.changing():
            executor.finish()
            executor.restart(0 if weights_only else manifest.step)
            rounds.hold(LOADING, fill)
            if open_step is not None:
                executor.establish(MICRO_STEP)
                rounds.hold(LOADING, partial(fill_sums, open_step))
                executor.go_on_within(open_step.micro_steps, sums)
        if not weights_only:
            executor.seed = executor.seed if manifest.seed is None else manifest.seed
        if running.optimizer is not None:
            running.optimizer.forget_written()
            if not weights_only and manifest.groups:
                notes += restore_groups(manifest.groups, running.optimizer)
        if self._job.rank == 0:
            for note in notes:
                warnings.warn(f"'{path}' {note}.", CheckpointWarning, stacklevel=3)
        return LoadedState(
            path=path,
            manifest=manifest,
            shared=states[0],
            state=states[1],
            micro_steps=0 if open_step is None else open_step.micro_steps,
            notes=tuple(notes),
        )

    def _open_step(
        self, program: Program, manifest: Manifest
    ) -> tuple[OpenStep | None, str | None]:
        """Return the unfinished step of a checkpoint if this program can continue it.

        Otherwise a sentence on why not.
        """
        step = manifest.open_step
        if step is None or manifest.origin.program_digest == self._digest(program):
            return step, None
        return None, (
            f"was saved by another program after {step.micro_steps} micro-steps of a step: that step begins anew"
        )

    def report(self) -> None:
        """Raise the error of a finished save that failed, unless it was raised before."""
        self._writer.report()

    def join(self) -> None:
        """Wait for the current save, before a change to state that it reads without a copy.

        Raises:
            UserError: as ``report``.
        """
        self._writer.join()

    def close(self) -> None:
        """Wait for the current save, and destroy the process group.

        Raises:
            UserError: where the save failed and its error was not raised before.
        """
        try:
            self._writer.close()
        finally:
            if self._rounds is not None:
                self._rounds.close()
                self._rounds = None

    @property
    def _world_size(self) -> int:
        return 1 if self._job.is_alone else torch.distributed.get_world_size()

    def _open_rounds(self) -> Rounds:
        if self._rounds is None:
            self._rounds = RoundsAlone() if self._job.is_alone else open_rounds(self._timeout)
        return self._rounds

    def _origin(self, program: Program) -> Origin:
        return Origin(
            zeroir=__version__,
            torch=torch.__version__,
            program_digest=self._digest(program),
            fingerprint=program.fingerprint,
            world_size=program.mesh.world_size,
            mesh=tuple((axis.name, axis.size) for axis in program.mesh.axes),
            options=program.options.pairs,
            saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _digest(self, program: Program) -> str:
        if self._digested is None or self._digested[0] is not program:
            self._digested = program, digest(program)
        return self._digested[1]


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Convert metrics to Python floats, including numpy's numbers and tensors with one element.

    Raises:
        UserError: where a value is not a number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            kind = type(value).__qualname__
            raise UserError(f"The metric {name!r} is of type {kind}: give a number.") from None
    return numbers


def _snapshot_makers(running: Running, *, is_copied: bool) -> list[SnapshotMaker]:
    """Return the snapshot makers of this process's ranks; with ``is_copied`` training continues during the save."""
    executor, memories = running.executor, running.memories
    weight_sums: Sequence[float | None] = [None] * len(memories)
    if executor.micro_steps_done:
        weight_sums = executor.weight_sums()
    saved: Sequence[SavedState | None] = [None] * len(memories)
    if is_copied:
        saved = executor.save_state()
    try:
        with executor.entered():
            if not is_copied:
                # The writer's thread must not depend on streams.
                executor.finish()
            return [
                SnapshotMaker(running.program, memory, saved=copies, weight_sum=weight_sum)
                for memory, copies, weight_sum in zip(memories, saved, weight_sums, strict=True)
            ]
    except BaseException:
        for copies in saved:
            if copies is not None:
                copies.release()
        raise


def _releasing(makers: Sequence[SnapshotMaker], save: Callable[[], str]) -> str:
    try:
        return save()
    finally:
        for maker in makers:
            maker.release()


def _fail(rounds: Rounds, error: Exception) -> str:
    """Tell the other ranks of an error on this one, and raise it."""

    def share() -> bytes:
        raise error

    return rounds.hold(SAVING, share).decode()
