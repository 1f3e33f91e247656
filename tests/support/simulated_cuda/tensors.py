"""Tensors on a device that is not there: only tasks of streams read and write their elements, which the CPU has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from tests.support.simulated_cuda.driver import SimulatedCuda

CPU: Final = torch.device("cpu")
_OWN_COPY: Final = {"aten::_unsafe_view", "aten::_reshape_alias"}
_WITH_INDICES: Final = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
}


class DeviceTensor(Tensor):
    """A tensor that Python code sees on ``cuda``. C++ sees ``meta``, for which no code of a device is needed."""

    elements: Tensor
    place: torch.device
    cuda_driver: SimulatedCuda
    owner: DeviceTensor

    @staticmethod
    def __new__(
        cls,
        elements: Tensor,
        driver: SimulatedCuda,
        place: torch.device,
        owner: DeviceTensor | None,
    ) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            elements.shape,
            strides=elements.stride(),
            storage_offset=elements.storage_offset(),
            dtype=elements.dtype,
            device=torch.device("meta"),
        )
        made.elements, made.cuda_driver, made.place = elements, driver, place
        if owner is not None:
            made.owner = owner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        return self.elements.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elements.untyped_storage()

    def tolist(self) -> object:  # type: ignore[override]
        return self.to("cpu").tolist()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.place})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        tensors = _of_device(args, given)
        return Call(tensors[0].cuda_driver, func, args, given, tensors).run()


class FactoryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the tensors that code asks a device for."""

    def __init__(self, driver: SimulatedCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._driver = driver

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        device = given.get("device")
        tensors = _of_device(args, given)
        # Torch's own C++ code makes intermediate tensors on the device that it sees.
        kinds = ("cuda", "meta") if self._driver.has_chosen_stream() else ("cuda",)
        is_asked = device is not None and torch.device(cast("str", device)).type in kinds
        if tensors or is_asked:
            return Call(self._driver, func, args, given, tensors).run()
        return func(*args, **given)


_OF_LITERALS: Final = frozenset((torch.tensor, torch.as_tensor))


class LiteralMode(TorchFunctionMode):
    """Makes tensors of Python's numbers on the CPU first, because torch's own code asks for the real device."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if func in _OF_LITERALS and given.get("device") is not None:
            device = torch.device(cast("str", given.pop("device")))
            made = _called(func, args, given)
            assert isinstance(made, Tensor)
            return made.to(device)
        return func(*args, **given)


@dataclass(frozen=True, slots=True)
class Schema:
    """What an operator's schema says, which is slow to ask of torch."""

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    """The arguments that it writes."""
    return_count: int
    is_view: bool
    is_aliased: bool
    """Whether each result is an argument, or a view of one."""

    @classmethod
    @cache
    def of(cls, func: OpOverload) -> Schema:
        schema = func._schema
        aliases = [returned.alias_info for returned in schema.returns]
        return cls(
            name=schema.name,
            arguments=tuple(argument.name for argument in schema.arguments),
            written=frozenset(
                argument.name
                for argument in schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ),
            return_count=len(aliases),
            is_view=any(alias is not None and not alias.is_write for alias in aliases),
            is_aliased=all(alias is not None for alias in aliases),
        )


class Call:
    """One call of an operator, with its ``tensors`` that are on a device; without any, it makes one there."""

    def __init__(
        self,
        driver: SimulatedCuda,
        func: OpOverload,
        args: Sequence[object],
        kwargs: dict[str, object],
        tensors: Sequence[DeviceTensor],
    ) -> None:
        self.driver, self.func, self.args, self.kwargs = driver, func, args, kwargs
        self.schema = Schema.of(func)
        self.name = self.schema.name
        self.tensors = tensors
        place = kwargs.get("device")
        self.place = (
            tensors[0].place if tensors else driver.with_index(torch.device(cast("str", place)))
        )

    def run(self) -> object:
        if self.name == "aten::copy_":
            return self._copy()
        if self.name == "aten::_to_copy":
            return self._to_copy()
        if self.schema.is_view and self.name not in _OWN_COPY:
            return self._view()
        if self.func is torch.ops.aten._local_scalar_dense.default:
            return self._at_once()
        return self._submitted()

    def _written(self) -> list[object]:
        """The arguments that it writes."""
        if not self.schema.written:
            return []
        named = dict(zip(self.schema.arguments, self.args, strict=False)) | self.kwargs
        return [named[name] for name in named if name in self.schema.written]

    def _view(self) -> object:
        base = self.tensors[0]
        made = _called(self.func, _elements(self.args), _elements(self.kwargs))
        owner = getattr(base, "owner", base)

        def one(value: object) -> object:
            if isinstance(value, Tensor):
                return DeviceTensor(value, self.driver, self.place, owner)
            return value

        return _mapped(one, made)

    def _at_once(self) -> object:
        """Run what gives the host a value, or whose sizes depend on values, when all before it is done."""
        self.driver.host_waits(self.place, self.name)
        results = _called(self.func, _elements(self.args), _elements(self.kwargs))
        return _mapped(
            lambda e: self.driver.adopt(e, self.place) if isinstance(e, Tensor) else e, results
        )

    def _submitted(self) -> object:
        """Return results without values, and let the current stream compute them."""
        # A task must not hold the tensors themselves, whose memory is free when nobody else holds them.
        args, kwargs = self._at_submission(self.args), self._at_submission(self.kwargs)
        func = self.func
        own = self._written()
        if any(isinstance(one, Tensor) for one in _leaves(own)) and self.schema.is_aliased:
            self.driver.submit(self.place, lambda: _called(func, args, kwargs))
            count = self.schema.return_count
            return None if not count else own[0] if count == 1 else tuple(own)
        try:
            types = _called(func, _metas(args), _metas(kwargs))
        except (NotImplementedError, RuntimeError):
            return self._at_once()
        leaves = [leaf for leaf in _leaves(types) if leaf is None or isinstance(leaf, Tensor)]
        if len(leaves) < sum(1 for _ in _leaves(types)):
            return self._at_once()
        if self.name == "aten::native_layer_norm":
            # The kernels are the CPU's, whose statistics have the type of the input; CUDA's are in FP32.
            dtype = cast("Tensor", leaves[0]).dtype
            leaves = [cast("Tensor", leaf).to(dtype) for leaf in leaves]
        made = [
            None
            if leaf is None
            else self.driver.new(leaf.shape, _own_stride(leaf), leaf.dtype, self.place)
            for leaf in leaves
        ]
        targets = [None if one is None else one.elements for one in made]

        def compute() -> None:
            results = _leaves(_called(func, args, kwargs))
            for target, value in zip(targets, results, strict=True):
                if target is not None:
                    assert isinstance(value, Tensor)
                    target.copy_(value)

        self.driver.submit(self.place, compute)
        following = iter(made)
        return _mapped(lambda _: next(following), types)

    def _at_submission(self, values: object) -> object:
        """Return arguments as a task takes them: a scalar of the host is read when a kernel is launched."""

        def of_task(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DeviceTensor):
                return tensor.elements
            if tensor.dim() and self.name.startswith("aten::") and self.name not in _WITH_INDICES:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {self.name} has one on cpu"
                )
            return tensor.clone()

        def of_device(value: object) -> object:
            return CPU if isinstance(value, torch.device) else value

        return _mapped(lambda v: of_task(v) if isinstance(v, Tensor) else of_device(v), values)

    def _copy(self) -> object:
        target, source = cast("Tensor", self.args[0]), cast("Tensor", self.args[1])
        is_async = bool(self.args[2] if len(self.args) > 2 else self.kwargs.get("non_blocking"))
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            into, out_of = target.elements, source.elements
        elif isinstance(target, DeviceTensor):
            is_direct = is_async and self.driver.is_pinned(source)
            # Other memory of the host is copied to a buffer of CUDA's before the call returns.
            into, out_of = target.elements, source if is_direct else source.clone()
        else:
            into, out_of = target, cast("DeviceTensor", source).elements
            if not (is_async and self.driver.is_pinned(target)):
                self.driver.host_waits(self.place, self.name)
                into.copy_(out_of)
                return target
        self.driver.submit(self.place, lambda: into.copy_(out_of))
        return target

    def _to_copy(self) -> object:
        source = cast("Tensor", self.args[0])
        asked = self.kwargs.get("device")
        device = source.device if asked is None else torch.device(cast("str", asked))
        kwargs = {
            k: v
            for k, v in self.kwargs.items()
            if k not in ("device", "non_blocking", "pin_memory")
        }
        if device.type == "cuda":
            elements = source.elements if isinstance(source, DeviceTensor) else source.clone()
            place = self.driver.with_index(device)
            like = torch.ops.aten._to_copy.default(_meta(elements), **kwargs)
            made = self.driver.new(like.shape, like.stride(), like.dtype, place)
            self.driver.submit(self.place, lambda: made.elements.copy_(elements))
            return made
        self.driver.host_waits(self.place, self.name)
        return torch.ops.aten._to_copy.default(
            cast("DeviceTensor", source).elements, device=CPU, **kwargs
        )


def _mapped(function: Callable[[object], object], values: object) -> object:
    """What a function makes of each value in lists, tuples and dicts, and of what is none of these."""
    if isinstance(values, list | tuple):
        made = [_mapped(function, value) for value in values]
        return made if isinstance(values, list) else tuple(made)
    if isinstance(values, dict):
        return {key: _mapped(function, value) for key, value in values.items()}
    return function(values)


def _leaves(values: object) -> Iterator[object]:
    """The values in lists and tuples, or what is none of these."""
    if isinstance(values, list | tuple):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def _of_device(args: Sequence[object], kwargs: Mapping[str, object]) -> list[DeviceTensor]:
    """The tensors of a device among the arguments of a call."""
    found: list[DeviceTensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, DeviceTensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in _leaves(value) if isinstance(one, DeviceTensor)]
    return found


def _called(function: Callable[..., object], args: object, kwargs: object) -> object:
    # These are tensors of the host, or without elements: the modes above have nothing to add.
    with torch._C._DisableTorchDispatch():
        return function(*cast("Sequence[object]", args), **cast("dict[str, object]", kwargs))


def _elements(values: object) -> object:
    def one(value: object) -> object:
        if isinstance(value, DeviceTensor):
            return value.elements
        return CPU if isinstance(value, torch.device) else value

    return _mapped(one, values)


def _own_stride(like: Tensor) -> Sequence[int]:
    """Return a stride in which each element has memory of its own."""
    is_apart = all(
        stride or size < 2 for size, stride in zip(like.shape, like.stride(), strict=True)
    )
    return like.stride() if is_apart else torch.empty(like.shape, device="meta").stride()


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _metas(values: object) -> object:
    def one(value: object) -> object:
        if isinstance(value, Tensor):
            return _meta(value)
        return torch.device("meta") if isinstance(value, torch.device) else value

    return _mapped(one, values)


def watch_end(tensor: DeviceTensor, freed: Callable[[], None]) -> None:
    """Call a function when nobody holds a tensor or a view of it any more."""
    weakref.finalize(tensor, freed).atexit = False
