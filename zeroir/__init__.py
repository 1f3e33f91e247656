"""zeroir: compile a PyTorch training step into an explicit, verified ZeRO schedule, and run it.

The public API is loaded on first use, so that ``import zeroir`` costs nothing and imports no torch:

* ``zeroir.compile(model, stage=3, ...)`` compiles a model file and returns a ``CompiledProgram``; options that belong
  together are objects, such as ``zeroir.Offload(...)``, and ``zeroir.optim`` has optimizers with their settings;
* ``zeroir.load(path)`` reads one from disk;
* ``print(program)`` shows its schedule, ``program.engine()`` returns an ``Engine``, whose ``step(batch)`` trains and
  returns a ``StepResult``; its ``save(path)`` returns a ``PendingSave``, its ``load(path)`` a ``LoadedState``;
* ``zeroir.Receiver(address)`` loads what ``engine.publish(address)`` hands to processes that infer;
* ``zeroir.ResumableLoader(dataset, ...)`` gives batches whose order survives a resume, by any number of ranks;
* ``zeroir.ZeroirTrainer`` is Hugging Face's ``Trainer`` over an engine, ``zeroir.ZeroirStrategy`` a strategy of PyTorch
  Lightning's, and ``zeroir.prepare`` makes an engine for a loop of accelerate;
* ``zeroir.simulate(program, "dgx-h100")`` predicts the time of a step, and ``zeroir.estimate(7.5e9, world_size=64)``
  memory and communication from the number of parameters alone;
* ``zeroir.plan(model, "dgx-h100", memory="80GB")`` chooses the options with which a step is shortest;
* ``zeroir.quantize_frozen(model)`` stores the frozen weights of a model in 4 or 8 bits;
* ``zeroir.register_workspace(op, formula)`` declares the memory that an operator of your own needs, and
  ``zeroir.measure_workspace(op, *args)`` measures it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# What type checkers and editors read; ``_HOMES`` says the same to Python.
if TYPE_CHECKING:
    from zeroir import optim as optim
    from zeroir.api import CompiledProgram as CompiledProgram
    from zeroir.api import compile_model, load_program
    from zeroir.api.search.costs import estimate as estimate
    from zeroir.api.search.costs import simulate as simulate
    from zeroir.api.search.histogram import simulate_histogram as simulate_histogram
    from zeroir.api.search.plan import plan as plan
    from zeroir.config import CompileOptions as CompileOptions
    from zeroir.config.communication import Communication as Communication
    from zeroir.config.communication import Prefetch as Prefetch
    from zeroir.config.communication import Unshard as Unshard
    from zeroir.config.loss_scale import LossScale as LossScale
    from zeroir.config.offload import Offload as Offload
    from zeroir.config.precision import Precision as Precision
    from zeroir.config.steps import Evaluate as Evaluate
    from zeroir.config.steps import MicroSteps as MicroSteps
    from zeroir.config.steps import Recompute as Recompute
    from zeroir.config.units import Units as Units
    from zeroir.errors import InternalError as InternalError
    from zeroir.errors import UserError as UserError
    from zeroir.integrations.accelerate import prepare as prepare
    from zeroir.integrations.hugging_face import ZeroirTrainer as ZeroirTrainer
    from zeroir.integrations.lightning import ZeroirStrategy as ZeroirStrategy
    from zeroir.quantize import quantize_frozen as quantize_frozen
    from zeroir.runtime.checkpoint.background import PendingSave as PendingSave
    from zeroir.runtime.checkpoint.loading import LoadedState as LoadedState
    from zeroir.runtime.data.loader import ResumableLoader as ResumableLoader
    from zeroir.runtime.engine.engine import Engine as Engine
    from zeroir.runtime.engine.results import Evaluation as Evaluation
    from zeroir.runtime.engine.results import StepResult as StepResult
    from zeroir.runtime.memory.operator_workspaces import measure_workspace as measure_workspace
    from zeroir.runtime.publishing.receiver import Receiver as Receiver
    from zeroir.torch_ops.foreign_workspaces import register_workspace as register_workspace

    compile = compile_model  # noqa: A001
    load = load_program

__version__ = "0.1.0"

_PUBLIC = {
    "zeroir.api": ("CompiledProgram", "compile", "load"),
    "zeroir.api.search.costs": ("estimate", "simulate"),
    "zeroir.api.search.histogram": ("simulate_histogram",),
    "zeroir.api.search.plan": ("plan",),
    "zeroir.config": ("CompileOptions",),
    "zeroir.config.communication": ("Communication", "Prefetch", "Unshard"),
    "zeroir.config.loss_scale": ("LossScale",),
    "zeroir.config.offload": ("Offload",),
    "zeroir.config.precision": ("Precision",),
    "zeroir.config.steps": ("Evaluate", "MicroSteps", "Recompute"),
    "zeroir.config.units": ("Units",),
    "zeroir.errors": ("InternalError", "UserError"),
    "zeroir.integrations.accelerate": ("prepare",),
    "zeroir.integrations.hugging_face": ("ZeroirTrainer",),
    "zeroir.integrations.lightning": ("ZeroirStrategy",),
    "zeroir.optim": ("optim",),
    "zeroir.quantize": ("quantize_frozen",),
    "zeroir.runtime.checkpoint.background": ("PendingSave",),
    "zeroir.runtime.checkpoint.loading": ("LoadedState",),
    "zeroir.runtime.data.loader": ("ResumableLoader",),
    "zeroir.runtime.engine.engine": ("Engine",),
    "zeroir.runtime.engine.results": ("Evaluation", "StepResult"),
    "zeroir.runtime.memory.operator_workspaces": ("measure_workspace",),
    "zeroir.runtime.publishing.receiver": ("Receiver",),
    "zeroir.torch_ops.foreign_workspaces": ("register_workspace",),
}
"""The public names, by the module that is imported when one of them is first used."""

_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
_NAMES_THERE = {"compile": "compile_model", "load": "load_program"}
_EXTRAS = {
    "ZeroirStrategy": "lightning",
    "ZeroirTrainer": "huggingface",
    "prepare": "huggingface",
}


def _loaded(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'zeroir' has no attribute '{name}'")
    try:
        module = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if name not in _EXTRAS:
            raise
        raise ModuleNotFoundError(
            f"zeroir.{name} needs {error.name}, which is not installed: pip install 'zeroir[{_EXTRAS[name]}]'.",
            name=error.name,
        ) from error
    value: object = module if name == "optim" else getattr(module, _NAMES_THERE.get(name, name))
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # Type checkers know the names above, and would take any other for one, too.
    __all__ = list(_HOMES)
    __getattr__ = _loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
