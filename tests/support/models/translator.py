"""torch's own transformer layers and an LSTM over them; inputs in a nested dict, a list and a named tuple."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
VOCABULARY = 32


class Texts(NamedTuple):
    tokens: Tensor
    is_padding: Tensor


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        decoder = nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(decoder, 2, nn.LayerNorm(WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Texts, targets: dict[str, list[Tensor]]) -> Tensor:
        (tokens,) = targets["tokens"]
        memory = self.encoder(self.tokens(source.tokens), src_key_padding_mask=source.is_padding)
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.decoder(self.tokens(tokens), memory, causal, tgt_is_causal=True)
        logits = self.head(self.lstm(x)[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def model() -> nn.Module:
    return Translator()


def batch() -> dict[str, object]:
    tokens = torch.arange(2 * 6).view(2, 6)
    source = Texts(tokens, tokens == 11)
    return {"source": source, "targets": {"tokens": [tokens.flip(1)]}}
