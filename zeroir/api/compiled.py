"""A compiled program: an artefact, its verification, and its public methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zeroir import artifact as artifacts
from zeroir.api.compilations import Compile, CompileSource
from zeroir.api.keywords import flat_values
from zeroir.api.lowering import Lowered, lower, verified
from zeroir.api.search.idle_offload import warn_of_idle_offload
from zeroir.artifact import Artifact, ConfigRecord
from zeroir.config import (
    CompileOptions,
    changed,
    for_world_size,
    options_of,
    why_not_evaluate,
)
from zeroir.config.shapes import values_given
from zeroir.errors import UserError
from zeroir.ir.analysis.instances import instance
from zeroir.ir.program import EVALUATE, MICRO_STEP, Program
from zeroir.ir.text import print_program, print_section
from zeroir.memory.curve import peak_text
from zeroir.report.names import counted, shortened
from zeroir.report.opaque_code import KnownModules, has_opaque_code
from zeroir.report.summary import Summary, summarise
from zeroir.verify import Report, VerificationError

if TYPE_CHECKING:
    from zeroir.api.search.speculation import SpeculationChoice
    from zeroir.config.offload import Offload
    from zeroir.config.steps import MicroSteps
    from zeroir.cost.machine import Machine
    from zeroir.frontend.lowering.tracing import TracedModel
    from zeroir.frontend.source.module_source import FrozenModules
    from zeroir.frontend.source.source import Model, ModelSource, WeightFunction
    from zeroir.frontend.watch.watch import Watch
    from zeroir.runtime.distributed.rendezvous import JobRank
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.opened_program import EngineSettings
    from zeroir.runtime.state.initial_module import StateSource


@dataclass(frozen=True, kw_only=True, repr=False)
class CompiledProgram:
    """A scheduled program, the logical program that it was lowered from, and its verification report.

    ``path`` is the file that it was read from, if any; the model file is also
    searched from there. ``source`` is the module or function that it was compiled from in this process, if any.
    ``speculation`` is the choice whether the host's update is speculative, if it was made in this process. ``watch``
    has, in the same case as ``source``, the state of the user's code that the program was compiled from, and
    ``compile_again`` compiles the source as it is now. ``narrowings`` say, also in that case, which lines let sizes
    decide, so that dims have smaller ranges than were asked for. ``compile_source`` compiles another source, such as
    the model file of a program that was read from a file.
    """

    artifact: Artifact
    report: Report
    path: Path | None = None
    source: ModelSource | None = field(default=None, compare=False)
    speculation: SpeculationChoice | None = field(default=None, compare=False)
    watch: Watch | None = field(default=None, compare=False)
    compile_again: Compile | None = field(default=None, compare=False)
    narrowings: tuple[str, ...] = field(default=(), compare=False)
    compile_source: CompileSource | None = field(default=None, compare=False)

    @property
    def program(self) -> Program:
        """The scheduled program, which is executed."""
        return self.artifact.scheduled

    @property
    def logical(self) -> Program:
        """The program for one device, before any pass."""
        return self.artifact.logical

    @property
    def options(self) -> CompileOptions:
        """The options that it was lowered with."""
        return options_of(self.program)

    @property
    def requested(self) -> CompileOptions:
        """The user's options, without the compiler's choices, for instance for ``--offload adaptive``."""
        return options_of(self.logical)

    @property
    def config(self) -> ConfigRecord | None:
        """The configuration file of the options, with notes on ignored keys; None without one."""
        return self.artifact.config

    @property
    def units(self) -> tuple[str, ...]:
        """The units in the order of their first use."""
        return tuple(dict.fromkeys(flat.unit for flat in self.program.flats))

    def summary(self) -> Summary:
        """Summarize the program: sizes, ops, bytes, laws."""
        options = self.options
        known: KnownModules = {}
        if has_opaque_code(self.program):
            from zeroir.torch_ops.opaque import known_modules

            known = known_modules(self.program.segments)
        return summarise(
            self.program,
            self.report,
            stage=options.stage,
            precision=options.precision.dtype,
            known=known,
        )

    def text(self, *, section: str | None = None) -> str:
        """Return the whole program, or one section, in the IR's canonical text."""
        if section is None:
            return print_program(self.program)
        self.require(section=section)
        return print_section(self.program.section_by_name[section], self.program)

    def __repr__(self) -> str:
        return (
            f"<CompiledProgram of {self.artifact.model_path}: {self.program.outline}; "
            f"{peak_text(self.program)}; text() is the whole program>"
        )

    def _repr_html_(self) -> str:
        """Return the facts that ``zeroir show`` begins with, as a notebook shows them."""
        from zeroir.report.render import summary_html

        return summary_html(self.summary())

    def __str__(self) -> str:
        from zeroir.report.config import config_text
        from zeroir.report.render import render_text

        return config_text(self.artifact) + render_text(self.summary(), self.program)

    def save(self, path: str | Path) -> None:
        """Write the program to a ``.zir`` file; a failure leaves no partial file.

        Raises:
            UserError: if the path cannot be written.
        """
        artifacts.save(self.artifact, Path(path))

    @property
    def accumulates(self) -> bool:
        """Whether a step may take several batches: any number, or, if they run unit by unit, a multiple of a group."""
        return MICRO_STEP in self.logical.section_by_name

    def specialise(
        self,
        *,
        world_size: int | None = None,
        micro_steps: int | MicroSteps | None = None,
        offload: str | Sequence[str] | Offload | None = None,
        updates_last: bool = False,
    ) -> CompiledProgram:
        """Lower the program again, without the model, for another job.

        Omitted arguments keep their values. If nothing differs, the program itself is returned.

        Args:
            world_size: The number of ranks. The groups of a mesh keep their size.
            micro_steps: The micro-batches of a step. Most programs for more than one take any number.
            offload: What is kept outside device memory, and where.
            updates_last: Begin the update after the backward, once all gradients exist; results are the same.

        Raises:
            UserError: if these conflict with one another, or with the options of the program.
        """
        given = {"micro_steps": micro_steps, "offload": offload}
        changes = flat_values({name: value for name, value in given.items() if value is not None})
        return specialised(self, changes, world_size=world_size, updates_last=updates_last)

    def for_device(self, source: ModelSource, job_rank: JobRank) -> CompiledProgram:
        """Return the program, compiled again where it was captured for another device and does not run on this one."""
        from zeroir.api.running.device import compiled_for_device

        again = compiled_for_device(self, self.compile_source, source, job_rank)
        return self if again is None else replace(cast("CompiledProgram", again), path=self.path)

    def at(self, values: Mapping[str, int] | str | None) -> CompiledProgram:
        """Return the program for batches of one shape, on which buffers lie where they lie for every other.

        ``values`` are those of dims, as ``{"length": 2048}`` or ``"length=2048"``; other dims have their largest. The
        memory of a rank is that of the program itself, which is planned for the largest.

        Raises:
            UserError: where the program has no such dim, or was not compiled for that value.
        """
        of_dims = values_given(self.program, values)
        logical, scheduled = (
            instance(program, of_dims) for program in (self.logical, self.program)
        )
        return replace(self, artifact=replace(self.artifact, logical=logical, scheduled=scheduled))

    def after_pass(self, number: int) -> CompiledProgram:
        """Return the program after the first ``number`` passes; after 0 passes it is the program for one device.

        Raises:
            UserError: if the program has fewer passes, or this version's passes produce a different program.
        """
        from zeroir.report.passes import programs_after_passes

        if not 0 <= number <= len(self.program.passes):
            count = counted(len(self.program.passes), "pass", "passes")
            raise UserError(
                f"There is no pass {number}: {count} made the program, and 0 is before them."
            )
        programs = programs_after_passes(self.logical, self.program)
        artifact = replace(self.artifact, scheduled=programs[number])
        compiled = replace(self, artifact=artifact, speculation=None)
        return require_valid(with_report(compiled))

    def require_evaluation(self) -> None:
        """Raise a UserError that says why, if the program has no section ``evaluate``."""
        if EVALUATE in self.program.section_by_name:
            return
        raise UserError(why_not_evaluate(self.program))

    def require(self, *, section: str | None = None, unit: str | None = None) -> None:
        """Raise a UserError if a section or unit does not exist; the message names the existing ones."""
        sections = [each.name for each in self.program.sections]
        if section is not None and section not in sections:
            raise UserError(
                f"The program has no section '{section}'; its sections are {', '.join(sections)}."
            )
        if unit is not None and unit not in self.units:
            units = ", ".join(shortened(self.units))
            raise UserError(f"The program has no unit '{unit}'; its units are {units}.")

    def engine(
        self,
        *,
        seed: int = 0,
        model: Model | None = None,
        frozen: FrozenModules | None = None,
        allow_model_change: bool = False,
        kernels: str = "eager",
        cuda_graphs: bool = False,
        self_check: bool = True,
        state: StateSource | None = None,
        keep_module: bool = False,
        weight: WeightFunction | None = None,
        timeout: timedelta | None = None,
        ignore: Sequence[str] = (),
        compile_again: bool = True,
    ) -> Engine:
        """Make an engine for this process, with parameters from the module in memory or the model file.

        Under torchrun it is one rank of the job; elsewhere the program is lowered for a world size of 1. The batch of
        ``engine.step(batch)`` has the structure, shapes and dtypes of the example batch. ``model`` is the path of the
        model file if it was moved, or the module (or a function that makes it) with the initial values; ``frozen`` are
        the modules beside it where the program was compiled with some. Without it, a program that was compiled from a
        module in this process takes the module's current values, those of rank 0. As they move to the engine, the
        module's tensors become meta tensors on all ranks, so that no rank holds them twice; with ``keep_module`` they
        stay. ``state``, a mapping or a function from names to tensors, provides the
        values of the parameters and persistent buffers that it contains: with it, the module may be on the meta device.

        ``weight`` returns the weights of batches if the program uses them and was compiled elsewhere, from a module.

        Before each step the engine compares what the program was compiled from (attributes and modes of modules, hooks,
        globals and closures that the step's code mentions) with what is there now. After a change it compiles the
        program again, once for each state, and keeps parameters and states; it refuses a change of which parameters
        there are, and with ``compile_again=False`` every one. ``ignore`` are patterns of names whose changes no step
        depends on. Tensors outside the module count with their present values.

        ``timeout`` bounds the wait for another rank in a collective; the default is 5 minutes.

        A program that was captured for another device, on which the results that it saves have other types, is compiled
        again.

        ``kernels`` selects the kernels of segments: ``eager`` runs torch's operators one by one, ``inductor`` compiles
        each distinct segment once and caches it on disk. With ``cuda_graphs`` sections are launched as CUDA graphs if
        they can be captured; otherwise a warning says why not. With ``self_check`` each distinct segment is computed
        once on random numbers, by its kernel and by its plain operators.

        Raises:
            UserError: if the model file is missing, differs from the one that was compiled or from that of rank 0, or
                if a kernel and its operators compute different results.
        """
        from zeroir.api.model_of_program import source_for_engine
        from zeroir.api.running.agreement import require_same_model
        from zeroir.api.running.engines import kernel_backend
        from zeroir.runtime.comm.job import DEFAULT_TIMEOUT
        from zeroir.runtime.distributed import rendezvous
        from zeroir.runtime.engine.opened_program import EngineSettings

        source = source_for_engine(
            self.artifact,
            self.path,
            self.source,
            model,
            frozen,
            allow_model_change=allow_model_change,
        )
        if weight is not None:
            source = replace(source, weight=weight)
        job_rank = rendezvous.join_job(timeout or DEFAULT_TIMEOUT)
        require_same_model(job_rank, source)
        compiled = self.specialise(world_size=job_rank.world_size)
        compiled = compiled.for_device(source, job_rank)
        return compiled.open_engine(
            source,
            job_rank,
            EngineSettings(
                kernels=kernel_backend(kernels),
                seed=seed,
                timeout=timeout or DEFAULT_TIMEOUT,
                cuda_graphs=cuda_graphs,
                self_check=self_check,
            ),
            state=state,
            keep_module=keep_module,
            ignore=ignore,
            compile_again=compile_again,
        )

    def open_engine(
        self,
        source: ModelSource,
        job_rank: JobRank,
        settings: EngineSettings,
        *,
        state: StateSource | None = None,
        keep_module: bool = False,
        ignore: Sequence[str] = (),
        compile_again: bool = False,
    ) -> Engine:
        """Make an initialised engine for this process's rank of the job, as ``Engine.initialise`` does."""
        from zeroir.api.running.opening import opened_engine

        return opened_engine(
            self,
            lowered_again,
            source,
            job_rank,
            settings,
            state=state,
            keep_module=keep_module,
            ignore=ignore,
            compile_again=compile_again,
        )

    def from_file(self, source: ModelSource, narrowings: tuple[str, ...]) -> CompiledProgram:
        """Return the program of a file with its model file as the source from which it is compiled again."""
        if self.compile_source is None:
            return self
        return replace(
            self,
            source=source,
            compile_again=partial(self.compile_source, source),
            narrowings=narrowings,
        )


def specialised(
    compiled: CompiledProgram,
    changes: Mapping[str, object],
    *,
    world_size: int | None = None,
    updates_last: bool = False,
) -> CompiledProgram:
    """Lower the program again as ``CompiledProgram.specialise`` does, with options by flat name."""
    from zeroir.frontend.lowering.accumulate import accumulate
    from zeroir.workspace.segments import declared

    options = compiled.requested
    if world_size is not None and world_size != options.world_size:
        options = for_world_size(options, world_size)
    changes = dict(changes)
    count = changes.pop("micro_steps", None)
    begins_to_accumulate = isinstance(count, int) and count > 1 and not compiled.accumulates
    if "order" in changes or begins_to_accumulate or options.micro_steps.is_step_interleaved:
        changes["micro_steps"] = count or options.micro_steps.count
    elif isinstance(count, int):
        _require_groups(compiled, count)
    may_overlap = options.is_update_overlapped or options.offload.speculate
    if updates_last and (may_overlap or options.may_speculate):
        changes |= {"overlap_update": False, "speculate": False}
    options = changed(options, **changes)
    folder = options.offload.folder or compiled.artifact.offload_folder
    artifact = replace(compiled.artifact, offload_folder=folder)
    if options.all_pairs == compiled.requested.all_pairs:
        return replace(compiled, artifact=artifact)
    logical = artifact.logical
    if begins_to_accumulate:
        logical = declared(accumulate(logical))
    artifact = replace(artifact, logical=replace(logical, options=options))
    made = with_proof(artifact, lower(artifact.logical, is_kept=True), path=compiled.path)
    return replace(
        made,
        source=compiled.source,
        watch=compiled.watch,
        compile_again=compiled.compile_again,
        narrowings=compiled.narrowings,
        compile_source=compiled.compile_source,
    )


def _require_groups(compiled: CompiledProgram, micro_steps: int) -> None:
    group = compiled.program.interleaved
    if micro_steps % group:
        raise UserError(
            f"--micro-steps {micro_steps} is no multiple of {group}, but the program runs its micro-batches in groups "
            f"of {group} (--order {compiled.options.micro_steps.order}): name such a multiple, or another --order."
        )


def lowered_again(artifact: Artifact) -> CompiledProgram:
    """Lower the logical program of an artefact."""
    return with_proof(artifact, lower(artifact.logical))


def with_proof(
    artifact: Artifact,
    lowered: Lowered,
    *,
    path: Path | None = None,
    machine: Machine | None = None,
) -> CompiledProgram:
    """Return the compiled program that an artefact was lowered to, after the passes' proof and that of a budget."""
    compiled = CompiledProgram(
        artifact=replace(artifact, scheduled=lowered.proof.program),
        report=lowered.proof.report,
        path=path,
        speculation=lowered.speculation,
    )
    if compiled.requested.offload.memory_budget is not None or machine is not None:
        compiled = require_valid(with_report(compiled, machine=machine))
    warn_of_idle_offload(compiled.program, compiled.options)
    return compiled


def with_source(
    compiled: CompiledProgram,
    source: ModelSource,
    traced: TracedModel,
    compile_again: Compile,
) -> CompiledProgram:
    """Return the program with the module or function that it was compiled from."""
    if source.file is not None and not source.is_in_hand:
        return compiled
    from zeroir.frontend.watch.watch import Watch
    from zeroir.torch_ops.opaque import opaque_modules

    return replace(
        compiled,
        source=source,
        watch=Watch.of(
            source,
            traced.outside,
            traced.numbers,
            traced.kept,
            traced.reads,
            opaque_modules(traced.program.segments),
        ),
        compile_again=compile_again,
        narrowings=traced.narrowings,
    )


def with_report(
    compiled: CompiledProgram, budget_bytes: int | None = None, machine: Machine | None = None
) -> CompiledProgram:
    """Verify the program, and return it with the resulting artefact and report."""
    artifact, report = verified(compiled.artifact, budget_bytes, machine)
    return replace(compiled, artifact=artifact, report=report)


def require_valid(compiled: CompiledProgram) -> CompiledProgram:
    """Return the program, or raise a VerificationError if its report is not valid."""
    if not compiled.report.is_valid:
        raise VerificationError(compiled.report)
    return compiled
