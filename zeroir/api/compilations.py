"""What an engine must know of a compiled program so that it can compile others while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from zeroir.artifact import Artifact, ConfigRecord
    from zeroir.config import CompileOptions
    from zeroir.frontend.source.source import Earlier, ModelSource
    from zeroir.frontend.watch.watch import Watch
    from zeroir.ir.program import Program
    from zeroir.torch_ops.batches import Batch


class Compile(Protocol):
    """Compiles a source as it is now, from another example batch if one is given.

    The program goes on with an earlier one.
    """

    def __call__(
        self,
        options: CompileOptions,
        config: ConfigRecord | None,
        earlier: Earlier,
        batch: Batch = None,
    ) -> Compiled:
        """Return the compiled program."""


class CompileSource(Protocol):
    """Compiles a source as ``Compile`` does."""

    def __call__(
        self,
        source: ModelSource,
        options: CompileOptions,
        config: ConfigRecord | None,
        earlier: Earlier,
        batch: Batch = None,
    ) -> Compiled:
        """Return the compiled program."""


class Compiled(Protocol):
    """The parts of ``CompiledProgram`` that are needed for others; they are documented there."""

    @property
    def artifact(self) -> Artifact:
        """The contents of its file."""

    @property
    def program(self) -> Program:
        """The scheduled program."""

    @property
    def logical(self) -> Program:
        """The program for one device."""

    @property
    def options(self) -> CompileOptions:
        """The options that it was lowered with."""

    @property
    def requested(self) -> CompileOptions:
        """The user's options."""

    @property
    def config(self) -> ConfigRecord | None:
        """The configuration file of the options."""

    @property
    def source(self) -> ModelSource | None:
        """What it was compiled from."""

    @property
    def watch(self) -> Watch | None:
        """The state of the user's code that it was compiled from."""

    @property
    def compile_again(self) -> Compile | None:
        """A function that compiles the source as it is now."""

    @property
    def narrowings(self) -> tuple[str, ...]:
        """Which lines let sizes decide."""

    @property
    def accumulates(self) -> bool:
        """Whether a step may take several batches."""

    def specialise(self, *, micro_steps: int | None = None) -> Self:
        """Lower the program again for steps of several batches."""

    def from_file(self, source: ModelSource, narrowings: tuple[str, ...]) -> Self:
        """Return the program with its model file as the source from which it is compiled again."""
