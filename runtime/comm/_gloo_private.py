"""The part of torch that makes gloo groups beside the default one, between processes of several jobs.

Torch may change it: only here are private names of ``ProcessGroupGloo`` used.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from zeroir.runtime.distributed.rank_discovery import KeyValueStore


class GlooGroup:
    """A group of ``size`` processes that meet in a store; this one is its ``member``, at an ``address`` of its machine.

    Raises:
        RuntimeError: where another one does not come within the timeout; so do all methods where one is lost.
    """

    def __init__(
        self, store: KeyValueStore, member: int, size: int, *, address: str, timeout: timedelta
    ) -> None:
        gloo = cast("Any", dist.ProcessGroupGloo)
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address)]
        self._gloo = gloo(store, member, size, options)

    def broadcast(self, data: Tensor) -> None:
        """Send these bytes of member 0, or receive them."""
        self._gloo.broadcast(data, 0).wait()

    def agree(self) -> None:
        """Wait until every member has called this."""
        self._gloo.barrier().wait()
