"""Bugs that no law can see, and bugs that cannot be written as a program."""

from __future__ import annotations

from typing import Final

from tests.verify.museum.exhibit import Unseen, issue, pull

UNSEEN: Final = (
    Unseen(
        report=issue("facebookresearch/xformers", 173, "2022-01-04"),
        happened="A kernel of dropout used the address of its seed instead of the seed: other masks for equal seeds.",
        reason="The fault is inside a kernel. Laws say which kernel reads and writes what; tests and the self-check "
        "compare what it computes.",
    ),
    Unseen(
        report=issue("pytorch/pytorch", 190717, "2026-07-21"),
        happened="A compiled backward recomputed a dropout with another mask than the forward's.",
        reason="The compiler of kernels made the fault inside a segment. A program in which another seed is "
        "recomputed breaks Z406; what a compiler makes of a segment is compared with its operators before training.",
    ),
    Unseen(
        report=issue("huggingface/accelerate", 3844, "2025-11-21"),
        happened="FSDP2 kept frozen parameters in FP32 as well: LoRA took more memory than with FSDP.",
        reason="The numbers are right. A budget (Z301) refuses the program where the memory does not suffice, but no "
        "law asks for the smallest dtype.",
    ),
    Unseen(
        report=issue("verl-project/verl", 5070, "2026-01-27"),
        happened="Weight decay was applied to biases and norms, too.",
        reason="It is a setting. The logical program has the same one, and the schedule is faithful to it.",
    ),
    Unseen(
        report=pull("huggingface/accelerate", 3154, "2024-10-11"),
        happened="Tied weights were separate parameters after initialisation on the meta device.",
        reason="It happens in Python, before there is a program. The program shows it: one parameter more.",
    ),
    Unseen(
        report=issue("pytorch/pytorch", 147168, "2025-02-14"),
        happened="The caching allocator kept buffers that collectives had used for longer than FSDP2 needed them.",
        reason="It is how the allocator works; programs do not depend on one where `plan-memory` gives each buffer "
        "its place.",
    ),
)

UNWRITABLE: Final = (
    Unseen(
        report=issue("deepspeedai/DeepSpeed", 7998, "2026-05-07"),
        happened="ZeRO-3 hangs where ranks call a module a different number of times.",
        reason="Ops run unconditionally, so all ranks issue the same collectives.",
    ),
    Unseen(
        report=issue("deepspeedai/DeepSpeed", 8262, "2026-08-17"),
        happened="ZeRO-3 hangs where ranks end the generation of a text at different lengths.",
        reason="A program has no loop whose length depends on data.",
    ),
    Unseen(
        report=issue("deepspeedai/DeepSpeed", 2343, "2022-09-22"),
        happened="Stage 2 mixed up gradients that became ready in another order on another rank.",
        reason="One program serves all ranks, so reductions have one order and name what they reduce.",
    ),
)
