"""Every key of DeepSpeed's configuration is honoured, explained or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from zeroir.config import make_options
from zeroir.deepspeed import Translation, translate
from zeroir.deepspeed.optimizers import OPTIMIZERS
from zeroir.deepspeed.table import tables, treatments
from zeroir.deepspeed.treatment import Kind, treatment_of
from zeroir.errors import UserError

ROOT = Path(__file__).parents[2]
KEYS: list[str] = json.loads((ROOT / "tests/data/deepspeed_keys.json").read_text())["keys"]
TREATMENTS = dict(treatments())


def nested(key: str, value: object) -> dict[str, object]:
    """A configuration with this value at a dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def translated(data: Mapping[str, object], **given: object) -> Translation:
    return translate(data, given=given, world_size=2, example_batch_size=8)


def test_every_key_of_deepspeeds_documentation_and_code_is_known() -> None:
    blocks = {known.rpartition(".")[0] for known in TREATMENTS}
    for key in KEYS:
        parts = key.split(".")
        prefixes = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        assert prefixes & TREATMENTS.keys() or key in blocks, key


def zero(stage: int, **keys: object) -> dict[str, object]:
    """A configuration with keys of ``zero_optimization``."""
    return {"zero_optimization": {"stage": stage, **keys}}


HONOURED: dict[str, list[tuple[dict[str, object], dict[str, object]]]] = {
    "train_batch_size": [({"train_batch_size": 64}, {"micro_steps": 1})],
    "train_micro_batch_size_per_gpu": [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, {"micro_steps": 4})
    ],
    "gradient_accumulation_steps": [({"gradient_accumulation_steps": 3}, {"micro_steps": 3})],
    "gradient_clipping": [
        ({"gradient_clipping": 0.5}, {"clip": 0.5}),
        ({"gradient_clipping": 0}, {"clip": None}),
        ({}, {"clip": 1.0}),
    ],
    "communication_data_type": [
        ({"communication_data_type": "fp32"}, {"precision": "fp32", "reduce_dtype": None}),
        (
            {"communication_data_type": "fp32", "bf16": {"enabled": True}},
            {"precision": "bf16", "reduce_dtype": "fp32"},
        ),
        ({"communication_data_type": "bf16", "bf16": {"enabled": True}}, {"precision": "bf16"}),
    ],
    "optimizer.type": [
        ({"optimizer": {"type": "adam"}}, {"optimizer": "adamw", "weight_decay": 0.0}),
        ({"optimizer": {"type": "AdamW"}}, {"optimizer": "adamw", "weight_decay": 0.0}),
        ({"optimizer": {"type": "SGD"}}, {"optimizer": "sgd", "lr": 1e-3}),
        ({"optimizer": {"type": "Lion"}}, {"optimizer": "lion", "beta1": 0.9, "beta2": 0.999}),
        ({"optimizer": {"type": "Adafactor"}}, {"optimizer": "adafactor", "lr": 0.01}),
    ],
    "optimizer.params": [({"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}, {"lr": 0.5})],
    "scheduler.type": [({"scheduler": {"type": "WarmupLR"}}, {"schedule": "WarmupLR"})],
    "scheduler.params": [
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
            {"schedule": "WarmupLR{warmup_num_steps=5}"},
        )
    ],
    "fp16.enabled": [({"fp16": {"enabled": True}}, {"precision": "fp16"})],
    "fp16.loss_scale": [
        (
            {"fp16": {"enabled": True, "loss_scale": 128}},
            {"loss_scale": 128.0, "initial_loss_scale": None},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 0}},
            {"loss_scale": None, "initial_loss_scale": 65536.0},
        ),
    ],
    "fp16.initial_scale_power": [
        ({"fp16": {"enabled": True, "initial_scale_power": 5}}, {"initial_loss_scale": 32.0})
    ],
    "fp16.loss_scale_window": [
        ({"fp16": {"enabled": True, "loss_scale_window": 5}}, {"loss_scale_window": 5})
    ],
    "fp16.hysteresis": [
        ({"fp16": {"enabled": True, "hysteresis": 5}}, {"loss_scale_hysteresis": 5})
    ],
    "fp16.consecutive_hysteresis": [
        (
            {"fp16": {"enabled": True, "consecutive_hysteresis": True}},
            {"loss_scale_consecutive_hysteresis": True},
        )
    ],
    "fp16.min_loss_scale": [
        ({"fp16": {"enabled": True, "min_loss_scale": 4}}, {"minimum_loss_scale": 4.0})
    ],
    "bf16.enabled": [({"bf16": {"enabled": True}}, {"precision": "bf16"})],
    "bfloat16.enabled": [({"bfloat16": {"enabled": True}}, {"precision": "bf16"})],
    "zero_optimization.stage": [
        ({"zero_optimization": {"stage": 2}}, {"stage": 2}),
        ({"zero_optimization": True}, {"stage": 1}),
        ({"zero_optimization": False}, {"stage": 0}),
        ({}, {"stage": 0}),
    ],
    "zero_optimization.reduce_bucket_size": [
        (zero(2, reduce_bucket_size=5e8), {"bucket": 2 * 10**9}),
        (
            {
                "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
                "fp16": {"enabled": True},
            },
            {"bucket": 2000, "bucket_gathers": 0},
        ),
    ],
    "zero_optimization.allgather_bucket_size": [
        (zero(1, allgather_bucket_size=1000), {"bucket_gathers": 4000}),
        (zero(3, allgather_bucket_size=5), {"bucket_gathers": None}),
    ],
    "zero_optimization.overlap_comm": [
        (zero(3, overlap_comm=False), {"overlap_update": False, "prefetch": 0}),
        (zero(3, overlap_comm=True), {"overlap_update": None, "prefetch": None}),
        (zero(2, overlap_comm=False), {"prefetch": None}),
    ],
    "zero_optimization.stage3_prefetch_bucket_size": [
        (zero(3, stage3_prefetch_bucket_size=1e7), {"prefetch_bytes": 4 * 10**7}),
        (zero(3, stage3_prefetch_bucket_size=0), {"prefetch": 0, "prefetch_bytes": None}),
        (zero(2, stage3_prefetch_bucket_size=1e7), {"prefetch_bytes": None}),
    ],
    "zero_optimization.stage3_max_live_parameters": [
        (zero(3, stage3_max_live_parameters=1000), {"prefetch_bytes": 4000}),
        (zero(3, stage3_max_live_parameters=1e9), {"prefetch_bytes": 2 * 10**8}),
    ],
    "zero_optimization.stage3_max_reuse_distance": [
        (zero(3, stage3_max_reuse_distance=1e9), {"unshard_bytes": 4 * 10**9}),
        (zero(3, stage3_max_reuse_distance=0), {"unshard_bytes": None}),
    ],
    "zero_optimization.mics_shard_size": [
        (zero(3, mics_shard_size=1), {"mesh": "replicate=2,shard=1"}),
        (zero(3, mics_shard_size=-1), {"mesh": None}),
        (zero(2, mics_shard_size=1), {"mesh": None}),
    ],
    "zero_optimization.offload_optimizer.device": [
        (
            zero(1, offload_optimizer={"device": "cpu"}),
            {"offload": "optimizer,gradients", "offload_to": None},
        ),
        (
            zero(3, offload_optimizer={"device": "nvme"}),
            {"offload": "optimizer,gradients", "offload_to": "disk"},
        ),
        (zero(3, offload_optimizer={"device": "none"}), {"offload": None, "offload_to": None}),
        (zero(0, offload_optimizer={"device": "cpu"}), {"offload": None}),
    ],
    "zero_optimization.offload_optimizer.nvme_path": [
        (
            zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/nvme"}),
            {"offload_to": "disk:/nvme"},
        ),
        (zero(2, offload_optimizer={"device": "cpu", "nvme_path": "/nvme"}), {"offload_to": None}),
    ],
    "zero_optimization.offload_optimizer.ratio": [
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.3}), {"offload_fraction": 0.3}),
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 1.0}), {"offload_fraction": None}),
        (zero(2, offload_optimizer={"device": "cpu", "ratio": 0.3}), {"offload_fraction": None}),
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 0}), {"offload": None}),
    ],
    "zero_optimization.offload_param.device": [
        (zero(3, offload_param={"device": "cpu"}), {"offload": "parameters", "offload_to": None}),
        (
            zero(3, offload_param={"device": "nvme"}),
            {"offload": "parameters", "offload_to": "disk"},
        ),
        (zero(2, offload_param={"device": "cpu"}), {"offload": None}),
    ],
    "zero_optimization.offload_param.nvme_path": [
        (
            zero(
                3,
                offload_param={"device": "nvme", "nvme_path": "/nvme"},
                offload_optimizer={"device": "nvme", "nvme_path": "/nvme"},
            ),
            {"offload": "optimizer,gradients,parameters", "offload_to": "disk:/nvme"},
        ),
        (
            zero(
                3,
                offload_param={"device": "cpu"},
                offload_optimizer={"device": "nvme", "nvme_path": "/nvme"},
            ),
            {"offload_to": "optimizer=disk:/nvme,parameters=host"},
        ),
    ],
    "zero_optimization.cpu_offload": [
        (zero(2, cpu_offload=True), {"offload": "optimizer,gradients"}),
        (zero(2, cpu_offload=False), {"offload": None}),
    ],
    "zero_optimization.offload_param.max_in_cpu": [
        (zero(3, offload_param={"device": "nvme", "max_in_cpu": 500}), {"host_cache": "2000B"}),
        (zero(3, offload_param={"device": "nvme"}), {"host_cache": None}),
        (zero(3, offload_param={"device": "cpu", "max_in_cpu": 500}), {"host_cache": None}),
        (zero(2, offload_param={"device": "nvme", "max_in_cpu": 500}), {"host_cache": None}),
    ],
    "zero_optimization.cpu_offload_param": [
        (zero(3, cpu_offload_param=True), {"offload": "parameters"}),
        (zero(3, cpu_offload_param=False), {"offload": None}),
    ],
    "activation_checkpointing.cpu_checkpointing": [
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"offload": "activations"}),
        ({"activation_checkpointing": {"cpu_checkpointing": False}}, {"offload": None}),
    ],
}
"""For each honoured key: configurations, and options that come of them; None where the option is not set."""


def test_every_honoured_key_has_cases() -> None:
    honoured = {key for key, item in TREATMENTS.items() if item.kind is Kind.HONOURED}
    assert HONOURED.keys() == honoured


@pytest.mark.parametrize("key", HONOURED)
def test_an_honoured_key_sets_options(key: str) -> None:
    for data, expected in HONOURED[key]:
        translation = translated(data)
        for option, value in expected.items():
            assert translation.options.get(option) == value, (data, option)
            assert (option in translation.origins) == (option in translation.options)
        make_options({"world_size": 2, **translation.options})


PLAIN: dict[str, object] = {
    "seq_parallel_communication_data_type": "fp32",
    "zero_optimization.leaf_module": {"classes": ["Block"]},
    "checkpoint.tag_validation": "Warn",
    "checkpoint.parallel_write": {"pipeline_stage": False},
    "checkpoint.writer": {"type": "NEBULA"},
    "compile.passes": ["z1"],
    "log_level": "info",
}
"""Values of keys whose type is not one of the following."""


def plain_value(key: str) -> object:
    """Some value of the type that the key has."""
    if key in PLAIN:
        return PLAIN[key]
    for value in (True, 3, 2.5, {"enabled": True}):
        try:
            translated(nested(key, value))
        except UserError as error:
            if "but should be" not in str(error):
                raise
        else:
            return value
    raise AssertionError(key)


def test_a_key_without_meaning_is_one_line_and_changes_nothing() -> None:
    keys = [key for key, item in TREATMENTS.items() if item.kind is Kind.WITHOUT_MEANING]
    for key in keys:
        base: dict[str, object] = (
            {"optimizer": {"type": "Adam"}} if key.startswith("optimizer") else {}
        )
        if key.startswith(("bf16", "bfloat16", "fp16")):
            base = nested(f"{key.partition('.')[0]}.enabled", True)
        value = plain_value(key) if not base else True
        data = nested(key, value)
        for name, block in base.items():
            own = data.setdefault(name, {})
            assert isinstance(own, dict)
            assert isinstance(block, dict)
            own.update(block)
        with_key, without = translated(data), translated(base)
        assert with_key.options == without.options, key
        (note,) = set(with_key.notes) - set(without.notes)
        assert note == f"{key}: no meaning here; {TREATMENTS[key].reason}."


PARAMS: dict[str, tuple[object, dict[str, object] | str]] = {
    "lr": (0.5, {"lr": 0.5}),
    "betas": ([0.8, 0.95], {"beta1": 0.8, "beta2": 0.95}),
    "eps": (1e-6, {"eps": 1e-6}),
    "weight_decay": (0.3, {"weight_decay": 0.3}),
    "beta2_decay": (-0.5, {"beta2_decay": -0.5}),
    "d": (2.0, {"d": 2.0}),
    "adam_w_mode": (False, {"optimizer": "adam"}),
    "torch_adam": (True, {"weight_decay": 0.01}),
    "momentum": (0.8, {"optimizer": "momentum", "momentum": 0.8}),
    "dampening": (0.1, {}),
    "nesterov": (True, "needs a momentum above 0"),
    "max_grad_norm": (1.0, "use gradient_clipping"),
    "maximize": (True, "zeroir minimises the loss"),
    "differentiable": (True, "does not differentiate"),
    "bias_correction": (False, "corrects the bias"),
    "amsgrad": (True, "no AMSGrad"),
    "fp32_optimizer_states": (False, "optimizer states are FP32"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_of_an_optimizer_has_its_treatment(name: str) -> None:
    for key, field in OPTIMIZERS[name].model_fields.items():
        treatment = treatment_of(field)
        value, expected = PARAMS.get(key, (True, {}))
        data = {"optimizer": {"type": name, "params": {key: value}}}
        if key == "adam_w_mode" and name == "AdamW":
            expected = {"optimizer": "adamw"}
        if key == "eps" and name == "Adafactor":
            data = {"optimizer": {"type": name, "params": {key: [1e-6, 1e-4]}}}
            expected = {"eps": 1e-6, "eps2": 1e-4}
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                translated(data)
            continue
        translation = translated(data)
        assert translation.options.items() >= expected.items(), key
        make_options({"world_size": 2, **translation.options})
        is_noted = any(f"optimizer.params.{key}:" in note for note in translation.notes)
        assert is_noted == (treatment.kind is Kind.WITHOUT_MEANING), key


def test_momentum_has_its_parameters() -> None:
    params = {"momentum": 0.8, "dampening": 0.0, "nesterov": True, "lr": 0.1}
    options = translated({"optimizer": {"type": "SGD", "params": params}}).options
    expected = {"optimizer": "momentum", "momentum": 0.8, "dampening": 0.0, "nesterov": True}
    assert options.items() >= expected.items()


def test_options_that_are_given_win() -> None:
    data: dict[str, object] = {
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1e7},
        "fp16": {"enabled": True, "loss_scale_window": 5},
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}},
    }
    given = {"stage": 2, "precision": "bf16", "micro_steps": 2, "optimizer": "sgd", "clip": 3.0}
    options = translated(data, **given).options
    assert options.keys().isdisjoint(given)
    assert options.keys().isdisjoint(("prefetch_bytes", "loss_scale_window", "beta1"))


def test_offload_that_is_given_replaces_all_of_the_file() -> None:
    block = {"device": "nvme", "nvme_path": "/nvme", "ratio": 0.5}
    data: dict[str, object] = zero(3, offload_optimizer=block)
    options = translated(data, offload=()).options
    assert not {"offload", "offload_to", "offload_fraction"} & options.keys()


def test_automatic_values_resolve() -> None:
    """As Hugging Face's integration fills them in from its arguments."""
    data: dict[str, object] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale_window": 7},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    result = translated(data, micro_steps=4, precision="fp16", lr=0.25)
    assert result.micro_batch_size == 8
    assert result.options == {
        "stage": 3,
        "clip": 1.0,
        "initial_loss_scale": 65536.0,
        "loss_scale_window": 7,
        "loss_scale_hysteresis": 2,
        "loss_scale_consecutive_hysteresis": False,
        "minimum_loss_scale": 1.0,
        "optimizer": "adamw",
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "schedule": "WarmupDecayLR{warmup_min_lr=0.0,warmup_max_lr=0.25,warmup_num_steps=0}",
    }
    assert result.origins["clip"] == 'gradient_clipping "auto"'


def test_a_block_of_another_precision_is_one_line() -> None:
    notes = translated({"fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 3}}).notes
    assert notes == ("fp16.*: no meaning here; the block is not enabled.",)


@pytest.mark.parametrize(
    ("block", "note"),
    [
        (
            {"stage": 3, "overlap_comm": False, "stage3_prefetch_bucket_size": 5},
            "zero_optimization.stage3_prefetch_bucket_size: no meaning with overlap_comm false.",
        ),
        (
            {"stage": 1, "stage3_max_reuse_distance": 5, "stage3_max_live_parameters": 2},
            (
                "zero_optimization.stage3_max_live_parameters, zero_optimization.stage3_max_reuse_distance: no meaning "
                "at stage 1, as in DeepSpeed."
            ),
        ),
        (
            {"stage": 3, "allgather_bucket_size": 5},
            "zero_optimization.allgather_bucket_size: no meaning at stage 3, as in DeepSpeed.",
        ),
        (
            {"stage": 0, "allgather_bucket_size": 5, "stage3_prefetch_bucket_size": 5},
            (
                "zero_optimization.allgather_bucket_size, zero_optimization.stage3_prefetch_bucket_size: no meaning at "
                "stage 0, as in DeepSpeed."
            ),
        ),
    ],
)
def test_a_key_without_effect_beside_others_is_one_line(
    block: dict[str, object], note: str
) -> None:
    assert translated({"zero_optimization": block}).notes == (note,)


def test_keys_of_one_reason_share_a_line() -> None:
    (note,) = translated({"tensorboard": {"enabled": True}, "wandb": {"enabled": True}}).notes
    assert note.startswith("tensorboard, wandb: no meaning here; `zeroir run --log FILE` writes")


def test_the_documentation_has_the_table(update_golden: bool) -> None:
    page = ROOT / "docs" / "deepspeed.md"
    head, mark, _ = page.read_text(encoding="utf-8").partition("## Every key\n\n")
    assert mark
    if update_golden:
        page.write_text(f"{head}{mark}{tables()}", encoding="utf-8")
    assert page.read_text(encoding="utf-8") == f"{head}{mark}{tables()}"
