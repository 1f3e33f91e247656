"""A copy of a user's module with its tensors on the meta device.

It preserves tensors that are tied or share memory, hooks, the training flag of every submodule, and objects in
attributes. Nothing in the user's module changes, and no tensor memory is allocated.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroir.errors import UserError
from zeroir.frontend._torch_hooks import HOOKS_OF_MODULES
from zeroir.frontend._torch_private import (
    as_plain_tensors,
    copy_gradient_hooks,
    storage_address,
)
from zeroir.frontend.source.source import explain
from zeroir.frontend.source.source_lines import line_of_error, line_of_module, refusals_at


def meta_copy(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device.

    Raises:
        UserError: if an object in the module cannot be copied.
    """
    twins = _Twins()
    # Parameters have their own method for copies, which would copy their values.
    with as_plain_tensors():
        memo: dict[int, object] = {id(p): twins.parameter(p) for p in module.parameters()}
    # The state of a generator is a tensor with values, which a twin lacks.
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, torch.Generator):
                memo[id(value)] = value.clone_state()
    with torch.device("cpu"), as_plain_tensors(), _CopiesOnMeta(twins):
        return deep_copy(module, memo)


def deep_copy(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Copy a module by ``copy.deepcopy``, and let hooks and functions in attributes refer to the copies of modules.

    Raises:
        UserError: if an object in the module cannot be copied.
    """
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # noqa: BLE001 - any error of the objects in the module
        what = (
            f"The module {type(module).__name__} cannot be copied, which is needed to trace it; pass a function that "
            "makes it instead. The copy failed"
        )
        with refusals_at(line_of_module(module, "")):
            raise UserError(explain(error, line_of_error(error), what)) from None
    _rebind_functions(copied, memo)
    return copied


class _Twins:
    """Creates the meta twins of tensors; twins of tensors with a common storage have a common storage, too."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        # They are kept alive with the twins, so that no two storages share an address.
        self._seen: list[Tensor] = []

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a meta parameter with the same hooks and ``requires_grad``."""
        twin = nn.Parameter(self.plain(parameter), requires_grad=parameter.requires_grad)
        vars(twin).update(vars(parameter))
        copy_gradient_hooks(parameter, twin)
        return twin

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor that requires a gradient where the other one does."""
        twin = self.plain(tensor)
        if tensor.grad_fn is None:
            return twin.requires_grad_(tensor.requires_grad)
        # It was computed from parameters, which must be visible to the tracer.
        return twin.requires_grad_().clone()

    def plain(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor without a gradient, in the twin of the storage."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return torch.empty_like(tensor, device="meta")
        address = storage_address(tensor)
        if address not in self._storages:
            size_bytes = tensor.untyped_storage().nbytes()
            block = torch.empty(size_bytes, dtype=torch.uint8, device="meta")
            self._storages[address] = block.untyped_storage()
            self._seen.append(tensor)
        twin = torch.empty(0, dtype=tensor.dtype, device="meta")
        with torch.no_grad():
            return twin.set_(
                self._storages[address], tensor.storage_offset(), tensor.shape, tensor.stride()
            )


_DATA: Final = inspect.getattr_static(Tensor, "data").__get__


class _CopiesOnMeta(TorchFunctionMode):
    """Makes deep copies of tensors return their meta twins."""

    def __init__(self, twins: _Twins) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func == _DATA:  # of a parameter that is not registered, whose copy is that of its data
            (parameter,) = args
            assert isinstance(parameter, Tensor)
            return self._twins.plain(parameter)
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        assert isinstance(tensor, Tensor)
        assert isinstance(memo, dict)
        if id(tensor) not in memo:
            memo[id(tensor)] = self._twins.tensor(tensor)
        return memo[id(tensor)]


def _rebind_functions(copied: nn.Module, memo: Mapping[int, object]) -> None:
    """Let hooks and functions in attributes that refer to a module of the original refer to its copy.

    ``copy.deepcopy`` does not copy functions or the objects in their closures.
    """
    copies = _FunctionCopies(memo)
    for module in copied.modules():
        for owner in _function_owners(module):
            for key, value in list(owner.items()):
                if isinstance(value, FunctionType):
                    owner[key] = copies.of(value)


def _function_owners(module: nn.Module) -> Iterator[dict[object, object]]:
    own = cast("dict[object, object]", vars(module))
    yield own
    for name in HOOKS_OF_MODULES:
        hooks = own.get(name)
        if isinstance(hooks, dict):
            yield hooks


class _FunctionCopies:
    """Functions with the copies of modules in their closures and defaults; ``memo`` is that of the deep copy."""

    def __init__(self, memo: Mapping[int, object]) -> None:
        self._memo = memo
        # A function may be in its own closure.
        self._functions: dict[int, FunctionType] = {}

    def of(self, function: FunctionType) -> FunctionType:
        """Return the copy; the function itself where it refers to no module."""
        if id(function) in self._functions:
            return self._functions[id(function)]
        self._functions[id(function)] = function
        cells, defaults = function.__closure__ or (), function.__defaults__ or ()
        keywords = function.__kwdefaults__ or {}
        new_cells = tuple(map(self._cell, cells))
        new_defaults = tuple(map(self._value, defaults))
        new_keywords = {name: self._value(value) for name, value in keywords.items()}
        before = (*cells, *defaults, *keywords.values())
        after = (*new_cells, *new_defaults, *new_keywords.values())
        if all(new is old for new, old in zip(after, before, strict=True)):
            return function
        copied = FunctionType(
            function.__code__, function.__globals__, function.__name__, new_defaults, new_cells
        )
        copied.__kwdefaults__ = new_keywords
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
        vars(copied).update(vars(function))
        self._functions[id(function)] = copied
        return copied

    def _cell(self, cell: CellType) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            return cell
        twin = self._value(value)
        return cell if twin is value else CellType(twin)

    def _value(self, value: object) -> object:
        match value:
            case nn.Module():
                return self._memo.get(id(value), value)
            case MethodType(__self__=nn.Module() as owner) if id(owner) in self._memo:
                return MethodType(value.__func__, self._memo[id(owner)])
            case FunctionType():
                return self.of(value)
            case _:
                return value
