"""The script's own optimizers, whose groups a program took over.

Their settings stay valid: a change, such as that of a learning-rate scheduler that drives them, goes on to the group of
the running program before the next update. Until the engine is closed, their ``step`` raises UserError, because the
engine updates, and so do ``state``, ``state_dict`` and ``load_state_dict``, because it has their states. Hooks around
``step`` are refused. Of an optimizer that the program does not know, every change of a setting is.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from zeroir.errors import CheckpointWarning, UserError
from zeroir.runtime.engine.live_optimizer import LiveOptimizer

_OF_IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Settings that choose how torch computes the same update."""


class ScriptOptimizers:
    """The script's optimizers.

    ``names`` has the names of parameters by their ids, and ``live`` the groups of the running program.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], names: Mapping[int, str], live: LiveOptimizer
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._live = live
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._of_name = {
            names.get(id(parameter), ""): index
            for index, group in enumerate(groups)
            for parameter in group["params"]
        }
        self._indices: list[int] = []
        self._add_indices()
        # What changed since the program was compiled, as by a scheduler that warms up, is set now.
        self._known: list[dict[str, object]] = [{} for _ in groups]
        self._require_no_hooks()
        self._set(_settings_of(self.optimizers), slice(None))
        self._own = [{name: vars(each).get(name) for name in _REFUSALS} for each in optimizers]
        for optimizer in optimizers:
            # Else schedulers warn that step() was not called, or was replaced.
            vars(optimizer).update(_REFUSALS, _opt_called=True, state=_StatesOfEngine())

    def release(self) -> None:
        """Let the script's optimizers update again, from new states."""
        for optimizer, own in zip(self.optimizers, self._own, strict=True):
            for name, method in own.items():
                if vars(optimizer).get(name) is not _REFUSALS[name]:
                    continue
                del vars(optimizer)[name]
                if method is not None:
                    vars(optimizer)[name] = method
            optimizer.state = defaultdict(dict)
            # SGD has states only with momentum.
            if any(group.get("momentum", 1) for group in optimizer.param_groups):
                _warn_at_first_step(optimizer)

    def follow(self) -> None:
        """Set what has changed in the groups of the program.

        Raises:
            UserError: where groups or parameters were added or removed, a setting changed that the program lacks,
                states were replaced, or a hook of ``step`` was added.
        """
        self._require_no_hooks()
        for optimizer in self.optimizers:
            if not isinstance(optimizer.state, _StatesOfEngine):
                _refuse_states()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if len(groups) != len(self._known):
            raise UserError(
                f"The optimizer has {len(groups)} groups now, and had {len(self._known)} when the program was "
                "compiled from it: compile again."
            )
        present = _settings_of(self.optimizers)
        count = len(self._indices)
        if present != self._known:
            self._set(present, slice(count))
        if len(self._live.param_groups) > count:
            self._add_indices()
            self._known = [{} for _ in groups]
            # The settings of the other groups stay as they are: they need not be the script's.
            self._set(present, slice(count, None))

    def _require_no_hooks(self) -> None:
        for optimizer in self.optimizers:
            for hook in _hooks_of(optimizer):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise UserError(
                    f"The optimizer has the hook {name} around its step(), which the engine does not call, because it "
                    "updates itself: remove the hook, and do what it does after engine.step(batch)."
                )

    def _add_indices(self) -> None:
        """Find the group of the script for each new group of the program."""
        for group in self._live.param_groups[len(self._indices) :]:
            named = (self._of_name[n] for n in group["param_names"] if n in self._of_name)
            self._indices.append(next(named))

    def _set(self, present: list[dict[str, object]], which: slice) -> None:
        """Set what has changed in some groups of the program."""
        groups = self._live.param_groups[which]
        for live, index in zip(groups, self._indices[which], strict=True):
            known = self._known[index]
            for name, value in present[index].items():
                if known and known.get(name) == value:
                    continue
                if name in live:
                    wanted = _with_own_defaults(value, live[name])
                    if live[name] != wanted:
                        live[name] = copy.copy(wanted)
                elif known:
                    raise UserError(
                        f"The optimizer's {name} is {value!r} now, and was {known.get(name)!r} when the program was "
                        "compiled from it, which has no such setting to change: compile again."
                    )
        self._known = present


class UnknownOptimizers:
    """The script's optimizers of a module's ``parameters``, given by their ids, that the program does not know."""

    def __init__(self, parameters: Collection[int], known: Collection[Optimizer]) -> None:
        found = (each for each in _all_optimizers() if not any(each is other for other in known))
        self._settings = [
            (weakref.ref(each), _settings_of([each])) for each in found if _has(each, parameters)
        ]

    def require_unchanged(self) -> None:
        """Raise a UserError where a setting of one has changed."""
        for reference, before in self._settings:
            optimizer = reference()
            present = [] if optimizer is None else _settings_of([optimizer])
            if optimizer is None or present == before:
                continue
            kind = type(optimizer).__name__
            raise UserError(
                f"{_change(before, present)} in the script's {kind}, which the engine does not follow, because "
                f"zeroir.compile did not get it: pass it as optimizer=, or set the groups of engine.optimizer."
            )


def _all_optimizers() -> Iterator[Optimizer]:
    # Not by isinstance, which asks objects for their class.
    return (each for each in gc.get_objects() if issubclass(type(each), Optimizer))


def _has(optimizer: Optimizer, parameters: Collection[int]) -> bool:
    groups = vars(optimizer).get("param_groups", ())
    return any(id(parameter) in parameters for group in groups for parameter in group["params"])


def _change(before: Sequence[dict[str, object]], present: Sequence[dict[str, object]]) -> str:
    """Say which setting of the groups of an optimizer has changed."""
    for old, new in zip(before, present, strict=False):
        for name, value in new.items():
            if old.get(name) != value:
                return f"{name} is {value!r} now and was {old.get(name)!r}"
    return f"{len(present)} groups are now, and {len(before)} were,"


def _hooks_of(optimizer: Optimizer) -> Iterator[Callable[..., object]]:
    """Yield the hooks around the step of an optimizer that are neither torch's nor zeroir's."""
    for hooks in (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ):
        for hook in hooks.values():
            if (getattr(hook, "__module__", None) or "").partition(".")[0] not in _NOT_THE_USERS:
                yield hook


_NOT_THE_USERS: Final = ("torch", "zeroir")


def _settings_of(optimizers: Sequence[Optimizer]) -> list[dict[str, object]]:
    """Return a copy of the settings of each group that torch's update reads, and the number of its parameters."""
    return [
        {
            **{
                name: copy.copy(value)
                for name, value in group.items()
                if name in optimizer.defaults and name not in _OF_IMPLEMENTATION
            },
            "number of parameters": len(group["params"]),
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _with_own_defaults(value: object, present: object) -> object:
    """Return a setting in which None, torch's own choice, is what the program has, as in the pair ``eps``."""
    if not isinstance(value, tuple) or not isinstance(present, tuple) or len(value) != len(present):
        return value
    pairs = zip(value, present, strict=True)
    return tuple(own if given is None else given for given, own in pairs)


def _refuse_step(*_: object, **__: object) -> NoReturn:
    raise UserError(
        "The engine updates the parameters that this optimizer was made for: call engine.step(batch), and leave out "
        "optimizer.step(). Changes of its param_groups apply to the engine, such as those of a scheduler."
    )


class _StatesOfEngine(dict[Any, Any]):
    """Stands for the states of an optimizer while an engine has them: it has none, and refuses to read or get any."""

    def __getitem__(self, key: object) -> NoReturn:
        _refuse_states()

    def __setitem__(self, key: object, value: object) -> NoReturn:
        _refuse_states()

    def __iter__(self) -> NoReturn:
        _refuse_states()

    keys = values = items = clear = update = pop = popitem = setdefault = get = __iter__  # type: ignore[assignment]


vars(_refuse_step)["_wrapped_by_lr_sched"] = True


def _refuse_states(*_: object, **__: object) -> NoReturn:
    raise UserError(
        "The engine has the states of this optimizer: save them with engine.save or engine.optimizer_state_dict(), or "
        "save and load them with state_dict() and load_state_dict() of engine.optimizer."
    )


_REFUSALS: Final[Mapping[str, Callable[..., object]]] = {
    "step": _refuse_step,
    "state_dict": _refuse_states,
    "load_state_dict": _refuse_states,
}
"""What the script's optimizers do instead of their own methods."""


def _warn_at_first_step(optimizer: Optimizer) -> None:
    def warn(*_: object) -> None:
        handle.remove()
        warnings.warn(
            "This optimizer begins with new states, such as momenta of zero: those of the engine ended with it. To go "
            "on with them, take engine.optimizer_state_dict() before engine.close().",
            CheckpointWarning,
            stacklevel=4,
        )

    handle = optimizer.register_step_pre_hook(warn)
