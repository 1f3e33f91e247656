"""Bugs of the update: norms, decisions, optimizers, copies of parameters, and reports."""

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
    ZERO0_CLIPPED,
    ZERO1,
    ZERO1_MUON,
    ZERO2,
    ZERO3,
)
from zeroir.ir.program import MICRO_STEP, UPDATE

UPDATES: Final = (
    Exhibit(
        report=pull("pytorch/pytorch", 88955, "2022-11-12"),
        happened="FSDP without sharding summed the norm of whole gradients over ranks: each counted once for every "
        "rank.",
        mistake="Each rank takes the norm of whole gradients, and the norms are summed.",
        make=ZERO0_CLIPPED,
        damage=alter(UPDATE, "grad_norm", "[0:768]@dp", ""),
        code="Z405",
        culprit="%norm",
    ),
    Exhibit(
        report=pull("RLinf/RLinf", 1558, "2026-09-11"),
        happened="The norm of the rank's own shard was used for clipping, because a group was never found.",
        mistake="The norm is not reduced over ranks.",
        make=ZERO3,
        damage=alter(UPDATE, "all_reduce", "%norm -> %norm, ", ""),
        code="Z405",
        culprit="%norm",
    ),
    Exhibit(
        report=issue("ByteDance-Seed/VeOmni", 184, "2025-11-10"),
        happened="With hybrid sharding, the norm was summed over the replicas, too.",
        mistake="The norm is reduced over shards and replicas.",
        make=HYBRID,
        damage=each(
            alter(UPDATE, "all_reduce %norm", "!1 = ", ""),
            alter(UPDATE, "all_reduce %loss", "all_reduce", "!1 = all_reduce %norm -> %norm,"),
        ),
        code="Z405",
        culprit="%norm",
    ),
    Exhibit(
        report=pull("radixark/miles_diffusion", 35, "2026-07-13"),
        happened="Under FSDP the logged norm was that of the rank's own shard, while clipping used the true one.",
        mistake="The engine reads this rank's part of the norm.",
        make=ZERO3,
        damage=each(
            declare(
                "buffer %norm : f32[1] device scalar = value norm",
                "buffer %norm : f32[1] device scalar = value norm\n"
                "buffer %own_norm : f32[1] device scalar = value own_norm",
            ),
            declare("scalar %norm = (0.0)", "scalar %norm = (0.0)\nscalar %own_norm = (0.0)"),
            declare("report squared_norm %norm", "report squared_norm %own_norm"),
            alter(UPDATE, "grad_norm", "!0 = ", ""),
            put(UPDATE, "!0 = cast %norm -> %own_norm  stream=compute", "wait !0"),
        ),
        code="Z408",
        culprit="%own_norm",
    ),
    Exhibit(
        report=issue("facebookresearch/fairscale", 754, "2021-09-06"),
        happened="Without a gradient scaler that knows of shards, ranks that find NaN skip the step alone, and "
        "the next collective hangs.",
        mistake="The overflow flag is not reduced over ranks.",
        make=ZERO1,
        damage=alter(UPDATE, "all_reduce", "%overflow -> %overflow, ", ""),
        code="Z405",
        culprit="%overflow",
    ),
    Exhibit(
        report=issue("deepspeedai/DeepSpeed", 2686, "2023-01-10"),
        happened="ZeRO updated the loss scale before it divided the gradients' norm by it.",
        mistake="The loss scale is updated before the decision that divides by it.",
        make=ZERO1,
        damage=move(UPDATE, "update_scale", "decide"),
        code="Z405",
        culprit="update_scale",
    ),
    Exhibit(
        report=issue("pytorch/examples", 1196, "2023-10-27"),
        happened="Gradients were clipped without a division by the loss scale before.",
        mistake="The clipping coefficient ignores the loss scale.",
        make=ZERO1,
        damage=alter(UPDATE, "decide", " loss_scale=%loss_scale[0:1]", ""),
        code="Z405",
        culprit="loss scale",
    ),
    Exhibit(
        report=issue("deepspeedai/DeepSpeed", 8443, "2026-09-06"),
        happened="ZeRO-3 applied Muon to the gradient of each micro-batch, which advanced the momentum once for each.",
        mistake="A micro-step advances Muon's momentum.",
        make=ZERO1_MUON,
        damage=each(
            put(MICRO_STEP, "alloc %root.pre.direction  stream=compute", "release %root.pre.grad"),
            put(
                MICRO_STEP,
                "direction muon grad=%root.pre.grad[0:768]@dp states=(%root.pre.momentum_buffer)"
                " -> %root.pre.direction[0:768]@dp step=%step lr=%lr hyper=%hyper"
                " gradient_divisor=%gradient_divisor  group=default stream=compute",
                "release %root.pre.grad",
            ),
            put(
                MICRO_STEP, "release %root.pre.direction  stream=compute", "release %root.pre.grad"
            ),
        ),
        code="Z405",
        culprit="direction",
    ),
    Exhibit(
        report=issue("SWivid/F5-TTS", 631, "2024-12-15"),
        happened="The moving average of the weights advanced at each micro-batch instead of each update.",
        mistake="A micro-step advances the moving average.",
        make=ZERO1,
        damage=put(
            MICRO_STEP,
            "average %root.pre.master -> %root.pre.ema  decay=0.9 stream=compute",
            "cast %batch_weight",
        ),
        code="Z403",
        culprit="average",
    ),
    Exhibit(
        report=pull("NVIDIA/Megatron-LM", 5976, "2026-07-22"),
        happened="Megatron-FSDP made an empty optimizer step to create the states, which Adam's count of steps kept: "
        "the first updates were too small.",
        mistake="The count of steps begins with 1.",
        make=ZERO3,
        damage=declare("scalar %step = (0.0)", "scalar %step = (1.0)"),
        code="Z406",
        culprit="%step",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 2058, "2022-06-27"),
        happened="ZeRO-2 with experts copied updated FP32 parameters to the place of another partition: a part of the "
        "parameters was not trained.",
        mistake="Each rank writes its updated shard to the place of rank 0.",
        make=ZERO2,
        damage=alter(UPDATE, "cast %blocks.0.master", "[0:768]@dp", "[0:256]"),
        code="Z403",
        culprit="%blocks.0.param",
    ),
    Exhibit(
        report=pull("pytorch/pytorch", 106858, "2023-08-09"),
        happened="After an update of FP32 parameters, FSDP's next evaluation used the fp16 copy from before.",
        mistake="An updated parameter is not cast to the dtype that the model computes in.",
        make=ZERO3,
        damage=drop(UPDATE, "cast %blocks.0.master"),
        code="Z403",
        culprit="%blocks.0.param",
    ),
    Exhibit(
        report=issue("huggingface/accelerate", 3979, "2026-03-18"),
        happened="The cast of parameters to FP32 before FSDP2 did nothing, so master weights stayed in bf16 and small "
        "updates were lost.",
        mistake="Master weights, gradients and states of an update are in bf16.",
        make=ZERO3,
        damage=each(
            *(
                declare(f"%blocks.0.{name} : f32", f"%blocks.0.{name} : bf16")
                for name in ("master", "exp_avg", "exp_avg_sq", "grad32")
            )
        ),
        code="Z004",
        culprit="%blocks.0.master",
    ),
    Exhibit(
        report=issue("deepspeedai/DeepSpeed", 8415, "2026-09-04"),
        happened="ZeRO skipped steps with overflows in bf16 without a word: training seemed to go on.",
        mistake="No report names the flag that skips a step.",
        make=ZERO1,
        damage=declare("report skip %skip\n", ""),
        code="Z408",
        culprit="%skip",
    ),
)
