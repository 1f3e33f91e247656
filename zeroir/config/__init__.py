"""The options of a compilation, validated once. Programs keep them as objects, and files as texts.

``table`` says how an option is declared, and derives flat names and flat models. ``options`` has all of them, in
objects of those that belong together: ``precision``, ``steps``, ``optimizer``, ``communication``, ``offload`` and
``loss_scale``. ``rules`` and ``offload_rules`` say which go together, ``making`` validates values by flat name, and
``of_programs`` has the options of a program.
``groups`` and ``meshes`` read what two of these options mean.
"""

from zeroir.config.making import (
    GivenOptions,
    changed,
    for_world_size,
    has_effect,
    make_given_options,
    make_options,
    replaced,
)
from zeroir.config.meshes import default_world_size
from zeroir.config.of_programs import options_of, why_not_evaluate
from zeroir.config.options import CompileOptions
from zeroir.config.precision import FloatName
from zeroir.config.table import explain_validation

__all__ = [
    "CompileOptions",
    "FloatName",
    "GivenOptions",
    "changed",
    "default_world_size",
    "explain_validation",
    "for_world_size",
    "has_effect",
    "make_given_options",
    "make_options",
    "options_of",
    "replaced",
    "why_not_evaluate",
]
