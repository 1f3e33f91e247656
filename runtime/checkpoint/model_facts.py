"""Facts of the model that a checkpoint records in addition to values: names of its buffers, and its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue
from torch import Tensor, nn

from zeroir.runtime.state.named_tensors import NamedTensors
from zeroir.torch_ops.frozen_modules import frozen_modules, users_module
from zeroir.torch_ops.types import IR_DTYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a model. ``names`` maps each name of a named tensor to all names of that tensor.

    ``saved`` are the names in the model's ``state_dict``, in order, or None where they are not known, followed by those
    of frozen modules beside the model, which are ``apart``. ``config_owner`` is the name of the module that ``config``
    describes.
    """

    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    saved: tuple[str, ...] | None = None
    apart: frozenset[str] = frozenset()
    config: JsonValue = None
    config_owner: str = ""

    def is_of_model(self, name: str) -> bool:
        """Return whether the ``state_dict`` of the model itself contains a tensor under this name."""
        return (self.saved is None or name in self.saved) and name not in self.apart

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return the other names of a tensor."""
        return tuple(other for other in self.names.get(name, ()) if other != name)

    def unread(self, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of ``others`` in the ``state_dict``; the program does not hold them, so they never change."""
        saved = frozenset() if self.saved is None else self.saved
        return {
            name: value
            for name, value in others.items()
            if name in saved and value.dtype in IR_DTYPE and value.numel()
        }

    def is_persistent(self, name: str) -> bool:
        """Return whether the model's ``state_dict`` contains the tensor under any of its names."""
        if self.saved is None:
            return True
        return not set(self.saved).isdisjoint(self.names.get(name, (name,)))


def model_facts(module: nn.Module) -> ModelFacts:
    """Return the facts of a model, whose tensors may be on the meta device."""
    tensors = NamedTensors(module)
    names = {name: group for _, group in tensors.names_by_tensor() for name in group}
    config, owner = _config(module)
    apart = [
        f"{name}.{each}"
        for name, frozen in frozen_modules(module).items()
        for each in frozen.state_dict(keep_vars=True)
    ]
    return ModelFacts(
        names=names,
        saved=(*users_module(module).state_dict(keep_vars=True), *apart),
        apart=frozenset(apart),
        config=config,
        config_owner=owner,
    )


def _config(module: nn.Module) -> tuple[JsonValue, str]:
    """Return the configuration of the outermost module with one like Hugging Face's models, and the module's name."""
    for name, child in module.named_modules():
        to_dict = getattr(getattr(child, "config", None), "to_dict", None)
        if not callable(to_dict):
            continue
        try:
            # Converted to text and back, so that only values that JSON can represent remain.
            config: JsonValue = json.loads(json.dumps(to_dict(), allow_nan=False))
        except (TypeError, ValueError):
            continue
        if isinstance(config, dict) and not config.get("architectures"):
            # ``save_pretrained`` records it in the same way; a model built from a configuration lacks it.
            config["architectures"] = [type(child).__name__]
        return config, name
    return None, ""
