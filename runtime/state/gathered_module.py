"""A plain module with the present values of the parameters, available between two steps.

The module has the user's class and is created for each block on the meta device. Its parameters and buffers get memory
and values, gathered flat by flat, and lose them when the block ends. The module remains, but then every use of its
tensors raises an error, so that no code computes with old values or keeps a copy of the model by keeping the module.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from zeroir.errors import ModelWarning, UserError
from zeroir.ir.program import Program
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.engine.patterns import matching
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.full_parameters import whole_parameters
from zeroir.runtime.state.initial_module import Factory, built_without_values
from zeroir.runtime.state.named_tensors import NamedTensors, without_memory
from zeroir.runtime.state.waiting_states import WaitingStates
from zeroir.torch_ops.absent_tensors import AbsentTensor, ReturnedTensor, absent, unlent_tensor

T = TypeVar("T")

DeepCopy = Callable[[nn.Module, dict[int, object]], nn.Module]
"""``copy.deepcopy`` of a module with a memo: copies by the ids of originals."""


def module_maker(source: Factory | nn.Module, deep_copy: DeepCopy = copy.deepcopy) -> Factory:
    """Return a function that creates the user's module; at least its parameters are on the meta device.

    A module is copied by ``deep_copy`` as it is at the time of the call, with all its named tensors on the meta device.
    """
    if isinstance(source, nn.Module):
        return partial(_copied, source, deep_copy)
    return partial(built_without_values, source)


def _copied(module: nn.Module, deep_copy: DeepCopy) -> nn.Module:
    memo: dict[int, object] = {}
    for tensor, _ in NamedTensors(module).names_by_tensor():
        memo[id(tensor)] = twin = without_memory(tensor)
        vars(twin).update(vars(tensor))
    return deep_copy(module, memo)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGatherer:
    """Gathers modules of a program on one rank. ``comm`` gathers; all ranks call this together.

    ``make`` creates the whole module. ``others`` are the values of tensors that the program does not hold. ``adapt``
    makes a module compute in the dtypes of the program's parameters, where some are kept in FP32.
    """

    program: Program
    memory: RankMemory
    comm: Comm
    make: Factory
    others: Mapping[str, Tensor]
    adapt: Callable[[nn.Module], None] | None = None
    waiting: WaitingStates | None = None

    @contextmanager
    def gathered(
        self, name: str, units: Sequence[str] | None, *, masters: bool, ema: bool
    ) -> Iterator[nn.Module]:
        """Yield a module with the present values, as ``Engine.gathered`` does."""
        lent_units = None if units is None else self._matching_units(units)
        whole = self.make()
        module = _submodule(whole, name)
        if self.adapt is not None and not masters:
            self.adapt(whole)
        tensors = NamedTensors(whole)
        wanted = {id(tensor) for tensor, _ in NamedTensors(module).names_by_tensor()}
        gathered_tensors = [pair for pair in tensors.names_by_tensor() if id(pair[0]) in wanted]
        with torch.inference_mode(mode=False), torch.no_grad():
            self._fill(tensors, gathered_tensors, lent_units, masters=masters, ema=ema)
        versions = [tensor._version for tensor, _ in gathered_tensors]
        try:
            yield module
            changed = [
                (_name_in(name, names), isinstance(tensor, nn.Parameter))
                for (tensor, names), version in zip(gathered_tensors, versions, strict=True)
                if tensor._version != version
            ]
        finally:
            with torch.inference_mode(mode=False):
                for tensor, _ in gathered_tensors:
                    if not tensor.is_meta or isinstance(tensor, AbsentTensor):
                        tensors.replace(tensor, absent(tensor, ReturnedTensor))
        _refuse_changes(changed)

    def _matching_units(self, units: Sequence[str]) -> frozenset[str]:
        names = list(dict.fromkeys(flat.unit for flat in self.program.flats))
        patterns = (units,) if isinstance(units, str) else units
        return frozenset(matching(names, patterns, "unit of the program"))

    def _fill(
        self,
        tensors: NamedTensors,
        gathered_tensors: Sequence[tuple[Tensor, tuple[str, ...]]],
        units: frozenset[str] | None,
        *,
        masters: bool,
        ema: bool,
    ) -> None:
        """Give tensors, which are listed with all their names, memory and values, unless they are of other units."""
        bindings = {b.name: b for b in self.program.module_buffers if b.data is None}
        device = self.memory.device
        of_slot: dict[str, list[Tensor]] = {}
        for tensor, names in gathered_tensors:
            home = _first(self.program.parameter_by_name, names)
            binding = _first(bindings, names)
            other = _first(self.others, names)
            if home is not None and units is not None and home[0].unit not in units:
                tensors.replace(tensor, absent(tensor, unlent_tensor(home[0].unit)))
            elif home is not None:
                of_slot.setdefault(home[1].name, []).append(tensor)
            elif binding is not None:
                values = self.memory.buffer(binding.buffer).to(device, copy=True)
                _put(tensors, tensor, values.view(binding.shape))
            elif other is not None:
                _put(tensors, tensor, other.to(device, copy=True))
        parameters = whole_parameters(
            self.program,
            [self.memory],
            self.comm,
            of_slot,
            masters=masters,
            ema=ema,
            waiting=self.waiting,
        )
        for slot, (values,) in parameters:
            for tensor in of_slot[slot.name]:
                _put(tensors, tensor, values)


def _put(tensors: NamedTensors, tensor: Tensor, values: Tensor) -> None:
    """Replace a tensor of a module by one with other values and memory."""
    is_parameter = isinstance(tensor, nn.Parameter)
    new = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    tensors.replace(tensor, new)


def _first(values: Mapping[str, T], names: Sequence[str]) -> T | None:
    """Return the value of the first name that has one."""
    return next((values[name] for name in names if name in values), None)


def _name_in(module: str, names: Sequence[str]) -> str:
    """Return the one of a tensor's names that is in a module."""
    prefix = f"{module}." if module else ""
    return next((name for name in names if name.startswith(prefix)), names[0])


def _submodule(whole: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(whole.named_modules(remove_duplicate=False))
    if name in modules:
        return modules[name]
    if name in NamedTensors(whole):
        owner = name.rpartition(".")[0]
        raise UserError(
            f"'{name}' is a tensor of the module '{owner}', and engine.gathered() lends modules: pass '{owner}'."
        )
    near = get_close_matches(name, modules, n=3)
    names = ", ".join(f"'{each}'" for each in near or [each for each in modules if each][:3])
    raise UserError(f"The model has no module '{name}'; names like it are {names or 'none'}.")


def _refuse_changes(changed: Sequence[tuple[str, bool]]) -> None:
    """Reject in-place changes of parameters, and warn of those of buffers, which a forward in training mode makes."""
    parameters = [name for name, is_parameter in changed if is_parameter]
    if parameters:
        raise UserError(
            f"The block changed '{parameters[0]}' in place, but engine.gathered() lends tensors for reading, and the "
            "engine keeps its own values: change a copy."
        )
    if changed:
        warnings.warn(
            f"The block changed the buffer '{changed[0][0]}' of the lent module, and the engine keeps its own value: "
            "call eval() on the module, if its forward should change no buffers.",
            ModelWarning,
            stacklevel=4,
        )
