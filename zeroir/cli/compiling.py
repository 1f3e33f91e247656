"""The commands that compile a model. Only they need the options, which are slow to load."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from zeroir.api.config_file import DEFAULT_FILE, ResolvedOptions, resolve_options
from zeroir.cli.arguments import AsJson, InCounts, InSeeds, Model
from zeroir.cli.console import err, out, print_json, progress
from zeroir.cli.option_groups import Kernels, Options
from zeroir.config.model_spec import ModelSpec
from zeroir.config.offload_places import ADAPTIVE
from zeroir.config.table import FlatOptions

if TYPE_CHECKING:
    from zeroir.frontend.source.source import ModelSource

CompileOptions = Annotated[Options | None, Parameter(name="*")]
Config = Annotated[
    Path | None,
    Parameter(
        help="DeepSpeed's configuration (JSON), or a TOML file of the options below, which win over it. "
        "[default: zeroir.toml in the current folder, if there is one]"
    ),
]


def resolved(
    config: Path | None, options: FlatOptions | None, source: Callable[[], ModelSource]
) -> ResolvedOptions:
    """Resolve the options of the command line and of the configuration; a line names a file that was found unasked."""
    if config is None and Path(DEFAULT_FILE).is_file():
        config = Path(DEFAULT_FILE)
        err.print(f"Options come from {DEFAULT_FILE} in the current folder.")
    given = {} if options is None else options.given
    return resolve_options(config, given, source, giver="command line")


def print_notes(chosen: ResolvedOptions) -> None:
    """Print the notes on keys without meaning on stderr, where a command prints other results on stdout."""
    for note in () if chosen.record is None else chosen.record.notes:
        err.print(note)


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Let the collector of garbage skip the objects from before the block, as those of the model file's libraries are.

    They are many more than those of a compilation, and it would look at each of them again and again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def compile(  # noqa: A001 - the command's name is the field's word
    model: Model,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            name=["-o", "--output"],
            help="The program file to write. [default: MODEL.zir in the current folder]",
        ),
    ] = None,
    config: Config = None,
    options: CompileOptions = None,
    as_json: AsJson = False,
) -> int:
    """Trace a model, place every collective for the stage, prove the schedule, and write a program.

    Example: zeroir compile examples/gpt.py --stage 3 --world-size 4 -o gpt.zir
    """
    from zeroir.api.capture import file_source
    from zeroir.api.compiling import compile_source
    from zeroir.api.search.adaptive import chosen_in_words
    from zeroir.api.sentences import warnings_as_sentences
    from zeroir.artifact.outputs import PROGRAM, require_writable
    from zeroir.report.config import config_json, render_config
    from zeroir.report.render import render_summary

    path = Path(f"{ModelSpec.parse(model).stem}.zir") if output is None else output
    require_writable(path, PROGRAM)
    with progress(f"Compiling {model}"), warnings_as_sentences():
        source = cache(lambda: file_source(model))
        chosen = resolved(config, options, source)
        source()
        with collecting_new_objects():
            compiled = compile_source(source(), chosen.options, chosen.record)
        compiled.save(path)
    if as_json:
        print_json({"path": str(path), **config_json(compiled.artifact), **compiled.summary()})
    else:
        if compiled.artifact.config is not None:
            out.print(render_config(compiled.artifact.config, compiled.program))
        out.print(render_summary(compiled.summary()))
        if ADAPTIVE in chosen.options.offload.what:
            out.print(chosen_in_words(compiled.options))
        if compiled.speculation is not None:
            out.print(compiled.speculation.in_words())
        out.print(f"Wrote {path}.")
    return 0


def check(
    model: Model,
    /,
    *,
    config: Config = None,
    options: CompileOptions = None,
    steps: Annotated[int, Parameter(validator=InCounts, help="Training steps to compare.")] = 3,
    seed: Annotated[
        int,
        Parameter(validator=InSeeds, help="Seed of weights, data, dropout and interleaving."),
    ] = 0,
    kernels: Kernels = "eager",
    draw_shapes: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Draw the sizes that shapes() leaves open, the smallest and the largest among them, and make batches "
            "of them from the example. With --shapes, or without batches() in the model file, they always are.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Compare the program on virtual ranks with eager PyTorch replicas; exit 1 if they differ.

    Example: zeroir check examples/gpt.py --stage 3 --world-size 4
    """
    from zeroir.api.capture import file_source
    from zeroir.api.checks.check import check_model
    from zeroir.api.sentences import warnings_as_sentences

    with progress(f"Checking {model}"), warnings_as_sentences():
        chosen = resolved(config, options, lambda: file_source(model))
        print_notes(chosen)
        comparison = check_model(
            model,
            chosen.options,
            steps=steps,
            seed=seed,
            kernels=kernels,
            draw_shapes=draw_shapes,
        )
    if as_json:
        print_json(comparison.to_json())
    else:
        out.print(str(comparison))
    return 0 if comparison.is_equal else 1
