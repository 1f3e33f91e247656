"""From a model to a logical program: load, capture, cut, lower. The only compile-time code that imports torch.

A run only loads a model file, so this package imports the compiler at the first trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroir.config import CompileOptions
from zeroir.frontend.source.entry import load_model_file
from zeroir.frontend.source.source import ModelSource

if TYPE_CHECKING:
    from zeroir.frontend.lowering.tracing import TracedModel

__all__ = ["ModelSource", "load_model_file", "trace"]


def trace(source: ModelSource, options: CompileOptions) -> TracedModel:
    """Trace one device's training step of a model, without allocating any weights.

    Raises:
        UserError: if the model cannot be built, traced or cut as the options require; it names the line.
    """
    from zeroir.frontend.lowering.tracing import trace_model

    return trace_model(source, options)
