"""A compiled program: an artefact, its verification, and its public methods; and the functions that make one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from zeroir import artifact as artifacts
from zeroir.api.capture import capture_source, file_source, given_source
from zeroir.api.config_file import Config, resolve_options
from zeroir.api.idle_offload import warn_of_idle_offload
from zeroir.api.keywords import CompileKeywords, OffloadKeywords, is_torchs
from zeroir.api.lowering import Lowered, lower, verified
from zeroir.artifact import Artifact, ConfigRecord
from zeroir.config import CompileOptions, make_options, options_from_pairs
from zeroir.config.offload_fields import ADAPTIVE
from zeroir.errors import InternalError, UserError
from zeroir.ir.program import EVALUATE, MICRO_STEP, Program, why_not_evaluate
from zeroir.ir.text import print_program, print_section
from zeroir.report.names import counted, shortened
from zeroir.report.summary import Summary, summarise
from zeroir.verify import Report, VerificationError

if TYPE_CHECKING:
    from zeroir.api.speculation import SpeculationChoice
    from zeroir.cost.machine import Machine
    from zeroir.frontend.source import LossFunction, Model, ModelSource, WeightFunction
    from zeroir.runtime.engine import Engine
    from zeroir.runtime.module_values import StateSource
    from zeroir.torch_ops.batches import Batch


@dataclass(frozen=True, kw_only=True, repr=False)
class CompiledProgram:
    """A scheduled program, the logical program that it was lowered from, and its verification report.

    ``path`` is the file that it was read from, if any; the model file is also searched from there. ``source`` is the
    module in hand or function that it was compiled from in this process, if any. ``speculation`` is the choice whether
    the host's update is speculative, if it was made in this process.
    """

    artifact: Artifact
    report: Report
    path: Path | None = None
    source: ModelSource | None = field(default=None, compare=False)
    speculation: SpeculationChoice | None = field(default=None, compare=False)

    @property
    def program(self) -> Program:
        """The scheduled program, which runs."""
        return self.artifact.scheduled

    @property
    def logical(self) -> Program:
        """The program for one device, before any pass."""
        return self.artifact.logical

    @cached_property
    def options(self) -> CompileOptions:
        """The options that the program was compiled with."""
        return options_from_pairs(self.program.options)

    @property
    def as_requested(self) -> CompileOptions:
        """The options as they were asked for: what the compiler chose is open again, as with ``--offload adaptive``."""
        requested = self.logical.option
        given: dict[str, object] = {}
        if "speculate" not in requested:
            given["speculate"] = None
        if requested.get("offload") == ADAPTIVE:
            places = {name: requested.get(name) for name in ("offload_to", "host_cache")}
            given |= {"offload": ADAPTIVE, **places, "offload_units": ()}
        return make_options({**self.options.model_dump(), **given})

    @property
    def config(self) -> ConfigRecord | None:
        """The configuration file that options came from, with notes on keys without meaning; None without one."""
        return self.artifact.config

    @property
    def units(self) -> tuple[str, ...]:
        """The units in the order of their first use."""
        return tuple(dict.fromkeys(flat.unit for flat in self.program.flats))

    def summary(self) -> Summary:
        """Figures of the program: sizes, ops, bytes, laws."""
        options = self.options
        return summarise(
            self.program, self.report, stage=options.stage, precision=options.precision
        )

    def text(self, *, section: str | None = None) -> str:
        """The whole program, or one section, in the IR's canonical text."""
        if section is None:
            return print_program(self.program)
        self.require(section=section)
        return print_section(self.program.section_by_name[section], self.program)

    def __repr__(self) -> str:
        options, units = self.options, len(self.units)
        return (
            f"<CompiledProgram of {self.artifact.model_path}: stage {options.stage}, {options.precision}, "
            f"{counted(options.world_size, 'rank')}, {counted(units, 'unit')}>"
        )

    def __str__(self) -> str:
        from zeroir.report.config import config_text
        from zeroir.report.render import render_text

        return config_text(self.artifact) + render_text(self.summary(), self.program)

    def save(self, path: str | Path) -> None:
        """Write the program to a ``.zir`` file; a failure leaves no partial file.

        Raises:
            UserError: where the path cannot be written.
        """
        artifacts.save(self.artifact, Path(path))

    def for_world_size(self, world_size: int) -> CompiledProgram:
        """The same program lowered again, from its logical program, for another number of ranks.

        Raises:
            UserError: where the groups of its mesh do not divide the world size.
        """
        options = self.as_requested.for_world_size(world_size)
        compiled = self._lowered_again(self.artifact, options)
        warn_of_idle_offload(compiled.program)
        return compiled

    def with_offload(self, **given: Unpack[OffloadKeywords]) -> CompiledProgram:
        """The same program, lowered again from its logical program where these options differ from its own.

        They say what is kept outside device memory; those that are not given stay as they are.

        Raises:
            UserError: where the options do not go together.
        """
        requested = self.as_requested
        options = make_options({**requested.model_dump(), **given})
        folder = options.offload_folder or self.artifact.offload_folder
        artifact = replace(self.artifact, offload_folder=folder)
        if options.to_pairs() == requested.to_pairs():
            return replace(self, artifact=artifact)
        compiled = self._lowered_again(artifact, options)
        warn_of_idle_offload(compiled.program)
        return compiled

    def without_overlap(self) -> CompiledProgram:
        """The same program lowered again with an update that begins after the backward; its results are the same."""
        options = self.options
        if not (options.overlap_update or options.speculate or options.may_speculate):
            return self
        given = {"overlap_update": False, "speculate": False}
        options = make_options({**self.as_requested.model_dump(), **given})
        return self._lowered_again(self.artifact, options)

    @property
    def accumulates(self) -> bool:
        """Whether its steps take several batches: any number, or where they run unit by unit a multiple of a group."""
        return MICRO_STEP in self.logical.section_by_name

    def for_accumulation(self, micro_steps: int) -> CompiledProgram:
        """A program for steps of one batch lowered again, from its logical program, for steps of any number.

        ``micro_steps``, at least 2, is the number that ``zeroir run`` takes unless told otherwise.
        """
        from zeroir.frontend.accumulate import accumulate
        from zeroir.workspace.segments import declared

        options = self.as_requested.for_micro_steps(micro_steps)
        logical = declared(replace(accumulate(self.logical), options=options.to_pairs()))
        return self._lowered_again(replace(self.artifact, logical=logical), options)

    def in_order(self, order: str, micro_steps: int) -> CompiledProgram:
        """The same program, lowered again from its logical program, for another order of so many micro-batches.

        Raises:
            UserError: where the order does not go together with the number or another option, or with the model.
        """
        compiled = self
        if micro_steps > 1 and not self.accumulates:
            compiled = self.for_accumulation(micro_steps)
        requested = compiled.as_requested
        given = {"order": order, "micro_steps": micro_steps}
        options = make_options({**requested.model_dump(), **given})
        if options.to_pairs() == requested.to_pairs():
            return compiled
        logical = replace(compiled.logical, options=options.to_pairs())
        return self._lowered_again(replace(compiled.artifact, logical=logical), options)

    def _lowered_again(self, artifact: Artifact, options: CompileOptions) -> CompiledProgram:
        """The logical program of ``artifact`` lowered with these options, from the same file and source as this one."""
        compiled = _with_proof(artifact, lower(artifact.logical, options), self.path)
        return replace(compiled, source=self.source)

    def after_pass(self, number: int) -> CompiledProgram:
        """The program after the first ``number`` passes; after 0 passes it is the program of one device.

        Raises:
            UserError: where the program has fewer passes, or this version's passes make another program.
        """
        from zeroir.report.passes import programs_after_passes

        if not 0 <= number <= len(self.program.passes):
            count = counted(len(self.program.passes), "pass", "passes")
            raise UserError(
                f"There is no pass {number}: {count} made the program, and 0 is before them."
            )
        programs = programs_after_passes(self.logical, self.program)
        artifact = replace(self.artifact, scheduled=programs[number])
        return replace(_require_valid(_verified(artifact, self.path)), source=self.source)

    def require_evaluation(self) -> None:
        """Raise UserError where the program has no section ``evaluate``, saying why."""
        if EVALUATE in self.program.section_by_name:
            return
        raise UserError(why_not_evaluate(self.program))

    def require(self, *, section: str | None = None, unit: str | None = None) -> None:
        """Raise UserError where a section or unit does not exist; the message names those that do."""
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
        allow_model_change: bool = False,
        kernels: str = "eager",
        cuda_graphs: bool = False,
        self_check: bool = True,
        state: StateSource | None = None,
        keep_module: bool = False,
        weight: WeightFunction | None = None,
    ) -> Engine:
        """An engine for this process, its parameters initialised from the module in hand or the model file.

        Under torchrun it is one rank of the job; elsewhere the program is lowered for a world size of 1. The batch of
        ``engine.step(batch)`` has the structure, shapes and dtypes of the example batch. ``model`` names the model file
        where it has been moved, or is the module (or a function that makes it) whose values the engine takes. Without
        it a program that was compiled from a module in this process takes the module's present values, those of rank 0:
        as they move to the engine, the module's tensors become meta tensors on all ranks, so that no rank holds them
        twice. With ``keep_module`` they stay. ``state``, a mapping or a function from names to tensors, gives the
        parameters and persistent buffers that it has their values: with it, the module may be on the meta device.

        ``weight`` gives the weights of batches where the program takes them and was compiled elsewhere, from a module.

        ``kernels`` selects the kernels of segments: ``eager`` runs torch's
        operators one by one, ``inductor`` compiles each distinct segment once and keeps it on disk. With
        ``cuda_graphs`` sections are launched as CUDA graphs where they can be captured; otherwise a warning says why
        not. With ``self_check`` each distinct segment is computed once on random numbers, by its kernel and by its
        plain operators.

        Raises:
            UserError: where the model file is missing, is not the one that was compiled, or is another one than that of
                rank 0, or where a kernel and its operators compute different results.
        """
        from zeroir.api.agreement import require_same_model
        from zeroir.api.engines import fitted, open_engine
        from zeroir.api.model_of_program import source_for_engine
        from zeroir.runtime import rendezvous

        source = source_for_engine(self, model, allow_model_change=allow_model_change)
        if weight is not None:
            source = replace(source, weight=weight)
        job_rank = rendezvous.join_job()
        require_same_model(job_rank, source)
        compiled, _ = fitted(self, job_rank.world_size)
        return open_engine(
            compiled,
            source,
            job_rank,
            seed,
            kernels,
            cuda_graphs=cuda_graphs,
            self_check=self_check,
            state=state,
            keep_module=keep_module,
        )


def compile_model(
    model: Model,
    batch: Batch = None,
    *,
    loss: LossFunction | None = None,
    weight: WeightFunction | None = None,
    config: Config | None = None,
    **options: Unpack[CompileKeywords],
) -> CompiledProgram:
    """Compile a model file, a module, or a function that makes the module.

    A model file is named as on the command line: ``path/to/model.py`` or ``package.module``, and ``:build`` or
    ``:build(layers=12)`` after it for another factory than ``model``.

    ``batch`` is an example micro-batch of one rank: needed, except for a model file, which has its own. The loss is
    what the module's forward returns, or ``loss(module, batch)``, which returns it or a pair of it and outputs.
    ``weight`` gives the weight of a batch. ``config`` is DeepSpeed's configuration, as its file or its contents, or a
    TOML file of options. The other keywords are ``CompileOptions``' fields, and win over the configuration.
    ``optimizer`` may also be a class of ``torch.optim``, or an instance of one over the parameters of a module in hand,
    whose groups the program takes over.

    A module in hand stays as it is; its values enter when an engine is made.

    Raises:
        UserError: if the file, the module, the batch or an option is wrong.
    """
    source = given_source(model, batch, loss, weight)
    given: Mapping[str, object] = options
    if is_torchs(options.get("optimizer")):
        from zeroir.api.torch_optimizers import translated

        translation = translated(options["optimizer"], model, options)
        source, given = translation.source(source), translation.options
    resolved = resolve_options(config, given, lambda: source, giver="argument")
    return compile_source(source, resolved.options, resolved.record)


def compile_with(model: str | Path, options: CompileOptions) -> CompiledProgram:
    """Compile a model file with validated options."""
    return compile_source(file_source(model), options)


def compile_source(
    source: ModelSource, options: CompileOptions, config: ConfigRecord | None = None
) -> CompiledProgram:
    """Compile a source with validated options; ``config`` is the file that they come from, if they do."""
    artifact = replace(capture_source(source, options), config=config)
    try:
        # The program holds the options that the model itself sets, such as the units to recompute.
        chosen = lower(artifact.logical, options_from_pairs(artifact.logical.options))
    except VerificationError as error:
        raise InternalError(f"The traced program is broken before any pass. {error}") from error
    from zeroir.runtime.kernels.declared import misdeclared

    problem = misdeclared(chosen.proof.program.segments)
    if problem is not None:
        raise InternalError(f"The program declares results that torch does not compute: {problem}.")
    compiled = _with_proof(artifact, chosen, None)
    warn_of_idle_offload(compiled.program)
    return compiled if source.file is not None else replace(compiled, source=source)


def lowered(artifact: Artifact, options: CompileOptions, machine: Machine) -> CompiledProgram:
    """A captured model lowered with these options, which must not change the capture.

    Its segments declare the workspaces that were measured on the machine, if there are any.
    """
    logical = replace(artifact.logical, options=options.to_pairs())
    chosen = lower(logical, options, machine)
    artifact = replace(artifact, logical=logical, scheduled=chosen.proof.program)
    compiled = _require_valid(_verified(artifact, None, machine=machine))
    warn_of_idle_offload(compiled.program)
    return replace(compiled, speculation=chosen.speculation)


def load_program(path: str | Path) -> CompiledProgram:
    """Read a ``.zir`` file and verify it.

    Raises:
        UserError: if the file is missing or damaged, has a newer schema, or breaks a law.
    """
    return _require_valid(load_unverified(path))


def load_unverified(
    path: str | Path, *, budget_bytes: int | None = None, machine: Machine | None = None
) -> CompiledProgram:
    """Read a ``.zir`` file and make its report, valid or not, with a budget of device memory if one is given.

    Workspaces that were measured on ``machine`` replace the declared ones.
    """
    return _verified(artifacts.load(Path(path)), Path(path), budget_bytes, machine)


def _with_proof(artifact: Artifact, lowered: Lowered, path: Path | None) -> CompiledProgram:
    """The program that the passes made of the artefact's logical program; a budget is all that is left to verify."""
    proof = lowered.proof
    artifact = replace(artifact, scheduled=proof.program)
    if proof.program.option.get("memory_budget") is not None:
        compiled = _require_valid(_verified(artifact, path))
    else:
        compiled = CompiledProgram(artifact=artifact, report=proof.report, path=path)
    return replace(compiled, speculation=lowered.speculation)


def _verified(
    artifact: Artifact,
    path: Path | None,
    budget_bytes: int | None = None,
    machine: Machine | None = None,
) -> CompiledProgram:
    artifact, report = verified(artifact, budget_bytes, machine)
    return CompiledProgram(artifact=artifact, report=report, path=path)


def _require_valid(compiled: CompiledProgram) -> CompiledProgram:
    if not compiled.report.is_valid:
        raise VerificationError(compiled.report)
    return compiled
