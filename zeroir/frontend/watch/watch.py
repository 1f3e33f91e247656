"""Compares the state that a program was compiled from with the present one, before each step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import CodeType, MappingProxyType
from typing import Final

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroir.errors import ChangedCodeError
from zeroir.frontend.source.outside_reads import NOTHING_READ, OutsideReads
from zeroir.frontend.source.source import ModelSource
from zeroir.frontend.watch.code_state import CodeState
from zeroir.frontend.watch.live_modules import LiveModules
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.frontend.watch.stored_tensors import NOTHING_KEPT, KeptTensors
from zeroir.frontend.watch.walk import FILE, HOOK, SETTING, Leaf
from zeroir.ir.reports import Storing
from zeroir.torch_ops.followed_numbers import FollowedNumbers, is_number
from zeroir.torch_ops.frozen_modules import users_module

_LONGEST_VALUE = 60


@dataclass(slots=True)
class Watch:
    """The state from which a program was compiled. ``model`` is the user's module, where there is one in this process.

    ``tensors`` are those outside the module whose present values the program follows, by the names of its constants.
    ``numbers`` are those that the program follows, and ``unfollowed`` names those that it was to follow and cannot.
    ``kept`` are the places where the code stores tensors, ``ignored`` patterns of names whose changes do not matter,
    and ``optimizers`` those of the script whose groups the program has. ``_evaluated`` is the state of the last
    evaluation, whose modes may differ.
    """

    model: nn.Module | None
    tensors: Mapping[str, Tensor]
    _state: CodeState
    _numbers: FollowedNumbers | None = None
    kept: KeptTensors = NOTHING_KEPT
    unfollowed: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    _evaluated: CodeState | None = None

    @classmethod
    def of(
        cls,
        source: ModelSource,
        tensors: Mapping[str, Tensor] = MappingProxyType({}),
        numbers: FollowedNumbers | None = None,
        kept: KeptTensors = NOTHING_KEPT,
        reads: OutsideReads = NOTHING_READ,
        opaque: Iterable[str] = (),
    ) -> Watch:
        """Return the present state of a source, from which a program was compiled that follows these ``numbers``.

        Its code stores tensors at the places ``kept``, and ``reads`` files and variables of the environment. That of
        the modules ``opaque`` runs at each step.
        """
        model = source.model() if source.is_in_hand else None
        live = LiveModules.of(model, opaque, (source.loss,))
        code = ReachedCode.of(model, (source.loss,))
        names = frozenset() if numbers is None else numbers.names
        state = CodeState.of(model, code, tensors.values(), names, kept.ids, live, reads)
        watch = cls(model, tensors, state, numbers, kept, source.earlier.numbers - names)
        state.leaves |= watch._answers()
        return watch

    @property
    def numbers(self) -> frozenset[str]:
        """The names of the numbers that the program follows."""
        return self._state.numbers

    def copied(self) -> Watch:
        """Return the same state for another engine, which may ignore other names."""
        return replace(self)

    def ignore(self, patterns: Sequence[str]) -> None:
        """Accept changes of the names that match one of these patterns, as in ``fnmatch``."""
        self.ignored = tuple(dict.fromkeys((*self.ignored, *patterns)))

    def parameter_names(self) -> Mapping[int, str]:
        """Return the names of the module's parameters by their ids."""
        model = self.model
        return {} if model is None else {id(p): name for name, p in model.named_parameters()}

    def trained_names(self) -> Sequence[str]:
        """Return the names of the module's parameters that require a gradient now."""
        model = self.model
        named = () if model is None else users_module(model).named_parameters()
        return [name for name, parameter in named if parameter.requires_grad]

    def remember(self) -> None:
        """Compare with the present state from now on, but for the modes of modules, which an evaluation may set."""
        modes = {name: leaf for name, leaf in self._state.leaves.items() if _is_mode(name)}
        now = self._now()
        now.quick.is_doubtful = any(now.leaves.get(name) != leaf for name, leaf in modes.items())
        now.leaves |= modes
        self._state, self._evaluated = now, None

    def differing(self, values: Mapping[str, str]) -> frozenset[str]:
        """Return the names whose present values are others than these, as ``CodeState.plain_values`` has them."""
        present = self._state.plain_values
        return frozenset(n for n, text in values.items() if present.get(n, text) != text)

    def compiled_from(self, values: Mapping[str, str]) -> None:
        """Take these values, by name, for those that the program was compiled from on all ranks.

        Each differs on some rank now, so that the next step finds a change on every rank, whatever the value is then.
        """
        leaves = self._state.leaves
        for name, text in values.items():
            kind = leaves[name][0]
            leaves[name] = (kind, f"{text} on all ranks")
            self._state.quick.is_doubtful = True

    @property
    def appends(self) -> bool:
        """Whether the code appends tensors to a list."""
        return self.kept.are_appended

    def keep(self, moment: Storing, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors, by their names, where the code would store them in a micro-step or an evaluation."""
        states = [self._state, *([] if self._evaluated is None else [self._evaluated])]
        for container, key, value in self.kept.put(moment, tensors):
            for state in states:
                state.quick.expect(container, key, value)

    def _now(self) -> CodeState:
        state, numbers = self._state, self._numbers
        now = CodeState.of(
            self.model,
            state.code,
            self.tensors.values(),
            state.numbers,
            state.stored,
            state.live,
            state.reads,
        )
        for name in () if numbers is None else state.numbers:
            value = now.places[name].value if name in now.places else None
            if numbers is not None and is_number(value):
                numbers.values[name] = value
        now.leaves |= self._answers()
        return now

    def _answers(self) -> dict[str, Leaf]:
        """Return what the trace learnt of numbers, for their present values, as leaves."""
        answers = () if self._numbers is None else self._numbers.present_answers()
        return {text: (type(answer), repr(answer)) for text, answer in answers}

    def _reads_alike(self) -> bool:
        """Read the present values of the numbers; return whether the trace would learn the same of them."""
        state, numbers = self._state, self._numbers
        for name in () if numbers is None else state.numbers:
            place = state.places[name]
            value = place.value
            if not is_number(value) or type(value) is not state.leaves[name][0]:
                return False
            assert numbers is not None
            numbers.values[name] = value
            place.expect(value)
        return all(state.leaves[text] == leaf for text, leaf in self._answers().items())

    def _write_numbers(self) -> None:
        if self._numbers is not None:
            self._numbers.write_tensors()

    def require_unchanged(self, *, is_step: bool = True) -> None:
        """Compare the state with that of the compilation; an evaluation, unlike a step, may happen in either mode.

        Raises:
            ChangedCodeError: where something changed that the program does not follow; it names it and the line that
                reads it.
        """
        known = [self._state, *([] if is_step or self._evaluated is None else [self._evaluated])]
        if self._reads_alike() and any(state.quick.holds() for state in known):
            self._write_numbers()
            return
        before, now = self._state, self._now()
        changed = {
            name: (before.leaves.get(name), now.leaves.get(name))
            for name in {**before.leaves, **now.leaves}
            if before.leaves.get(name) != now.leaves.get(name)
            and (is_step or not _is_mode(name))
            and not self._is_ignored(name)
        }
        if changed:
            numbers = frozenset(
                name
                for name in changed
                if name in now.places and name not in self.unfollowed | self.numbers
            )
            # A number that can be followed is the smaller news.
            name = min(changed, key=numbers.__contains__)
            old, new = changed[name]
            raise ChangedCodeError(
                *_change_and_remedy(name, old, new, before.lines.get(name, "")),
                may_compile=not any(map(_is_of_parameters, changed.values())),
                is_of_training=all(each.endswith(".requires_grad") for each in changed),
                is_of_numbers=name in numbers,
                numbers=numbers,
            )
        if is_step:
            self._state = now
        else:
            self._evaluated = now
        self._write_numbers()

    def state(self) -> Hashable:
        """Return a value that is the same where the present state is."""
        return frozenset(
            item for item in self._now().leaves.items() if not self._is_ignored(item[0])
        )

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


def _is_mode(name: str) -> bool:
    return name.rpartition(".")[2] == "training"


def _is_of_parameters(leaves: tuple[Leaf | None, Leaf | None]) -> bool:
    """Return whether a change is one of the module's tensors, whose values the program does not have."""
    return any(leaf is not None and leaf[0] is Tensor and len(leaf) == _OWN for leaf in leaves)


_OWN: Final = 2
"""The length of the leaf of a tensor of the module's own, whose version does not count."""


def _change_and_remedy(name: str, old: Leaf | None, new: Leaf | None, line: str) -> tuple[str, str]:
    owner, _, last = name.rpartition(".")
    subject, value, before, remedy = name, _value(new), _earlier(old), _IF_UNREAD
    match old or new:
        case (bool() as is_on,) if last == "training":
            subject = owner or "The model"
            value = f"is in {'evaluation' if is_on else 'training'} mode"
            remedy = "or set its mode back"
        case (bool() as is_on,):
            subject = f"The parameter {owner}"
            value = "is frozen" if is_on else "is trained"
            remedy = "or set requires_grad back"
        case (str(kind), int()) if kind == HOOK:
            subject = f"A hook of {owner or 'the model'}"
            value, before = ("has gone", "ran") if new is None else ("is there", "was not")
            remedy = "or read outputs of the program instead (outputs=)"
        case (kind, _) if kind == FILE and name.startswith("The path"):
            value = "exists" if new == (FILE, "exists") else "is missing"
            before = "was not so"
        case (kind, _) if kind == FILE:
            value, before = "has other contents", "had not"
        case (kind, *_) if kind is CodeType:
            subject = f"The code of {name.removesuffix('.__code__')}"
            value, before = "is another", "was not replaced"
        case (kind, *_) if kind == SETTING and old is not None and len(old) > _OWN:
            value, before = "is another function", "was torch's own"
        case (kind, *_) if kind is nn.Module:
            subject = f"The submodule {name}"
            value = "has gone" if new is None else f"is {'' if old is None else 'another '}{new[1]}"
            remedy = "with the new module"
    reader = f", which {line} reads," if line else ""
    change = f"{subject}{reader} {value} now, but {before} when the program was compiled"
    return change, f"compile again, {remedy}"


_IF_UNREAD = "pass it with the batch as a tensor, or name it in engine(ignore=[...]) if no step depends on it"


def _value(leaf: Leaf | None) -> str:
    """Say what a value is, such as ``is 0.5``."""
    match leaf:
        case None:
            return "does not exist"
        case (_, str(text)):
            return f"is {text:.{_LONGEST_VALUE}}"
        case (kind, _) if kind is Tensor:
            return "is another tensor"
        case (kind, *_) if kind is Tensor:
            return "has other values"
        case (type() as kind, *_):
            return f"is another {kind.__name__}, or has other contents,"
        case _:
            return f"is {leaf!r:.{_LONGEST_VALUE}}"


def _earlier(leaf: Leaf | None) -> str:
    """Say what a value was, such as ``it was 0.0``."""
    match leaf:
        case None:
            return "did not exist"
        case (_, str(text)):
            return f"was {text:.{_LONGEST_VALUE}}"
        case _:
            return "was not so"
