"""The paper's reconstructor for MNIST: a perceptron that learns on shadow models what an image leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lit_recon._torchvision

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.attacks.released.base import FittedReconstructor, check_shadows
from lit_recon.attacks.released.kernel_ridge import unit_length
from lit_recon.attacks.released.networks.training import (
    Accelerator,
    FittedNetwork,
    PairBatches,
    PairTraining,
    Standardization,
    TrainedReconstructor,
    train_pairs,
)
from lit_recon.errors import ConfigError
from lit_recon.models.reconstructors import ReconstructorMLP


class ReconstructorModule(PairTraining):
    """Trains a reconstructor on mean absolute plus mean squared error.

    Args:
        network: features `(m, p)` to images `(m, c, h, w)`.
        lr: learning rate of RMSProp, whose average decays by 0.9 per step as in the authors' library.

    Source: Balle, Cherubin and Hayes 2022, table V, MNIST.
    """

    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__(network)
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        features, images = batch
        found = self.network(features)
        loss = F.l1_loss(found, images) + F.mse_loss(found, images)
        self.record(loss, len(images))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The paper's optimizer."""
        return torch.optim.RMSprop(self.network.parameters(), lr=self.lr, alpha=0.9, eps=1e-8)


@dataclass(frozen=True)
class NeuralReconstructor(TrainedReconstructor):
    """The paper's reconstructor: a perceptron on standardized weights.

    It returns no labels; the label is that of the shadow model whose difference has the most similar direction.

    Args:
        hidden: neurons of each hidden layer.
        lr: learning rate of RMSProp.
        batch_size: shadow models per step.
        epochs: over all shadow models.
        seed: of the network's weights and of the order of shadow models.
        accelerator: that trains it.

    Source: Balle, Cherubin and Hayes 2022, table V, MNIST.
    """

    hidden: Sequence[int] = (1000, 1000)
    lr: float = 1e-3
    batch_size: int = 128
    epochs: int = 100
    seed: int = 0
    accelerator: Accelerator = "auto"

    def __post_init__(self) -> None:
        if not self.hidden or min(*self.hidden, self.batch_size, self.epochs) < 1 or not self.lr > 0:
            raise ConfigError(
                "hidden, batch_size and epochs must be at least 1 and lr above 0; "
                f"got {list(self.hidden)}, {self.batch_size}, {self.epochs} and {self.lr}"
            )

    def train(
        self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int, state: Path | None
    ) -> FittedReconstructor:
        check_shadows(differences, images, labels, n_classes)
        standardization = Standardization.fitted(differences)
        features = standardization(differences)
        channels, height, width = images.shape[1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = ReconstructorMLP(features.shape[1], (channels, height, width), self.hidden)
        module = ReconstructorModule(network, self.lr)
        pairs = PairBatches(features, images, self.batch_size, self.seed)
        train_pairs(module, pairs, self.epochs, self.accelerator, state, repr(self))
        figures = {"training_loss": module.losses[-1]}
        return FittedNetwork(module.network, standardization, unit_length(differences), labels, figures)
