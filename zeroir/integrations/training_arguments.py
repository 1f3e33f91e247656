"""What Hugging Face's ``TrainingArguments`` mean for an engine: options of its program, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from torch import nn

from zeroir.errors import UserError
from zeroir.integrations.defaults import precision_of

if TYPE_CHECKING:
    from transformers.training_args import TrainingArguments

    from zeroir.api.keywords import CompileKeywords
    from zeroir.config import FloatName

_OF_DDP: Final = "it is for DistributedDataParallel, which an engine replaces"
_IGNORED: Final[Mapping[str, str]] = {
    "fp16_full_eval": "it evaluates in the precision of its program",
    "bf16_full_eval": "it evaluates in the precision of its program",
    "torch_compile_backend": "torch_compile=True selects its kernels, which are Inductor's",
    "torch_compile_mode": "torch_compile=True selects its kernels, which have no modes",
    "torch_empty_cache_steps": "its program plans the memory",
    "debug": "the model's hooks are a part of the compiled step, and read no values",
    "parallelism_config": "it shards by the ZeRO stage of zeroir_options",
    "ddp_find_unused_parameters": _OF_DDP,
    "ddp_bucket_cap_mb": _OF_DDP,
    "ddp_broadcast_buffers": _OF_DDP,
    "ddp_static_graph": _OF_DDP,
}
"""Arguments that would be ignored if set, and the reason."""


def require_supported(args: TrainingArguments) -> None:
    """Refuse arguments that an engine cannot follow, and keep one process on one device.

    Raises:
        UserError: if there are such arguments.
    """
    if args.fsdp or args.deepspeed:
        which = "fsdp" if args.fsdp else "deepspeed"
        raise UserError(
            f"TrainingArguments has {which}=, which distributes the training itself: leave it out, and pass the ZeRO "
            "stage and the offloading as zeroir_options."
        )
    if args.auto_find_batch_size:
        raise UserError(
            "ZeroirTrainer does not try batch sizes: leave auto_find_batch_size out, and look at what "
            "`zeroir plan` finds for the model."
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise UserError(
            "load_best_model_at_end needs the state of the engine in the checkpoints: leave save_only_model out."
        )
    for name, reason in _IGNORED.items():
        value = getattr(args, name, None)
        if value and (name, value) != ("torch_compile_backend", "inductor"):
            raise UserError(
                f"{name}={value!r} of TrainingArguments has no effect with an engine: {reason}. Leave it out."
            )
    if args.n_gpu > 1:
        args._n_gpu = 1  # As the trainer does for models that use several devices by themselves.


def options_of_arguments(args: TrainingArguments, model: nn.Module) -> CompileKeywords:
    """Return the options of the program that these arguments ask for."""
    return {
        "world_size": args.world_size,
        "precision": _precision(args, model),
        "micro_steps": args.gradient_accumulation_steps,
        "clip": args.max_grad_norm if args.max_grad_norm else None,
    }


def _precision(args: TrainingArguments, model: nn.Module) -> FloatName:
    """Return the precision in the arguments, or else that of the model's parameters."""
    if args.bf16:
        return "bf16"
    if args.fp16:
        return "fp16"
    return precision_of(model)
