"""The functions and classes for Python users, on which the command line is built."""

from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import compile_model, compile_with, load_program, load_unverified

__all__ = ["CompiledProgram", "compile_model", "compile_with", "load_program", "load_unverified"]
