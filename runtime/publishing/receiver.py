"""A process that infers with the weights that another job trains."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.runtime.comm.job import DEFAULT_TIMEOUT
from zeroir.runtime.publishing.file_channel import FileInlet
from zeroir.runtime.publishing.network_channel import NetworkInlet
from zeroir.runtime.publishing.outlet import Inlet, place_of

_POLL_S: Final = 0.02

Load = Callable[[Iterable[tuple[str, Tensor]]], object]


class Receiver:
    """Receives the weights that ``engine.publish(address)`` sends, in a process that is no rank of its job.

    ``address`` is that of ``engine.publish``: the path of a file, or ``host:port``. The engine need not be there yet.
    ``timeout`` bounds how long ``update`` waits.

    Attributes:
        address: The address that was given.
        version: How many times weights were published up to those that were loaded last; 0 before the first.
        step: The number of training steps before these weights.
    """

    def __init__(
        self, address: str | os.PathLike[str], *, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        place = place_of(address)
        self.address = address
        self._timeout = timeout
        self._inlet: Inlet = (
            FileInlet(place) if isinstance(place, Path) else NetworkInlet(place, timeout)
        )
        self.version = 0
        self.step = 0

    def update(self, target: nn.Module | Load, *, wait: bool = False) -> bool:
        """Load the newest weights, if there are newer ones than the last; return whether there were.

        They are copied to the parameters and persistent buffers of a module with the names and shapes of the trained
        one, in the dtypes and on the devices that these have. Instead of a module, ``target`` may be a function, which
        is called with pairs of names and tensors on the CPU; a tied parameter comes once. With ``wait`` this waits for
        newer weights. An engine that publishes at ``host:port`` waits until its receivers call this.

        Raises:
            UserError: where the module has other names or shapes, what was published has not come whole, or with
                ``wait`` nothing newer has come in time. The module is as it was before.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._has_updated(target):
            if not wait:
                return False
            if time.monotonic() > deadline:
                raise UserError(
                    f"In {self._timeout.total_seconds():.0f} s {self._inlet.absence()}: look at what rank 0 of the "
                    "training job printed."
                )
            time.sleep(_POLL_S)
        return True

    def _has_updated(self, target: nn.Module | Load) -> bool:
        with self._inlet.newer(self.version) as weights:
            if weights is None:
                return False
            if isinstance(target, nn.Module):
                weights.load_into(target)
            else:
                target(iter(weights))
            self.version, self.step = weights.version, weights.step
        return True

    def close(self) -> None:
        """Leave the engine; a file stays."""
        self._inlet.close()


def file_of(receiver: Receiver) -> str | os.PathLike[str]:
    """Return the path of the file that a receiver reads.

    Raises:
        UserError: where it listens at a port.
    """
    if not isinstance(place_of(receiver.address), Path):
        raise UserError(
            f"A receiver at {receiver.address} is for another process, which asks for the weights while this one "
            f'waits: call engine.publish("{receiver.address}"), or give the receiver the path of a file.'
        )
    return receiver.address
