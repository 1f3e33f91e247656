"""Publishing: all ranks gather, one chunk at a time, and rank 0 puts it into the outlet of an address."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from zeroir.errors import UserError
from zeroir.runtime.comm.job import Job, PeerError
from zeroir.runtime.publishing.file_channel import FileOutlet
from zeroir.runtime.publishing.image import Image, packed
from zeroir.runtime.publishing.network_channel import NetworkOutlet
from zeroir.runtime.publishing.outlet import Outlet, place_of


@dataclass(slots=True)
class Published:
    """The version that was published, or why none was."""

    version: int = 0
    failure: UserError | None = None


class Publisher:
    """The outlets of an engine, by address. All ranks call its methods together; only rank 0 has outlets."""

    def __init__(self) -> None:
        self._outlets: dict[Path | str, Outlet] = {}

    def publish(
        self,
        image: Image,
        job: Job,
        address: str | os.PathLike[str],
        receivers: int | None,
        timeout: timedelta,
    ) -> Published:
        """Publish the weights. Where rank 0 cannot, each rank has the failure, once all have gathered all."""
        sending = _Sending()
        try:
            with sending.noting_failure():
                if job.rank == 0:
                    sending.outlet = self._outlet(address, receivers, timeout)
            sending.await_receivers(job, timeout)
            sending.send(image)
        finally:
            sending.abandon()
        lines = [str(sending.version), *str(sending.failure or "").splitlines()]
        version, *failure = job.shared_lines([lines[0], " ".join(lines[1:])])
        if any(failure) and sending.failure is None:
            sending.failure = PeerError(" ".join(failure))
        return Published(version=int(version), failure=sending.failure)

    def _outlet(
        self, address: str | os.PathLike[str], receivers: int | None, timeout: timedelta
    ) -> Outlet:
        place = place_of(address)
        if isinstance(place, Path):
            if receivers is not None:
                raise UserError(
                    f"'{place}' is a file, which any number of receivers read: leave out receivers={receivers}."
                )
            if place not in self._outlets:
                self._outlets[place] = FileOutlet(place)
            return self._outlets[place]
        if receivers is not None and receivers < 1:
            raise UserError(f"receivers={receivers}, but there must be at least one.")
        outlet = self._outlets.get(str(place))
        if not isinstance(outlet, NetworkOutlet):
            outlet = self._outlets[str(place)] = NetworkOutlet(place)
        outlet.expect(receivers or 1, timeout)
        return outlet

    def close(self) -> None:
        """Close the outlets."""
        for outlet in self._outlets.values():
            outlet.close()
        self._outlets.clear()


@dataclass(slots=True)
class _Sending:
    """A version on its way. A rank without an outlet, or whose outlet has failed, only gathers with the others."""

    outlet: Outlet | None = None
    version: int = 0
    failure: UserError | None = None

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note an error of the block, which all ranks raise later."""
        try:
            yield
        except UserError as error:
            self.failure = error
            self.abandon()

    def abandon(self) -> None:
        """Drop a version that is not finished."""
        outlet, self.outlet = self.outlet, None
        if outlet is not None:
            outlet.abandon()

    def await_receivers(self, job: Job, timeout: timedelta) -> None:
        """Wait for the receivers of rank 0, at most a second between two collectives."""
        deadline = time.monotonic() + timeout.total_seconds()
        is_waiting = True
        while is_waiting:
            with self.noting_failure():
                is_waiting = self.outlet is not None and not self.outlet.is_awaited()
                if is_waiting and self.outlet is not None and time.monotonic() > deadline:
                    raise UserError(self.outlet.missing())
            of_rank_zero, *_ = job.exchange([is_waiting and self.failure is None])
            is_waiting = bool(of_rank_zero[0])

    def send(self, image: Image) -> None:
        """Gather all chunks and send them."""
        with self.noting_failure():
            if self.outlet is not None:
                sizes = [chunk.size_bytes for chunk in image.chunks]
                self.version = self.outlet.begin(image.header, sizes)
        for chunk in image.chunks:
            values = chunk.gather()
            with self.noting_failure():
                if self.outlet is not None:
                    self.outlet.write(packed(values, chunk.places))
            del values
        with self.noting_failure():
            if self.outlet is not None:
                self.outlet.finish()
                self.outlet = None
