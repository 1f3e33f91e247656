"""Tensors on a device that is not there: only tasks of streams read and write their elements, which the CPU has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
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
        drivers = [
            leaf.cuda_driver for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)
        ]
        return Call(drivers[0], func, args, dict(kwargs or {})).run()


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
        leaves = pytree.tree_leaves((args, given))
        is_of_device = any(isinstance(leaf, DeviceTensor) for leaf in leaves)
        # Torch's own C++ code makes intermediate tensors on the device that it sees.
        kinds = ("cuda", "meta") if self._driver.has_chosen_stream() else ("cuda",)
        is_asked = device is not None and torch.device(cast("str", device)).type in kinds
        if is_of_device or is_asked:
            return Call(self._driver, func, args, given).run()
        return func(*args, **given)


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
        if func in (torch.tensor, torch.as_tensor) and given.get("device") is not None:
            device = torch.device(cast("str", given.pop("device")))
            made = _called(func, args, given)
            assert isinstance(made, Tensor)
            return made.to(device)
        return func(*args, **given)


class Call:
    """One call of an operator, of which at least one tensor is on a device."""

    def __init__(
        self,
        driver: SimulatedCuda,
        func: OpOverload,
        args: Sequence[object],
        kwargs: dict[str, object],
    ) -> None:
        self.driver, self.func, self.args, self.kwargs = driver, func, args, kwargs
        self.name = func._schema.name
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor)]
        place = kwargs.get("device")
        self.place = (
            tensors[0].place if tensors else driver.with_index(torch.device(cast("str", place)))
        )
        self.written = {
            id(tensor)
            for argument, value in self._arguments()
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in pytree.tree_leaves(value)
            if isinstance(tensor, Tensor)
        }

    def run(self) -> object:
        if self.name == "aten::copy_":
            return self._copy()
        if self.name == "aten::_to_copy":
            return self._to_copy()
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write
            for r in self.func._schema.returns
        )
        if is_view and self.name not in _OWN_COPY:
            return self._view()
        if self.func is torch.ops.aten._local_scalar_dense.default:
            return self._at_once()
        return self._submitted()

    def _arguments(self) -> list[tuple[torch._C.Argument, object]]:
        schema = self.func._schema.arguments
        named = dict(zip((a.name for a in schema), self.args, strict=False)) | self.kwargs
        return [(argument, named[argument.name]) for argument in schema if argument.name in named]

    def _view(self) -> object:
        base = next(t for t in pytree.tree_leaves(self.args) if isinstance(t, DeviceTensor))
        made = _called(self.func, _elements(self.args), _elements(self.kwargs))
        owner = getattr(base, "owner", base)
        return pytree.tree_map_only(
            Tensor, lambda e: DeviceTensor(e, self.driver, self.place, owner), made
        )

    def _at_once(self) -> object:
        """Run what gives the host a value, or whose sizes depend on values, when all before it is done."""
        self.driver.host_waits(self.place, self.name)
        results = _called(self.func, _elements(self.args), _elements(self.kwargs))
        return pytree.tree_map_only(Tensor, lambda e: self.driver.adopt(e, self.place), results)

    def _submitted(self) -> object:
        """Return results without values, and let the current stream compute them."""
        # A task must not hold the tensors themselves, whose memory is free when nobody else holds them.
        args, kwargs = self._at_submission(self.args), self._at_submission(self.kwargs)
        func = self.func
        returned = self.func._schema.returns
        is_in_place = bool(self.written) and all(r.alias_info is not None for r in returned)
        if is_in_place:
            self.driver.submit(self.place, lambda: _called(func, args, kwargs))
            own = [
                v
                for a, v in self._arguments()
                if a.alias_info is not None and a.alias_info.is_write
            ]
            return None if not returned else own[0] if len(returned) == 1 else tuple(own)
        try:
            types = _called(func, _metas(args), _metas(kwargs))
        except (NotImplementedError, RuntimeError):
            return self._at_once()
        leaves, spec = pytree.tree_flatten(types)
        if not all(isinstance(leaf, Tensor) or leaf is None for leaf in leaves):
            return self._at_once()
        if self.name == "aten::native_layer_norm":
            # The kernels are the CPU's, whose statistics have the type of the input; CUDA's are in FP32.
            leaves = [leaf.to(leaves[0].dtype) for leaf in leaves]
        made = [
            None
            if leaf is None
            else self.driver.new(leaf.shape, _own_stride(leaf), leaf.dtype, self.place)
            for leaf in leaves
        ]
        targets = [None if one is None else one.elements for one in made]

        def compute() -> None:
            for target, value in zip(
                targets, pytree.tree_leaves(_called(func, args, kwargs)), strict=True
            ):
                if target is not None:
                    target.copy_(value)

        self.driver.submit(self.place, compute)
        return pytree.tree_unflatten(made, spec)

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

        return pytree.tree_map(
            lambda v: of_task(v) if isinstance(v, Tensor) else of_device(v), values
        )

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


def _called(function: Callable[..., object], args: object, kwargs: object) -> object:
    return function(*cast("Sequence[object]", args), **cast("dict[str, object]", kwargs))


def _elements(values: object) -> object:
    def one(value: object) -> object:
        if isinstance(value, DeviceTensor):
            return value.elements
        return CPU if isinstance(value, torch.device) else value

    return pytree.tree_map(one, values)


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

    return pytree.tree_map(one, values)


def watch_end(tensor: DeviceTensor, freed: Callable[[], None]) -> None:
    """Call a function when nobody holds a tensor or a view of it any more."""
    weakref.finalize(tensor, freed).atexit = False
