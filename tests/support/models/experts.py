"""Mixtures of experts of transformers, from tiny configurations: one factory for each family."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def mixtral() -> nn.Module:
    """Mixtral: 8 experts, 2 for each token."""
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, intermediate_size=24, num_key_value_heads=1, num_local_experts=8)
    )


def deepseek_v3() -> nn.Module:
    """DeepSeek-V3: a dense layer, then 8 experts in 2 groups beside a shared one, and latent attention."""
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES,
            intermediate_size=24,
            moe_intermediate_size=12,
            num_key_value_heads=2,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    )


def qwen3_moe() -> nn.Module:
    """Qwen3-MoE: 8 experts, 2 for each token."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            intermediate_size=24,
            moe_intermediate_size=12,
            num_key_value_heads=1,
            num_experts=8,
            num_experts_per_tok=2,
        )
    )


def gpt_oss() -> nn.Module:
    """gpt-oss: 8 experts with biases, 2 for each token, and attention with sinks and sliding windows."""
    return GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            intermediate_size=24,
            num_key_value_heads=1,
            head_dim=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=4,
        )
    )


def olmoe() -> nn.Module:
    """OLMoE: 8 experts, 2 for each token, and a loss that balances their load."""
    return OlmoeForCausalLM(
        OlmoeConfig(
            **SIZES,
            intermediate_size=24,
            num_key_value_heads=2,
            num_experts=8,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


def batch() -> dict[str, torch.Tensor]:
    """Three tokens of two experts each: of eight experts at least two get no token."""
    ids = torch.randint(0, 64, (1, 3))
    return {"input_ids": ids, "labels": ids}


def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of predicting the next token."""
    value: torch.Tensor = module(**batch).loss
    return value
