"""A whole version of weights, as a file of safetensors in memory or on a disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.runtime.publishing.image import ALIASES, STEP, VERSION
from zeroir.runtime.state.named_tensors import NamedTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """Weights by the names of the module that was trained. ``stored`` maps each name to the one that the file has."""

    version: int
    step: int
    stored: Mapping[str, str]
    _file: Any

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor once, with the name that it has in a file of Hugging Face."""
        for name in dict.fromkeys(self.stored.values()):
            yield name, self._file.get_tensor(name)

    def load_into(self, module: nn.Module) -> None:
        """Copy the weights to a module's parameters and persistent buffers, in the dtypes that these have.

        Raises:
            UserError: where names or shapes differ, or a tensor has no memory; then nothing has changed.
        """
        copies = self._copies(module)
        with torch.inference_mode():
            for tensor, name in copies:
                tensor.copy_(self._file.get_tensor(name))

    def _copies(self, module: nn.Module) -> list[tuple[Tensor, str]]:
        """Return the module's tensors, each with the name of its values."""
        named = NamedTensors(module)
        copies: list[tuple[Tensor, str]] = []
        for tensor, names in named.names_by_tensor():
            own = [name for name in names if named.is_saved(name)]
            found = dict.fromkeys(self.stored[name] for name in own if name in self.stored)
            if own and not found and tensor.numel():
                raise UserError(
                    f"The module has '{own[0]}', which was not published: receive into the model that is trained."
                )
            if len(found) > 1:
                first, second, *_ = found
                raise UserError(
                    f"The module has one tensor for '{first}' and '{second}', which are two where they are trained: "
                    "tie them there, or untie them here."
                )
            copies += [(tensor, name) for name in found]
        taken = {name for _, name in copies}
        for name in self.stored.values():
            if name not in taken:
                raise UserError(
                    f"'{name}' was published, but the module has no such parameter or persistent buffer: receive into "
                    "the model that is trained."
                )
        for tensor, name in copies:
            self._require_fitting(tensor, name)
        return copies

    def _require_fitting(self, tensor: Tensor, name: str) -> None:
        shape = self._file.get_slice(name).get_shape()
        if list(tensor.shape) != shape:
            raise UserError(
                f"'{name}' was published with the shape {shape}, but the module's has {list(tensor.shape)}: receive "
                "into the model that is trained."
            )
        if tensor.is_meta:
            raise UserError(
                f"The module's '{name}' is on the meta device, so it has no memory for weights: call "
                "module.to_empty(device=...) first."
            )


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[StoredWeights]:
    """Open a file of published weights.

    Raises:
        UserError: where it is none.
    """
    try:
        opening = cast("Any", safe_open)(os.fspath(path), framework="pt")
    except SafetensorError as error:
        raise UserError(f"'{os.fspath(path)}' has no published weights: {error}.") from error
    with opening as file:
        metadata: dict[str, str] = file.metadata() or {}
        if VERSION not in metadata:
            raise UserError(
                f"'{os.fspath(path)}' was not written by engine.publish: give the address that it has."
            )
        stored = {name: name for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        for name, others in json.loads(metadata[ALIASES]).items():
            stored |= dict.fromkeys(others, name)
        yield StoredWeights(
            version=int(metadata[VERSION]),
            step=int(metadata[STEP]),
            stored=stored,
            _file=file,
        )
