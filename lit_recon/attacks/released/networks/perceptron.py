"""The paper's reconstructor for MNIST: a perceptron on standardized weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lit_recon._torchvision

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.attacks.released.networks.training import PairTraining, Standardization, TrainedReconstructor
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


@dataclass
class NeuralReconstructor(TrainedReconstructor):
    """The paper's reconstructor: a perceptron on standardized weights.

    Args:
        hidden: neurons of each hidden layer.
        lr: learning rate of RMSProp.
        batch_size, epochs, seed, accelerator: see `TrainedReconstructor`.

    Source: Balle, Cherubin and Hayes 2022, table V, MNIST.
    """

    hidden: Sequence[int] = (1000, 1000)
    lr: float = 1e-3

    def __post_init__(self) -> None:
        if not self.hidden or min(*self.hidden, self.batch_size, self.epochs) < 1 or not self.lr > 0:
            raise ConfigError(
                "hidden, batch_size and epochs must be at least 1 and lr above 0; "
                f"got {list(self.hidden)}, {self.batch_size}, {self.epochs} and {self.lr}"
            )

    def encoder(self, differences: Tensor) -> Callable[[Tensor], Tensor]:
        return Standardization.fitted(differences)

    def training(self, n_features: int, image_shape: tuple[int, int, int]) -> PairTraining:
        return ReconstructorModule(ReconstructorMLP(n_features, image_shape, self.hidden), self.lr)
