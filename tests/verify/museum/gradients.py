"""Bugs of gradients: what is summed, how often, in which dtype, over which ranks."""

from __future__ import annotations

from typing import Final

from tests.verify.museum.exhibit import (
    Exhibit,
    alter,
    declare,
    drop,
    each,
    issue,
    move,
    pull,
    put,
)
from tests.verify.museum.subjects import (
    HYBRID,
    HYBRID_FP32,
    ZERO0_ONE_STREAM,
    ZERO1,
    ZERO1_ONE_STREAM,
    ZERO1_TIED,
    ZERO2,
    ZERO2_TIED,
    ZERO2_WEIGHTED,
    ZERO3,
)
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE

GRADIENTS: Final = (
    Exhibit(
        report=pull("allenai/open-instruct", 1498, "2026-02-26"),
        happened="Under ZeRO-2 each backward counted as the last one and reset the sums: the step had the gradient "
        "of the last micro-batch alone.",
        mistake="The last micro-step overwrites a sum of gradients instead of adding to it.",
        make=ZERO2,
        damage=alter(LAST_MICRO_STEP, "cast %root.post.grad -> +=", "+= ", ""),
        code="Z402",
        culprit="%root.post.grad_sum",
    ),
    Exhibit(
        report=issue("NVIDIA/Megatron-LM", 6660, "2026-08-19"),
        happened="Megatron-FSDP reduced sums of gradients again at each micro-batch, which doubled them each time in "
        "groups of one rank.",
        mistake="A micro-step before the last one reduces the sum in place.",
        make=ZERO1,
        damage=put(
            MICRO_STEP,
            "reduce_scatter %root.post.grad_sum -> %root.post.grad_sum[0:768]@dp  comm=reduce stream=compute",
            "release %root.post.grad",
        ),
        code="Z402",
        culprit="%root.post.grad_sum",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 7839, "2026-02-09"),
        happened="bf16 without ZeRO did not clear gradients after a step, so they were added to those of the next.",
        mistake="A sum of gradients is not cleared after the update.",
        make=ZERO2,
        damage=drop(UPDATE, "fill %blocks.0.grad_sum"),
        code="Z402",
        culprit="%blocks.0.grad_sum",
    ),
    Exhibit(
        report=pull("NVIDIA/Megatron-LM", 4609, "2026-05-04"),
        happened="The gradient buffer also received gathered parameters and was not cleared after that, so gradients "
        "were added to parameters.",
        mistake="A gradient is added to what the buffer held before.",
        make=ZERO2_TIED,
        damage=alter(
            LAST_MICRO_STEP,
            "compute @post.backward",
            "grad post.weight: %",
            "grad post.weight: += %",
        ),
        code="Z402",
        culprit="%root.pre.grad_full",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 3832, "2023-06-28"),
        happened="ZeRO-3 reduced gradients whose padding had undefined values.",
        mistake="Padding of a gradient is not cleared before the reduction.",
        make=ZERO3,
        damage=drop(LAST_MICRO_STEP, "fill %blocks.1.grad_full[16:64]"),
        code="Z402",
        culprit="%blocks.1.grad_full",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 7985, "2026-04-28"),
        happened="The gradient of the last micro-batch was added after the reduction, so each rank updated with its "
        "own.",
        mistake="The last micro-step's gradient is added to the sum behind the reduction.",
        make=ZERO1_ONE_STREAM,
        damage=move(
            LAST_MICRO_STEP, "reduce_scatter %root.post.grad_sum", "cast %root.post.grad -> +="
        ),
        code="Z402",
        culprit="%root.post.grad_sum",
    ),
    Exhibit(
        report=issue("NVIDIA/Megatron-LM", 844, "2024-05-28"),
        happened="Gradients of tied embeddings were reduce-scattered before those of both uses were added.",
        mistake="The gradient of a tied weight is reduced before its second contribution.",
        make=ZERO1_TIED,
        damage=move(LAST_MICRO_STEP, "reduce_scatter %root.pre.grad", "compute @pre.backward"),
        code="Z402",
        culprit="%root.pre.grad",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 5154, "2024-02-19"),
        happened="With bf16 at stage 0, gradients were added to the FP32 sums first, and then the bf16 ones were "
        "all-reduced.",
        mistake="The all-reduce is of a micro-step's gradient instead of the sum.",
        make=ZERO0_ONE_STREAM,
        damage=alter(LAST_MICRO_STEP, "all_reduce %blocks.1.grad_sum", "grad_sum", "grad"),
        code="Z404",
        culprit="%blocks.1.grad_sum",
    ),
    Exhibit(
        report=issue("verl-project/verl", 7493, "2026-08-20"),
        happened="With `fsdp_size=1`, FSDP reduced gradients within groups of one rank: replicas never synchronised.",
        mistake="A gradient is not reduced over the replicas.",
        make=HYBRID,
        damage=drop(LAST_MICRO_STEP, "all_reduce %blocks.1.grad"),
        code="Z404",
        culprit="%blocks.1.grad",
    ),
    Exhibit(
        report=pull("PrimeIntellect-ai/prime-rl", 1957, "2026-03-05"),
        happened="The loss was a mean over a rank's own tokens, and FSDP averaged those means: tokens of ranks with "
        "few of them counted more.",
        mistake="The weights of the micro-batches are not summed over ranks.",
        make=ZERO2_WEIGHTED,
        damage=drop(UPDATE, "all_reduce %weight", "wait !2"),
        code="Z402",
        culprit="%weight",
    ),
    Exhibit(
        report=pull("facebookresearch/dinov3", 250, "2025-10-21"),
        happened="FSDP2 summed gradients over ranks where they should have been averaged; large runs came to NaN.",
        mistake="The update divides gradients by 1 instead of the number of ranks.",
        make=ZERO3,
        damage=alter(UPDATE, "decide", "divisor=3", "divisor=1"),
        code="Z402",
        culprit="decide",
    ),
    Exhibit(
        report=pull("verl-project/verl-SpeCo", 29, "2026-07-17"),
        happened="The loss was divided by the tokens of all ranks, and FSDP divided by the ranks once more.",
        mistake="The update divides by the number of ranks twice.",
        make=ZERO3,
        damage=alter(UPDATE, "decide", "divisor=3", "divisor=9"),
        code="Z402",
        culprit="decide",
    ),
    Exhibit(
        report=issue("deepspeedai/DeepSpeed", 1800, "2022-03-01"),
        happened="With bf16, gradients of micro-batches were also added in bf16, which loses small ones.",
        mistake="A sum of gradients is kept in bf16.",
        make=ZERO2,
        damage=each(
            declare(
                "buffer %root.post.grad_sum : f32[256] device grad",
                "buffer %widened : f32[256] device grad\n"
                "buffer %root.post.grad_sum : bf16[256] device grad",
            ),
            alter(UPDATE, "optimizer_step", "grad=%root.post.grad_sum", "grad=%widened", nth=3),
            put(UPDATE, "alloc %widened  stream=compute", "optimizer_step", nth=3),
            put(
                UPDATE,
                "cast %root.post.grad_sum -> %widened  stream=compute",
                "optimizer_step",
                nth=3,
            ),
            put(UPDATE, "release %widened  stream=compute", "cast %root.post.master"),
        ),
        code="Z406",
        culprit="flat root.post are added in bf16",
    ),
    Exhibit(
        report=issue("pytorch/pytorch", 190626, "2026-07-21"),
        happened="FSDP2 applied `reduce_dtype` to its own reduction alone; the one over the other mesh axis ran in "
        "bf16.",
        mistake="The reduction over the second mesh axis sends bf16.",
        make=HYBRID_FP32,
        damage=alter(
            LAST_MICRO_STEP, "all_reduce %blocks.1.grad", "comm=across", "comm=across wire=bf16"
        ),
        code="Z406",
        culprit="flat blocks.1 passes through bf16",
    ),
)
