"""Reconstructors that are neural networks (RecoNN), trained on shadow models."""

from __future__ import annotations

from lit_recon.attacks.released.networks.convolutional import ConvolutionalReconstructor
from lit_recon.attacks.released.networks.perceptrons import ComponentsReconstructor, NeuralReconstructor

__all__ = ["ComponentsReconstructor", "ConvolutionalReconstructor", "NeuralReconstructor"]
