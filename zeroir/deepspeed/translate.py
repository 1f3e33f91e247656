"""Translation of a DeepSpeed configuration to zeroir's options, with the key that each comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from zeroir.deepspeed.batch_sizes import resolve_batch_sizes
from zeroir.deepspeed.model import FP16, ZeroOptimization
from zeroir.deepspeed.optimizers import translate_optimizer
from zeroir.deepspeed.read import Reading, read
from zeroir.deepspeed.translate_offload import translate_offload
from zeroir.deepspeed.treatment import in_bytes, treatment_of
from zeroir.errors import UserError
from zeroir.schedules import DEEPSPEED_SCHEDULES, make_schedule

_ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
_DEFAULT: Final = "DeepSpeed's default"
_ZERO: Final = "zero_optimization."


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Options by name, the place in the configuration that each comes from, and notes on ignored keys.

    ``micro_batch_size`` is the number of samples that the example batch must have.
    """

    options: Mapping[str, object]
    origins: Mapping[str, str]
    notes: tuple[str, ...]
    micro_batch_size: int


def translate(
    data: Mapping[str, object],
    *,
    given: Mapping[str, object],
    world_size: int,
    example_batch_size: int,
) -> Translation:
    """Translate a configuration to options, except those that are ``given`` elsewhere, which take precedence.

    ``example_batch_size`` is the number of samples of the model's example batch.

    Raises:
        UserError: on an unknown key, a wrong value, or a key that cannot be honoured.
    """
    given_precision = given.get("precision")
    reading = read(data, given_precision if isinstance(given_precision, str) else None)
    translator = _Translator(reading=reading, given=given, options={}, origins={}, notes=[])
    translator.precision()
    stage = translator.stage_and_mesh(world_size)
    translator.communication(stage)
    translator.offload(stage)
    translator.optimizer()
    translator.schedule()
    sizes = translator.batch_sizes(world_size, example_batch_size)
    return Translation(
        options=translator.options,
        origins=translator.origins,
        notes=(*_grouped(reading.notes), *translator.notes),
        micro_batch_size=sizes,
    )


def _grouped(notes: tuple[tuple[str, str], ...]) -> list[str]:
    """Return one note per reason, with all keys that it applies to."""
    keys: dict[str, list[str]] = {}
    for key, reason in notes:
        keys.setdefault(reason, []).append(key)
    return [f"{', '.join(names)}: no meaning here; {reason}." for reason, names in keys.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Translator:
    """Collects options; each of its methods translates one part of the configuration."""

    reading: Reading
    given: Mapping[str, object]
    options: dict[str, object]
    origins: dict[str, str]
    notes: list[str]

    def set(self, option: str, value: object, key: str) -> None:
        """Set an option unless it is given elsewhere; if ``key`` is not in the file, its origin is a default."""
        if option in self.given:
            return
        self.options[option] = value
        is_there = key in self.reading.given
        if not is_there and key.startswith("optimizer."):
            is_there = key.removeprefix("optimizer.params.") in self.optimizer_params
        origin = key if is_there else _DEFAULT
        self.origins[option] = f'{key} "auto"' if key in self.reading.automatic else origin

    def plain(
        self, block: BaseModel, place: str, stage: int, *, is_default_kept: bool, but: str = ""
    ) -> None:
        """Set the options that keys of a block become by themselves, except that of one key.

        With ``is_default_kept`` an absent key leaves zeroir's default, otherwise it has DeepSpeed's.
        """
        for name, field in type(block).model_fields.items():
            treatment = treatment_of(field)
            is_left_out = name == but or (is_default_kept and not self.is_given(place + name))
            if treatment.option is None or stage not in treatment.stages or is_left_out:
                continue
            value = getattr(block, name)
            if treatment.is_of_elements:
                value = in_bytes(value, self.itemsize_bytes)
            if treatment.convert is not None:
                value = treatment.convert(value)
            if value is not None:
                self.set(treatment.option, value, place + name)

    def is_given(self, key: str) -> bool:
        """Return whether a key has a value."""
        return key in self.reading.given

    @property
    def itemsize_bytes(self) -> int:
        """The bytes of a parameter or gradient."""
        return _ELEMENT_BYTES[self.reading.precision]

    @property
    def optimizer_params(self) -> Mapping[str, object]:
        block = self.reading.configuration.optimizer
        return {} if block is None else block.params

    @property
    def zero(self) -> ZeroOptimization:
        value = self.reading.configuration.zero_optimization
        return value if isinstance(value, ZeroOptimization) else ZeroOptimization(stage=int(value))

    def precision(self) -> None:
        """Translate ``fp16`` and ``bf16``, and ``communication_data_type``, which must be consistent with them."""
        configuration, precision = self.reading.configuration, self.reading.precision
        enabled = {"fp16": "fp16.enabled", "bf16": "bf16.enabled", "fp32": "fp16.enabled"}
        key = enabled[precision]
        if precision == "bf16" and key not in self.reading.given:
            key = "bfloat16.enabled"
        self.set("precision", precision, key)
        wire = configuration.communication_data_type
        if wire == "fp32" != precision:
            self.set("reduce_dtype", wire, "communication_data_type")
        elif wire is not None and wire != precision:
            raise UserError(
                f"communication_data_type cannot be honoured: gradients travel in {precision}, the dtype of the "
                f"parameters, or in fp32, not in {wire}."
            )
        if precision == "fp16":
            self.loss_scaling(configuration.fp16)

    def loss_scaling(self, block: FP16) -> None:
        """Translate the loss scaler's keys; a static scale needs no other key."""
        if block.loss_scale or "loss_scale" in self.given:
            self.set("loss_scale", block.loss_scale, "fp16.loss_scale")
            return
        is_one = block.hysteresis == 1
        consecutive = "consecutive_hysteresis"
        self.plain(block, "fp16.", 0, is_default_kept=False, but=consecutive if is_one else "")
        if is_one and block.consecutive_hysteresis:
            self.notes.append(f"fp16.{consecutive}: no meaning with fp16.hysteresis 1.")

    def stage_and_mesh(self, world_size: int) -> int:
        """Translate ``zero_optimization.stage``, and MiCS's groups of ranks, and return the stage."""
        block = self.reading.configuration.zero_optimization
        key = "zero_optimization" if isinstance(block, bool) else "zero_optimization.stage"
        self.set("stage", self.zero.stage, key)
        stage = self.given.get("stage", self.zero.stage)
        group = self.zero.mics_shard_size
        if group > 0 and stage == 3 and "mesh" not in self.given:
            if world_size % group:
                raise UserError(
                    f"zero_optimization.mics_shard_size is {group}, but {world_size} ranks are no multiple of it."
                )
            mesh = f"replicate={world_size // group},shard={group}"
            self.set("mesh", mesh, "zero_optimization.mics_shard_size")
        return stage if isinstance(stage, int) else self.zero.stage

    def communication(self, stage: int) -> None:
        """Translate bucket sizes, prefetching and overlap."""
        zero = self.zero
        self.plain(zero, _ZERO, stage, is_default_kept=True)
        if stage and "bucket" in self.options and "bucket_gathers" not in self.options:
            self.set("bucket_gathers", 0, f"{_ZERO}reduce_bucket_size")
        if zero.overlap_comm is False:
            self.set("overlap_update", False, f"{_ZERO}overlap_comm")
        if stage == 3:
            self.parameters()
        others = [
            key
            for name, field in type(zero).model_fields.items()
            if self.is_given(key := _ZERO + name) and stage not in treatment_of(field).stages
        ]
        if others:
            keys = ", ".join(others)
            self.notes.append(f"{keys}: no meaning at stage {stage}, as in DeepSpeed.")

    def offload(self, stage: int) -> None:
        """Translate offloading; options that are given elsewhere replace all of it."""
        if "offload" in self.given:
            return
        translation = translate_offload(self.reading.configuration, self.zero, stage)
        for option, (value, key) in translation.options.items():
            self.set(option, value, key)
        block = self.zero.offload_param
        if block is not None and "max_in_cpu" in block.model_fields_set:
            key = "zero_optimization.offload_param.max_in_cpu"
            if stage == 3 and block.device == "nvme":
                self.set("host_cache", f"{in_bytes(block.max_in_cpu, self.itemsize_bytes)}B", key)
            else:
                self.notes.append(f"{key}: no meaning without parameters on a disk.")
        self.notes.extend(translation.notes)

    def parameters(self) -> None:
        """Translate the limits of what stage 3 prefetches."""
        zero = self.zero
        prefetch, most = f"{_ZERO}stage3_prefetch_bucket_size", f"{_ZERO}stage3_max_live_parameters"
        given = [key for key in (prefetch, most) if self.is_given(key)]
        if {"prefetch", "prefetch_budget", "prefetch_bytes"} & self.given.keys():
            return
        if zero.overlap_comm is False:
            self.set("prefetch", 0, f"{_ZERO}overlap_comm")
            if given:
                self.notes.append(f"{', '.join(given)}: no meaning with overlap_comm false.")
        elif given:
            numel = min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters)
            key = prefetch if numel == zero.stage3_prefetch_bucket_size else most
            option = "prefetch_bytes" if numel else "prefetch"
            self.set(option, in_bytes(numel, self.itemsize_bytes), key)

    def optimizer(self) -> None:
        """Translate ``optimizer`` and ``gradient_clipping``."""
        block = self.reading.configuration.optimizer
        if block is not None and "optimizer" in self.given:
            self.notes.append(f"optimizer: replaced by optimizer={self.given['optimizer']}.")
        elif block is not None:
            translation = translate_optimizer(block.type, block.params)
            for option, (value, key) in translation.options.items():
                self.set(option, value, key)
            self.notes.extend(_grouped(translation.notes))
        self.plain(self.reading.configuration, "", 0, is_default_kept=False)

    def schedule(self) -> None:
        """Translate ``scheduler``."""
        block = self.reading.configuration.scheduler
        if block is None:
            return
        if block.type not in DEEPSPEED_SCHEDULES:
            raise UserError(
                f"scheduler.type cannot be honoured: zeroir has no schedule {block.type}; it has "
                f"{', '.join(DEEPSPEED_SCHEDULES)}, and engine.optimizer takes those of torch.optim.lr_scheduler."
            )
        params = {
            key: value[0] if isinstance(value, list) and len(value) == 1 else value
            for key, value in block.params.items()
        }
        # As Hugging Face's integration fills them in.
        automatic = {"warmup_min_lr": 0.0, "warmup_max_lr": self.lr(), "warmup_num_steps": 0}
        for key, value in automatic.items():
            if f"scheduler.params.{key}" in self.reading.automatic:
                params[key] = value
                self.notes.append(f'scheduler.params.{key}: "auto" is {value:g}.')
        if "scheduler.params.total_num_steps" in self.reading.automatic:
            self.notes.append(
                'scheduler.params.total_num_steps: "auto" is --steps of `zeroir run`.'
            )
        elif "total_num_steps" not in params and block.type in ("WarmupDecayLR", "WarmupCosineLR"):
            raise UserError(
                f"scheduler.params.total_num_steps is missing, which {block.type} needs."
            )
        try:
            schedule = make_schedule(block.type, params)
        except UserError as error:
            raise UserError(f"In scheduler.params, {error}") from None
        self.set("schedule", schedule.text(), "scheduler.type")

    def lr(self) -> float:
        """Return the learning rate before any schedule."""
        value = self.given.get("lr", self.options.get("lr", 1e-3))
        return float(value) if isinstance(value, int | float) else 1e-3

    def batch_sizes(self, world_size: int, example: int) -> int:
        """Set the number of micro-steps, and return the micro-batch size."""
        configuration = self.reading.configuration
        is_automatic = "train_micro_batch_size_per_gpu" in self.reading.automatic
        given_steps = self.given.get("micro_steps")
        sizes = resolve_batch_sizes(
            train=configuration.train_batch_size,
            micro=example if is_automatic else configuration.train_micro_batch_size_per_gpu,
            accumulation=given_steps
            if isinstance(given_steps, int)
            else configuration.gradient_accumulation_steps,
            world_size=world_size,
            example=example,
        )
        key = "gradient_accumulation_steps"
        if key not in self.reading.given and "train_batch_size" in self.reading.given:
            key = "train_batch_size"
        self.set("micro_steps", sizes.accumulation, key)
        return sizes.micro
