"""What Python users call, and what the command line is made of."""

from zeroir.api.compiled import (
    CompiledProgram,
    compile_model,
    compile_with,
    load_program,
    load_unverified,
)

__all__ = ["CompiledProgram", "compile_model", "compile_with", "load_program", "load_unverified"]
