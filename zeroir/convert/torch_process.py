"""The process that reads files of torch, ``python -m zeroir.convert.torch_process``. ``torch_files.py`` starts it.

``torch.load(weights_only=True)`` imports and calls only what torch allows. But within that, a pickle of 60 bytes can
still create a ``bytearray`` of 64 GB, hash a tuple that doubles at each level, or hash one so deep that the stack
overflows. So files are read in a separate process, with limits of memory and processor time.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgpack

from zeroir.convert.torch_files import DCP, METADATA, REFUSED
from zeroir.convert.torch_reader import packed_file
from zeroir.errors import UserError, is_out_of_memory

MEMORY_BYTES: Final = 2 << 30
"""The memory limit for reading, in addition to torch's memory and 16 bytes for each byte of DCP's metadata."""

PROCESSOR_S: Final = 60
"""The time limit for reading, in addition to 1 s for each file, and for each 100 kB of DCP's metadata."""

ANSWER_BYTES: Final = 64 << 20
"""The size limit of an answer, in addition to that of DCP's metadata: more than a million tensors need."""


def main() -> None:
    """Answer a request, which is the kind of the files and their paths."""
    kind, *paths = sys.argv[1:]
    try:
        answer = _answer(kind, [Path(path) for path in paths])
    except UserError as error:
        refusal = str(error)
    except OSError as error:
        refusal = f"'{error.filename or paths[0]}' cannot be read: {error.strerror}."
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        refusal = (
            f"'{paths[0]}' takes more than {MEMORY_BYTES >> 30} GB of memory to read, even without its tensors: it is "
            "damaged, or was made to do harm."
        )
    else:
        sys.stdout.buffer.write(answer)
        return
    sys.stdout.buffer.write(refusal.encode(errors="replace"))
    sys.exit(REFUSED)


def _answer(kind: str, paths: Sequence[Path]) -> bytes:
    metadata_bytes = 0
    if kind == DCP:
        from zeroir.convert.dcp_reader import packed_entries

        (folder,) = paths
        status = (folder / METADATA).stat()
        # A sparse file does not raise the limit.
        metadata_bytes = min(status.st_size, status.st_blocks * 512)
        _limit(metadata_bytes, 1)
        parts = list(packed_entries(folder))
    else:
        _limit(0, len(paths))
        parts = [packed_file(path) for path in paths]
    answer: bytes = msgpack.packb(parts)
    # Packed data may refer to one value many times, and each reference takes memory when it is unpacked.
    if len(answer) > ANSWER_BYTES + metadata_bytes:
        raise MemoryError
    return answer


def _limit(metadata_bytes: int, file_count: int) -> None:
    """Limit the resources of this process from here on."""
    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    own_s = int(time.process_time())
    for limit, wanted in (
        (resource.RLIMIT_AS, own_bytes + MEMORY_BYTES + 16 * metadata_bytes),
        (resource.RLIMIT_CPU, own_s + PROCESSOR_S + file_count + metadata_bytes // 100_000),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(limit)
        own = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(limit, (own, most))


if __name__ == "__main__":
    main()
