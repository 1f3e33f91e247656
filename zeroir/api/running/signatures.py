"""What an engine compiles while it runs: programs after a change of the user's code, and for batches of other sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from zeroir.api.sentences import LOGGER
from zeroir.config import CompileOptions, replaced
from zeroir.config.shapes import BatchShapes, parse_shapes, shapes_text
from zeroir.config.steps import BATCHES, ELEMENTS
from zeroir.errors import ModelWarning, ShapesError
from zeroir.ir.program import MICRO_STEP, Program
from zeroir.ir.sizes import Dim, Size

if TYPE_CHECKING:
    from zeroir.api.compilations import Compiled
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.signatures import Signatures
    from zeroir.runtime.engine.watched_code import CompiledAgain, WatchedCode


def signatures_of(
    compiled: Compiled,
    engine: Engine,
    code: WatchedCode,
    step_counts: Mapping[str, int] = MappingProxyType({}),
) -> Signatures:
    """Return a program for an engine that follows ``code``, and what compiles others for batches of other sizes."""
    from zeroir.runtime.engine.signatures import Signatures, Splits

    own = _for_engine(compiled, engine, code)
    if not compiled.narrowings or compiled.compile_again is None:
        return Signatures(own)
    whole = _whole(compiled)
    splits = Splits(
        reason=" and ".join(compiled.narrowings),
        dims=whole.dims,
        inputs=whole.inputs,
        compile_at=partial(_compiled_at, compiled, engine, code, step_counts),
    )
    return Signatures(own, splits)


def compiled_after_change(
    compiled: Compiled,
    engine: Engine,
    code: WatchedCode,
    numbers: frozenset[str],
    step_counts: Mapping[str, int],
) -> Signatures:
    """Compile the source of a program as it is now, for an engine that follows ``code``, and these numbers, too."""
    from zeroir.frontend.source.source import Earlier

    assert compiled.compile_again is not None
    earlier = Earlier(flats=compiled.logical.flats, numbers=numbers, step_counts=step_counts)
    with _notes_that_are_new(compiled, engine):
        again = compiled.compile_again(compiled.requested, compiled.config, earlier)
    again, own = _like_running(again, engine, code)
    return signatures_of(again, engine, own, step_counts)


@contextmanager
def _notes_that_are_new(compiled: Compiled, engine: Engine) -> Iterator[None]:
    """Let rank 0 alone warn of a program that all ranks compile, and not of sizes if the first program was narrowed."""
    with warnings.catch_warnings():
        if engine.rank != 0:
            warnings.simplefilter("ignore", ModelWarning)
        elif compiled.narrowings:
            warnings.filterwarnings("ignore", ".* the sizes of the batch decide", ModelWarning)
        yield


def accumulating(compiled: Compiled, rank: int) -> Callable[[], Program] | None:
    """Return a function that lowers a program for steps of several batches; None if it takes them."""
    if compiled.accumulates:
        return None

    def lowered_again() -> Program:
        if rank == 0:
            LOGGER.info(
                "The program was compiled for steps of one batch: it is lowered again for steps of any number. With "
                "--micro-steps 2 it is so from the start."
            )
        return compiled.specialise(micro_steps=2).program

    return lowered_again


def _for_engine(compiled: Compiled, engine: Engine, code: WatchedCode) -> CompiledAgain:
    from zeroir.runtime.engine.watched_code import CompiledAgain

    return CompiledAgain(
        program=compiled.program, code=code, accumulating=accumulating(compiled, engine.rank)
    )


def _like_running(
    compiled: Compiled, engine: Engine, code: WatchedCode
) -> tuple[Compiled, WatchedCode]:
    """Return a program for steps as those of the engine's, and what it follows, the script's optimizers among it."""
    if MICRO_STEP in engine.program.section_by_name and not compiled.accumulates:
        compiled = compiled.specialise(micro_steps=2)
    assert compiled.watch is not None
    compiled.watch.optimizers = tuple(code.optimizers)
    return compiled, compiled.watch


def _whole(compiled: Compiled) -> Program:
    """Return the program with the dims and the shapes of inputs that were asked for, before they were narrowed."""
    assert compiled.options.shapes is not None
    shapes = parse_shapes(compiled.options.shapes)
    dims = _dims_of(shapes)
    inputs = tuple(
        replace(
            binding,
            shape=tuple(
                given if isinstance(given, Size) else own
                for given, own in zip(shapes[binding.path], binding.shape, strict=True)
            ),
        )
        if binding.path in shapes
        else binding
        for binding in compiled.program.inputs
    )
    return replace(
        compiled.program, dims=tuple(sorted(dims, key=lambda dim: dim.name)), inputs=inputs
    )


def left_out(compiled: Compiled) -> list[str]:
    """Return phrases about the sizes of a program that has fewer than its options ask for, such as ``rows <= 5``."""
    if compiled.options.shapes is None:
        return []
    whole = _whole(compiled)
    asked = {dim.name: dim for dim in whole.dims}
    phrases: list[str] = []
    for dim in compiled.program.dims:
        if dim.name not in asked:
            phrases += _in_classes(whole, compiled.program, dim)
            continue
        least = "" if dim.minimum == asked[dim.name].minimum else f"{dim.minimum:,} <= "
        most = "" if dim.maximum == asked[dim.name].maximum else f" <= {dim.maximum:,}"
        if least or most:
            phrases.append(f"{least}{dim.name}{most}")
    return phrases


def _in_classes(whole: Program, program: Program, dim: Dim) -> list[str]:
    """Return a phrase on the sizes that depend on a dim which stands for some values of another one."""
    of_all = {binding.path: binding.shape for binding in whole.inputs}
    pairs = (
        (other, size)
        for binding in program.inputs
        for size, other in zip(binding.shape, of_all[binding.path], strict=True)
    )
    return next(
        (
            [f"{other} = {size} with {dim.name} from {dim.minimum:,} to {dim.maximum:,}"]
            for other, size in pairs
            if isinstance(size, Size) and dim in size.dims
        ),
        [],
    )


def _dims_of(shapes: BatchShapes) -> set[Dim]:
    sizes = (size for shape in shapes.values() for size in shape if isinstance(size, Size))
    return {dim for size in sizes for dim in size.dims}


def _compiled_at(
    compiled: Compiled,
    engine: Engine,
    code: WatchedCode,
    step_counts: Mapping[str, int],
    values: Mapping[str, int],
) -> CompiledAgain:
    """Compile the source for batches of these sizes, and as many others as its code treats alike."""
    import torch

    from zeroir.api.checks.drawn_batches import batch_of_sizes
    from zeroir.frontend.source.source import Earlier
    from zeroir.runtime.training.random_states import host_generators_kept

    assert compiled.compile_again is not None
    assert compiled.source is not None
    with host_generators_kept():
        batch = compiled.source.batch()
    example = batch_of_sizes(_whole(compiled), batch, values, torch.Generator().manual_seed(0))
    earlier = Earlier(flats=compiled.logical.flats, numbers=code.numbers, step_counts=step_counts)
    options = compiled.options
    if compiled.source.weight is None:
        mean_over = BATCHES if compiled.program.weight is None else ELEMENTS
        options = replaced(options, mean_over=mean_over)
    while True:
        try:
            with _notes_that_are_new(compiled, engine):
                again = compiled.compile_again(options, compiled.config, earlier, example)
        except ShapesError as error:
            if options.shapes is None:
                raise
            options = _with_fixed(options, values, error.dims)
        else:
            again, own = _like_running(again, engine, code)
            return _for_engine(again, engine, own)


def _with_fixed(
    options: CompileOptions, values: Mapping[str, int], names: frozenset[str]
) -> CompileOptions:
    """Return options in whose shapes the dims of these names, all if there are none of these, have their values."""
    assert options.shapes is not None
    shapes = parse_shapes(options.shapes)
    dims = _dims_of(shapes)
    fixed = {dim: values[dim.name] for dim in dims if dim.name in names} or {
        dim: values[dim.name] for dim in dims
    }
    other = {
        path: tuple(size.replaced(fixed) if isinstance(size, Size) else size for size in shape)
        for path, shape in shapes.items()
    }
    has_dims = any(isinstance(size, Size) for shape in other.values() for size in shape)
    return replaced(options, shapes=shapes_text(other) if has_dims else None)
