"""Keys that are refused, and values that are wrong, are one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.deepspeed.test_keys import TREATMENTS, nested, translated
from zeroir.config import make_options
from zeroir.deepspeed.treatment import Kind
from zeroir.errors import UserError

REFUSED: dict[str, tuple[object, object]] = {
    "fp16.fp16_master_weights_and_grads": (True, False),
    "bf16.bf16_master_weights_and_grads": (True, False),
    "bf16.bf16_optimizer_states": (True, False),
    "bfloat16.bf16_master_weights_and_grads": (True, False),
    "bfloat16.bf16_optimizer_states": (True, False),
    "zero_optimization.zenflow": ({"topk_ratio": 0.1}, None),
    "zero_optimization.zero_hpz_partition_size": (8, 1),
    "zero_optimization.zero_quantized_weights": (True, False),
    "zero_optimization.zero_quantized_nontrainable_weights": (True, False),
    "zero_optimization.zero_quantized_gradients": (True, False),
    "zero_optimization.zeropp_loco_param": ({"err_beta": 0.8}, None),
    "gradient_allreduce_op": ("sum", "mean"),
    "data_types.grad_accum_dtype": ("bf16", "fp32"),
    "data_types.param_dtype": ("bf16", None),
    "data_types.buffer_dtype": ("bf16", None),
    "checkpoint.load_universal": (True, False),
    "compile.deepcompile": (True, False),
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


WRONG: list[tuple[dict[str, object], str]] = [
    (
        {"zero_optimization": {"reduce_buket_size": 5}},
        "DeepSpeed has no key zero_optimization.reduce_buket_size; did you mean reduce_bucket_size?",
    ),
    ({"train_batchsize": 5}, "DeepSpeed has no key train_batchsize; did you"),
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
    ({"optimizer": {"type": "Lamb"}}, "zeroir has no optimizer Lamb; from this file it takes SGD"),
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
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
        "optimizer.params.betas is [0.9], which has too few numbers.",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95, 0.99]}}},
        "optimizer.params.betas is [0.9, 0.95, 0.99], which has too many numbers.",
    ),
    ({"scheduler": {"type": "CosineAnnealingLR"}}, "scheduler.type cannot be honoured: zeroir"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}},
        "In scheduler.params, WarmupLR has no option warmup; its options are warmup_min_lr,",
    ),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is missing, which WarmupDecayLR"),
    (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 3}},
        "mics_shard_size is 3, but 2 ranks are no multiple of it.",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
        "zero_optimization.offload_param.device is 'gpu', but should be 'none', 'cpu' or 'nvme'.",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"devices": "cpu"}}},
        "DeepSpeed has no key zero_optimization.offload_optimizer.devices; did you mean device?",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                "offload_param": {"device": "nvme", "nvme_path": "/b"},
            }
        },
        "offload_param.device for disk:/b, but a rank has one file on disk: make the folders equal.",
    ),
]


@pytest.mark.parametrize(("data", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_what_is_wrong_is_named_with_its_place(data: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        translated(data)
    assert words in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


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
