"""Bounds on how far a stream may run ahead of the order of the ops, and so on the number of live buffers.

Only data dependencies delay a stream. A fast stream may therefore allocate buffers long before an earlier op of another
stream runs, and a slow one may release them long after later ops. A bound of a program limits that for one kind of
buffer. Passes state bounds and never the waits: the waits are derived from the bounds and from data dependencies, and
the verifier checks each section against each bound (Z302, and Z503 for pages).

Each bound concerns a buffer's beginning, at its ``alloc``:

* ``bound KIND ahead=N``: buffers of the kind come in groups. Of the groups with a release above the ``alloc``, all
  but the last N have certainly ended when the buffer begins. So at most N groups are live in addition to those that
  are live in the order of the ops; buffers released below the ``alloc`` are intentionally live and do not count.
* ``bound KIND behind=STREAM``: the last op of the stream above the ``alloc``, other than an ``alloc``, is certainly
  done when the buffer begins. So the stream that allocates buffers of the kind never runs ahead of STREAM.
* ``bound KIND live=N``: of the buffers of the kind that begin above the ``alloc``, all but N - 1 have certainly ended.
  So at most N are live at once in any order of the ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from zeroir.ir.fields import Declares, NameKind, Refers


class BoundKind(StrEnum):
    """Kinds of temporary buffers to which a bound can apply, and their groups.

    * ``full_parameters``: gathered parameters. A group consists of those with the same first reader.
    * ``full_gradients``: buffers to which compute ops write gradients. A group consists of those with the same last
      writer; those that one launch reduces are one group.
    * ``activations``: values on the device that compute ops pass to each other, including those that a forward saves
      for its backward. A group consists of those with the same first writer.
    * ``device_staging``, ``host_staging``: buffers of the role ``staging`` in that space which a transfer fills or
      empties; ``disk_staging``: those on the host which a load fills or a store empties. A group consists of those with
      the same first user, apart from the transfers that fill them.
    * ``pages``: buffers of the role ``page``. Each is a group.
    """

    FULL_PARAMETERS = "full_parameters"
    FULL_GRADIENTS = "full_gradients"
    ACTIVATIONS = "activations"
    DEVICE_STAGING = "device_staging"
    HOST_STAGING = "host_staging"
    DISK_STAGING = "disk_staging"
    PAGES = "pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadBound:
    """At most ``ahead`` groups of the kind are live in addition to those that are live in the order of the ops."""

    syntax: ClassVar[str] = "{kind} ahead={ahead}"

    kind: Annotated[BoundKind, Declares(NameKind.BOUND)]
    ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindBound:
    """A buffer of the kind begins only when the previous op of the stream ``behind`` is done."""

    syntax: ClassVar[str] = "{kind} behind={behind}"

    kind: Annotated[BoundKind, Declares(NameKind.BOUND)]
    behind: Annotated[str, Refers(NameKind.STREAM, "the bound on {kind} names")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBound:
    """At most ``live`` buffers of the kind are live at once."""

    syntax: ClassVar[str] = "{kind} live={live}"

    kind: Annotated[BoundKind, Declares(NameKind.BOUND)]
    live: int


Bound = AheadBound | BehindBound | LiveBound


def with_bound(bounds: Iterable[Bound], bound: Bound) -> tuple[Bound, ...]:
    """Return the bounds with this one, which replaces one of the same kind; there is one of each kind."""
    return (*(old for old in bounds if old.kind is not bound.kind), bound)
