"""Build a module without its memory, and any one of its tensors later, bit for bit as the constructor made it.

Under :func:`record` a model's code runs as it stands, but every tensor of more than a few thousand elements lives on
the meta device. What was done to it is written down; a random op also notes where the generator stands (see ``draws``).
Replaying the few ops that one tensor depends on gives the tensor: a rank needs the memory of its shard and of one
parameter, and parameters equal those of ``torch.manual_seed(seed); model()`` whatever order modules are built and
initialised in. Whoever wants many tensors asks for them in the order of their ``position``: then each draw is carried
out once, and one that was drawn over again, or that nobody asks for, is only passed over.

Most small tensors are real, so code that looks at values (``.item()``, ``.tolist()``) works on them; on others reading
a value replays the tensor. Those that begin as ``torch.empty`` are deferred whatever their size, since random numbers
that are wanted at once would have to be drawn at once, with all those before them. What cannot be recorded (a model
that puts tensors on a device, reads deferred tensors outside torch, or draws parameters from another library's
generator on meta tensors) raises. Then the caller records with ``is_lazy=False``, where draws are carried out at once
as well as later, and small tensors are real throughout; or builds the whole module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeroir.runtime.draws import Draw, Draws, Moment, call
from zeroir.runtime.recording import (
    Entry,
    Geometry,
    Recording,
    geometry_of,
    is_whole,
    mapped,
    storage_of,
    tensors_in,
)

_DEFERRED_NUMEL: Final = 4096

_aten = torch.ops.aten
# In-place ops that replace every element of a tensor without looking at it.
_REPLACING: Final = frozenset(
    {
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.copy_.default,
        _aten.normal_.default,
        _aten.uniform_.default,
    }
)


@contextmanager
def record(*, is_lazy: bool = True) -> Iterator[Recording]:
    """Defer the large tensors that the block makes; torch's generator is used as a real construction would.

    With ``is_lazy`` draws wait until a value is wanted, and so do small tensors that begin without values.
    """
    recording = Recording(Draws(is_strict=is_lazy))
    recording.draws.begin()
    with _Disguise(recording), _Recorder(recording, is_lazy=is_lazy):
        yield recording
    # An op that draws and does not say so would have left a state that is nobody's.
    recording.draws.now()


class _Disguise(TorchFunctionMode):
    """Deferred tensors say that they are on the CPU: some initialisers leave meta tensors alone."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        getter = getattr(func, "__self__", None)
        if getter in (torch.Tensor.is_meta, torch.Tensor.device):
            tensor = args[0]
            if isinstance(tensor, Tensor) and self._recording.knows(tensor):
                return False if getter is torch.Tensor.is_meta else torch.device("cpu")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording, *, is_lazy: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._is_lazy = is_lazy

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and what would see to that imports torch's compiler into every rank.
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        tensors = tensors_in(args, kwargs)
        if not tensors and any(argument.name == "device" for argument in func._schema.arguments):
            return self._make(func, args, kwargs)
        if not any(self._recording.knows(tensor) for tensor in tensors):
            return self._carry_out(func, args, kwargs)
        if self._must_be_real(func, args, kwargs):
            return self._carry_out(func, self._real(args), self._real_kwargs(kwargs))
        return self._defer(func, args, kwargs)

    def _carry_out(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """An op on real tensors, after the draws that come before it."""
        if not _draws(func) or _own_generator(kwargs) is not None:
            return func(*args, **kwargs)
        draws = self._recording.draws
        draws.settle(draws.now())
        try:
            return func(*args, **kwargs)
        finally:
            draws.begin()

    def _make(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A factory: real where the result is small and has values, or is not meant for the CPU."""
        if torch.device(str(kwargs.get("device") or "cpu")).type != "cpu":
            return func(*args, **kwargs)
        sketch = func(
            *args, **{**_without_generator(kwargs), "device": "meta", "pin_memory": False}
        )
        if not isinstance(sketch, Tensor) or not self._is_deferred(func, sketch):
            return self._carry_out(func, args, kwargs)
        self._note(func, args, kwargs, [sketch])
        return sketch

    def _is_deferred(self, func: torch._ops.OpOverload, sketch: Tensor) -> bool:
        if sketch.numel() >= _DEFERRED_NUMEL:
            return True
        is_empty = func is _aten.empty.memory_format and sketch.numel() > 0
        return self._is_lazy and is_empty and sketch.is_floating_point()

    def _defer(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        # What fills a tensor in place returns it as it was; some meta kernels of such ops import torch's compiler.
        if _is_in_place(func):
            self._note(func, args, kwargs, [leaf for leaf in args[:1] if isinstance(leaf, Tensor)])
            return args[0]
        meta_args = [mapped(_to_meta, arg) for arg in args]
        meta_kwargs = _without_generator({n: mapped(_to_meta, v) for n, v in kwargs.items()})
        if torch.device(str(meta_kwargs.get("device") or "cpu")).type == "cpu":
            if meta_kwargs.get("device") is not None:
                meta_kwargs["device"] = torch.device("meta")
        else:
            raise RuntimeError("the model moves tensors to a device while it is built")
        result = func(*meta_args, **meta_kwargs)
        results = tensors_in(result)
        known = {storage_of(leaf) for leaf in tensors_in(args, kwargs) if leaf.is_meta}
        is_view = not func._schema.is_mutable and all(storage_of(r) in known for r in results)
        if not is_view:
            self._note(func, args, kwargs, results)
        return result

    def _note(
        self,
        func: torch._ops.OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        results: list[Tensor],
    ) -> None:
        tensors = [tensor for tensor in tensors_in(args, kwargs) if tensor.is_meta]
        reads = frozenset(map(storage_of, tensors))
        fresh = [result for result in results if storage_of(result) not in reads]
        written = fresh + _mutated(func, args, kwargs)
        replaces = storage_of(fresh[0]) if len(fresh) == 1 else None
        if func in _REPLACING and isinstance(args[0], Tensor) and is_whole(args[0]):
            replaces = storage_of(args[0])
        kept_args = tuple(mapped(_keep, arg) for arg in args)
        kept_kwargs = {name: mapped(_keep, value) for name, value in kwargs.items()}
        before, after = self._drawn(func, kept_args, kept_kwargs)
        self._recording.note(
            Entry(
                function=func,
                args=kept_args,
                kwargs=kept_kwargs,
                reads=reads,
                made=tuple(
                    geometry_of(result) if storage_of(result) not in reads else None
                    for result in results
                ),
                replaces=replaces,
                before=before,
                after=after,
            ),
            {storage_of(tensor): tensor for tensor in written},
        )

    def _drawn(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Moment | None, Moment | None]:
        """The moments before and after an op that draws; the model's own generator is moved on at once."""
        if not _draws(func):
            return None, None

        def run(generator: torch.Generator) -> object:
            scratch = [mapped(_scratch, arg) for arg in args]
            named = {name: mapped(_scratch, value) for name, value in kwargs.items()}
            return call(func, scratch, named, generator)

        own = _own_generator(kwargs)
        if own is not None:
            before = Moment(state=own.get_state())
            run(own)
            return before, None
        filled = args[0] if args and _is_in_place(func) else None
        is_plain = isinstance(filled, Geometry) and filled.is_contiguous
        draws = self._recording.draws
        before = draws.now()
        after = draws.postpone(
            before,
            Draw(
                function=func,
                run=run,
                dtype=filled.dtype if isinstance(filled, Geometry) and is_plain else None,
                filled_numel=filled.numel if isinstance(filled, Geometry) and is_plain else 0,
            ),
        )
        if not self._is_lazy:
            draws.settle(after)
        return before, after

    def _must_be_real(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> bool:
        """Whether the op hands values to Python, or writes them to a real tensor."""
        has_values = any(
            str(r.type) not in ("Tensor", "List[Tensor]") for r in func._schema.returns
        )
        return has_values or any(not t.is_meta for t in _mutated(func, args, kwargs))

    def _real(self, args: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(mapped(self._materialised, arg) for arg in args)

    def _real_kwargs(self, kwargs: dict[str, object]) -> dict[str, object]:
        return {name: mapped(self._materialised, value) for name, value in kwargs.items()}

    def _materialised(self, value: object) -> object:
        is_known = isinstance(value, Tensor) and self._recording.knows(value)
        return self._recording.materialise(value) if is_known else value  # type: ignore[arg-type]


def _keep(value: object) -> object:
    """An argument as the recording keeps it: safe from what happens to it later."""
    if not isinstance(value, Tensor):
        return value
    return geometry_of(value) if value.is_meta else value.detach().clone()


def _to_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


def _scratch(value: object) -> object:
    if not isinstance(value, Geometry):
        return value
    # Zeros: distributions such as bernoulli check their parameters.
    scratch = torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="cpu")
    return scratch.zero_()


def _mutated(
    func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[Tensor]:
    """The tensors that an op writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += tensors_in(value)
    return found


def _is_in_place(func: torch._ops.OpOverload) -> bool:
    """Whether an op returns its first argument, of which it has changed the elements and nothing else."""
    schema = func._schema
    if not schema.arguments or len(schema.returns) != 1 or torch.Tag.inplace_view in func.tags:
        return False
    own, result = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return own is not None and own.is_write and result is not None and result.is_write


def _without_generator(kwargs: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in kwargs.items() if name != "generator"}


def _draws(func: torch._ops.OpOverload) -> bool:
    """Whether an op moves a generator on."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _own_generator(kwargs: dict[str, object]) -> torch.Generator | None:
    """The generator that is given to an op, if it is another than torch's."""
    generator = kwargs.get("generator")
    is_own = isinstance(generator, torch.Generator) and generator is not torch.default_generator
    return generator if is_own else None  # type: ignore[return-value]


def build_deferred(
    factory: Callable[[], nn.Module], seed: int, *, is_lazy: bool = True
) -> tuple[nn.Module, Recording]:
    """Build a module under ``torch.manual_seed(seed)`` with its large tensors deferred; see ``record``.

    The caller's generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with record(is_lazy=is_lazy) as recording:
            module = factory()
    return module, recording
