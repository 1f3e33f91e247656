"""Compile every causal language model of transformers from a tiny configuration, and compare it with eager replicas.

Configurations are made tiny by rule: sizes that they have are replaced by small ones; a few types need more than that.
A model that eager PyTorch cannot build or train from such a configuration is left out. Of the others the record says
which are equal bit for bit, which are refused, each with the sentence, and which differ.

    python -m tools.survey_causal_models              every model
    python -m tools.survey_causal_models --experts    those with experts
    python -m tools.survey_causal_models gemma olmo   these; a record keeps its verdicts on the others
    … --record docs/records/causal-models.json        write the record, too, after each model
    … --missing                                       only models that the record does not have
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict, cast

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tools import record_file
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.errors import ZeroirError

SIZES: dict[str, int | float] = {
    name: size
    for size, names in (
        (64, "vocab_size vocab_size_per_layer_input"),
        (
            16,
            (
                "hidden_size n_embd d_model dim embed_dim n_embed word_embed_proj_dim embedding_size hidden_dim "
                "lru_width"
            ),
        ),
        (
            24,
            (
                "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size mlp_hidden_size dense_intermediate_size "
                "intermediate_size_mlp"
            ),
        ),
        (
            12,
            (
                "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
                "shared_intermediate_size expert_ffn_hidden_size"
            ),
        ),
        (
            2,
            (
                "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_attention_heads "
                "n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_key_value_heads "
                "num_kv_heads index_n_heads n_group num_experts_per_tok num_experts_per_token moe_topk moe_k "
                "moe_top_k num_expert_group linear_num_key_heads linear_num_value_heads eos_token_id"
            ),
        ),
        (
            8,
            (
                "head_dim attention_head_dim kv_lora_rank q_lora_rank v_head_dim index_head_dim mamba_d_head "
                "mamba_head_dim linear_key_head_dim linear_value_head_dim"
            ),
        ),
        (
            4,
            (
                "qk_rope_head_dim qk_nope_head_dim index_topk num_experts num_local_experts n_routed_experts "
                "moe_num_experts sliding_window state_size conv_kernel time_step_rank mamba_d_state mamba_d_conv "
                "mamba_n_heads mamba_num_heads ssm_state_size rotary_dim"
            ),
        ),
        (
            1,
            (
                "topk_group n_shared_experts num_shared_experts first_k_dense_replace num_limited_groups "
                "mamba_n_groups n_groups bos_token_id decoder_start_token_id"
            ),
        ),
        (32, "max_position_embeddings n_positions n_ctx max_seq_len"),
        (0, "num_nextn_predict_layers num_mtp_layers pad_token_id"),
        (
            0.0,
            (
                "dropout attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop activation_dropout "
                "layerdrop router_jitter_noise hidden_dropout_prob attention_probs_dropout_prob "
                "classifier_dropout"
            ),
        ),
    )
    for name in names.split()
}
"""The tiny sizes, by the names that configurations have for them."""

OF_ONE_TYPE: dict[str, dict[str, object]] = {
    "codegen": {"n_head": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "mamba_headdim": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What else a model type needs, because its sizes depend on one another or are lists of layers."""

ABSENT = frozenset({"head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"})
"""Sizes that some configurations leave open."""

MOST_NUMEL = 4_000_000
IS_OF_EXPERTS = re.compile(r"(num|n)_.*expert|moe_", re.IGNORECASE)


class Content(TypedDict):
    """What the record holds beside its head."""

    head: list[str]
    rows: list[list[str]]
    models: dict[str, list[str]]
    experts: list[str]


MODEL_FILE = """
import torch
from tools.survey_causal_models import tiny

def model():
    return tiny({kind!r})

def batch():
    ids = torch.randint(3, 64, (2, 6))
    return {{"input_ids": ids, "labels": ids}}

def loss(module, batch):
    return module(**batch).loss
"""


def config_of(kind: str) -> object:
    """The tiny configuration of a model type; one of text where the type has several modalities."""
    config = CONFIG_MAPPING[kind]()
    plain = {name for name, value in vars(config).items() if isinstance(value, (int, float, bool))}
    absent = {name for name, value in vars(config).items() if value is None}
    given = {name: SIZES[name] for name in SIZES if name in plain | (absent & ABSENT)}
    for attribute, name in getattr(config, "attribute_map", {}).items():
        if attribute in SIZES and name in plain and name not in given:
            given[name] = SIZES[attribute]
    if "qk_rope_head_dim" in plain:
        # Latent attention derives its dimensions from these.
        given.pop("head_dim", None)
    make = cast("Callable[..., object]", CONFIG_MAPPING[kind])
    return make(**{**given, **OF_ONE_TYPE.get(kind, {})}, use_cache=False)


def tiny(kind: str) -> torch.nn.Module:
    """The model of a type from its tiny configuration."""
    model: torch.nn.Module = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])(
        config_of(kind)
    )
    return model


def survey(kind: str, folder: Path) -> tuple[str, str]:
    """The verdict on a model and its reason: ``left out``, ``equal``, ``refused`` or ``different``."""
    try:
        with torch.device("meta"):
            numel = sum(parameter.numel() for parameter in tiny(kind).parameters())
        if numel > MOST_NUMEL:
            return "left out", f"its tiny configuration has {numel:,} elements"
        model = tiny(kind)
        ids = torch.randint(3, 64, (2, 6))
        loss = model(input_ids=ids, labels=ids).loss
        if not loss.isfinite():
            return "left out", "its loss is not finite"
        loss.backward()
    except Exception as error:  # noqa: BLE001 - a configuration that does not fit a model raises anything
        return "left out", f"{type(error).__name__}: {error}".splitlines()[0][:160]
    path = folder / f"{kind.replace('-', '_')}.py"
    path.write_text(MODEL_FILE.format(kind=kind))
    try:
        options = make_options({"stage": 3, "world_size": 2})
        comparison = check_model(str(path), options, steps=2, seed=0)
    except ZeroirError as error:
        return "refused", " ".join(str(error).split()).replace(f"{folder}/", "")[:300]
    return ("equal", "") if comparison.is_equal else ("different", str(comparison.differences[0]))


def main() -> int:
    """Survey the models and write the record."""
    parser = argparse.ArgumentParser(
        description="Survey the causal language models of transformers."
    )
    record_file.add_option(parser)
    parser.add_argument("--missing", action="store_true", help="only models that the record lacks")
    parser.add_argument("--experts", action="store_true", help="only models with experts")
    parser.add_argument("kinds", nargs="*", metavar="MODEL", help="only these model types")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kept = recorded(given.record) if given.missing or given.kinds else {}
    verdicts = dict(kept)
    with tempfile.TemporaryDirectory() as folder:
        for kind in sorted(given.kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            if (given.missing and kind in kept) or (given.experts and not has_experts(kind)):
                continue
            start = time.monotonic()
            verdict, reason = verdicts[kind] = survey(kind, Path(folder))
            print(
                f"{kind:24} {verdict:10} {time.monotonic() - start:5.1f} s  {reason[:150]}",
                flush=True,
            )
            about = {"transformers": transformers.__version__}
            record_file.write(given.record, "survey_causal_models", content_of(verdicts), about)
    content = content_of(verdicts)
    record_file.print_table(content["head"], content["rows"])
    return 1 if any(verdict == "different" for verdict, _ in verdicts.values()) else 0


def has_experts(kind: str) -> bool:
    """Whether the configuration of a model type has sizes of experts."""
    try:
        return any(map(IS_OF_EXPERTS.match, vars(CONFIG_MAPPING[kind]())))
    except Exception:  # noqa: BLE001 - a configuration without defaults has no tiny one either
        return False


def recorded(path: Path | None) -> dict[str, tuple[str, str]]:
    """The verdicts of a record; none where there is no file."""
    if path is None or not path.exists():
        return {}
    models = json.loads(path.read_text())["models"]
    return {kind: (verdict, reason) for kind, (verdict, reason) in models.items()}


def content_of(verdicts: Mapping[str, tuple[str, str]]) -> Content:
    """The content of the record: a table of the verdicts, the verdict on each model, and those with experts."""
    by_verdict: dict[str, list[str]] = {}
    for kind, (verdict, _) in sorted(verdicts.items()):
        by_verdict.setdefault(verdict, []).append(kind)
    return {
        "head": ["verdict", "models", "which"],
        "rows": [
            [verdict, str(len(by_verdict[verdict])), ", ".join(by_verdict[verdict])]
            for verdict in ("equal", "different", "refused", "left out")
            if verdict in by_verdict
        ],
        "models": {kind: [*verdict] for kind, verdict in sorted(verdicts.items())},
        "experts": [kind for kind in sorted(verdicts) if has_experts(kind)],
    }


if __name__ == "__main__":
    sys.exit(main())
