"""Models of transformers with tiny configurations, and batches of any shape for them.

Configurations are made tiny by rule: sizes that they have are replaced by small ones, in those of their parts, too. A
few types need more than that. Batches are those that a tokenizer or an image processor and a collator make.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

KINDS: Mapping[str, Mapping[str, str | Sequence[str]]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
"""The class of each model type, by the kind of the model."""

SIZES: dict[str, int | float] = {
    name: size
    for size, names in (
        (64, "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions n_ctx max_seq_len"),
        (64, "max_encoder_position_embeddings max_decoder_position_embeddings"),
        (16, "hidden_size n_embd d_model dim embed_dim n_embed word_embed_proj_dim embedding_size hidden_dim"),
        (16, "lru_width"),
        (24, "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size mlp_hidden_size dense_intermediate_size"),
        (24, "intermediate_size_mlp encoder_ffn_dim decoder_ffn_dim"),
        (12, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
        (12, "shared_intermediate_size expert_ffn_hidden_size"),
        (2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"),
        (2, "num_self_attends_per_block num_hidden_groups num_attention_heads n_head n_heads num_heads"),
        (2, "decoder_attention_heads encoder_attention_heads num_key_value_heads num_kv_heads index_n_heads n_group"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k num_expert_group"),
        (2, "linear_num_key_heads linear_num_value_heads eos_token_id"),
        (8, "head_dim attention_head_dim kv_lora_rank q_lora_rank v_head_dim index_head_dim mamba_d_head d_kv"),
        (8, "mamba_head_dim linear_key_head_dim linear_value_head_dim"),
        (4, "qk_rope_head_dim qk_nope_head_dim index_topk num_experts num_local_experts n_routed_experts"),
        (4, "moe_num_experts sliding_window state_size conv_kernel time_step_rank mamba_d_state mamba_d_conv"),
        (4, "mamba_n_heads mamba_num_heads ssm_state_size rotary_dim attention_window"),
        (3, "mask_token_id"),
        (1, "topk_group n_shared_experts num_shared_experts first_k_dense_replace num_limited_groups"),
        (1, "mamba_n_groups n_groups bos_token_id decoder_start_token_id"),
        (0, "num_nextn_predict_layers num_mtp_layers pad_token_id"),
        (0.0, "dropout attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop activation_dropout"),
        (0.0, "layerdrop router_jitter_noise hidden_dropout_prob attention_probs_dropout_prob classifier_dropout"),
        (0.0, "drop_path_rate dropout_rate dropout_prob pooler_dropout"),
    )
    for name in names.split()
}  # fmt: skip
"""The tiny sizes, by the names that configurations have for them; lengths up to 64 have positions."""

OF_ONE_TYPE: dict[str, dict[str, object]] = {
    "codegen": {"n_head": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        # Its backward calls the layers again.
        "local_attention_probs_dropout_prob": 0.0,
    },
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

ABSENT = frozenset(("head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"))
"""Sizes that some configurations leave open."""

LIST_OF_HEADS = frozenset(("num_heads", "num_attention_heads"))
"""Where the numbers of heads are a list, the widths of the stages have to fit it."""

ROWS, LENGTHS, PATCHES = (1, 4), (2, 24), (2, 5)
"""The smallest and the largest numbers of rows and words, and of patches of a height or a width."""

_NO_LABEL, _MASK, _FIRST_WORD = -100, 3, 4
_MASKED_SHARE = 0.3


def config_of(kind: str, name: str) -> PreTrainedConfig:
    """The tiny configuration of a model type."""
    default = cast("Callable[[], PreTrainedConfig]", CONFIG_MAPPING[name])()
    others: dict[str, object] = {"use_cache": False}
    if kind == "causal" and hasattr(default, "is_decoder"):
        others["is_decoder"] = True
    if kind == "seq2seq":
        others["decoder_start_token_id"] = 1
    if kind == "sequence":
        # A model takes the last word of a row that is no padding.
        others["pad_token_id"] = 0
    return _tiny(default, {**others, **OF_ONE_TYPE.get(name, {})})


def _tiny(default: PreTrainedConfig, others: Mapping[str, object]) -> PreTrainedConfig:
    """A configuration with tiny sizes, in its parts, too, and with others that it is given."""
    values = vars(default)
    given: dict[str, object] = {}
    for key, size in SIZES.items():
        value = values.get(key)
        if type(value) in (int, float):
            given[key] = int(size) if isinstance(value, int) else float(size)
        elif key in ABSENT and key in values and value is None:
            given[key] = size
    for attribute, key in getattr(default, "attribute_map", {}).items():
        if attribute in SIZES and type(values.get(key)) is int and key != "num_stages":
            given.setdefault(key, SIZES[attribute])
    side = EXAMPLE.height * patch_of(default)
    for key, value in values.items():
        if isinstance(value, PreTrainedConfig):
            given[key] = _tiny(value, {})
        elif key == "image_size" and value is not None:
            given[key] = (side, side) if isinstance(value, list | tuple) else side
        elif key == "depths":
            given[key] = [1] * len(value)
    if values.keys() & {"hidden_sizes", "depths"}:
        # These follow from the sizes of the stages.
        given.pop("hidden_size", None)
        given.pop("num_layers", None)
    if any(
        isinstance(values.get(key), list | tuple) for key in ("num_heads", "num_attention_heads")
    ):
        # The stages have numbers of heads that fit their widths.
        given.pop("embed_dim", None)
    if "qk_rope_head_dim" in values:
        # Latent attention derives its dimensions from these.
        given.pop("head_dim", None)
    make = cast("Callable[..., PreTrainedConfig]", type(default))
    return make(**{**given, **others})


def patch_of(config: PreTrainedConfig) -> int:
    """The pixels of which heights and widths of images are multiples."""
    patch = getattr(getattr(config, "vision_config", config), "patch_size", None)
    return 32 if not isinstance(patch, int) or 32 % patch == 0 else 2 * patch


def tiny(kind: str, name: str) -> nn.Module:
    """The model of a type from its tiny configuration."""
    named = KINDS[kind][name]
    model_class = getattr(transformers, named if isinstance(named, str) else named[0])
    return cast("nn.Module", model_class(config_of(kind, name)))


class Sizes(NamedTuple):
    """The sizes of a batch: words of the input and of the target, patches of the height and of the width."""

    rows: int
    length: int
    target: int
    height: int
    width: int


EXAMPLE = Sizes(rows=3, length=7, target=5, height=3, width=3)
SMALLEST = Sizes(ROWS[0], LENGTHS[0], LENGTHS[0], PATCHES[0], PATCHES[0])
LARGEST = Sizes(ROWS[1], LENGTHS[1], LENGTHS[1], PATCHES[1], PATCHES[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm:
    """What the batches of a model have.

    They have a mask of padding, or not, and targets that are as long as their inputs, or not. Images are multiples of a
    patch, and of several sizes, or all of that of the configuration. To some models an argument says that they are.
    """

    kind: str
    has_mask: bool = False
    has_target: bool = False
    patch: int = 32
    is_sized: bool = False
    interpolates: bool = False

    def batch(self, sizes: Sizes = EXAMPLE, seed: int = 0) -> dict[str, Tensor]:
        """A batch of these sizes."""
        chance = torch.Generator().manual_seed(seed)
        if self.kind == "image":
            patches = (sizes.height, sizes.width) if self.is_sized else EXAMPLE[-2:]
            sides = (self.patch * side for side in patches)
            pixels = torch.randn(sizes.rows, 3, *sides, generator=chance)
            labels = torch.randint(2, (sizes.rows,), generator=chance)
            return {"pixel_values": pixels, "labels": labels}
        ids, is_word = self._words(sizes.rows, sizes.length, chance)
        batch = {"input_ids": ids}
        if self.has_mask:
            batch["attention_mask"] = is_word.long()
        if self.kind == "sequence":
            return {**batch, "labels": torch.randint(2, (sizes.rows,), generator=chance)}
        if self.has_target:
            ids, is_word = self._words(sizes.rows, sizes.target, chance)
        elif self.kind == "masked":
            is_word &= torch.rand(is_word.shape, generator=chance) < _MASKED_SHARE
            is_word[:, 0] = True
            batch["input_ids"] = ids.masked_fill(is_word, _MASK)
        return {**batch, "labels": ids.masked_fill(~is_word, _NO_LABEL)}

    def _words(self, rows: int, length: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of words, and which of them are no padding; all of the first row are none."""
        lengths = torch.randint(1, length + 1, (rows, 1), generator=chance)
        lengths[0 if self.has_mask else slice(None)] = length
        ids = torch.randint(_FIRST_WORD, 64, (rows, length), generator=chance)
        is_word = torch.arange(length) < lengths
        return ids.masked_fill(~is_word, 0), is_word

    def batches(self, seed: int) -> Iterator[dict[str, Tensor]]:
        """Batches of random sizes, after one of the smallest or of the largest."""
        chance = random.Random(seed)
        sizes = LARGEST if seed % 2 else SMALLEST
        while True:
            yield self.batch(sizes, chance.randint(0, 2**20))
            ends = zip(SMALLEST, LARGEST, strict=True)
            sizes = Sizes(*(chance.randint(*each) for each in ends))

    @property
    def shapes(self) -> str:
        """The shapes of batches of all sizes, as a text."""
        rows = f"{SMALLEST.rows}<=rows<={LARGEST.rows}"
        if self.kind == "image":
            sides = (
                f"{PATCHES[0]}<={self.patch}*{side}<={PATCHES[1]}" if self.is_sized else "_"
                for side in ("height", "width")
            )
            return f"pixel_values: {rows}, 3, {', '.join(sides)}; labels: rows"
        mask = "; attention_mask: rows, length" if self.has_mask else ""
        length = "<={}<=".join(map(str, LENGTHS))
        target = length.format("target") if self.has_target else "length"
        labels = "rows" if self.kind == "sequence" else f"rows, {target}"
        return f"input_ids: {rows}, {length.format('length')}{mask}; labels: {labels}"

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of the model, or of its logits where it has none."""
        others = {"interpolate_pos_encoding": True} if self.interpolates else {}
        output = model(**batch, **others)
        loss = getattr(output, "loss", None)
        return cast(
            "Tensor", cross_entropy(output.logits, batch["labels"]) if loss is None else loss
        )


class UntrainableError(Exception):
    """Eager PyTorch cannot train a model on batches of any form; the text is about the last one."""


def form_of(kind: str, model: nn.Module) -> BatchForm:
    """The form of the batches of a model: the first that eager PyTorch trains, for all sizes.

    Raises:
        UntrainableError: where there is none.
    """
    arguments = inspect.signature(model.forward).parameters
    masks = [name for name in (True, False) if not name or "attention_mask" in arguments]
    match kind:
        case "image":
            patch = patch_of(cast("PreTrainedConfig", model.config))
            forms = [
                BatchForm(kind=kind, patch=patch, is_sized=is_sized) for is_sized in (True, False)
            ]
            if "interpolate_pos_encoding" in arguments:
                forms.insert(0, replace(forms[0], interpolates=True))
        case "seq2seq":
            forms = [
                BatchForm(kind=kind, has_mask=has_mask, has_target=has_target)
                for has_target in (True, False)
                for has_mask in masks
            ]
        case _:
            forms = [BatchForm(kind=kind, has_mask=has_mask) for has_mask in masks]
    why_not = ""
    for form in forms:
        why_not = _why_untrainable(form, model)
        if not why_not:
            return form
    raise UntrainableError(why_not)


def _why_untrainable(form: BatchForm, model: nn.Module) -> str:
    """Why eager PyTorch cannot train a model on batches of a form; empty where it can."""
    mixed = Sizes(2, LENGTHS[0], LENGTHS[1], PATCHES[1], PATCHES[0])
    for sizes in (
        EXAMPLE,
        SMALLEST,
        LARGEST,
        mixed,
        mixed._replace(height=PATCHES[0], width=PATCHES[1]),
    ):
        model.zero_grad()
        try:
            loss = form.loss(model, form.batch(sizes))
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - a batch that does not fit a model raises anything
            return f"{type(error).__name__}: {error}".splitlines()[0][:160]
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        if not all(bool(x.isfinite().all()) for x in (loss, *gradients)):
            return "its loss or a gradient is not finite"
    return ""
