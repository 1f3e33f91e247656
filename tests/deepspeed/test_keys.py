"""Every key of DeepSpeed's configuration is honoured, explained or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_deepspeeds_documentation_and_code_is_known(key: str) -> None:
    parts = key.split(".")
    prefixes = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    blocks = {known.rpartition(".")[0] for known in TREATMENTS}
    assert prefixes & TREATMENTS.keys() or key in blocks


HONOURED: dict[str, list[tuple[dict[str, object], dict[str, object]]]] = {
    "train_batch_size": [({"train_batch_size": 64}, {"micro_steps": 1})],
    "train_micro_batch_size_per_gpu": [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8},
            {"micro_steps": 4},
        )
    ],
    "gradient_accumulation_steps": [({"gradient_accumulation_steps": 3}, {"micro_steps": 3})],
    "gradient_clipping": [
        ({"gradient_clipping": 0.5}, {"clip": 0.5}),
        ({"gradient_clipping": 0}, {"clip": None}),
        ({}, {"clip": 1.0}),
    ],
    "communication_data_type": [
        ({"communication_data_type": "fp32"}, {"precision": "fp32"}),
        ({"communication_data_type": "bf16", "bf16": {"enabled": True}}, {"precision": "bf16"}),
    ],
    "optimizer.type": [
        ({"optimizer": {"type": "adam"}}, {"optimizer": "adamw", "weight_decay": 0.0}),
        ({"optimizer": {"type": "AdamW"}}, {"optimizer": "adamw", "weight_decay": 0.0}),
        ({"optimizer": {"type": "SGD"}}, {"optimizer": "sgd", "lr": 1e-3}),
        ({"optimizer": {"type": "Lion"}}, {"optimizer": "lion", "beta1": 0.9, "beta2": 0.999}),
        ({"optimizer": {"type": "Adafactor"}}, {"optimizer": "adafactor", "lr": 0.01}),
    ],
    "optimizer.params": [
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}, {"lr": 0.5}),
    ],
    "scheduler.type": [
        ({"scheduler": {"type": "WarmupLR"}}, {"schedule": "WarmupLR"}),
    ],
    "scheduler.params": [
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
            {"schedule": "WarmupLR{warmup_num_steps=5}"},
        ),
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
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, {"bucket": 2 * 10**9}),
        (
            {
                "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
                "fp16": {"enabled": True},
            },
            {"bucket": 2000, "bucket_gathers": 0},
        ),
    ],
    "zero_optimization.allgather_bucket_size": [
        (
            {"zero_optimization": {"stage": 1, "allgather_bucket_size": 1000}},
            {"bucket_gathers": 4000},
        ),
        ({"zero_optimization": {"stage": 3, "allgather_bucket_size": 5}}, {"bucket_gathers": None}),
    ],
    "zero_optimization.overlap_comm": [
        (
            {"zero_optimization": {"stage": 3, "overlap_comm": False}},
            {"overlap_update": False, "prefetch": 0},
        ),
        (
            {"zero_optimization": {"stage": 3, "overlap_comm": True}},
            {"overlap_update": None, "prefetch": None},
        ),
        ({"zero_optimization": {"stage": 2, "overlap_comm": False}}, {"prefetch": None}),
    ],
    "zero_optimization.stage3_prefetch_bucket_size": [
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1e7}},
            {"prefetch_bytes": 4 * 10**7},
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}},
            {"prefetch": 0, "prefetch_bytes": None},
        ),
        (
            {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 1e7}},
            {"prefetch_bytes": None},
        ),
    ],
    "zero_optimization.stage3_max_live_parameters": [
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1000}},
            {"prefetch_bytes": 4000},
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}},
            {"prefetch_bytes": 2 * 10**8},
        ),
    ],
    "zero_optimization.stage3_max_reuse_distance": [
        (
            {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 1e9}},
            {"unshard_bytes": 4 * 10**9},
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0}},
            {"unshard_bytes": None},
        ),
    ],
    "zero_optimization.mics_shard_size": [
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 1}},
            {"mesh": "replicate=2,shard=1"},
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, {"mesh": None}),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 1}}, {"mesh": None}),
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


@pytest.mark.parametrize(
    "key", [key for key, item in TREATMENTS.items() if item.kind is Kind.WITHOUT_MEANING]
)
def test_a_key_without_meaning_is_one_line_and_changes_nothing(key: str) -> None:
    base: dict[str, object] = {"optimizer": {"type": "Adam"}} if key.startswith("optimizer") else {}
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
    assert with_key.options == without.options
    (note,) = set(with_key.notes) - set(without.notes)
    assert note == f"{key}: no meaning here; {TREATMENTS[key].reason}."


REFUSED: dict[str, tuple[object, object]] = {
    "fp16.fp16_master_weights_and_grads": (True, False),
    "bf16.bf16_master_weights_and_grads": (True, False),
    "bf16.bf16_optimizer_states": (True, False),
    "bfloat16.bf16_master_weights_and_grads": (True, False),
    "bfloat16.bf16_optimizer_states": (True, False),
    "zero_optimization.offload_param": ({"device": "nvme"}, {"device": "none"}),
    "zero_optimization.offload_optimizer": ({"device": "cpu"}, None),
    "zero_optimization.zenflow": ({"topk_ratio": 0.1}, None),
    "zero_optimization.cpu_offload": (True, False),
    "zero_optimization.cpu_offload_param": (True, False),
    "zero_optimization.zero_hpz_partition_size": (8, 1),
    "zero_optimization.zero_quantized_weights": (True, False),
    "zero_optimization.zero_quantized_nontrainable_weights": (True, False),
    "zero_optimization.zero_quantized_gradients": (True, False),
    "zero_optimization.zeropp_loco_param": ({"err_beta": 0.8}, None),
    "gradient_allreduce_op": ("sum", "mean"),
    "data_types.grad_accum_dtype": ("bf16", "fp32"),
    "data_types.param_dtype": ("bf16", None),
    "data_types.buffer_dtype": ("bf16", None),
    "activation_checkpointing.cpu_checkpointing": (True, False),
    "checkpoint.load_universal": (True, False),
    "compile.deepcompile": (True, False),
    "compile.offload_activation": (True, False),
    "compile.offload_opt_states": (True, False),
    "compile.offload_parameters": (True, False),
    "amp": ({"enabled": True, "opt_level": "O1"}, {"enabled": False}),
    "torch_autocast": ({"enabled": True}, {"enabled": False}),
    "sparse_attention": ({"mode": "fixed"}, None),
    "pipeline": ({"stages": "auto"}, None),
    "tensor_parallel": ({"autotp_size": 4}, {"autotp_size": 0}),
    "expert_parallel": ({"enabled": True}, {"enabled": False}),
    "sequence_parallel_size": (2, 1),
    "hybrid_engine": ({"enabled": True}, {"enabled": False}),
    "elasticity": ({"enabled": True}, {"enabled": False}),
    "autotuning": ({"enabled": True}, {"enabled": False}),
    "data_efficiency": ({"enabled": True}, {"enabled": False, "data_routing": {"enabled": True}}),
    "curriculum_learning": ({"enabled": True}, {"enabled": False}),
    "progressive_layer_drop": ({"enabled": True}, {"enabled": False}),
    "compression_training": (
        {"sparse_pruning": {"shared_parameters": {"enabled": True}}},
        {"sparse_pruning": {"shared_parameters": {"enabled": False}}},
    ),
    "quantize_training": ({"enabled": True}, {"enabled": False}),
    "weight_quantization": ({"bits": 8}, None),
    "eigenvalue": ({"enabled": True}, {"enabled": False}),
    "nebula": ({"enabled": True}, {"enabled": False}),
    "datastates_ckpt": ({"host_cache_size": 16}, None),
}
"""For each refused key a value that asks for something, and one that does not."""


def test_every_refused_key_has_cases() -> None:
    assert REFUSED.keys() == {k for k, item in TREATMENTS.items() if item.kind is Kind.REFUSED}


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_key_is_one_sentence_unless_it_asks_for_nothing(key: str) -> None:
    asking, plain = (nested(key, value) for value in REFUSED[key])
    for data in (asking, plain):
        block = key.partition(".")[0]
        if block in ("fp16", "bf16", "bfloat16"):
            own = data[block]
            assert isinstance(own, dict)
            own["enabled"] = True
    with pytest.raises(UserError) as caught:
        translated(asking)
    assert str(caught.value) == f"{key} cannot be honoured: {TREATMENTS[key].reason}."
    assert translated(plain).notes == ()


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


WRONG: list[tuple[dict[str, object], str]] = [
    (
        {"zero_optimization": {"reduce_buket_size": 5}},
        "DeepSpeed has no key zero_optimization.reduce_buket_size; did you mean reduce_bucket_size?",
    ),
    (
        {"train_batchsize": 5},
        "DeepSpeed has no key train_batchsize; did you mean train_batch_size?",
    ),
    ({"zzz": 5}, "DeepSpeed has no key zzz."),
    (
        {"zero_optimization": {"stage": 7}},
        "zero_optimization.stage is 7, but should be less than or equal to 3.",
    ),
    ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage is 'two', but should be"),
    ({"zero_optimization": 3}, "zero_optimization is 3, but should be"),
    ({"train_batch_size": 0}, "train_batch_size is 0, but should be greater than or equal to 1."),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale is -1, but should be"),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled and bf16.enabled are both true; leave one of them out.",
    ),
    (
        {"communication_data_type": "fp16"},
        "communication_data_type cannot be honoured: gradients travel in fp32",
    ),
    ({"optimizer": {"params": {}}}, "optimizer.type is missing."),
    (
        {"optimizer": {"type": "Lamb"}},
        "zeroir has no optimizer Lamb; from this file it takes Adam,",
    ),
    ({"optimizer": {"type": "sgd"}}, "zeroir has no optimizer sgd"),
    ({"optimizer": {"type": "Muon"}}, "write --optimizer muon and --group beside a file without"),
    (
        {"optimizer": {"type": "Adam", "params": {"lrr": 1}}},
        "Adam has no parameter optimizer.params.lrr; did you mean lr?",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5]}}},
        "optimizer.params.betas.1 is 1.5, but should be less than 1.",
    ),
    (
        {"scheduler": {"type": "CosineAnnealingLR"}},
        "scheduler.type cannot be honoured: zeroir has no schedule CosineAnnealingLR;",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}},
        "In scheduler.params, WarmupLR has no option warmup; its options are warmup_min_lr,",
    ),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is missing, which WarmupDecayLR"),
    (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 3}},
        "mics_shard_size is 3, but 2 ranks are no multiple of it.",
    ),
]


@pytest.mark.parametrize(("data", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_what_is_wrong_is_named_with_its_place(data: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        translated(data)
    assert words in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


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
    ("zero", "note"),
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
    ],
)
def test_a_key_without_effect_beside_others_is_one_line(zero: dict[str, object], note: str) -> None:
    assert translated({"zero_optimization": zero}).notes == (note,)


def test_keys_of_one_reason_share_a_line() -> None:
    (note,) = translated({"tensorboard": {"enabled": True}, "wandb": {"enabled": True}}).notes
    assert note.startswith("tensorboard, wandb: no meaning here; `zeroir run --json` writes")


def test_the_documentation_has_the_table(update_golden: bool) -> None:
    page = ROOT / "docs" / "deepspeed.md"
    head, mark, _ = page.read_text(encoding="utf-8").partition("## Every key\n\n")
    assert mark
    if update_golden:
        page.write_text(f"{head}{mark}{tables()}", encoding="utf-8")
    assert page.read_text(encoding="utf-8") == f"{head}{mark}{tables()}"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from(["auto", "fp16", "", "cpu"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["enabled", "device", "stage", "type"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(TREATMENTS)), JSON, max_size=3))
def test_any_values_give_options_or_one_sentence(values: dict[str, object]) -> None:
    """Options that do not go together are one sentence, too."""
    data: dict[str, object] = {}
    for key, value in values.items():
        *blocks, name = key.split(".")
        at = data
        for block in blocks:
            inner = at.setdefault(block, {})
            assert isinstance(inner, dict)
            at = inner
        at[name] = value
    sentence = "."
    try:
        make_options({"world_size": 2, **translated(data).options})
    except UserError as error:
        sentence = str(error)
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
