"""A wide layer with a known batch behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.features.activations import Activation
from lit_recon.attacks.updates.features.layer import LayerGradient

Kind = Literal["random", "positive", "centered"]
Labels = Literal["distinct", "random", "same"]
Build = Callable[..., tuple[LayerGradient, Tensor, Tensor]]


@pytest.fixture
def build() -> Build:
    """Gradient of the summed cross-entropy by autograd, the true features `(n, d)` of unit norm, and the labels.

    `positive` features behave like pooled ones behind a ReLU, with cosines of about 0.75; `centered` are those minus
    the mean of others.
    """

    def make(
        activation: Activation,
        n: int = 4,
        d: int = 48,
        m: int = 1024,
        k: int = 10,
        kind: Kind = "centered",
        labels: Labels = "distinct",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        bias: float = 0.0,
        trained: int = 0,
    ) -> tuple[LayerGradient, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(m, d, generator=generator, dtype=dtype)
        # neurons that training has moved: neither independent of each other nor of unit variance
        weight[:trained] = 0.3 * weight[:trained] + torch.randn(d, generator=generator, dtype=dtype) / d**0.5
        head = torch.randn(k, m, generator=generator, dtype=dtype) / m
        biases = torch.full((m,), bias, dtype=dtype)
        features = _features(kind, n, d, generator, dtype)
        classes = {
            "distinct": torch.randperm(k, generator=generator)[:n],
            "random": torch.randint(k, (n,), generator=generator),
            "same": torch.zeros(n, dtype=torch.int64),
        }[labels]
        inputs = [value.clone().requires_grad_() for value in (weight, biases, head)]
        value = torch.relu if activation.name == "relu" else activation.value
        logits = value(features @ inputs[0].T + inputs[1]) @ inputs[2].T
        loss = torch.nn.functional.cross_entropy(logits, classes, reduction="sum")
        gradients = [gradient.double() for gradient in torch.autograd.grad(loss, inputs)]
        seen = LayerGradient(
            weight=weight.double(),
            bias=biases.double(),
            head_weight=head.double(),
            head_bias=torch.zeros(k, dtype=torch.float64),
            weight_gradient=gradients[0],
            bias_gradient=gradients[1],
            head_gradient=gradients[2],
            activation=activation,
            gaussian=torch.arange(m) >= trained,
            n_examples=n,
        )
        return seen, torch.nn.functional.normalize(features.double(), dim=1), classes

    return make


def _features(kind: Kind, n: int, d: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if kind == "random":
        return torch.nn.functional.normalize(torch.randn(n, d, generator=generator, dtype=dtype), dim=1)
    mean = torch.randn(d, generator=generator, dtype=dtype).abs()
    features = (mean + 0.7 * torch.randn(n, d, generator=generator, dtype=dtype)).relu()
    if kind == "centered":
        public = (mean + 0.7 * torch.randn(500, d, generator=generator, dtype=dtype)).relu()
        features = features - public.mean(dim=0)
    return torch.nn.functional.normalize(features, dim=1)
