"""From a model to a logical program: load, capture, cut, lower. The only compile-time code that imports torch.

A run only loads a model file, so this package imports the compiler at the first trace.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroir.config import CompileOptions
from zeroir.frontend.source.entry import load_model_file
from zeroir.frontend.source.source import ModelSource
from zeroir.ir.program import Program

__all__ = ["ModelSource", "TracedModel", "load_model_file", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A logical program, and its options: those given, and what the model sets, such as the units to recompute."""

    program: Program
    options: CompileOptions


def trace(source: ModelSource, options: CompileOptions) -> TracedModel:
    """Trace one device's training step of a model, without allocating a weight.

    Raises:
        UserError: where the model cannot be built, traced or cut as the options demand; it names the line.
    """
    from zeroir.frontend.lowering.tracing import trace_model

    return trace_model(source, options)
