"""The submodules whose parameters are gathered together, and those whose code runs as it is."""

from __future__ import annotations

from typing import Annotated, Final

from zeroir.config.table import Option, OptionObject

_GROUP: Final = "Sharding"


class Units(OptionObject):
    """The submodules that the compiler treats as one.

    ``modules`` are patterns of those whose parameters share a flat buffer, and ``opaque`` of those whose code runs as
    it is: None lets the compiler find the smallest that cannot be traced, ``none`` refuses these, and ``root`` is the
    model itself.
    """

    modules: Annotated[
        str | None,
        Option(
            name="units",
            group=_GROUP,
            help="The submodules that share a flat buffer: patterns of names (blocks.*), class:NAME or min:NUMEL, "
            "separated by commas. [default: repeated blocks]",
        ),
    ] = None
    opaque: Annotated[
        str | None,
        Option(
            group=_GROUP,
            help="Modules whose code runs as it is, since it cannot be traced: patterns of names (encoder.layers.*), "
            "separated by commas, root for the model itself, or none, with which such code is refused. [default: the "
            "smallest inside the model that can]",
        ),
    ] = None
