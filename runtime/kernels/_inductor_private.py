"""Compiles segments with Inductor.

Only this module, ``_inductor_sizes`` for sizes that depend on dims, and ``_inductor_libraries``, which loads the
results, use torch's private interfaces for that. Compiling imports the compiler, which takes seconds and about 120 MB,
and happens in other processes (``compile_worker``).

A library reads its arguments and writes its destinations, which are inputs of its function like the arguments; it
returns nothing. Its interface is one function (``segment.h``). AOTInductor's own interface (``interface.h``, with a
container of models) takes three times as long to compile as the segment. It is used only where it is necessary: for
constants, and for operators that no C function can call, neither one of torch's nor one of ``operator_calls``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, fx

from zeroir.ir.segments.segment import TensorType
from zeroir.ir.sizes import Dim
from zeroir.runtime.kernels._inductor_libraries import EXTERN_CALLS, LIBRARY
from zeroir.runtime.kernels.operator_calls import CFunction, function_name, operator_calls
from zeroir.torch_ops.types import TORCH_DTYPE

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_SEGMENT_HEADER: Final = Path(__file__).with_name("segment.h")
Decompositions = Mapping[torch._ops.OpOverload, Callable[..., object]]

_C_FUNCTIONS: Final = ("mm_out", "bmm_out", "addmm_out")
"""Operators of ``torch_ops.out_variants`` that correspond to torch's C functions of the same names and arguments."""

_OWN_C_FUNCTIONS: Final = ("embedding_gradient",)
"""Operators of ``torch_ops.out_variants`` for which ``segment.h`` has a C function."""

OPTIONS: Final[Mapping[str, object]] = {
    # Only the order of the graph ensures that a destination is written before it is read.
    "reorder_for_locality": False,
    # Shapes and strides were fixed when the segment was compiled.
    "size_asserts": False,
    "fx_graph_cache": False,
    "aot_inductor.enable_frame_pointer": False,
    "aot_inductor.enable_line_tables": False,
}
"""Inductor's options; those that a version of torch lacks are omitted."""


def compile_library(
    graph: fx.GraphModule,
    inputs: Sequence[TensorType],
    decompositions: Decompositions,
    folder: Path,
    device: torch.device,
    *,
    host_inputs: frozenset[int] = frozenset(),
    unaligned_inputs: frozenset[int] = frozenset(),
    dims: Sequence[Dim] = (),
) -> None:
    """Compile a graph of torch operators that returns nothing into ``folder``, with additional decompositions.

    ``inputs`` are the types of the graph's inputs; those in ``host_inputs`` are on the host, and those in
    ``unaligned_inputs`` may begin anywhere. With ``dims`` the graph has one input before these, a tensor on the host
    whose shape has the values of the dims.

    Raises:
        SizesError: where the code would be right for some values of the dims only.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from zeroir.runtime.kernels._inductor_sizes import SizesError, Symbols

    def compile_with(options: Mapping[str, object]) -> None:
        symbols = Symbols(dims)
        mode = FakeTensorMode(shape_env=symbols, static_shapes=True)
        with torch.no_grad(), mode, symbols.in_use():
            examples = [
                # Inductor expects an input to be aligned if its example's offset is a multiple of the alignment.
                torch.empty_strided(
                    [2, *symbols.of(kind.shape)],
                    [1, *symbols.of(kind.stride)],
                    dtype=TORCH_DTYPE[kind.dtype],
                    device="cpu" if index in host_inputs else device,
                )[1 if index in unaligned_inputs else 0]
                for index, kind in enumerate(inputs)
            ]
            if dims:
                shape = symbols.of([dim.size for dim in dims])
                examples.insert(0, torch.empty_strided(shape, [0] * len(dims), device="cpu"))
            table = {**select_decomp_table(), **decompositions}
            traced = make_fx(graph, decomposition_table=table)(*examples)
        traced.graph.eliminate_dead_code(is_impure_node=has_effect)
        traced.recompile()
        with symbols.in_use():
            _compile(traced, examples, mode, folder, options)
        symbols.require_right_for_all()

    _lower_ours()
    try:
        with _as_function(folder, operator_calls(graph.graph, device)) as options:
            compile_with(options)
            if not _describes_calls(folder):
                _keep_only(folder, LIBRARY)
                return
    except SizesError:
        raise
    except Exception:  # noqa: BLE001 - the segment is compiled as a model instead
        pass
    _keep_only(folder)
    with _as_model() as options:
        compile_with(options)
    if (calls := _describes_calls(folder)) is not None:
        calls.rename(folder / EXTERN_CALLS)
    _keep_only(folder, LIBRARY, EXTERN_CALLS)


def _compile(
    graph: fx.GraphModule,
    examples: Sequence[Tensor],
    mode: FakeTensorMode,
    folder: Path,
    options: Mapping[str, object],
) -> None:
    """Compile a graph of torch's and zeroir's operators with Inductor."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner, get_cpp_wrapper_config
    from torch._inductor.virtualized import V

    supported = config.get_config_copy()
    patch = {
        **{name: value for name, value in OPTIONS.items() if name in supported},
        "cpp_wrapper": True,
        "aot_inductor.output_path": str(folder / LIBRARY),
        **options,
    }
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(V.set_aot_compilation(True))
        stack.enter_context(tracing(TracingContext(mode)))
        # Without these settings torch 2.11 does not keep the binaries of a GPU's kernels; later versions set them.
        stack.enter_context(config.patch(get_cpp_wrapper_config()))
        stack.enter_context(config.patch(patch))
        stack.enter_context(_quick_check_of_instructions())
        stack.enter_context(_wrapping_integers())
        compile_fx_inner(graph, examples, aot_mode=True, cpp_wrapper=True)


@contextmanager
def _as_function(
    folder: Path, calls: Mapping[torch._ops.OpOverload, CFunction]
) -> Iterator[Mapping[str, object]]:
    """Yield options that compile a segment as one function, ``segment.h``, instead of AOTInductor's container.

    They are the options of a model for static linking: its class has its own name, declared in a header of that name.
    Torch writes that header unless it exists. The segment calls operators by the functions ``calls``.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    name_in_torch = CppWrapperCpu.get_c_shim_func_name

    def name_of(kernel: str, device: str) -> str:
        """Return the function that calls an operator; torch's name would be that of a function for its own ``op``."""
        is_ours = any(operator._schema.name == kernel for operator in calls)
        return function_name(kernel, device) if is_ours else name_in_torch(kernel, device)

    # The name is also that of a lock between processes.
    name = f"Segment{hashlib.sha256(bytes(folder)).hexdigest()[:16]}"
    declared = f"#define ZEROIR_MODEL AOTInductorModel{name}\n{_SEGMENT_HEADER.read_text()}"
    definitions = "\n".join(call.definition for call in calls.values())
    declared += f'extern "C" {{\n{definitions}\n}}\n'
    (folder / f"{name}.h").write_text(declared)
    options = {
        "aot_inductor.dynamic_linkage": False,
        "aot_inductor.model_name_for_generated_files": name,
        "aot_inductor.custom_ops_to_c_shims": {
            operator: [call.declaration] for operator, call in calls.items()
        },
    }
    # An environment variable enables these checks at run time, but they take as long to compile as the rest.
    checks = "generate_input_output_runtime_checks"
    with (
        _replaced(CppWrapperCpu, checks, lambda _: None),
        _replaced(CppWrapperCpu, "get_c_shim_func_name", staticmethod(name_of)),
    ):
        yield options


@contextmanager
def _as_model() -> Iterator[Mapping[str, object]]:
    """Yield options that compile a segment as a model in AOTInductor's container."""
    from torch._inductor.lowering import lowerings

    operators = [getattr(torch.ops.zeroir, name).default for name in _OWN_C_FUNCTIONS]
    ours = {op: lowerings.pop(op) for op in operators}
    try:
        yield {}
    finally:
        lowerings.update(ours)


@contextmanager
def _quick_check_of_instructions() -> Iterator[None]:
    """Check with a file without headers that the compiler supports a processor's instruction sets.

    Inductor's own check compiles torch's vector classes for every set, and loads each library in a new process.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.cpu_vec_isa import VecISA

    def is_supported(instructions: VecISA, code: str) -> bool:
        flags = instructions.build_arch_flags().split()
        return not subprocess.run(
            [get_cpp_compiler(), *flags, "-x", "c++", "-c", "-", "-o", os.devnull],
            input="" if code == VecISA._avx_code else code,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode

    if platform.machine() != "x86_64":
        yield
        return
    with _replaced(VecISA, "check_build", is_supported):
        yield


@contextmanager
def _wrapping_integers() -> Iterator[None]:
    """Let integers wrap around in compiled code, as torch's do.

    To C++ an overflow is undefined. From the product of a position and a large number, which hashes of positions
    contain, a compiler concludes that the loop ends before it overflows.
    """
    from torch._inductor import cpp_builder

    flags = cpp_builder._get_ffast_math_flags
    with _replaced(cpp_builder, "_get_ffast_math_flags", lambda: [*flags(), "fwrapv"]):
        yield


@contextmanager
def _replaced(owner: object, name: str, function: Callable[..., object]) -> Iterator[None]:
    """Replace a function of a class or module within the block, if it has one of that name."""
    original = vars(owner).get(name)
    if original is None:
        yield
        return
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def has_effect(node: fx.Node) -> bool:
    """Return whether dead-code elimination must keep a node: an input, the output, or an operator that writes."""
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _lower_ours() -> None:
    """Register lowerings of zeroir's operators that fill a tensor."""
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

    class FillingCall(ir.ExternKernel):
        """A call of a C function that fills its first tensor; its other arguments are tensors, then numbers."""

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
            # The C++ wrappers of all devices derive from this class.
            assert isinstance(wrapper, CppWrapperCpu)
            assert isinstance(op, torch._ops.OpOverload)
            assert device is not None
            function = f"aoti_torch_{device.type}_{op._opname}"
            args = [node.codegen_reference() for node in self.inputs if isinstance(node, ir.IRNode)]
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
        FillingCall(op, tensors, [arg for arg in args if isinstance(arg, int | float)])

    def store(out: ir.TensorBox, value: ir.TensorBox) -> None:
        # The value may be computed in its destination, because no other node reads it. Inputs, and results of operators
        # that Inductor only calls, have their own memory.
        data = value.data
        is_computed = isinstance(data, ir.StorageBox) and isinstance(
            data.data, ir.Pointwise | ir.Reduction
        )
        mutate_to(out, value, unsafe_alias=is_computed)  # type: ignore[no-untyped-call]

    register_lowering(ours.store.default, type_promotion_kind=None)(store)
    for name in (*_C_FUNCTIONS, *_OWN_C_FUNCTIONS):
        op = getattr(ours, name).default
        register_lowering(op, type_promotion_kind=None)(partial(fill, op))


def _describes_calls(folder: Path) -> Path | None:
    """Return the file that describes calls of operators without a C function; None where there are no such calls."""
    for path in folder.glob("*.wrapper.json"):
        if json.loads(path.read_text()).get("nodes"):
            return path
    return None


def _keep_only(folder: Path, *names: str) -> None:
    """Delete all files but the named ones; where any are named, keep a device's binaries as well."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        elif path.name not in names and not (names and path.suffix in (".cubin", ".hsaco")):
            path.unlink()
