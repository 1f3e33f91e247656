"""The public Python functions and classes, which the command line uses, too."""

from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import compile_model, compile_with, load_program, load_unverified

__all__ = ["CompiledProgram", "compile_model", "compile_with", "load_program", "load_unverified"]
