"""What batches smaller than the largest change in an estimate: activations, copies, products and waits.

Model states and the elements that ranks send depend on parameters alone. Memory is needed for the largest batch, while
copies of activations and products are those of the mean one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from zeroir.cost.distribution import Distribution
from zeroir.cost.estimate import BatchesEstimate, Estimate, estimate
from zeroir.cost.estimate_options import EstimateOptions
from zeroir.cost.estimate_outside import MovedBytes
from zeroir.errors import UserError
from zeroir.ir.sizes import Dim

SEQ: Final = "seq"
BATCH: Final = "batch"


def dims_of(options: EstimateOptions) -> tuple[Dim, ...]:
    """Return the sizes of a batch that can vary: ``seq`` and ``batch``, up to those of the options.

    Raises:
        UserError: if the shape of a layer is not known.
    """
    if options.seq is None or options.layers is None or options.hidden is None:
        raise UserError(
            "An estimate for other batches needs the shape of a layer and the longest sequence: give --layers, "
            "--hidden, --heads and --seq."
        )
    return tuple(
        Dim(name=name, minimum=1, maximum=largest)
        for name, largest in ((SEQ, options.seq), (BATCH, options.batch))
    )


def estimate_batches(
    options: EstimateOptions, histogram: Mapping[tuple[int, ...], int]
) -> Estimate:
    """Return the estimate at every stage, and that of a step whose batches have a ``(seq, batch)`` so often."""
    largest = estimate(options)
    counts = list(histogram.values())
    estimates = [
        estimate(options.model_copy(update={SEQ: seq, BATCH: batch})) for seq, batch in histogram
    ]
    flops = Distribution.of(
        (_flops(each.options), count) for each, count in zip(estimates, counts, strict=True)
    )
    slowest = flops.largest_of(options.world_size).mean
    batches = BatchesEstimate(
        batches=sum(counts),
        shapes=len(counts),
        sizes=dict(zip((SEQ, BATCH), *histogram, strict=True)) if len(histogram) == 1 else None,
        tokens=_mean([seq * batch for seq, batch in histogram], counts),
        largest_tokens=(options.seq or 0) * options.batch,
        activations_bytes=_mean([_activations(each) for each in estimates], counts),
        largest_activations_bytes=_activations(largest),
        flops=flops.mean,
        largest_flops=_flops(options),
        wait_share=1 - flops.mean / slowest,
        moved=tuple(
            MovedBytes(
                to_host=round(_mean([moved.to_host for moved in of_stage], counts)),
                to_device=round(_mean([moved.to_device for moved in of_stage], counts)),
                load=round(_mean([moved.load for moved in of_stage], counts)),
                store=round(_mean([moved.store for moved in of_stage], counts)),
            )
            for of_stage in zip(
                *([stage.moved for stage in each.stages] for each in estimates), strict=True
            )
        ),
    )
    return replace(largest, batches=batches)


def _mean(values: Sequence[int], counts: Sequence[int]) -> float:
    return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)


def _activations(figures: Estimate) -> int:
    return 0 if figures.activations is None else figures.activations.total_bytes


def _flops(options: EstimateOptions) -> int:
    """Return the operations of a micro-batch: 6Ψ + 12·layers·hidden·seq for each token.

    The source is Chowdhery et al. 2022, "PaLM", appendix B. Layers that are computed again take a third more. That
    attention may be causal is not used.
    """
    layers, hidden, seq = options.layers or 0, options.hidden or 0, options.seq or 0
    passes = 4 if options.recompute else 3
    per_token = passes * (2 * round(options.params) + 4 * layers * hidden * seq)
    return per_token * seq * options.batch
