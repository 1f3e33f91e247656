"""Segments compiled by Inductor, once for every structure and kept on disk between runs.

``compile`` looks a segment up in the cache; ``finish``, or the first call of a kernel, compiles missing segments in
other processes. This process loads libraries and never imports the compiler. Without a C++ compiler, and for a segment
that Inductor rejects, eager kernels are used, with one warning.

Where sizes depend on dims, a segment is compiled once for all of them. If its code would be right for some of the sizes
only, eager kernels are used, with that warning.

Results differ from those of eager kernels: Inductor adds in another order, keeps fused values in FP32 and has its own
polynomials for elementary functions. Eager mode rounds every value between two operators, with a relative error of at
most eps / 2, and a sum in another order differs by a few roundings of its partial sums. Over a path of d operators such
errors, if independent, grow with √d. So results may differ by 4 × eps × √d, relative to the largest element;
``kernels.tolerance`` computes this.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from zeroir.artifact.cache_folder import cache_folder
from zeroir.errors import KernelWarning
from zeroir.ir.analysis.instances import with_other_sizes
from zeroir.ir.ops import Mode
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Segment
from zeroir.ir.sizes import Dim, Size
from zeroir.runtime.kernels import graph
from zeroir.runtime.kernels._inductor_libraries import Library, load_library
from zeroir.runtime.kernels.base import Kernel
from zeroir.runtime.kernels.cache import KernelCache, kernel_key
from zeroir.runtime.kernels.compile_pool import HostShare, compile_missing
from zeroir.runtime.kernels.compile_worker import Request
from zeroir.runtime.kernels.cpp_library import NO_COMPILER, cpp_compiler
from zeroir.runtime.kernels.cuda_toolkit import NO_HEADERS, cuda_toolkit
from zeroir.runtime.kernels.eager import EagerKernels
from zeroir.torch_ops.opaque import words_of
from zeroir.torch_ops.purity import declarations


class InductorKernels:
    """Compiled segments on one device, from a cache under ``folder``."""

    compiles_dims = True

    def __init__(
        self,
        device: torch.device,
        *,
        folder: Path | None = None,
        host_share: HostShare | None = None,
    ) -> None:
        self._device = device
        self._threads = torch.get_num_threads()
        self._cache = KernelCache(cache_folder() if folder is None else folder)
        self._host_share = HostShare.from_environment() if host_share is None else host_share
        self._eager = EagerKernels(device)
        self._kernels: dict[str, InductorKernel] = {}
        self._missing: dict[str, Request] = {}
        self._sized: dict[str, list[InductorKernel]] = {}

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        """Return the kernel of a segment, which ``finish``, or otherwise its first call, completes."""
        if words_of([segment]):
            return self._eager.compile(segment, bindings)
        key = kernel_key(segment, bindings, self._device, self._threads)
        kernel = self._kernels.get(key)
        is_new = kernel is None
        if kernel is None:
            dims = graph.kernel_dims(segment, bindings)
            kernel = InductorKernel(segment, tuple(bindings), dims, self.finish)
            self._kernels[key] = kernel
        if kernel.dims:
            self._sized.setdefault(segment.name, []).append(kernel)
        if is_new and not self._load(key, kernel):
            self._missing[key] = Request(
                segment=segment,
                operators=declarations(node.op for node in segment.nodes),
                bindings=tuple(bindings),
                device=str(self._device),
                threads=self._threads,
                folder="",
                dims=kernel.dims,
            )
        return kernel

    def at(self, values: Mapping[str, int]) -> KernelsOfInstance:
        """Return the kernels of the program's instance where dims have these values."""
        return KernelsOfInstance(self, self._sized, values, EagerKernels(self._device))

    def finish(self) -> None:
        """Compile the segments that the cache lacks, or wait for other processes of this host that do."""
        missing, self._missing = self._missing, {}
        if not missing:
            return
        if cpp_compiler() is None:
            errors = dict.fromkeys(missing, NO_COMPILER)
        elif self._device.type == "cuda" and not torch.version.hip and cuda_toolkit() is None:
            errors = dict.fromkeys(missing, NO_HEADERS)
        else:
            try:
                errors = compile_missing(missing, self._cache, self._host_share)
            except OSError as error:
                errors = dict.fromkeys(missing, str(error))
        for key in missing:
            if key not in errors and not self._load(key, self._kernels[key]):
                errors[key] = "the compiled library does not load."
        for key in errors:
            kernel = self._kernels[key]
            kernel.use(self._eager.compile(kernel.segment, kernel.bindings))
        if errors and self._host_share.rank == 0:
            names = sorted({missing[key].segment.name for key in errors})
            reason = next(iter(errors.values())).splitlines()[0]
            warnings.warn(
                f"Eager kernels compute {', '.join(names)}, which could not be compiled: {reason}",
                KernelWarning,
                stacklevel=2,
            )

    def _load(self, key: str, kernel: InductorKernel) -> bool:
        folder = self._cache.find(key)
        if folder is None:
            return False
        try:
            library = load_library(folder, self._device)
        except (OSError, RuntimeError):
            return False
        outputs = graph.graph_outputs(kernel.bindings)
        kernel.use(_LibraryKernel(library=library, outputs=outputs, bindings=kernel.bindings))
        return True


@dataclass(slots=True, eq=False)
class InductorKernel:
    """A segment that runs a library or an eager kernel; its first use calls ``finish`` if it has neither.

    With ``dims`` it is called at their values alone.
    """

    segment: Segment
    bindings: tuple[Binding | None, ...]
    dims: tuple[Dim, ...]
    finish: Callable[[], None]
    _kernel: Kernel | None = None

    def use(self, kernel: Kernel) -> None:
        """Use this kernel from now on."""
        self._kernel = kernel

    def at(self, values: Mapping[str, int]) -> Kernel | None:
        """Return the kernel where the dims have these values; None where it is an eager one."""
        kernel = self._finished()
        if not isinstance(kernel, _LibraryKernel):
            return None
        shaped = torch.empty(()).expand([values[dim.name] for dim in self.dims])
        return replace(kernel, leading=(shaped,))

    def __call__(self, arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
        assert not self.dims
        self._finished()(arguments, destinations)

    def _finished(self) -> Kernel:
        if self._kernel is None:
            self.finish()
        assert self._kernel is not None
        return self._kernel


@dataclass(frozen=True, slots=True)
class KernelsOfInstance:
    """The kernels of a program's instance: those of the program, called with the values of its dims."""

    whole: InductorKernels
    sized: Mapping[str, Sequence[InductorKernel]]
    values: Mapping[str, int]
    eager: EagerKernels

    compiles_dims = False

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        """Return the kernel of a segment of the instance."""
        of_segment = self.sized.get(segment.name)
        if of_segment is None:
            return self.whole.compile(segment, bindings)

        def value(size: Size) -> int:
            return size.at(self.values)

        wanted = tuple(bindings)
        same = (k for k in of_segment if with_other_sizes(k.bindings, value) == wanted)
        return next(same).at(self.values) or self.eager.compile(segment, bindings)

    def at(self, values: Mapping[str, int]) -> KernelsOfInstance:
        """Return these kernels, because an instance has no dims."""
        del values
        return self

    def finish(self) -> None:
        """Do nothing: the program's kernels are ready to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LibraryKernel:
    """A library; ``leading`` is the tensor with the values of its dims, if it has any."""

    library: Library
    outputs: graph.GraphOutputs
    bindings: tuple[Binding | None, ...]
    leading: tuple[Tensor, ...] = ()

    def __call__(self, arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
        tensors = [*self.leading, *arguments]
        for output in self.outputs.direct:
            target = destinations[output]
            assert target is not None
            tensors.append(target)
        if not self.outputs.scratch:
            self.library(tensors)
            return
        # The destination may overlap an argument, so the results are copied to it after everything has been read.
        targets = [destinations[output] for output in self.outputs.scratch]
        scratch = [torch.empty_like(target) for target in targets if target is not None]
        self.library([*tensors, *scratch])
        for output, target, value in zip(self.outputs.scratch, targets, scratch, strict=True):
            binding = self.bindings[output]
            assert target is not None
            assert binding is not None
            if binding.mode is Mode.WRITE:
                target.copy_(value)
            else:
                target.add_(value)
