"""The paper's reconstructor for CIFAR-10: transposed convolutions with a perceptual and an adversarial loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn, optim

from lit_recon.attacks.released.base import Background
from lit_recon.attacks.released.networks.training import PairTraining, TrainedReconstructor
from lit_recon.errors import ConfigError
from lit_recon.metrics.perceptual import Lpips, LpipsNetwork, Unavailable, load_lpips
from lit_recon.models.reconstructors import PatchDiscriminator, ReconstructorCNN

#: Least side of an image in pixels: the discriminator's convolutions reduce smaller ones to nothing.
_SMALLEST = 24


@dataclass(frozen=True)
class PerceptualLoss:
    """LPIPS as a part of the training loss.

    Args:
        network: backbone; `none` leaves it out.
        weights: file of its ImageNet weights; default: the cache of torch.hub.
        download: fetch the weights if they are not in the cache.
        weight: of the distance in the sum with the errors of pixels.
    """

    network: LpipsNetwork | Literal["none"] = "vgg"
    weights: Path | None = None
    download: bool = True
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ConfigError(f"weight must be above 0; got {self.weight}: leave LPIPS out by network: none")

    def loaded(self) -> Lpips | Unavailable:
        """The distance, or why it is not available."""
        if self.network == "none":
            return Unavailable("switched off by perceptual.network")
        return load_lpips(self.network, self.weights, self.download)


class AdversarialReconstructorModule(PairTraining):
    """One step of the discriminator on real and reconstructed images, then one of the reconstructor.

    The reconstructor's loss is mean absolute plus mean squared error, LPIPS times a weight, and the squared distance of
    the discriminator's scores from 1. LPIPS and the discriminator may be left out.

    Source: [Balle2022], section IV-B and table V; Mao et al. 2017 for the squared distances.
    """

    def __init__(
        self,
        network: nn.Module,
        discriminator: nn.Module | None,
        lpips: tuple[Lpips, float] | None,
        adversarial: float = 1.0,
        lr: float = 1e-4,
        weight_decay: float = 1e-4,
        discriminator_lr: float = 1e-5,
    ) -> None:
        super().__init__(network, lr)
        self.automatic_optimization = False  # the losses of the two networks differ
        self.discriminator, self.lpips, self.adversarial = discriminator, lpips, adversarial
        self.weight_decay, self.discriminator_lr = weight_decay, discriminator_lr
        self.n_optimizers = 1 if discriminator is None else 2

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        features, images = batch
        optimizers = self.optimizers()
        first, *others = optimizers if isinstance(optimizers, list) else [optimizers]
        found = self.network(features)
        loss = self.loss(found, images)
        self.record(loss, len(images))
        if self.discriminator is not None:
            judged = discriminator_loss(self.discriminator(images), self.discriminator(found.detach()))
            self._descend(others[0], judged)
            self.discriminator.requires_grad_(False)
            loss = loss + self.adversarial * (self.discriminator(found) - 1).square().mean()
            self.discriminator.requires_grad_(True)
        if self.lpips is not None:
            distance, weight = self.lpips
            loss = loss + weight * distance.loss(found, images).mean()
        self._descend(first, loss)
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> list[optim.Optimizer]:
        both: list[optim.Optimizer] = [optim.Adam(self.network.parameters(), self.lr, weight_decay=self.weight_decay)]
        if self.discriminator is not None:
            both.append(optim.Adam(self.discriminator.parameters(), self.discriminator_lr))
        return both

    def _descend(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def discriminator_loss(real: Tensor, found: Tensor) -> Tensor:
    """Least-squares loss of scores that should be 1 for real images and 0 for others. Mao et al. 2017, eq. 2.

    >>> import torch
    >>> float(discriminator_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])))
    0.5
    """
    return ((real - 1).square().mean() + found.square().mean()) / 2


@dataclass
class ConvolutionalReconstructor(TrainedReconstructor):
    """The reconstructor of [Balle2022], section IV-B, for color images: transposed convolutions.

    Args:
        perceptual: LPIPS in the loss; if its weights are not available, it is left out and a note says so.
        adversarial: weight of the adversarial loss; 0: no discriminator. The paper prints no weights.
        lr: learning rate of Adam.
        weight_decay: L2 penalty.
        discriminator_lr: learning rate of the discriminator's Adam.
        batch_size, epochs, seed, accelerator: see `TrainedReconstructor`.

    Source: tables V, VII and VIII.
    """

    perceptual: PerceptualLoss = PerceptualLoss()
    adversarial: float = 1.0
    lr: float = 1e-4
    weight_decay: float = 1e-4
    discriminator_lr: float = 1e-5
    epochs: int = field(default=1000, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.lr, self.discriminator_lr) <= 0 or min(self.adversarial, self.weight_decay) < 0:
            raise ConfigError(
                f"adversarial and weight_decay must be at least 0, lr and discriminator_lr above 0; got {self}"
            )

    def prepare(self, background: Background) -> None:
        super().prepare(background)
        if background.sizes is not None:
            self._check_images(background.sizes.image_shape)

    def training(self, n_features: int, image_shape: tuple[int, int, int]) -> PairTraining:
        self._check_images(image_shape)
        network = ReconstructorCNN(n_features, image_shape)
        discriminator = PatchDiscriminator(image_shape[0]) if self.adversarial else None
        self.lpips = self.perceptual.loaded()  # may draw random numbers, too
        return AdversarialReconstructorModule(
            network,
            discriminator,
            None if isinstance(self.lpips, Unavailable) else (self.lpips, self.perceptual.weight),
            self.adversarial,
            self.lr,
            self.weight_decay,
            self.discriminator_lr,
        )

    def _check_images(self, image_shape: tuple[int, int, int]) -> None:
        _, height, width = image_shape
        if height % 4 or width % 4:
            raise ConfigError(
                "ConvolutionalReconstructor needs images whose sides are multiples of 4 pixels; got "
                f"{height} x {width}: crop or scale the images, or take NeuralReconstructor"
            )
        if self.adversarial and min(height, width) < _SMALLEST:
            raise ConfigError(
                f"the discriminator needs images of at least {_SMALLEST} x {_SMALLEST} pixels; got {height} x {width}: "
                "set adversarial to 0"
            )

    @property
    def identity(self) -> str:
        """A training with LPIPS is not resumed on a machine where LPIPS is not available."""
        return f"{self!r} {'without' if isinstance(self.lpips, Unavailable) else 'with'} LPIPS"

    @property
    def notes(self) -> tuple[str, ...]:
        if isinstance(self.lpips, Unavailable):
            return (f"The reconstructor was trained without LPIPS: {self.lpips.reason}.",)
        return ()
