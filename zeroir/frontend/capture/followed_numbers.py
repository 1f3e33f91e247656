"""Captures a model so that numbers of the user's code count with their present values.

The numbers in attributes, globals and variables are replaced by followed ones for the time of the capture. Code may ask
for the type of one, or read its text. So the model is captured several times: with followed numbers that torch's
functions see as plain ones, and with other values. A number is followed where the first makes no difference from plain
numbers, and the second none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from zeroir.frontend.source.source import ModelSource
from zeroir.frontend.watch.code_state import CodeState
from zeroir.frontend.watch.reached_code import ReachedCode
from zeroir.frontend.watch.walk import NumberPlace
from zeroir.torch_ops.followed_numbers import (
    FollowedNumbers,
    Number,
    followed_by_math,
    is_integer,
    is_number,
)

if TYPE_CHECKING:
    from zeroir.frontend.capture.captured_model import CapturedModel

Capture = Callable[[FollowedNumbers], "CapturedModel"]

_OTHER_FLOATS: Final[tuple[Callable[[float], float], ...]] = (
    lambda value: value * (1 + 2.0**-20) + 2.0**-60,
    lambda value: value * (1 - 2.0**-20) - 2.0**-60,
)
"""Values so near that comparisons with others have the same answer, on one side at least."""

_STEPS: Final = (1, -1, 2, 10, 16, 100, 1000)
"""What is added to integers."""


def capture_with_numbers(source: ModelSource, capture: Capture) -> CapturedModel:
    """Capture a model; its ``numbers`` are those of the source's that it follows."""
    names = _places(source) if source.earlier.numbers else {}
    plain = capture(FollowedNumbers({}))
    while names:
        captured = _following(names, plain, capture)
        if captured is not None or len(names) == 1:
            return captured or plain
        names = {
            name: place
            for name, place in names.items()
            if _following({name: place}, plain, capture)
        }
    return plain


def _following(
    places: Mapping[str, NumberPlace], plain: CapturedModel, capture: Capture
) -> CapturedModel | None:
    """Return a capture that follows all these numbers; None where it would not be that of ``plain`` ones."""
    values = {name: _number(place.value) for name, place in places.items()}
    read = _captured(places, values, capture, are_read=True)
    if read is None or _graphs(read) != _graphs(plain):
        return None
    captured = _captured(places, values, capture)
    return captured if captured and _is_alike(captured, places, values, capture) else None


def _places(source: ModelSource) -> dict[str, NumberPlace]:
    model = source.model() if source.is_in_hand else None
    state = CodeState.of(model, ReachedCode.of(model, (source.loss,)))
    return {
        name: state.places[name] for name in sorted(source.earlier.numbers) if name in state.places
    }


def _number(value: object) -> Number:
    assert is_number(value)
    return value


def _is_alike(
    captured: CapturedModel,
    places: Mapping[str, NumberPlace],
    values: Mapping[str, Number],
    capture: Capture,
) -> bool:
    """Return whether a capture with other values of the numbers is the same."""
    assert captured.numbers is not None
    read = captured.numbers.answers
    # A program for one value of a number has another one for every other.
    changed = [name for name in values if name not in read]
    if not changed:
        return True
    for attempt in range(len(_STEPS)):
        nearby = {name: _nearby(values[name], attempt) for name in changed}
        other = _captured(places, {**values, **nearby}, capture)
        if other is None or other.numbers is None:
            return False
        answers = {text: repr(answer) for text, (_, answer) in other.numbers.answers.items()}
        if answers == {text: repr(answer) for text, (_, answer) in read.items()}:
            return _graphs(other) == _graphs(captured)
    return False


def _nearby(value: Number, attempt: int) -> Number:
    if not is_integer(value):
        return _OTHER_FLOATS[attempt % len(_OTHER_FLOATS)](value)
    return value + _STEPS[attempt]


def _captured(
    places: Mapping[str, NumberPlace],
    values: Mapping[str, Number],
    capture: Capture,
    *,
    are_read: bool = False,
) -> CapturedModel | None:
    """Capture with followed numbers; None where the code does not take them."""
    numbers = FollowedNumbers(values, are_read=are_read)
    try:
        with _placed({name: places[name] for name in values}, numbers), followed_by_math():
            return capture(numbers)
    except (Exception, SystemExit):  # noqa: BLE001 - without followed numbers the model raises it again
        return None


@contextmanager
def _placed(places: Mapping[str, NumberPlace], numbers: FollowedNumbers) -> Iterator[None]:
    """Put followed numbers in their places within the block."""
    before = {name: place.value for name, place in places.items()}
    try:
        for name, place in places.items():
            place.set(numbers.number(name))
        yield
    finally:
        for name, place in places.items():
            place.set(before[name])


def _graphs(captured: CapturedModel) -> list[object]:
    """Return the graphs of a capture without the values of numbers and the origins of nodes."""
    evaluation = captured.evaluation
    joints = [captured.joint, *([] if evaluation is None else [evaluation.joint])]
    return [
        replace(
            joint,
            inputs=tuple(
                replace(item, data=None if item.outside is not None else item.data)
                for item in joint.inputs
            ),
            nodes=tuple(replace(node, origin=None, source="") for node in joint.nodes),
        )
        for joint in joints
    ]
