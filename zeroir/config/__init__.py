"""The options of a compilation, validated once and stored in the program as text.

``option_fields`` declares each option by itself, ``offload_fields`` those of what is kept outside device memory.
``options`` states the rules between them, with those of ``effects`` and ``offload_rules``, and reads and stores them.
``groups`` and ``meshes`` read what these options mean.
"""

from zeroir.config.meshes import default_world_size
from zeroir.config.option_fields import GivenOptions, Precision
from zeroir.config.options import (
    CompileOptions,
    make_given_options,
    make_options,
    options_from_pairs,
)
from zeroir.config.texts import explain_validation

__all__ = [
    "CompileOptions",
    "GivenOptions",
    "Precision",
    "default_world_size",
    "explain_validation",
    "make_given_options",
    "make_options",
    "options_from_pairs",
]
