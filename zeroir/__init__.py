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

if TYPE_CHECKING:
    from zeroir import optim
    from zeroir.api import CompiledProgram
    from zeroir.api import compile_model as compile  # noqa: A004
    from zeroir.api import load_program as load
    from zeroir.api.search.costs import estimate, simulate
    from zeroir.api.search.histogram import simulate_histogram
    from zeroir.api.search.plan import plan
    from zeroir.config import CompileOptions
    from zeroir.config.communication import Communication, Prefetch, Unshard
    from zeroir.config.loss_scale import LossScale
    from zeroir.config.offload import Offload
    from zeroir.config.precision import Precision
    from zeroir.config.steps import Evaluate, MicroSteps, Recompute
    from zeroir.config.units import Units
    from zeroir.errors import InternalError, UserError
    from zeroir.integrations.accelerate import prepare
    from zeroir.integrations.hugging_face import ZeroirTrainer
    from zeroir.integrations.lightning import ZeroirStrategy
    from zeroir.quantize import quantize_frozen
    from zeroir.runtime.checkpoint.background import PendingSave
    from zeroir.runtime.checkpoint.loading import LoadedState
    from zeroir.runtime.data.loader import ResumableLoader
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.results import Evaluation, StepResult
    from zeroir.runtime.memory.operator_workspaces import measure_workspace
    from zeroir.runtime.publishing.receiver import Receiver
    from zeroir.torch_ops.foreign_workspaces import register_workspace

__all__ = [
    "Communication",
    "CompileOptions",
    "CompiledProgram",
    "Engine",
    "Evaluate",
    "Evaluation",
    "InternalError",
    "LoadedState",
    "LossScale",
    "MicroSteps",
    "Offload",
    "PendingSave",
    "Precision",
    "Prefetch",
    "Receiver",
    "Recompute",
    "ResumableLoader",
    "StepResult",
    "Units",
    "Unshard",
    "UserError",
    "ZeroirStrategy",
    "ZeroirTrainer",
    "compile",
    "estimate",
    "load",
    "measure_workspace",
    "optim",
    "plan",
    "prepare",
    "quantize_frozen",
    "register_workspace",
    "simulate",
    "simulate_histogram",
]

__version__ = "0.1.0"

_HOMES = {
    "Communication": ("zeroir.config.communication", "Communication"),
    "LossScale": ("zeroir.config.loss_scale", "LossScale"),
    "MicroSteps": ("zeroir.config.steps", "MicroSteps"),
    "Offload": ("zeroir.config.offload", "Offload"),
    "Precision": ("zeroir.config.precision", "Precision"),
    "Prefetch": ("zeroir.config.communication", "Prefetch"),
    "Evaluate": ("zeroir.config.steps", "Evaluate"),
    "Recompute": ("zeroir.config.steps", "Recompute"),
    "Units": ("zeroir.config.units", "Units"),
    "Unshard": ("zeroir.config.communication", "Unshard"),
    "CompileOptions": ("zeroir.config", "CompileOptions"),
    "CompiledProgram": ("zeroir.api", "CompiledProgram"),
    "Engine": ("zeroir.runtime.engine.engine", "Engine"),
    "Evaluation": ("zeroir.runtime.engine.results", "Evaluation"),
    "InternalError": ("zeroir.errors", "InternalError"),
    "LoadedState": ("zeroir.runtime.checkpoint.loading", "LoadedState"),
    "PendingSave": ("zeroir.runtime.checkpoint.background", "PendingSave"),
    "Receiver": ("zeroir.runtime.publishing.receiver", "Receiver"),
    "ResumableLoader": ("zeroir.runtime.data.loader", "ResumableLoader"),
    "StepResult": ("zeroir.runtime.engine.results", "StepResult"),
    "UserError": ("zeroir.errors", "UserError"),
    "ZeroirStrategy": ("zeroir.integrations.lightning", "ZeroirStrategy"),
    "ZeroirTrainer": ("zeroir.integrations.hugging_face", "ZeroirTrainer"),
    "compile": ("zeroir.api", "compile_model"),
    "estimate": ("zeroir.api.search.costs", "estimate"),
    "load": ("zeroir.api", "load_program"),
    "measure_workspace": ("zeroir.runtime.memory.operator_workspaces", "measure_workspace"),
    "plan": ("zeroir.api.search.plan", "plan"),
    "prepare": ("zeroir.integrations.accelerate", "prepare"),
    "quantize_frozen": ("zeroir.quantize", "quantize_frozen"),
    "register_workspace": ("zeroir.torch_ops.foreign_workspaces", "register_workspace"),
    "simulate": ("zeroir.api.search.costs", "simulate"),
    "simulate_histogram": ("zeroir.api.search.histogram", "simulate_histogram"),
}


_EXTRAS = {
    "ZeroirStrategy": "lightning",
    "ZeroirTrainer": "huggingface",
    "prepare": "huggingface",
}


def __getattr__(name: str) -> object:
    if name == "optim":
        return import_module("zeroir.optim")
    if name not in _HOMES:
        raise AttributeError(f"module 'zeroir' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    try:
        value: object = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS:
            raise
        raise ModuleNotFoundError(
            f"zeroir.{name} needs {error.name}, which is not installed: pip install 'zeroir[{_EXTRAS[name]}]'.",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
