"""What the runtime uses of Inductor, and how it loads what Inductor made; all of torch's private interfaces for it.

Compiling imports the compiler, which takes about 120 MB and seconds, and happens in processes of their own
(``compile_worker``). Loading and running imports none of it: a compiled segment is a library with a C interface
(AOTInductor's ``interface.h``).

A library reads its arguments and writes its destinations, which are inputs of its function like the arguments; it
returns nothing.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor, fx

from zeroir.errors import InternalError
from zeroir.ir.segment import TensorType
from zeroir.runtime.tensors import TORCH_DTYPE

LIBRARY: Final = "kernel.so"
EXTERN_CALLS: Final = "kernel.json"
"""Beside the library where it calls operators that torch offers no C function for."""

Decompositions = Mapping[torch._ops.OpOverload, Callable[..., object]]

_C_FUNCTIONS: Final = ("mm_out", "bmm_out", "addmm_out")
"""Operators of ``torch_ops.into`` that stand for the C function of torch with their name and arguments."""

OPTIONS: Final[Mapping[str, object]] = {
    # The order of the graph is what says that a destination is read after it is written.
    "reorder_for_locality": False,
    # Shapes and strides were settled when the segment was compiled.
    "size_asserts": False,
    "fx_graph_cache": False,
    "aot_inductor.enable_frame_pointer": False,
    "aot_inductor.enable_line_tables": False,
}
"""How Inductor is asked to compile; names that a version of torch lacks are left out."""


def compile_library(
    graph: fx.GraphModule,
    inputs: Sequence[TensorType],
    decompositions: Decompositions,
    folder: Path,
    device: torch.device,
    *,
    host_inputs: frozenset[int] = frozenset(),
) -> None:
    """Compile a graph of torch operators that returns nothing into ``folder``; further operators are decomposed.

    ``inputs`` are the types of the graph's inputs; those in ``host_inputs`` lie on the host.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _lower_ours()
    known = config.get_config_copy()
    options = {name: value for name, value in OPTIONS.items() if name in known}
    options |= {
        "cpp_wrapper": True,
        "aot_inductor.output_path": str(folder / LIBRARY),
    }
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        with mode:
            examples = [
                torch.empty_strided(
                    one.shape,
                    one.stride,
                    dtype=TORCH_DTYPE[one.dtype],
                    device="cpu" if index in host_inputs else device,
                )
                for index, one in enumerate(inputs)
            ]
            table = {**select_decomp_table(), **decompositions}
            traced = make_fx(graph, decomposition_table=table)(*examples)
        traced.graph.eliminate_dead_code(is_impure_node=has_effect)
        traced.recompile()
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(V.set_aot_compilation(True))
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(config.patch(options))
        compile_fx_inner(traced, examples, aot_mode=True, cpp_wrapper=True)
    _keep_only_what_runs(folder)


def has_effect(node: fx.Node) -> bool:
    """What dead-code elimination must keep: inputs, and whatever writes."""
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _lower_ours() -> None:
    """Tell Inductor what our operators that fill a tensor are."""
    import sympy
    from torch._inductor import ir
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.lowering import lowerings, mutate_to, register_lowering
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    ours = torch.ops.zeroir
    if ours.store.default in lowerings:
        return

    class Filling(ir.ExternKernel):
        """A call of a C function of torch that fills its first tensor; then come its tensors, then its numbers."""

        def __init__(
            self, op: torch._ops.OpOverload, tensors: Sequence[ir.IRNode], numbers: Sequence[float]
        ) -> None:
            inputs = self.unwrap_storage([self.realize_input(tensor) for tensor in tensors])
            layout = ir.NoneLayout(device=tensors[0].get_device())
            super().__init__(None, layout, inputs, tuple(numbers), op_overload=op)
            V.graph.mark_buffer_mutated(self.input_name(0))
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def codegen(self, wrapper: PythonWrapperCodegen) -> None:
            device, op = self.get_device(), self.op_overload
            assert isinstance(
                wrapper, CppWrapperCpu
            )  # the C++ wrappers of all devices derive from it
            assert isinstance(op, torch._ops.OpOverload)
            assert device is not None
            function = f"aoti_torch_{device.type}_{op._opname}"
            args = [one.codegen_reference() for one in self.inputs if isinstance(one, ir.IRNode)]
            args += [repr(number) for number in self.constant_args]
            wrapper.generate_c_shim_extern_kernel_call(function, args, device.type)

        def should_allocate(self) -> bool:
            return False

        def get_mutation_names(self) -> Sequence[str]:
            return [self.input_name(0)]

        def get_unbacked_symbol_defs(self) -> OrderedSet[sympy.Symbol]:
            return OrderedSet()

    def fill(op: torch._ops.OpOverload, *args: ir.TensorBox | float) -> None:
        tensors = [arg for arg in args if isinstance(arg, ir.TensorBox)]
        Filling(op, tensors, [arg for arg in args if isinstance(arg, float)])

    def store(out: ir.TensorBox, value: ir.TensorBox) -> None:
        # The value may be computed in its destination, since nobody else reads it: but an operator that Inductor
        # only calls makes its result in its own memory, and an input has its own.
        data = value.data
        is_own = isinstance(data, ir.StorageBox) and isinstance(
            data.data, ir.Pointwise | ir.Reduction
        )
        mutate_to(out, value, unsafe_alias=is_own)  # type: ignore[no-untyped-call]

    register_lowering(ours.store.default, type_promotion_kind=None)(store)
    for name in _C_FUNCTIONS:
        op = getattr(ours, name).default
        register_lowering(op, type_promotion_kind=None)(partial(fill, op))


def _keep_only_what_runs(folder: Path) -> None:
    """Name the description of extern calls as the loader looks for it, and drop sources and objects."""
    for path in folder.glob("*.wrapper.json"):
        if json.loads(path.read_text()).get("nodes"):
            path.rename(folder / EXTERN_CALLS)
    kept = {LIBRARY, EXTERN_CALLS}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        elif path.name not in kept and path.suffix not in (".cubin", ".hsaco"):
            path.unlink()


# ------------------------------------------------------------------------------------------------ loading


class Library(Protocol):
    """A compiled segment."""

    def __call__(self, tensors: list[Tensor], /) -> object:
        """Run on arguments and destinations, on the current stream."""


def load_library(folder: Path, device: torch.device) -> Library:
    """Load what ``compile_library`` wrote. RuntimeError or OSError where it does not fit this torch or machine."""
    path = folder / LIBRARY
    if not (folder / EXTERN_CALLS).exists():
        return _CLibrary(path, device, folder)
    import zeroir.torch_ops  # noqa: F401 - extern calls look our operators up by name

    if device.type == "cpu":
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run
    run = torch._C._aoti.AOTIModelContainerRunnerCuda(str(path), 1, str(device), str(folder)).run

    def on_device(tensors: list[Tensor], /) -> None:
        # It asks the device whether the segment's last call is done, and never recovers if that was captured.
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a compiled segment calls operators that only Python knows")
        run(tensors)

    return on_device


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _CLibrary:
    """A library called through its C interface, without the interpreter's lock.

    torch's own runner keeps the lock, and what overlaps with the segment, such as communication, would stand still. On
    a GPU it also waits for the segment's last call, because several threads may call it: here one thread does.
    """

    def __init__(self, path: Path, device: torch.device, folder: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._handle = ctypes.c_void_p()
        create = self._library.AOTInductorModelContainerCreateWithDevice
        create.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_char_p,
            ctypes.c_char_p,
        ]
        binaries = None if device.type == "cpu" else str(folder).encode()
        self._check(create(ctypes.byref(self._handle), 1, str(device).encode(), binaries))
        run = self._library.AOTInductorModelContainerRun
        if device.type == "cuda":
            run = self._library.AOTInductorModelContainerRunSingleThreaded
        array, size = ctypes.c_void_p, ctypes.c_size_t
        run.argtypes = [ctypes.c_void_p, array, size, array, size, ctypes.c_void_p, ctypes.c_void_p]
        self._run = run
        self._device = device
        self._results = (ctypes.c_void_p * 1)()

    def __call__(self, tensors: list[Tensor], /) -> None:
        """See ``Library``."""
        # The library takes the handles over.
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
        count = len(handles)
        array = (ctypes.c_void_p * count)(*[_pointer(handle, None) for handle in handles])
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device).cuda_stream
        self._check(self._run(self._handle, array, count, self._results, 0, stream, None))

    def _check(self, code: int) -> None:
        if code != 0:
            raise InternalError(f"a compiled segment failed with code {code}; see the lines above")
