"""Language models: from tokens `[n, length]` to logits of the next token, `[n, length, vocabulary]`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

SPREAD = 0.02
"""The standard deviation of a transformer's first weights."""


class RecurrentModel(nn.Module):
    """Stacked LSTM layers, whose state is zero at the start of every window."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        # torch warns of a dropout between layers where there is one layer
        between = dropout if layers > 1 else 0.0
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.decoder = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.dropout(self.embedding(tokens))
        # on CUDA any autocast runs an LSTM in float16, where gradients vanish unless the loss is scaled
        with torch.autocast(tokens.device.type, enabled=False):
            hidden, _ = self.recurrent(embedded.to(self.recurrent.weight_hh_l0.dtype))
        logits: Tensor = self.decoder(self.dropout(hidden))
        return logits


class Attention(nn.Module):
    """Each token looks at itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        split: Tensor = self.queries_keys_values(hidden).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind()
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.widening = nn.Linear(width, 4 * width)
        self.projection = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.projection(functional.gelu(self.widening(hidden)))
        return projected


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each normalised ahead and added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        refined: Tensor = hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return refined


class Transformer(nn.Module):
    """A decoder alone, with learned positions."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary, bias=False)
        self._initialise(SPREAD / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens are more than the context of {self.context}: cut them into windows")
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        logits: Tensor = self.decoder(self.norm(self.blocks(self.dropout(hidden))))
        return logits

    def _initialise(self, projection_spread: float) -> None:
        """Each block adds two projections to the sum that runs through: the more blocks, the smaller they start."""
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=projection_spread if name.endswith("projection") else SPREAD)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


def lstm(vocabulary: int, width: int = 650, layers: int = 3, dropout: float = 0.5) -> nn.Module:
    """An LSTM with dropout between its layers, ahead of the first and after the last (Zaremba et al., 2014)."""
    return RecurrentModel(vocabulary, width, layers, dropout)


def gpt(
    vocabulary: int, context: int = 256, width: int = 384, layers: int = 6, heads: int = 6, dropout: float = 0.1
) -> nn.Module:
    """A transformer like GPT-2 (Radford et al., 2019), with a decoder of its own weights."""
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, not {width} for {heads} heads")
    return Transformer(vocabulary, context, width, layers, heads, dropout)
