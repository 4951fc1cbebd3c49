"""A network that learns on shadow models what an image leaves behind in a model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import lit_recon._torchvision

import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.data.seeding import seeded_generator
from lit_recon.errors import ConfigError
from lit_recon.informed.kernel_ridge import unit_length
from lit_recon.informed.reconstructor import FittedReconstructor, ReconstructedTargets, Reconstructor, check_shadows
from lit_recon.informed.standardization import Standardization
from lit_recon.models.reconstructor import ReconstructorMLP
from lit_recon.modules.progress import TrainingProgress


class PairBatches:
    """Features and images in batches; the order is a function of seed and epoch alone."""

    def __init__(self, features: Tensor, images: Tensor, batch_size: int, seed: int) -> None:
        self.features, self.images, self.batch_size, self.seed = features, images, batch_size, seed
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self.features) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.features), generator=seeded_generator(self.seed, "pairs", self.epoch))
        self.epoch += 1
        for chosen in order.split(self.batch_size):
            yield self.features[chosen], self.images[chosen]


class ReconstructorModule(LightningModule):
    """Trains a reconstructor on mean absolute plus mean squared error.

    Args:
        network: features `(m, p)` to images `(m, c, h, w)`.
        lr: learning rate of RMSProp, whose average decays by 0.9 per step as in the authors' library.

    Source: Balle, Cherubin and Hayes 2022, table V, MNIST.
    """

    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__()
        self.network, self.lr = network, lr
        self.losses: list[float] = []
        self._sum = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        features, images = batch
        found = self.network(features)
        loss = F.l1_loss(found, images) + F.mse_loss(found, images)
        self._sum += float(loss.detach()) * len(images)
        return loss

    def on_train_epoch_end(self) -> None:
        """Keep the epoch's loss, summed over its images."""
        self.losses.append(self._sum)
        self._sum = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The paper's optimizer."""
        return torch.optim.RMSprop(self.network.parameters(), lr=self.lr, alpha=0.9, eps=1e-8)


@dataclass(frozen=True)
class NeuralReconstructor(Reconstructor):
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
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"

    def __post_init__(self) -> None:
        if not self.hidden or min(*self.hidden, self.batch_size, self.epochs) < 1 or not self.lr > 0:
            raise ConfigError(
                "hidden, batch_size and epochs must be at least 1 and lr above 0; "
                f"got {list(self.hidden)}, {self.batch_size}, {self.epochs} and {self.lr}"
            )

    def fit(self, differences: Tensor, images: Tensor, labels: Tensor, n_classes: int) -> FittedReconstructor:
        check_shadows(differences, images, labels, n_classes)
        standardization = Standardization.fitted(differences)
        features = standardization(differences)
        channels, height, width = images.shape[1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = ReconstructorMLP(features.shape[1], (channels, height, width), self.hidden)
        module = ReconstructorModule(network, self.lr)
        trainer = Trainer(
            accelerator=self.accelerator,
            devices=1,
            plugins=[LightningEnvironment()],  # this process alone, also where torchrun started several
            logger=False,
            callbacks=[TrainingProgress()],
            max_epochs=self.epochs,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
        )
        with torch.enable_grad():
            trainer.fit(module, PairBatches(features, images, self.batch_size, self.seed))
        module.network.cpu().eval()
        loss = module.losses[-1] / len(images)
        return _FittedNeuralReconstructor(module.network, standardization, unit_length(differences), labels, loss)


@dataclass(frozen=True, eq=False)
class _FittedNeuralReconstructor(FittedReconstructor):
    network: nn.Module
    standardization: Standardization
    directions: Tensor
    labels: Tensor
    loss: float

    @property
    def facts(self) -> dict[str, float]:
        """The last epoch's `training_loss`, mean absolute plus mean squared error."""
        return {"training_loss": self.loss}

    @torch.no_grad()
    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        images = self.network(self.standardization(differences))
        similarity, nearest = (unit_length(differences) @ self.directions.T).max(dim=1)
        return ReconstructedTargets(images, self.labels[nearest], (1 - similarity).clamp(min=0).double())
