"""The process that compiles segments, so that the training process never imports the compiler.

It reads requests from its standard input and answers each on its standard output: eight bytes of length, then msgpack.
An answer is empty, or the reason that the segment could not be compiled.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from zeroir.artifact import schema
from zeroir.artifact.stored_sizes import SizeNumbers, stored_sizes
from zeroir.ir.analysis.instances import with_other_integers
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.operators import Operator
from zeroir.ir.segments.segment import Segment
from zeroir.ir.sizes import Dim
from zeroir.runtime.device.driver import driver
from zeroir.runtime.kernels.stand_ins import StandIns

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to compile a segment into an empty folder, for a device and a number of threads.

    ``operators`` are the operators of libraries or the model that it calls, ``dims`` those on which its sizes depend.
    On the way to another process numbers of ``sizes``, which are texts, stand for such sizes.
    """

    segment: Segment
    operators: tuple[Operator, ...]
    bindings: tuple[Binding | None, ...]
    device: str
    threads: int
    folder: str
    dims: tuple[Dim, ...] = ()
    sizes: tuple[str, ...] = ()


def packed(request: Request) -> bytes:
    """Return the bytes of a request."""
    numbers = SizeNumbers()
    segment, bindings = with_other_integers((request.segment, request.bindings), numbers.number)
    return schema.pack(replace(request, segment=segment, bindings=bindings, sizes=numbers.texts))


def unpacked(data: bytes) -> Request:
    """Return the request that ``packed`` made these bytes of."""
    sent = schema.unpack(Request, data)
    sized = stored_sizes(sent.sizes, sent.dims)
    segment, bindings = with_other_integers((sent.segment, sent.bindings), sized)
    return replace(sent, segment=segment, bindings=bindings, sizes=())


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

    stand_ins.define(request.operators, request.segment)
    device = torch.device(request.device)
    torch.set_num_threads(request.threads)
    if device.type == "cuda":
        driver().set_device(device)
    _inductor_private.compile_library(
        graph.build_graph(request.segment, request.bindings, device),
        graph.input_types(request.segment, request.bindings),
        decompositions(device),
        Path(request.folder),
        device,
        host_inputs=graph.host_inputs(request.segment),
        unaligned_inputs=graph.unaligned_inputs(request.segment, request.bindings),
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
            request = unpacked(data)
            compile_segment(request, stand_ins)
        except Exception as error:  # noqa: BLE001 - the answer reports it, and other segments may succeed
            send(answers, (f"{type(error).__name__}: {error}".strip() or "unknown").encode())
        else:
            send(answers, b"")


if __name__ == "__main__":
    main()
