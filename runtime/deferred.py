"""Build a module without its memory, and any one of its tensors later, bit for bit as the constructor made it.

Under :func:`record` a model's code runs as it stands, but every tensor of more than a few thousand elements lives on
the meta device. What was done to it is written down; a random op also notes the generator's state and is carried out
once on scratch memory, so that the generator moves on exactly as in a real construction. Replaying the few ops that
one tensor depends on gives the tensor: a rank needs the memory of its shard and of one parameter, and parameters equal
those of ``torch.manual_seed(seed); model()`` whatever order modules are built and initialised in.

Small tensors are real throughout, so code that looks at values (``.item()``, ``.tolist()``) works on them; on large
ones reading a value replays the tensor. What cannot be recorded (a model that puts tensors on a device, reads large
tensors outside torch, or draws parameters from another library's generator on meta tensors) raises, and the caller
builds the whole module instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """A tensor on a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One recorded op. Tensors among the arguments are geometries of deferred storages, or real copies."""

    function: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    reads: frozenset[int]
    made: tuple[_Geometry | None, ...]
    replaces: int | None
    generator_state: Tensor | None


@dataclass(slots=True)
class Recording:
    """What was done to deferred tensors, in order."""

    _entries: list[_Entry] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)
    # A storage's address is its name, so none may die while the recording lives.
    _alive: dict[int, Tensor] = field(default_factory=dict)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor is deferred."""
        return tensor.is_meta and _storage(tensor) in self._writers

    def materialise(self, tensor: Tensor) -> Tensor:
        """The tensor's values, on the CPU; a real tensor as it is."""
        if not tensor.is_meta:
            return tensor.detach()
        if not self.knows(tensor):
            raise RuntimeError("a tensor on the meta device was made outside the recording")
        made: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for index in self._needed(_storage(tensor)):
                self._replay(self._entries[index], made)
        geometry = _geometry(tensor)
        if geometry.storage not in made:
            raise RuntimeError("a tensor has no elements yet")
        return _on(geometry, made)

    def note(self, entry: _Entry, writes: dict[int, Tensor]) -> None:
        """Append an op that writes the storages of the given tensors."""
        index = len(self._entries)
        self._entries.append(entry)
        for storage, tensor in writes.items():
            self._writers.setdefault(storage, []).append(index)
            self._alive[storage] = tensor

    def _needed(self, storage: int) -> list[int]:
        """The ops that the storage's values depend on, in order."""
        needed: set[int] = set()
        seen: set[tuple[int, int]] = set()
        demands = [(storage, len(self._entries))]
        while demands:
            demand = demands.pop()
            if demand in seen:
                continue
            seen.add(demand)
            wanted, before = demand
            for index in reversed(self._writers.get(wanted, [])):
                if index >= before:
                    continue
                needed.add(index)
                entry = self._entries[index]
                demands.extend((read, index) for read in entry.reads if read != wanted)
                if entry.replaces == wanted:
                    break
        return sorted(needed)

    def _replay(self, entry: _Entry, made: dict[int, torch.UntypedStorage]) -> None:
        generator = None
        if entry.generator_state is not None:
            generator = torch.Generator()
            generator.set_state(entry.generator_state)

        def real(value: object) -> object:
            if isinstance(value, _Geometry):
                if value.storage not in made:  # its first writer replaces it whole
                    nbytes = self._alive[value.storage].untyped_storage().nbytes()
                    made[value.storage] = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
                return _on(value, made)
            return value

        kwargs = {name: tree_map(real, value) for name, value in entry.kwargs.items()}
        if generator is not None and "generator" in {
            a.name for a in entry.function._schema.arguments
        }:
            kwargs["generator"] = generator
        elif entry.generator_state is not None:
            torch.set_rng_state(entry.generator_state)
        results = tree_leaves(entry.function(*tree_map(real, entry.args), **kwargs))
        for geometry, result in zip(entry.made, results, strict=False):
            if geometry is not None and geometry.storage not in made:
                dense = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype)
                is_alike = result.stride() == geometry.stride and result.storage_offset() == 0
                made[geometry.storage] = (
                    result if is_alike else dense.copy_(result)
                ).untyped_storage()


@contextmanager
def record() -> Iterator[Recording]:
    """Defer the large tensors that the block makes; torch's generator is used as a real construction would."""
    recording = Recording()
    with _Disguise(recording), _Recorder(recording):
        yield recording


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
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

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
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_deferred = any(self._recording.knows(leaf) for leaf in leaves)
        if not leaves and "device" in {argument.name for argument in func._schema.arguments}:
            return self._make(func, args, kwargs)
        if not is_deferred:
            return func(*args, **kwargs)
        if self._must_be_real(func, args, kwargs):
            return func(*self._real(args), **self._real_kwargs(kwargs))
        return self._defer(func, args, kwargs)

    def _make(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A factory: real where the result is small or not meant for the CPU."""
        if torch.device(str(kwargs.get("device") or "cpu")).type != "cpu":
            return func(*args, **kwargs)
        sketch = func(
            *args, **{**_without_generator(kwargs), "device": "meta", "pin_memory": False}
        )
        if not isinstance(sketch, Tensor) or sketch.numel() < _DEFERRED_NUMEL:
            return func(*args, **kwargs)
        state = _generator_state(func, kwargs)
        if state is not None:
            func(*args, **kwargs)  # moves the generator on
        self._note(func, args, kwargs, [sketch], state)
        return sketch

    def _defer(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        meta_args = tree_map(_to_meta, args)
        meta_kwargs = _without_generator({n: tree_map(_to_meta, v) for n, v in kwargs.items()})
        if torch.device(str(meta_kwargs.get("device") or "cpu")).type == "cpu":
            if meta_kwargs.get("device") is not None:
                meta_kwargs["device"] = torch.device("meta")
        else:
            raise RuntimeError("the model moves tensors to a device while it is built")
        state = _generator_state(func, kwargs)
        if state is not None:
            scratch = tree_map(_scratch, (args, kwargs))
            func(*scratch[0], **scratch[1])  # moves the generator on
        # What fills a tensor in place returns it as it was; some meta kernels of such ops import torch's compiler.
        result = args[0] if _is_in_place(func) else func(*meta_args, **meta_kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {
            _storage(leaf)
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.is_meta
        }
        is_view = not func._schema.is_mutable and all(_storage(r) in known for r in results)
        if not is_view:
            self._note(func, args, kwargs, results, state)
        return result

    def _note(
        self,
        func: torch._ops.OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        results: list[Tensor],
        state: Tensor | None,
    ) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_meta]
        reads = frozenset(map(_storage, tensors))
        fresh = [result for result in results if _storage(result) not in reads]
        written = fresh + _mutated(func, args, kwargs)
        replaces = _storage(fresh[0]) if len(fresh) == 1 else None
        if func in _REPLACING and isinstance(args[0], Tensor) and _is_whole(args[0]):
            replaces = _storage(args[0])
        self._recording.note(
            _Entry(
                function=func,
                args=tree_map(_keep, args),
                kwargs={name: tree_map(_keep, value) for name, value in kwargs.items()},
                reads=reads,
                made=tuple(
                    _geometry(result) if _storage(result) not in reads else None
                    for result in results
                ),
                replaces=replaces,
                generator_state=state,
            ),
            {_storage(tensor): tensor for tensor in written},
        )

    def _must_be_real(
        self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> bool:
        """Whether the op hands values to Python, or writes them to a real tensor."""
        has_values = any(
            str(r.type) not in ("Tensor", "List[Tensor]") for r in func._schema.returns
        )
        return has_values or any(not t.is_meta for t in _mutated(func, args, kwargs))

    def _real(self, args: tuple[object, ...]) -> tuple[object, ...]:
        real = self._materialised
        return tuple(tree_map(real, arg) for arg in args)

    def _real_kwargs(self, kwargs: dict[str, object]) -> dict[str, object]:
        return {name: tree_map(self._materialised, value) for name, value in kwargs.items()}

    def _materialised(self, value: object) -> object:
        is_known = isinstance(value, Tensor) and self._recording.knows(value)
        return self._recording.materialise(value) if is_known else value  # type: ignore[arg-type]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _geometry(tensor: Tensor) -> _Geometry:
    return _Geometry(
        storage=_storage(tensor),
        dtype=tensor.dtype,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )


def _on(geometry: _Geometry, made: dict[int, torch.UntypedStorage]) -> Tensor:
    empty = torch.empty(0, dtype=geometry.dtype)
    return empty.set_(made[geometry.storage], geometry.offset, geometry.size, geometry.stride)


def _keep(value: object) -> object:
    """An argument as the recording keeps it: safe from what happens to it later."""
    if not isinstance(value, Tensor):
        return value
    return _geometry(value) if value.is_meta else value.detach().clone()


def _to_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


def _scratch(value: object) -> object:
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    # Zeros: distributions such as bernoulli check their parameters.
    scratch = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return scratch.zero_()


def _is_whole(tensor: Tensor) -> bool:
    numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.is_contiguous() and tensor.numel() == numel


def _mutated(
    func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[Tensor]:
    """The tensors that an op writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
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


def _generator_state(func: torch._ops.OpOverload, kwargs: dict[str, object]) -> Tensor | None:
    """The state of the generator that a random op will draw from; None for other ops."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator")
    return (
        generator.get_state() if isinstance(generator, torch.Generator) else torch.get_rng_state()
    )


def build_deferred(factory: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recording]:
    """Build a module under ``torch.manual_seed(seed)`` with its large tensors deferred.

    The caller's generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with record() as recording:
            module = factory()
    return module, recording
