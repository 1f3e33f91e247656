"""The process that compiles segments, so that the training process never imports the compiler.

It reads requests from its standard input and answers each on its standard output: eight bytes of length, then msgpack.
An answer is empty, or the reason that the segment could not be compiled.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from zeroir.artifact import schema
from zeroir.errors import UserError
from zeroir.ir.analysis.instances import dims_in, with_other_integers, with_other_sizes
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.operators import Operator
from zeroir.ir.segments.segment import Segment
from zeroir.ir.size_text import parse_size
from zeroir.ir.sizes import Dim, Size
from zeroir.runtime.kernels.stand_ins import StandIns

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to compile a segment into an empty folder, for a device and a number of threads.

    ``operators`` are the operators of libraries or the model that it calls. Integers from ``_FIRST_SIZE`` down are
    numbers of ``sizes``, which are polynomials of ``dims``.
    """

    segment: Segment
    operators: tuple[Operator, ...]
    bindings: tuple[Binding | None, ...]
    dims: tuple[Dim, ...]
    sizes: tuple[str, ...]
    device: str
    threads: int
    folder: str

    @classmethod
    def of(
        cls,
        segment: Segment,
        bindings: tuple[Binding | None, ...],
        operators: tuple[Operator, ...],
        *,
        device: str,
        threads: int,
    ) -> Request:
        """Return the request for a segment; its folder is not chosen yet."""
        numbers: dict[Size, int] = {}
        plain_segment, plain_bindings = with_other_sizes(
            (segment, bindings), lambda size: _FIRST_SIZE - numbers.setdefault(size, len(numbers))
        )
        return cls(
            segment=plain_segment,
            operators=operators,
            bindings=plain_bindings,
            dims=dims_in((segment, *bindings)),
            sizes=tuple(map(str, numbers)),
            device=device,
            threads=threads,
            folder="",
        )

    def with_sizes(self) -> tuple[Segment, tuple[Binding | None, ...]]:
        """Return the segment and its bindings with sizes that depend on dims."""
        dims = {dim.name: dim for dim in self.dims}
        sizes = {
            _FIRST_SIZE - number: parse_size(text, dims) for number, text in enumerate(self.sizes)
        }
        return with_other_integers(
            (self.segment, self.bindings), lambda number: sizes.get(number) or number
        )


_FIRST_SIZE: Final = -(2**62)


def send(stream: IO[bytes], data: bytes) -> None:
    """Write one message."""
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Read one message; None at the end of the stream, even in the middle of a message."""
    header = stream.read(_LENGTH_BYTES)
    if len(header) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(header, "little")
    data = stream.read(size)
    return data if len(data) == size else None


def compile_segment(request: Request, stand_ins: StandIns) -> None:
    """Compile in this process, in which ``stand_ins`` defines the operators of libraries and the model."""
    import torch

    from zeroir.runtime.kernels import _inductor_private, graph
    from zeroir.runtime.kernels.decompositions import decompositions

    segment, bindings = request.with_sizes()
    if request.dims and request.operators:
        names = ", ".join(operator.name for operator in request.operators)
        raise UserError(f"the model's own {names} declares results for one shape at a time.")
    stand_ins.define(request.operators, segment)
    device = torch.device(request.device)
    torch.set_num_threads(request.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _inductor_private.compile_library(
        graph.build_graph(segment, bindings, device),
        graph.input_types(segment, bindings),
        decompositions(device),
        Path(request.folder),
        device,
        host_inputs=graph.host_inputs(segment),
        dims=request.dims,
    )


def main() -> None:
    """Serve requests until the standard input ends."""
    requests = sys.stdin.buffer
    # The output of compilers must not mix with the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    stand_ins = StandIns()
    while (data := receive(requests)) is not None:
        try:
            request = schema.unpack(Request, data)
            compile_segment(request, stand_ins)
        except Exception as error:  # noqa: BLE001 - the answer reports it, and other segments may succeed
            send(answers, (f"{type(error).__name__}: {error}".strip() or "unknown").encode())
        else:
            send(answers, b"")


if __name__ == "__main__":
    main()
