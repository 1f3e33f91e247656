"""The keys of DeepSpeed's configuration, their types and their treatments.

Sources: ``docs/_pages/config-json.md``, ``deepspeed/runtime/config.py``, ``zero/config.py``, ``precision_config.py``,
``constants.py`` and the modules that they import, all of DeepSpeed 0.19.6. Defaults are DeepSpeed's. Inside blocks of
the type ``Free`` no key has its own treatment: the block has one for all of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from zeroir.deepspeed.json_types import BLOCK, Count, Free, Whole
from zeroir.deepspeed.offload_blocks import OffloadOptimizerBlock, OffloadParamBlock
from zeroir.deepspeed.treatment import (
    becomes,
    differs_from,
    honoured,
    is_enabled,
    is_enabled_inside,
    is_given,
    meaningless,
    refused,
    unless_zero,
)
from zeroir.ir.optimizers.catalogue import OF_DEEPSPEED

_UNITS = meaningless("parameters travel by unit; --units chooses the units")
_KEPT = meaningless("small parameters lie in the flat buffer of their unit and travel with it")
_RUN_LOG = meaningless("`zeroir run` prints losses; see --log-every, --json and --trace")
_MONITOR = meaningless(
    "`zeroir run --log FILE` writes JSON objects for any monitor, and --tensorboard for TensorBoard"
)
_NO_CHECKPOINTS = meaningless("it concerns DeepSpeed's checkpoint files")
_INTERNAL = meaningless("it concerns the inside of DeepSpeed")
_COMMUNICATION = meaningless("the program states every collective, and zeroir proves them")
_DIVIDED_ONCE = meaningless(
    "gradients are added as they are and divided once, in FP32; dynamic loss scaling handles overflows of the sum"
)
_QUANTISED = refused("zeroir has no quantised communication")
_PINNED = meaningless("host buffers are always pinned where there are GPUs")
_DEEPCOMPILE = meaningless("it concerns DeepCompile, which cannot be enabled; see --offload")
_DATA = refused("batches are what the model file's batches() yields; choose them there", is_enabled)


class JsonBlock(BaseModel):
    """A JSON object of the configuration."""

    model_config = BLOCK


class OptimizerBlock(JsonBlock):
    """``optimizer``."""

    type: Annotated[
        str,
        honoured(f"`optimizer`: {', '.join(OF_DEEPSPEED)}; others are refused by name"),
    ]
    params: Annotated[Free, honoured("the optimizer's options; see below")] = {}
    legacy_fusion: Annotated[bool, _INTERNAL] = False


class SchedulerBlock(JsonBlock):
    """``scheduler``."""

    type: Annotated[
        str,
        honoured(
            "`schedule`: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; others are refused by name"
        ),
    ]
    params: Annotated[Free, honoured("the options of the schedule; see below")] = {}


class FP16(JsonBlock):
    """``fp16``."""

    enabled: Annotated[bool, honoured("`precision` fp16")] = False
    auto_cast: Annotated[
        bool, meaningless("floating-point inputs are always cast to the dtype of the parameters")
    ] = False
    loss_scale: Annotated[
        float, Field(ge=0), honoured("0: dynamic; else `loss_scale`, a static scale")
    ] = 0.0
    initial_scale_power: Annotated[
        Whole,
        Field(le=120),
        becomes("initial_loss_scale", ", 2 to this power", lambda power: 2.0**power),
    ] = 16
    loss_scale_window: Annotated[Count, becomes("loss_scale_window")] = 1000
    hysteresis: Annotated[Count, becomes("loss_scale_hysteresis")] = 2
    consecutive_hysteresis: Annotated[bool, becomes("loss_scale_consecutive_hysteresis")] = False
    min_loss_scale: Annotated[float, Field(gt=0), becomes("minimum_loss_scale")] = 1.0
    fp16_master_weights_and_grads: Annotated[
        bool, refused("master weights, and the gradients that the update reads, are FP32 in zeroir")
    ] = False


class BF16(JsonBlock):
    """``bf16``."""

    enabled: Annotated[bool, honoured("`precision` bf16")] = False
    immediate_grad_update: Annotated[
        bool, meaningless("gradients are added as soon as they are reduced")
    ] = False
    check_grad_overflow: Annotated[
        bool,
        meaningless(
            "bf16 has the range of FP32, and steps are not checked; training stops at a loss that is not finite"
        ),
    ] = True
    bf16_master_weights_and_grads: Annotated[
        bool, refused("master weights, and the gradients that the update reads, are FP32 in zeroir")
    ] = False
    bf16_optimizer_states: Annotated[bool, refused("optimizer states are FP32 in zeroir")] = False


class ZeroOptimization(JsonBlock):
    """``zero_optimization``."""

    stage: Annotated[int, Field(ge=0, le=3), honoured("`stage`")] = 0
    contiguous_gradients: Annotated[
        bool, meaningless("gradients are always written into the flat buffer of their unit")
    ] = True
    reduce_scatter: Annotated[
        bool,
        meaningless(
            "stages 2 and 3 reduce-scatter, stages 0 and 1 sum all of the gradient; the results are equal"
        ),
    ] = True
    reduce_bucket_size: Annotated[
        Whole,
        becomes(
            "bucket",
            ": gradients, converted from elements to bytes of their dtype",
            is_of_elements=True,
        ),
    ] = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[bool, _COMMUNICATION] = True
    allgather_partitions: Annotated[
        bool, meaningless("parameters are always all-gathered; broadcasts would give equal values")
    ] = True
    allgather_bucket_size: Annotated[
        Whole,
        becomes(
            "bucket_gathers",
            " at stages 1 and 2: updated parameters, converted likewise",
            is_of_elements=True,
            stages=(1, 2),
        ),
    ] = 500_000_000
    overlap_comm: Annotated[
        bool | None,
        honoured("false: `prefetch` 0 and `overlap_update` off; true: zeroir's defaults"),
    ] = None
    load_from_fp32_weights: Annotated[bool, _NO_CHECKPOINTS] = True
    grad_hooks: Annotated[bool, _INTERNAL] = True
    elastic_checkpoint: Annotated[bool, _NO_CHECKPOINTS] = False
    offload_param: Annotated[OffloadParamBlock | None, honoured("see below")] = None
    offload_optimizer: Annotated[OffloadOptimizerBlock | None, honoured("see below")] = None
    zenflow: Annotated[Free | None, refused("zeroir has no ZenFlow", is_given)] = None
    sub_group_size: Annotated[
        Whole, meaningless("the update runs unit by unit, in chunks of a fixed size")
    ] = 1_000_000_000
    cpu_offload: Annotated[
        bool | None, honoured("the old name of `offload_optimizer` with the device cpu")
    ] = None
    cpu_offload_param: Annotated[
        bool | None, honoured("the old name of `offload_param` with the device cpu")
    ] = None
    cpu_offload_use_pin_memory: Annotated[bool | None, _PINNED] = None
    stage3_prefetch_bucket_size: Annotated[
        Whole,
        honoured("`prefetch_bytes` at stage 3, converted likewise; 0 is `prefetch` 0", stages=(3,)),
    ] = 50_000_000
    stage3_param_persistence_threshold: Annotated[Whole, _KEPT] = 100_000
    stage3_model_persistence_threshold: Annotated[Whole, _KEPT] = 2**62
    stage3_max_live_parameters: Annotated[
        Whole, honoured("an upper bound of `prefetch_bytes` at stage 3", stages=(3,))
    ] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[
        Whole,
        becomes(
            "unshard_bytes",
            " at stage 3, converted likewise",
            unless_zero,
            is_of_elements=True,
            stages=(3,),
        ),
    ] = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: Annotated[
        bool, meaningless("engine.full_parameters() and engine.gathered() gather the weights")
    ] = False
    stage3_gather_fp16_weights_on_model_save: Annotated[
        bool, meaningless("engine.full_parameters() and engine.gathered() gather the weights")
    ] = False
    stage3_module_granularity_threshold: Annotated[Whole, _UNITS] = 0
    stage3_use_all_reduce_for_fetch_params: Annotated[bool, _COMMUNICATION] = False
    stage3_allgather_sequential: Annotated[bool, _COMMUNICATION] = False
    ignore_unused_parameters: Annotated[
        bool, meaningless("the traced step shows which parameters have a gradient")
    ] = True
    legacy_stage1: Annotated[bool, _INTERNAL] = False
    round_robin_gradients: Annotated[
        bool, meaningless("gradients are copied to the host as soon as they are reduced")
    ] = False
    zero_hpz_partition_size: Annotated[
        Whole,
        refused(
            "zeroir keeps no secondary shards; --mesh replicate=…,shard=… also keeps gathers within a node",
            differs_from(0, 1),
        ),
    ] = 1
    zero_quantized_weights: Annotated[bool, _QUANTISED] = False
    zero_quantized_nontrainable_weights: Annotated[bool, _QUANTISED] = False
    zero_quantized_gradients: Annotated[bool, _QUANTISED] = False
    zeropp_loco_param: Annotated[
        Free | None, refused("zeroir has no quantised communication", is_given)
    ] = None
    mics_shard_size: Annotated[
        int,
        honoured("`mesh`: groups of this number of ranks hold all shards (stage 3)", stages=(3,)),
    ] = -1
    mics_hierarchical_params_gather: Annotated[bool, _COMMUNICATION] = False
    memory_efficient_linear: Annotated[
        bool, meaningless("--select-saved chooses the values that are saved for the backward")
    ] = True
    pipeline_loading_checkpoint: Annotated[bool, _NO_CHECKPOINTS] = False
    override_module_apply: Annotated[bool, _INTERNAL] = True
    log_trace_cache_warnings: Annotated[bool, _INTERNAL] = False
    enable_sanity_checks: Annotated[bool, _INTERNAL] = False
    save_muon_momentum_buffer_in_memory: Annotated[
        bool, meaningless("all states of an optimizer are kept where --offload-to says")
    ] = False
    leaf_module: Annotated[Free | None, _UNITS] = None


class ActivationCheckpointing(JsonBlock):
    """``activation_checkpointing``."""

    partition_activations: Annotated[
        bool, meaningless("it divides activations among model-parallel ranks, and there are none")
    ] = False
    cpu_checkpointing: Annotated[
        bool, honoured("`offload` activations: all that are saved for the backward")
    ] = False
    contiguous_memory_optimization: Annotated[
        bool, meaningless("saved values have planned places in one block of memory")
    ] = False
    number_checkpoints: Annotated[
        int | None, meaningless("--recompute names the units that are recomputed")
    ] = None
    synchronize_checkpoint_boundary: Annotated[bool, _INTERNAL] = False
    profile: Annotated[bool, _RUN_LOG] = False


class DataTypes(JsonBlock):
    """``data_types``."""

    grad_accum_dtype: Annotated[
        str | None,
        refused("gradients accumulate in FP32 in zeroir", differs_from("fp32", "float32")),
    ] = None
    param_dtype: Annotated[
        str | None, refused("enable the block fp16 or bf16 instead", is_given)
    ] = None
    buffer_dtype: Annotated[
        str | None, refused("buffers have the dtype of the parameters", is_given)
    ] = None


class CompileBlock(JsonBlock):
    """``compile``."""

    deepcompile: Annotated[
        bool,
        refused("zeroir compiles the whole step itself; --kernels of `zeroir run` chooses kernels"),
    ] = False
    free_activation: Annotated[bool, _INTERNAL] = False
    free_activation_threshold: Annotated[Whole, _INTERNAL] = 10 * 1024 * 1024
    offload_activation: Annotated[bool, _DEEPCOMPILE] = False
    offload_activation_pin_memory: Annotated[bool, _DEEPCOMPILE] = True
    offload_opt_states: Annotated[bool, _DEEPCOMPILE] = False
    offload_parameters: Annotated[bool, _DEEPCOMPILE] = False
    double_buffer: Annotated[bool, _INTERNAL] = True
    symmetric_memory: Annotated[bool, _INTERNAL] = False
    debug_log: Annotated[bool, _INTERNAL] = False
    sync_before_reduce: Annotated[bool, _INTERNAL] = False
    sync_after_reduce: Annotated[bool, _INTERNAL] = False
    sync_before_allgather: Annotated[bool, _INTERNAL] = False
    sync_after_allgather: Annotated[bool, _INTERNAL] = False
    keep_int_input_tensors: Annotated[bool, _INTERNAL] = True
    keep_all_input_tensors: Annotated[bool, _INTERNAL] = False
    passes: Annotated[list[str] | None, _INTERNAL] = None


class CheckpointBlock(JsonBlock):
    """``checkpoint``."""

    tag_validation: Annotated[str, _NO_CHECKPOINTS] = "WARN"
    load_universal: Annotated[bool, refused("zeroir does not read DeepSpeed's checkpoints")] = False
    use_node_local_storage: Annotated[bool, _NO_CHECKPOINTS] = False
    parallel_write: Annotated[Free | None, _NO_CHECKPOINTS] = None
    checkpoint_serialization: Annotated[bool, _NO_CHECKPOINTS] = True
    writer: Annotated[Free | None, _NO_CHECKPOINTS] = None


def _asks_for_tensor_parallelism(value: object) -> bool:
    sizes = (
        [value.get(key) for key in ("autotp_size", "tp_size")] if isinstance(value, dict) else []
    )
    return any(isinstance(size, int) and size > 1 for size in sizes)


class DeepSpeedConfiguration(JsonBlock):
    """The whole file."""

    train_batch_size: Annotated[
        Count | None,
        honoured("micro-batch × accumulation × ranks; two of the three give the third"),
    ] = None
    train_micro_batch_size_per_gpu: Annotated[
        Count | None, honoured("must be the leading dimension of the example batch")
    ] = None
    gradient_accumulation_steps: Annotated[Count | None, honoured("`micro_steps`")] = None
    managed_gradient_accumulation: Annotated[
        bool, meaningless("engine.step(batches) and engine.micro_step(batch) are both there")
    ] = True
    optimizer: Annotated[OptimizerBlock | None, honoured("see below")] = None
    scheduler: Annotated[SchedulerBlock | None, honoured("see below")] = None
    fp16: Annotated[FP16, honoured("see below")] = FP16()
    bf16: Annotated[BF16, honoured("see below")] = BF16()
    bfloat16: Annotated[BF16 | None, honoured("the old name of `bf16`")] = None
    gradient_clipping: Annotated[
        float,
        Field(ge=0),
        becomes("clip", "; 0 turns clipping off, and absent it is 1.0", unless_zero),
    ] = 1.0
    zero_optimization: Annotated[
        ZeroOptimization | bool, honoured("see below; true is stage 1, and absent it is stage 0")
    ] = ZeroOptimization()
    communication_data_type: Annotated[
        Literal["fp32", "fp16", "bf16"] | None,
        honoured(
            "the dtype of the parameters, in which gradients travel, or `fp32`: `--reduce-dtype fp32`"
        ),
    ] = None
    seq_parallel_communication_data_type: Annotated[
        str | None, meaningless("zeroir has no sequence parallelism")
    ] = None
    prescale_gradients: Annotated[bool, _DIVIDED_ONCE] = False
    gradient_predivide_factor: Annotated[float, _DIVIDED_ONCE] = 1.0
    gradient_allreduce_op: Annotated[
        Literal["mean", "sum"],
        refused(
            "gradients are averaged in zeroir; multiply the loss instead", differs_from("mean")
        ),
    ] = "mean"
    sparse_gradients: Annotated[
        bool, meaningless("gradients of embeddings are dense, with equal results")
    ] = False
    disable_allgather: Annotated[bool, _COMMUNICATION] = False
    allgather_size: Annotated[Whole, _COMMUNICATION] = 500_000_000
    zero_allow_untested_optimizer: Annotated[bool, _INTERNAL] = False
    zero_force_ds_cpu_optimizer: Annotated[
        bool, meaningless("the host updates with torch's fused kernels")
    ] = True
    data_types: Annotated[DataTypes, honoured("see below")] = DataTypes()
    activation_checkpointing: Annotated[ActivationCheckpointing, honoured("see below")] = (
        ActivationCheckpointing()
    )
    checkpoint: Annotated[CheckpointBlock, honoured("see below")] = CheckpointBlock()
    compile: Annotated[CompileBlock, honoured("see below")] = CompileBlock()
    aio: Annotated[
        Free, meaningless("zeroir chooses the sizes and the number of requests of the disk")
    ] = {}
    amp: Annotated[
        Free, refused("zeroir has no Apex AMP; enable the block fp16 or bf16", is_enabled)
    ] = {}
    torch_autocast: Annotated[
        Free,
        refused(
            "enable the block bf16 or fp16 instead, or call torch.autocast in the model", is_enabled
        ),
    ] = {}
    sparse_attention: Annotated[
        Free | None, refused("the model file chooses the attention", is_given)
    ] = None
    pipeline: Annotated[Free | None, refused("zeroir has no pipeline parallelism", is_given)] = None
    tensor_parallel: Annotated[
        Free, refused("zeroir has no tensor parallelism", _asks_for_tensor_parallelism)
    ] = {}
    expert_parallel: Annotated[Free, refused("zeroir has no expert parallelism", is_enabled)] = {}
    sequence_parallel_size: Annotated[
        Whole, refused("zeroir has no sequence parallelism", differs_from(0, 1))
    ] = 1
    use_data_before_expert_parallelism: Annotated[
        bool, meaningless("zeroir has no expert parallelism")
    ] = False
    hybrid_engine: Annotated[
        Free, refused("engine.gathered() lends the module for generation instead", is_enabled)
    ] = {}
    elasticity: Annotated[
        Free,
        refused(
            "`zeroir run` adapts a program to the number of ranks, not the batch size", is_enabled
        ),
    ] = {}
    autotuning: Annotated[Free, refused("use `zeroir plan` instead", is_enabled)] = {}
    data_efficiency: Annotated[Free, _DATA] = {}
    curriculum_learning: Annotated[Free, _DATA] = {}
    dataloader_drop_last: Annotated[
        bool, meaningless("batches are what the model file's batches() yields")
    ] = False
    progressive_layer_drop: Annotated[
        Free, refused("the traced step has all layers", is_enabled)
    ] = {}
    compression_training: Annotated[
        Free, refused("zeroir neither quantises nor prunes models", is_enabled_inside)
    ] = {}
    quantize_training: Annotated[
        Free, refused("zeroir neither quantises nor prunes models", is_enabled_inside)
    ] = {}
    weight_quantization: Annotated[
        Free | None, refused("zeroir neither quantises nor prunes models", is_given)
    ] = None
    eigenvalue: Annotated[Free, refused("zeroir computes no eigenvalues", is_enabled)] = {}
    graph_harvesting: Annotated[
        bool, meaningless("`zeroir run --cuda-graphs` launches sections as CUDA graphs")
    ] = False
    nebula: Annotated[Free, refused("zeroir has no Nebula checkpoints", is_enabled)] = {}
    datastates_ckpt: Annotated[
        Free | None, refused("zeroir has no DataStates checkpoints", is_given)
    ] = None
    steps_per_print: Annotated[
        Whole | None, meaningless("`zeroir run --log-every N` prints every N steps")
    ] = None
    wall_clock_breakdown: Annotated[
        bool, meaningless("`zeroir run --trace` records every op of a step")
    ] = False
    memory_breakdown: Annotated[
        bool, meaningless("`zeroir report` shows the memory of every moment of a step")
    ] = False
    dump_state: Annotated[bool, meaningless("`zeroir show` prints a program and its options")] = (
        False
    )
    log_level: Annotated[str | None, _RUN_LOG] = None
    timers: Annotated[Free, _RUN_LOG] = {}
    flops_profiler: Annotated[
        Free, meaningless("`zeroir simulate` and `zeroir report` show the FLOP of every segment")
    ] = {}
    comms_logger: Annotated[
        Free,
        meaningless("`zeroir show` prints every collective, and `zeroir run --trace` times it"),
    ] = {}
    tensorboard: Annotated[Free, _MONITOR] = {}
    wandb: Annotated[Free, _MONITOR] = {}
    comet: Annotated[Free, _MONITOR] = {}
    csv_monitor: Annotated[Free, _MONITOR] = {}
    vocabulary_size: Annotated[Whole | None, meaningless("DeepSpeed only warns of it")] = None
