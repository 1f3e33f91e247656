"""The program of a run on a device for which it was not captured."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from zeroir.config import changed
from zeroir.errors import ModelWarning

if TYPE_CHECKING:
    from zeroir.api.compilations import Compiled, CompileSource
    from zeroir.frontend.source.source import ModelSource
    from zeroir.runtime.distributed.rendezvous import JobRank


def compiled_for_device(
    compiled: Compiled,
    compile_source: CompileSource | None,
    source: ModelSource,
    job_rank: JobRank,
) -> Compiled | None:
    """Compile a program again that was captured for another device, and whose results this one lacks; None if it has.

    Rank 0 says so.

    Raises:
        UserError: where it would have to be compiled again, and there is no example batch.
    """
    from zeroir.frontend.source.source import NOTHING_EARLIER
    from zeroir.runtime.kernels.other_devices import captured_for, difference_on, require_device

    device = job_rank.device
    difference = difference_on(compiled.program, device)
    if difference is None:
        return None
    if compile_source is None or (source.is_in_hand and source is not compiled.source):
        require_device(compiled.program, device)
        return None
    with warnings.catch_warnings():
        if job_rank.rank != 0:
            warnings.simplefilter("ignore", ModelWarning)
        warnings.warn(
            f"The program was captured for {captured_for(compiled.program)} and is compiled again for this run: "
            f"{difference}. Compile it with --device {device.type} to save that time.",
            ModelWarning,
            stacklevel=3,
        )
        options = changed(compiled.requested, device=device.type)
        return compile_source(source, options, compiled.config, NOTHING_EARLIER)
