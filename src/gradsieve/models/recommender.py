"""Neural collaborative filtering (He et al., 2017): from pairs of user and item, `[..., 2]`, to logits, `[...]`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _embedding(count: int, width: int) -> nn.Embedding:
    layer = nn.Embedding(count, width)
    nn.init.normal_(layer.weight, std=0.01)
    return layer


class NeuralFiltering(nn.Module):
    """Matrix factorisation beside a tower of linear layers, each with embeddings of its own."""

    def __init__(self, users: int, items: int, factors: int) -> None:
        super().__init__()
        self.user_factors = _embedding(users, factors)
        self.item_factors = _embedding(items, factors)
        self.user_features = _embedding(users, factors)
        self.item_features = _embedding(items, factors)
        self.tower = nn.Sequential(
            nn.Linear(2 * factors, factors),
            nn.ReLU(inplace=True),
            nn.Linear(factors, factors // 2),
            nn.ReLU(inplace=True),
        )
        self.joint = nn.Linear(factors + factors // 2, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        users, items = pairs.unbind(-1)
        product = self.user_factors(users) * self.item_factors(items)
        features = torch.cat([self.user_features(users), self.item_features(items)], dim=-1)
        logits: Tensor = self.joint(torch.cat([product, self.tower(features)], dim=-1))
        return logits.squeeze(-1)


def ncf(users: int, items: int, factors: int = 32) -> nn.Module:
    """The tower halves from `2 * factors`: 64, 32, 16."""
    if factors < 2:
        raise ValueError(f"factors must be at least 2, not {factors}")
    return NeuralFiltering(users, items, factors)
