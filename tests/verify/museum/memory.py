"""Bugs of memory, of order between streams, and of collectives."""

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
    ACTIVATIONS_ON_HOST,
    HYBRID,
    OFFLOADED,
    PARAMETERS_ON_HOST,
    PLANNED,
    SAVING,
    ZERO1,
    ZERO3,
    ZERO3_ONE_BUCKET,
    ZERO3_RECOMPUTED,
)
from zeroir.ir.program import LAST_MICRO_STEP, SAVE, UPDATE

MEMORY: Final = (
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 8059, "2026-06-13"),
        happened="An early version of the fix partitioned all gathered parameters after the forward. Frames that ran "
        "eagerly still needed them in the backward, which found empty tensors.",
        mistake="A gathered parameter is released before the backward that reads it.",
        make=ZERO3,
        damage=move(LAST_MICRO_STEP, "release %blocks.1.full", "compute @block.backward", nth=1),
        code="Z101",
        culprit="%blocks.1.full",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 8130, "2026-07-12"),
        happened="ZeRO-3 partitioned frozen parameters again after the recomputation of a checkpointed block, "
        "although its backward had yet to run.",
        mistake="A parameter is released between the recomputation and the backward of its unit.",
        make=ZERO3_RECOMPUTED,
        damage=move(LAST_MICRO_STEP, "release %blocks.1.full", "alloc %blocks.1.grad_full", nth=1),
        code="Z101",
        culprit="%blocks.1.full",
    ),
    Exhibit(
        report=issue("deepspeedai/DeepSpeed", 8486, "2026-09-11"),
        happened="A second wait for a stale handle marked a released parameter as available, so later fetches "
        "skipped the all-gather and a product ran on an empty weight.",
        mistake="The backward's gather of a parameter is left out.",
        make=ZERO3,
        damage=each(
            drop(LAST_MICRO_STEP, "prefetch %blocks.0.param", nth=1),
            alter(LAST_MICRO_STEP, "alloc %blocks.0.full", "alloc", "!11 = alloc", nth=1),
        ),
        code="Z401",
        culprit="%blocks.0.full",
    ),
    Exhibit(
        report=issue("NVIDIA/Megatron-LM", 5788, "2026-07-13"),
        happened="Megatron-FSDP freed a gathered bucket without telling the allocator that the compute stream still "
        "used it: rare wrong numbers or illegal accesses.",
        mistake="A gathered parameter is released on the gather stream, which does not wait for the compute stream.",
        make=ZERO3,
        damage=alter(LAST_MICRO_STEP, "release %blocks.0.full", "stream=compute", "stream=gather"),
        code="Z101",
        culprit="%blocks.0.full",
    ),
    Exhibit(
        report=pull("pytorch/pytorch", 91096, "2022-12-19"),
        happened="FSDP lost the call that keeps a shard's cast copy alive until the stream that reads it is done.",
        mistake="The copy of a shard is released on the stream that made it, while the all-gather reads it.",
        make=PARAMETERS_ON_HOST,
        damage=alter(
            LAST_MICRO_STEP, "release %root.pre.param.device", "stream=gather", "stream=copy_in"
        ),
        code="Z101",
        culprit="%root.pre.param.device",
    ),
    Exhibit(
        report=pull("pytorch/pytorch", 180665, "2026-04-17"),
        happened="With hybrid sharding and CPU offload, FSDP2 freed the reduced gradient while another stream copied "
        "it to the host: silently wrong gradients.",
        mistake="A reduced gradient is released without a wait for its copy to the host.",
        make=OFFLOADED,
        damage=drop(LAST_MICRO_STEP, "wait !23"),
        code="Z101",
        culprit="%root.pre.grad.reduced",
    ),
    Exhibit(
        report=issue("meta-pytorch/torchtune", 1867, "2024-10-19"),
        happened="Activations that were offloaded on a stream of their own could be deleted during the copy: NaN "
        "gradients.",
        mistake="An activation is released on the compute stream, which does not wait for its copy to the host.",
        make=ACTIVATIONS_ON_HOST,
        damage=alter(LAST_MICRO_STEP, "release %h.0", "stream=copy_out", "stream=compute"),
        code="Z101",
        culprit="%h.0",
    ),
    Exhibit(
        report=issue("pytorch/pytorch", 117510, "2024-01-16"),
        happened="FSDP resharded a frozen module in the backward without an unshard before: an assertion failed.",
        mistake="A parameter is released in the backward, which has not gathered it.",
        make=ZERO3,
        damage=put(LAST_MICRO_STEP, "release %root.pre.full  stream=compute", "release %h.0"),
        code="Z101",
        culprit="%root.pre.full",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 3727, "2023-06-09"),
        happened="ZeRO-2 with `overlap_comm` wrote gradients into a bucket whose reduction was still under way.",
        mistake="The bucket of the next unit begins without a wait for the reduction that reads it.",
        make=ZERO3_ONE_BUCKET,
        damage=drop(LAST_MICRO_STEP, "wait !10"),
        code="Z101",
        culprit="%root.post.grad_full",
    ),
    Exhibit(
        report=pull("pytorch/pytorch", 178549, "2026-03-26"),
        happened="Inductor's planner gave a freed buffer's memory to a buffer of another stream, which overwrote it "
        "during a read.",
        mistake="Two buffers that live at the same time get one place.",
        make=PLANNED,
        damage=declare(
            "%h.0 : bf16[8] device saved offset=6144", "%h.0 : bf16[8] device saved offset=7168"
        ),
        code="Z106",
        culprit="%h.0",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 8032, "2026-06-01"),
        happened="The release of a gathered parameter left its storage allocated.",
        mistake="A gathered parameter is not released.",
        make=ZERO3,
        damage=drop(LAST_MICRO_STEP, "release %blocks.1.full", nth=1),
        code="Z104",
        culprit="%blocks.1.full",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 8036, "2026-06-09"),
        happened="ZeRO-1 kept the buffers of unreduced gradients through the optimizer step, whose temporaries came on "
        "top.",
        mistake="The buffer of an unreduced gradient stays live into the update.",
        make=ZERO3,
        damage=drop(LAST_MICRO_STEP, "release %root.pre.grad_full"),
        code="Z104",
        culprit="%root.pre.grad_full",
    ),
)

ORDER: Final = (
    Exhibit(
        report=issue("deepspeedai/DeepSpeed", 8061, "2026-06-12"),
        happened="The reduction stream waited for the current stream alone, although other streams had copied "
        "gradients into the bucket.",
        mistake="A reduction does not wait for the backward that writes the gradient.",
        make=ZERO3,
        damage=drop(LAST_MICRO_STEP, "wait !8"),
        code="Z105",
        culprit="%root.post.grad_full",
    ),
    Exhibit(
        report=issue("NVIDIA/Megatron-LM", 950, "2024-07-25"),
        happened="With `--overlap-param-gather`, a layer could run before its bucket was gathered, with the weights "
        "of the step before.",
        mistake="The forward of a unit does not wait for the gather of its parameters.",
        make=ZERO3,
        damage=drop(LAST_MICRO_STEP, "wait !3"),
        code="Z103",
        culprit="%blocks.1.full",
    ),
    Exhibit(
        report=issue("NVIDIA/Megatron-LM", 7398, "2026-09-16"),
        happened="The reload of an offloaded activation could read the host's buffer before the copy into it was done.",
        mistake="An activation is copied back without a wait for its copy to the host.",
        make=ACTIVATIONS_ON_HOST,
        damage=drop(LAST_MICRO_STEP, "wait !8"),
        code="Z103",
        culprit="%h.1.host",
    ),
    Exhibit(
        report=pull("huggingface/trl", 7195, "2026-09-12"),
        happened="The offload of activations remembered the stream of its construction, and synchronised with that "
        "one instead of the stream in use.",
        mistake="Another stream than the copy's waits for the forward.",
        make=ACTIVATIONS_ON_HOST,
        damage=alter(LAST_MICRO_STEP, "wait !0", "on=copy_out", "on=copy_in"),
        code="Z105",
        culprit="%h.0",
    ),
    Exhibit(
        report=pull("pytorch/pytorch", 115710, "2023-12-12"),
        happened="FSDP's gradient scaler copied `found_inf` before the asynchronous all-reduce was done, so ranks "
        "without an overflow of their own did not see that of another rank.",
        mistake="The decision does not wait for the all-reduce of the overflow flag.",
        make=ZERO1,
        damage=drop(UPDATE, "wait !1"),
        code="Z103",
        culprit="%overflow",
    ),
    Exhibit(
        report=pull("NVIDIA/nvidia-resiliency-ext", 376, "2026-07-21"),
        happened="The trainer and the writer of a checkpoint shared memory, so the next optimizer step could change "
        "states that were not written yet.",
        mistake="An optimizer step does not wait for the copies of the last save.",
        make=SAVING,
        damage=drop(UPDATE, "wait !saved.root.post.exp_avg_sq"),
        code="Z105",
        culprit="%root.post.master",
    ),
    Exhibit(
        report=pull("deepspeedai/DeepSpeed", 7786, "2026-01-17"),
        happened="Checkpoints of bf16 at stage 0 lacked the optimizer's states, the step count among them.",
        mistake="A save leaves out the step count.",
        make=SAVING,
        damage=drop(SAVE, "to_host %step"),
        code="Z407",
        culprit="%step.snapshot",
    ),
    Exhibit(
        report=issue("ROCm/rccl", 2191, "2026-09-10"),
        happened="FSDP2 with tensor parallelism hangs where collectives of two or three communicators run at the same "
        "time.",
        mistake="A second collective runs on a stream that has no order with the first.",
        make=ZERO3,
        damage=each(
            alter(UPDATE, "all_reduce", ", %loss -> %loss", ""),
            put(UPDATE, "all_reduce %loss -> %loss  comm=reduce stream=copy_in", "decide"),
        ),
        code="Z202",
        culprit="collective on reduce",
    ),
    Exhibit(
        report=pull("NCAR/miles-credit", 416, "2026-06-10"),
        happened="The size of averages of FSDP2's unevenly padded shards was taken from the local shard, so ranks "
        "disagreed on the size of an all-gather and hung.",
        mistake="An all-gather's destination has another size than the shards together.",
        make=ZERO3,
        damage=alter(LAST_MICRO_STEP, "all_gather", "%root.pre.full ", "%root.pre.full[0:384] "),
        code="Z201",
        culprit="%root.pre.full[0:384]",
    ),
    Exhibit(
        report=issue("deepspeedai/DeepSpeed", 4784, "2023-12-07"),
        happened="With ZeRO++ and activation checkpointing, forward and backward were confused, and parameters were "
        "gathered within the wrong group.",
        mistake="A parameter is gathered over the replicas instead of the shards.",
        make=HYBRID,
        damage=alter(LAST_MICRO_STEP, "prefetch %blocks.1.param", "comm=gather", "comm=across"),
        code="Z401",
        culprit="%blocks.1.full",
    ),
)
