"""The state of modules: their attributes, modes, hooks and submodules, and which parameters are trained."""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from zeroir.frontend._torch_hooks import HOOKS_OF_MODULES, gradient_hooks
from zeroir.frontend.source.imports import is_known_package
from zeroir.frontend.watch.process_state import add_replaceable
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.frontend.watch.walk import HOOK, NumberPlace, Walk

_OF_TORCH: Final = frozenset(vars(nn.Module()))

BY_IDENTITY: Final = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""The classes of objects that are compared by their identity."""

OF_TRAINERS: Final = frozenset(("zeroir", "lightning", "pytorch_lightning"))
"""The packages with classes of trainers, which keep books on an object of the user's."""


def add_module_tree(walk: Walk, model: nn.Module, prefix: str, *, is_own: bool) -> None:
    """Add a module with its submodules; tensors of the model's own are the program's, those of others count."""
    # Objects in attributes may refer to the modules themselves.
    walk.seen.update((id(module), module) for module in model.modules())
    for name, module in model.named_modules():
        path = f"{prefix}.{name}".strip(".")
        _add_module(walk, path, module)
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                full = f"{path}.{key}".strip(".")
                if tensor is None or not is_own:
                    walk.add(full, tensor)
                    continue
                walk.seen[id(tensor)] = tensor
                walk.leaves[full] = (Tensor, id(tensor))
                if isinstance(tensor, nn.Parameter):
                    walk.leaves[f"{full}.requires_grad"] = (tensor.requires_grad,)
                    walk.quick.add_parameter(tensor)
                    _add_gradient_hooks(walk, full, tensor)
    live = () if walk.live is None else walk.live.modules
    traced = {base for m in model.modules() if m not in live for base in type(m).__mro__}
    for kind in dict.fromkeys(base for m in model.modules() for base in type(m).__mro__):
        if is_known_package(kind.__module__):
            forward = vars(kind).get("forward")
            if forward is not None:
                add_replaceable(
                    walk, f"{kind.__qualname__}.forward", vars(kind), "forward", forward
                )
        else:
            label = walk.label(kind.__name__, id(kind))
            forward = vars(kind).get("forward")
            if kind in traced and isinstance(forward, FunctionType):
                walk.add(f"{label}.forward", forward)  # It is called without a mention.
            walk.add_attributes(label, vars(kind), kind)


def _add_module(walk: Walk, path: str, module: nn.Module) -> None:
    own = vars(module)
    contents = dict(own)
    walk.leaves[f"{path}.training".strip(".")] = (module.training,)
    walk.seen[id(type(module))] = type(module)
    walk.leaves[f"{path}.__class__".strip(".")] = (type, id(type(module)))
    walk.quick.add_instance(module)
    for name, child in module._modules.items():
        walk.seen[id(child)] = child
        walk.leaves[f"{path}.{name}".strip(".")] = (nn.Module, type(child).__name__, id(child))
    for kind in ("_modules", "_parameters", "_buffers"):
        walk.quick.add_container(own[kind], dict(own[kind]))
    if isinstance(module, nn.ModuleDict):
        walk.leaves[f"{path}.keys()".strip(".")] = (list, repr(list(module._modules)))
        walk.quick.add_computed(lambda: list(module._modules))
    live = walk.live
    if live is None or module not in live.modules:
        walk.quick.add_container(own, contents)
        _add_hooks(walk, path, own)
    else:
        walk.quick.add_computed(lambda: module.training)
        if module in live.outermost:
            _add_hooks(walk, path, own)
        _add_read_by_others(walk, path, own, live.code)
        return
    # A module may be a part of a trainer, as Lightning's is, whose own code reads bookkeeping.
    is_read = _model_names(walk, module).__contains__ if is_trainer(module) else walk.code.mentions
    for key, value in own.items():
        # Another forward of one module is called without a mention.
        is_read_here = key == "forward" or (key not in _OF_TORCH and is_read(key))
        if is_read_here and not walk.is_stored(own, key):
            name = f"{path}.{key}".strip(".")
            walk.lines.setdefault(name, walk.code.attributes.get(key, ""))
            if isinstance(value, Tensor):
                walk.leaves[name] = (Tensor, id(value))  # the program has its value
            else:
                walk.add(name, value, NumberPlace(own, key, contents))


def _add_hooks(walk: Walk, path: str, own: dict[str, Any]) -> None:
    for kind in HOOKS_OF_MODULES:
        hooks = own.get(kind, {})
        walk.quick.add_container(hooks, dict(hooks))
        for number, hook in enumerate(hooks.values()):
            name = f"{path}.{kind}[{number}]".strip(".")
            walk.leaves[name] = (HOOK, id(hook))
            if id(hook) not in walk.seen:
                walk.seen[id(hook)] = hook
                if not isinstance(hook, BY_IDENTITY):
                    walk.add_object(walk.label(type(hook).__name__, id(hook)), hook)


def _add_gradient_hooks(walk: Walk, path: str, parameter: nn.Parameter) -> None:
    """Add the hooks of a parameter; none can be added once an engine has its values."""
    hooks = gradient_hooks(parameter)
    if hooks:
        walk.quick.add_computed(lambda: gradient_hooks(parameter))
    for number, hook in enumerate(hooks):
        walk.leaves[f"{path}.hooks[{number}]"] = (HOOK, id(hook))
        walk.seen[id(hook)] = hook


def _add_read_by_others(walk: Walk, path: str, own: dict[str, Any], code: ReachedCode) -> None:
    """Add those attributes of a live module that code of other modules mentions."""

    def labels() -> dict[str, str]:
        keys = [key for key in own if key not in _OF_TORCH and code.mentions(key)]
        return {key: f"{path}.{key}".strip(".") for key in keys if key != "forward"}

    for key, name in labels().items():
        walk.lines.setdefault(name, code.attributes.get(key, ""))
        walk.add(name, own[key], NumberPlace(own, key))

    def present() -> list[tuple[str, object]]:
        return [(n, own[key]) for key, n in labels().items() if n not in walk.numbers]

    kept = present()
    walk.quick.add_computed(lambda: _are_identical(present(), kept))


def _model_names(walk: Walk, module: nn.Module) -> frozenset[str]:
    """Return the names that the user's code mentions, and that of the packages with the module's classes."""
    packages = {
        kind.__module__.partition(".")[0]
        for kind in type(module).__mro__
        if not is_known_package(kind.__module__)
    }
    of_package = walk.code.of_package
    return frozenset(walk.code.of_users).union(
        *(of_package.get(package, ()) for package in packages - OF_TRAINERS)
    )


def _are_identical(
    present: Sequence[tuple[str, object]], kept: Sequence[tuple[str, object]]
) -> bool:
    """Return whether named values are the same objects."""
    return len(present) == len(kept) and all(
        name == other and value is old
        for (name, value), (other, old) in zip(present, kept, strict=True)
    )


def is_trainer(value: object) -> bool:
    """Return whether an object is of a class of zeroir's or Lightning's, or of one of the user's that extends it."""
    return any(kind.__module__.partition(".")[0] in OF_TRAINERS for kind in type(value).__mro__)
