"""The script's own optimizers, whose groups a program took over.

Their settings stay valid: a change, such as that of a learning-rate scheduler that drives them, goes on to the group of
the running program before the next update. Until the engine is closed, their ``step`` raises UserError, because the
engine updates, and so do ``state_dict`` and ``load_state_dict``, because it has their states.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

from torch.optim import Optimizer

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
        self._set([_settings(group) for group in groups], slice(None))
        self._own = [{name: vars(each).get(name) for name in _REFUSALS} for each in optimizers]
        for optimizer in optimizers:
            # Else schedulers warn that step() was not called, or was replaced.
            vars(optimizer).update(_REFUSALS, _opt_called=True)

    def release(self) -> None:
        """Let the script's optimizers update again, from new states."""
        for optimizer, own in zip(self.optimizers, self._own, strict=True):
            for name, method in own.items():
                if vars(optimizer).get(name) is not _REFUSALS[name]:
                    continue
                del vars(optimizer)[name]
                if method is not None:
                    vars(optimizer)[name] = method
            optimizer.state.clear()
            # SGD has states only with momentum.
            if any(group.get("momentum", 1) for group in optimizer.param_groups):
                _warn_at_first_step(optimizer)

    def follow(self) -> None:
        """Set what has changed in the groups of the program.

        Raises:
            UserError: where groups or parameters were added or removed, or a setting changed that the program lacks.
        """
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if len(groups) != len(self._known):
            raise UserError(
                f"The optimizer has {len(groups)} groups now, and had {len(self._known)} when the program was "
                "compiled from it: compile again."
            )
        present = [_settings(group) for group in groups]
        count = len(self._indices)
        if present != self._known:
            self._set(present, slice(count))
        if len(self._live.param_groups) > count:
            self._add_indices()
            self._known = [{} for _ in groups]
            # The settings of the other groups stay as they are: they need not be the script's.
            self._set(present, slice(count, None))

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


def _settings(group: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of the settings of a group, and the number of its parameters."""
    settings = {
        name: copy.copy(value)
        for name, value in group.items()
        if name not in _OF_IMPLEMENTATION and name not in ("params", "param_names", "name")
    }
    parameters = group["params"]
    assert isinstance(parameters, list)
    return {**settings, "number of parameters": len(parameters)}


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
