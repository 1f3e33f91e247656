"""The numbers of what segments compute, node by node; views of memory, whose types are checked elsewhere, share it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from tools.certificates.spans import require
from tools.checker.program import Declarations
from tools.checker.reading import FileRecord
from tools.checker.views import seen

Place = tuple[int, int]
"""The number of memory that a value stands in, and how many elements come before it there."""
_VIEWS: Final = re.compile(
    r"aten\.((_unsafe_)?view|alias|detach|diagonal|expand|lift_fresh|permute|select|slice|split(_with_sizes)?"
    r"|squeeze|t|transpose|unbind|unfold|unsqueeze)\.(default|int|Tensor|dim|dims)|zeroir\.strided\.default"
)


class Numbers:
    """Numbers of what is computed: what is equal has the same number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._layouts: dict[int, int] = {}
        self._calls: dict[Any, list[tuple[int, Place]]] = {}

    def of(self, *what: object) -> int:
        """Return the number of something."""
        return self._numbers.setdefault(what, len(self._numbers))

    def call(
        self, names: Declarations, segment: str, operands: list[Place]
    ) -> list[tuple[int, Place]]:
        """Return for each output of a segment its number, and where it stands."""
        of = names.segments[segment]
        key = id(of), tuple(operands)
        if key not in self._calls:
            self._calls[key] = self._called(of, operands)
        return self._calls[key]

    def _layout(self, kind: FileRecord) -> int:
        steps = [0 if n <= 1 else step for n, step in zip(kind.shape, kind.stride, strict=True)]
        return self.of("layout", tuple(kind.shape), tuple(steps))

    def _called(self, segment: FileRecord, operands: list[Place]) -> list[tuple[int, Place]]:
        places: list[Place] = list(operands)
        kinds: list[FileRecord | None] = list(segment.inputs)

        def number(value: int) -> int:
            kind, (base, shift) = kinds[value], places[value]
            if kind is not None and 0 in kind.shape:
                return self.of("empty", kind.dtype, self._layout(kind))
            layout = -1 if kind is None else self._layout(kind)
            is_whole = shift == 0 and self._layouts.get(base) == layout
            return base if is_whole else self.of("view", base, shift, layout)

        def spelled(argument: object) -> object:
            match argument:
                case ("ref", int() as value):
                    return "ref", number(value)
                case ("list", tuple() as items):
                    return "list", [spelled(item) for item in items]
            return argument

        def computed(
            op: str, arguments: Sequence[object], keywords: Sequence[Any], results: Sequence[Any]
        ) -> list[Place]:
            words = [[name, spelled(a)] for name, a in keywords]
            what = [op, [spelled(a) for a in arguments], words, results]
            node = self.of("node", json.dumps(what, default=vars))
            found = [self.of("result", node, i) for i in range(len(results))]
            for value, kind in zip(found, results, strict=True):
                self._layouts[value] = -1 if kind is None else self._layout(kind)
            return [(value, 0) for value in found]

        for node in segment.nodes:
            first = len(places)
            if _VIEWS.fullmatch(node.op):
                source = node.args[0][1]
                base, shift = places[source]
                of = [_seen(node, kinds[source], i) for i in range(len(node.results))]
                places += [(base, shift + offset) for offset in of]
            else:
                places += computed(node.op, node.args, node.kwargs, node.results)
            kinds += node.results
            if node.op == "zeroir.dropout.default":
                value, p, _ = node.args
                kind = node.results[0]
                factor = 1 / (1 - p) if p < 1 else 0.0
                kept = computed("aten.mul.Tensor", (value, ("ref", first + 1)), (), (kind,))
                places, kinds = [*places, *kept], [*kinds, kind]
                both = ("ref", len(places) - 1), factor
                places[first] = computed("aten.mul.Tensor", both, (), (kind,))[0]
                places, kinds = places[:-1], kinds[:-1]
        return [
            (number(i), (number(i), 0) if 0 in getattr(kinds[i], "shape", ()) else places[i])
            for i in segment.outputs
        ]


def _seen(node: FileRecord, kind: FileRecord | None, result: int) -> int:
    """Return how many elements a view begins after its source; it must have the type that its operator gives it."""
    require(kind is not None and node.results[result] is not None, "looks at no value")
    assert kind is not None
    shape, stride, made = kind.shape, kind.stride, node.results[result]
    op, given = node.op, [*node.args[1:]]
    items: list[Any] = [a[1] if isinstance(a, tuple) and a[0] == "list" else a for a in given]
    if op in {"aten.split.Tensor", "aten.split_with_sizes.default"}:
        (sizes, dim) = (items[0], items[1] if len(items) > 1 else 0)
        start = sum(sizes[:result]) if isinstance(sizes, tuple) else sizes * result
        length = sizes[result] if isinstance(sizes, tuple) else sizes
        op, given = "aten.slice.Tensor", [dim, start, start + length, 1]
    elif op == "aten.unbind.int":
        op, given = "aten.select.int", [items[0] if items else 0, result]
    elif op == "zeroir.strided.default":
        return int(items[2])
    elif op == "aten.diagonal.default":
        shift, rows, columns = items + [0, 0, 1][len(items) :]
        down, right = max(-shift, 0), max(shift, 0)
        is_empty = shape[rows] <= down or shape[columns] <= right
        return 0 if is_empty else int(down * stride[rows] + right * stride[columns])
    sight = seen(op, shape, stride, given)
    if sight is None:
        return 0
    steps = [
        [0 if n <= 1 else s for n, s in zip(made.shape, of, strict=True)]
        for of in (made.stride, sight[1])
    ]
    is_so = tuple(sight[0]) == made.shape and (steps[0] == steps[1] or 0 in made.shape)
    require(is_so and made.dtype == kind.dtype, f"says what {node.op} does not make")
    return sight[2]
