"""The buffers of one rank that are on disk: their places in the rank's file, and their bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from zeroir.runtime.disk.requests import PreparedTransfer, Requests
from zeroir.runtime.disk.scratch_file import ScratchFile, whole_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlaceInFile:
    """The offset and size of a buffer in the file; the bytes after it are unused up to the offset ``limit``."""

    offset: int
    size_bytes: int
    limit: int


class DiskBuffers:
    """Buffers in an unnamed file in ``folder``, or in the folder for temporary files; they are initialised with zeros.

    Raises:
        UserError: in every method, where the disk or the folder fails.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file = ScratchFile(folder, rank)
        self._requests = Requests(self._file)
        self._places: dict[str, _PlaceInFile] = {}

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._file.is_direct

    @property
    def read_bytes(self) -> int:
        """The bytes read from the file so far."""
        return self._requests.read_bytes

    @property
    def written_bytes(self) -> int:
        """The bytes written to the file so far."""
        return self._requests.written_bytes

    def add(self, sizes_bytes: Mapping[str, int]) -> None:
        """Allocate those of these buffers that are not allocated yet, all at once."""
        sizes = {name: size for name, size in sizes_bytes.items() if name not in self._places}
        offset = self._file.reserve(sum(map(whole_pages, sizes.values())))
        for name, size_bytes in sizes.items():
            limit = offset + whole_pages(size_bytes)
            self._places[name] = _PlaceInFile(offset=offset, size_bytes=size_bytes, limit=limit)
            offset = limit

    def add_parts(self, size_bytes: int, parts: Mapping[str, range]) -> None:
        """Place buffers at these byte ranges of a shared block of ``size_bytes``."""
        start = self._file.reserve(size_bytes)
        for name, part in parts.items():
            stop = start + part.stop
            place = _PlaceInFile(offset=start + part.start, size_bytes=len(part), limit=stop)
            self._places[name] = place

    def keep(self, names: Collection[str]) -> None:
        """Forget all other buffers; their bytes in the file stay unused."""
        self._places = {name: self._places[name] for name in names}

    def reading(self, name: str, start_bytes: int, target: Tensor) -> PreparedTransfer:
        """Return a function that reads bytes of a buffer, from ``start_bytes`` on, into a flat CPU tensor."""
        return self._requests.reading(self._places[name].offset + start_bytes, target)

    def writing(self, name: str, start_bytes: int, source: Tensor) -> PreparedTransfer:
        """Return a function that writes a flat CPU tensor to a buffer, from ``start_bytes`` on."""
        place = self._places[name]
        stop = place.offset + start_bytes + source.numel() * source.itemsize
        is_end = stop == place.offset + place.size_bytes
        limit = place.limit if is_end else stop
        return self._requests.writing(place.offset + start_bytes, source, limit=limit)
