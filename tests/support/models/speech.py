"""Hugging Face's Whisper, tiny, on audio of any length: its encoder has as many positions as the audio needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoder

MELS, LONGEST, MOST_WORDS, MOST_ROWS, VOCABULARY = 8, 40, 12, 3, 64
Speech = dict[str, Tensor]


class ShortAudio(WhisperEncoder):  # type: ignore[no-untyped-call]
    """Whisper's encoder, which refuses audio that is not padded to 30 seconds, without that refusal."""

    def forward(self, input_features: Tensor, **_: object) -> BaseModelOutput:
        """Encode features of shape (rows, mels, frames)."""
        x = nn.functional.gelu(self.conv1(input_features))
        x = nn.functional.gelu(self.conv2(x)).transpose(1, 2)
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, None)
        return BaseModelOutput(last_hidden_state=self.layer_norm(x))


def model() -> nn.Module:
    """Make the model."""
    settings = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "num_mel_bins": MELS,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "max_source_positions": LONGEST // 2,
        "max_target_positions": MOST_WORDS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    config = WhisperConfig.from_dict(settings)
    whisper = WhisperForConditionalGeneration(config)
    whisper.model.encoder = ShortAudio(config)
    return whisper


def speech(rows: int, frames: int, words: int, seed: int = 0) -> Speech:
    """Draw features and words."""
    chance = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(rows, MELS, frames, generator=chance),
        "labels": torch.randint(VOCABULARY, (rows, words), generator=chance),
    }


def batch() -> Speech:
    """Return an example; other batches have other sizes."""
    return speech(2, 21, 5)


def shapes() -> dict[str, tuple[int | Dim, ...]]:
    """Say that rows, frames and words differ."""
    rows, words = Dim("rows", max=MOST_ROWS), Dim("words", min=2, max=MOST_WORDS)
    frames = Dim("frames", min=3, max=LONGEST)
    return {"input_features": (rows, MELS, frames), "labels": (rows, words)}


def batches(rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Speech]:
    """Yield batches of random sizes."""
    step = start_step
    while True:
        here = (seed * 1009 + step) * world_size + rank
        chance = torch.Generator().manual_seed(here)
        most = torch.tensor([MOST_ROWS, LONGEST - 2, MOST_WORDS - 1])
        rows, frames, words = (torch.rand(3, generator=chance) * most).long().tolist()
        yield speech(1 + rows, 3 + frames, 2 + words, here)
        step += 1
