"""The module with whose values a program begins: one that rank 0 builds, or one that the user passes.

The values of a built module are those of ``torch.manual_seed(seed); model()``, because exactly that runs. Those of a
given module are its present ones. A module whose tensors are on the meta device takes them from a *state*, for example
an opened file of safetensors, tensor by tensor. The program's buffers replace the module's tensors: each tensor is
freed as soon as its values are in the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zeroir.errors import UserError
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.runtime.memory.malloc import trim_freed_memory
from zeroir.runtime.state.named_tensors import NamedTensors, without_memory
from zeroir.torch_ops.absent_tensors import MovedTensor, absent
from zeroir.torch_ops.batches import undense_kind
from zeroir.torch_ops.globals import torch_globals_kept
from zeroir.torch_ops.types import IR_DTYPE, TORCH_DTYPE

Factory = Callable[[], nn.Module]

_TRIM_BYTES = 16 << 20
"""Bytes of freed tensors after which the allocator returns them: it may have kept them for other tensors."""

_FLOATING = frozenset(dtype for dtype in IR_DTYPE if dtype.is_floating_point)

StateSource = Mapping[str, Tensor] | Callable[[str], Tensor]
"""Tensors by name, for example a ``state_dict``, or the method ``get_tensor`` of an opened file of safetensors."""


def watched_source(
    source: Factory | nn.Module, watch: Callable[[nn.Module], None]
) -> Factory | nn.Module:
    """Return a source of the same module that calls ``watch`` with the module as soon as it exists."""
    if isinstance(source, nn.Module):
        watch(source)
        return source

    def watched() -> nn.Module:
        module = source()
        if isinstance(module, nn.Module):
            watch(module)
        return module

    return watched


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor of the module that the program holds, with all its names; the program uses the first.

    ``dtypes`` are those that the module's tensor may have: a floating parameter is converted to the program's dtype,
    but not to floats of 8 bits.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtypes: frozenset[torch.dtype]

    @property
    def name(self) -> str:
        """The name that the program uses."""
        return self.names[0]


def held_tensors(program: Program) -> list[HeldTensor]:
    """Return the parameters and buffers of the module that the program holds, including those without elements."""
    return [
        *(
            HeldTensor(
                names=(slot.name, *slot.aliases),
                shape=slot.shape,
                dtypes=_FLOATING
                if flat.dtype.is_floating and flat.dtype is not DType.F8_E4M3
                else frozenset({TORCH_DTYPE[flat.dtype]}),
            )
            for flat in program.flats
            for slot in flat.slots
        ),
        *(
            HeldTensor(
                names=(binding.name,),
                shape=binding.shape,
                dtypes=frozenset({TORCH_DTYPE[program.buffer_by_name[binding.buffer].dtype]}),
            )
            for binding in program.module_buffers
            if binding.data is None
        ),
    ]


class InitialModule:
    """The values of a module's tensors by name, from the state where it has them. Only rank 0 reads them.

    With ``is_kept`` the module keeps its tensors. A module that ``is_made`` for these values may share buffers with the
    user's code, such as the weights of classes: only the module's own references to them are replaced.

    Raises:
        UserError: where module and state lack a tensor of the program, or it has a different shape or no values.
    """

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        state: StateSource | None,
        *,
        is_kept: bool,
        is_made: bool = False,
    ) -> None:
        if not (state is None or isinstance(state, Mapping) or callable(state)):
            raise UserError(
                f"state= is of type {type(state).__name__}; pass a mapping from names to tensors, or a function, for "
                "instance the get_tensor of an opened file of safetensors."
            )
        self._tensors = NamedTensors(module)
        self._state = state
        self._is_kept = is_kept
        self._untrimmed_bytes = 0
        self._is_made = is_made
        self._fetched: dict[str, Tensor] = {}
        self._row_major: tuple[str, Tensor] | None = None
        held = held_tensors(program)
        self._held = {tensor.name: tensor for tensor in held}
        for tensor in held:
            self._require(tensor)

    def fetch(self, name: str) -> torch.dtype:
        """Read a tensor from the state, if it is there, and keep it until ``free``; return the dtype of its values.

        Raises:
            UserError: where the state fails, or its tensor has another shape.
        """
        tensor = self._held[name]
        fetched = self._from_state(tensor.names)
        if fetched is None:
            return self._tensors[name].dtype
        if tuple(fetched.shape) != tensor.shape or fetched.is_meta or fetched.dtype not in IR_DTYPE:
            raise UserError(
                f"The state's '{name}' is a tensor of shape {list(fetched.shape)} and {fetched.dtype} on "
                f"{fetched.device}, but the program was compiled with the shape {list(tensor.shape)}."
            )
        self._fetched[name] = fetched.detach()
        return fetched.dtype

    def elements(self, name: str) -> Tensor:
        """Return the values, flat and row-major: a view, or a copy that is kept until another name is requested."""
        if self._row_major is None or self._row_major[0] != name:
            values = self._fetched.get(name)
            values = self._tensors[name].detach() if values is None else values
            self._row_major = name, values.reshape(-1)
        return self._row_major[1]

    def free(self, name: str) -> None:
        """Free the memory of a tensor whose values were copied: the module's tensor becomes one without values."""
        self._row_major = None
        self._fetched.pop(name, None)
        if not self._is_kept:
            tensor = self._tensors[name]
            if tensor.device.type == "cpu":
                self._untrimmed_bytes += tensor.nbytes
            del tensor
            _free(self._tensors, self._held[name], is_made=self._is_made)
            if self._untrimmed_bytes >= _TRIM_BYTES:
                self._untrimmed_bytes = 0
                trim_freed_memory()

    def shared_storage(self) -> tuple[str, str, int] | None:
        """Return the names of two tensors of the program that share storage, and its bytes.

        Freeing one frees nothing.
        """
        first: dict[int, str] = {}
        for name in self._held:
            tensor = self._tensors[name]
            if not tensor.numel() or tensor.is_meta or self._is_kept:
                continue
            storage = tensor.untyped_storage()
            if (other := first.setdefault(storage.data_ptr(), name)) != name:
                return other, name, storage.nbytes()
        return None

    def others(self) -> dict[str, Tensor]:
        """Return the values of the tensors that the program does not hold, by first name; no section reads them."""
        values: dict[str, Tensor] = {}
        held = {name for tensor in self._held.values() for name in tensor.names}
        for tensor, names in self._tensors.names_by_tensor():
            if held.isdisjoint(names) and tensor.grad_fn is None:
                value = self._from_mapping(names) if tensor.is_meta else tensor
                if value is not None and undense_kind(value) is None:
                    values[names[0]] = value.detach()
        return values

    def _require(self, tensor: HeldTensor) -> None:
        name = tensor.name
        if name not in self._tensors:
            raise UserError(
                f"The model has no parameter or buffer '{name}', which the program was compiled with; "
                "compile it again from this model."
            )
        own = self._tensors[name]
        if tuple(own.shape) != tensor.shape:
            raise UserError(
                f"The model's '{name}' has the shape {list(own.shape)}, but the program was compiled with "
                f"{list(tensor.shape)}; compile it again from this model."
            )
        if own.dtype not in tensor.dtypes:
            raise UserError(
                f"The model's '{name}' has the dtype {own.dtype}, but the program was compiled with "
                f"{' or '.join(sorted(map(str, tensor.dtypes)))}; compile it again from this model."
            )
        if self._is_in_state(tensor.names):
            return
        for alias in tensor.names[1:]:
            if alias in self._tensors and self._tensors[alias].data_ptr() != own.data_ptr():
                raise UserError(
                    f"The model's '{alias}' is not '{name}', to which it was tied when the program was compiled; "
                    "compile it again from this model."
                )
        if own.is_meta and self._state is not None:
            advice = self._near(name)
            if not self._tensors.is_saved(name):
                advice = ", and no state_dict has it: pass a function that makes the module, which gives it its value"
            raise UserError(f"The state has no '{name}', which is on the meta device{advice}.")
        if own.is_meta:
            raise UserError(
                f"The model's '{name}' is on the meta device, so it has no value to begin with: make it on the CPU "
                "(compiling allocates nothing), or pass values with engine(state=...). An engine takes the values of "
                "its module, unless it was made with keep_module=True."
            )

    def _is_in_state(self, names: tuple[str, ...]) -> bool:
        """Return whether the state provides this tensor's values; a function must provide those of a ``state_dict``."""
        match self._state:
            case None:
                return False
            case Mapping():
                return any(name in self._state for name in names)
            case _:
                return self._tensors[names[0]].is_meta or self._tensors.is_saved(names[0])

    def _from_state(self, names: tuple[str, ...]) -> Tensor | None:
        if self._state is None or not self._is_in_state(names):
            return None
        if isinstance(self._state, Mapping):
            return self._from_mapping(names)
        failure: Exception | None = None
        for name in names:  # A file has a tied parameter under one of its names.
            try:
                return self._state(name)
            except Exception as error:  # noqa: BLE001 - any error of the user's function
                failure = failure or error
        raise UserError(
            f"The state has no '{names[0]}': {type(failure).__name__}: {failure}"
        ) from failure

    def _from_mapping(self, names: tuple[str, ...]) -> Tensor | None:
        if not isinstance(self._state, Mapping):
            return None
        return next((self._state[name] for name in names if name in self._state), None)

    def _near(self, name: str) -> str:
        assert isinstance(self._state, Mapping)
        near = get_close_matches(name, list(self._state), n=3)
        return f"; its names like it are {', '.join(near)}" if near else ""


def free_module(program: Program, module: nn.Module) -> None:
    """Free the tensors of a module that the program holds: they become meta tensors."""
    tensors = NamedTensors(module)
    for held in held_tensors(program):
        _free(tensors, held)


def free_tensors(module: nn.Module, names: Collection[str]) -> None:
    """Free tensors of a module whose values have moved: they become meta tensors."""
    tensors = NamedTensors(module)
    for name in names:
        if name in tensors and not tensors[name].is_meta:
            tensors.replace(tensors[name], absent(tensors[name], MovedTensor))


def _free(tensors: NamedTensors, held: HeldTensor, *, is_made: bool = False) -> None:
    for (
        name
    ) in held.names:  # Several names of a parameter may be several tensors with the same memory.
        if name in tensors and not (is_made and tensors[name].is_meta):
            tensor = tensors[name]
            everywhere = not is_made or isinstance(tensor, nn.Parameter)
            empty = without_memory(tensor) if is_made else absent(tensor, MovedTensor)
            tensors.replace(tensor, empty, everywhere=everywhere)


def built(factory: Factory, seed: int) -> nn.Module:
    """Build the user's module under ``torch.manual_seed(seed)``.

    torch's generators and other globals are restored, because the ranks that build no module do not change theirs.
    """
    with torch_globals_kept():
        torch.manual_seed(seed)
        return factory()


def built_without_values(factory: Factory) -> nn.Module:
    """Build the user's module with its parameters on the meta device; buffers and other tensors have their values.

    A parameter becomes a meta tensor when it is registered, before its values are drawn. Where the constructor needs
    the values of parameters, they are available.
    """
    twins = WeakTensorKeyDictionary()

    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        if parameter not in twins:
            twins[parameter] = without_memory(parameter)
        twin = twins[parameter]
        assert isinstance(twin, nn.Parameter)
        return twin

    with torch_globals_kept():
        try:
            with _registration(on_meta):
                return factory()
        except Exception:  # noqa: BLE001 - building with values raises any error of the user's code again
            return factory()


@contextmanager
def _registration(
    hook: Callable[[nn.Module, str, nn.Parameter], nn.Parameter | None],
) -> Iterator[None]:
    # torch's annotation omits the parameter that a hook may return.
    register = nn.modules.module.register_module_parameter_registration_hook
    handle = register(cast("Callable[..., None]", hook))
    try:
        yield
    finally:
        handle.remove()
