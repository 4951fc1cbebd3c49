"""Training of a generator: against a critic, as the decoder of an encoder, or both."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import lit_recon._torchvision

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn, optim

from lit_recon.data.seeding import seeded_generator
from lit_recon.errors import ConfigError
from lit_recon.models.generative.generator import ConvCritic, ConvGenerator
from lit_recon.training.module import ImageBatch

#: Steps between two looks at whether the loss is still finite; reading it makes a GPU wait.
_DIVERGENCE_EVERY = 50
#: Moment decays of Adam under which a critic and a generator follow each other.
_BETAS = (0.5, 0.99)


@dataclass(frozen=True)
class GeneratorRecipe:
    """What a generator is trained for.

    Args:
        adversarial: weight of the hinge loss against a critic with spectral norm; 0: no critic.
        pixel_noise: standard deviation, in pixels of [0, 1], of the Gaussian around a reconstruction, in the loss of a
            variational autoencoder whose decoder is the generator; None: no encoder.
        lr: learning rate of Adam.
        average: decay of the running mean of the weights, which is what is kept.

    Raises:
        ConfigError: a setting outside its range, or nothing to train for.

    Source: [Lim2017] for the hinge loss, [Kingma2014] for the autoencoder, [Larsen2016] for both together.
    """

    adversarial: float = 1.0
    pixel_noise: float | None = None
    lr: float = 1e-3
    average: float = 0.999

    def __post_init__(self) -> None:
        if self.adversarial < 0 or self.lr <= 0 or not 0 <= self.average < 1:
            raise ConfigError(
                "a generator needs adversarial of at least 0, lr above 0 and average in [0, 1); "
                f"got {self.adversarial:g}, {self.lr:g} and {self.average:g}"
            )
        if self.pixel_noise is not None and self.pixel_noise <= 0:
            raise ConfigError(f"pixel_noise must be above 0; got {self.pixel_noise:g}")
        if self.adversarial == 0 and self.pixel_noise is None:
            raise ConfigError(
                "a generator needs something to learn from: set adversarial above 0, or give pixel_noise, or both"
            )


class GeneratorModule(LightningModule):
    """One step trains the critic on real and generated images, the next the generator with its encoder.

    Logs `generator_loss`, and `critic_loss` and `reconstruction_rmse` where there are any.

    Args:
        generator: to be trained.
        recipe: what for.
        width: of critic and encoder at full resolution.
        seed: of their weights and of the latents, which are functions of seed and step.

    Attributes:
        averaged: the generator with the running mean of its weights.
    """

    def __init__(self, generator: ConvGenerator, recipe: GeneratorRecipe, width: int, seed: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.recipe, self.seed = generator, recipe, seed
        shape = generator.image_shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.critic = ConvCritic(shape, 1, width) if recipe.adversarial else None
            encodes = recipe.pixel_noise is not None
            self.encoder = ConvCritic(shape, 2 * generator.latent_size, width, lipschitz=False) if encodes else None
        self.averaged = copy.deepcopy(generator).requires_grad_(False)

    @property
    def n_optimizers(self) -> int:
        """How often Lightning's step counter advances in a batch."""
        return 1 if self.critic is None else 2

    def training_step(self, batch: ImageBatch, batch_idx: int) -> dict[str, Tensor]:
        """One step of every network; manual, as their losses differ."""
        real = batch[0]
        step = self.global_step // self.n_optimizers
        random = seeded_generator(self.seed, "latents", step)
        latents, noise = torch.randn(2, len(real), self.generator.latent_size, generator=random).to(real)
        optimizers = self.optimizers()
        first, *others = optimizers if isinstance(optimizers, list) else [optimizers]
        loss, figures = real.new_zeros(()), {}
        if self.critic is not None:
            fake = self.generator(latents)
            judged = critic_loss(self.critic(real), self.critic(fake.detach()))
            self._descend(others[0], judged)
            figures["critic_loss"] = judged.detach()
            self.critic.requires_grad_(False)
            loss = loss - self.recipe.adversarial * self.critic(fake).mean()
            self.critic.requires_grad_(True)
        if self.encoder is not None and self.recipe.pixel_noise is not None:
            mean, log_variance = self.encoder(real).chunk(2, dim=1)
            drawn = self.generator(mean + noise * (0.5 * log_variance).exp())
            loss = loss + autoencoder_loss(real, drawn, mean, log_variance, self.recipe.pixel_noise)
            figures["reconstruction_rmse"] = (drawn - real).detach().square().mean().sqrt()
        self._descend(first, loss)
        self._average(step)
        figures["generator_loss"] = loss.detach()
        self.log_dict(figures, on_step=True, on_epoch=True)
        if step % _DIVERGENCE_EVERY == 0 and not math.isfinite(loss.detach()):
            raise ConfigError(
                f"the training of the generator diverged at step {step}: lower lr, now {self.recipe.lr:g}"
            )
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> list[optim.Optimizer]:
        """Adam for generator and encoder, and one for the critic."""
        parameters = [*self.generator.parameters(), *(self.encoder.parameters() if self.encoder is not None else ())]
        optimizers: list[optim.Optimizer] = [optim.Adam(parameters, self.recipe.lr, _BETAS)]
        if self.critic is not None:
            optimizers.append(optim.Adam(self.critic.parameters(), self.recipe.lr, _BETAS))
        return optimizers

    def _descend(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    @torch.no_grad()
    def _average(self, step: int) -> None:
        """Early weights are forgotten faster: they are far from where training ends."""
        decay = min(self.recipe.average, (1 + step) / (10 + step))
        for mean, value in zip(self.averaged.parameters(), self.generator.parameters(), strict=True):
            mean.lerp_(value, 1 - decay)


def critic_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Hinge loss of a critic that should say above 1 of real images and below -1 of generated ones. [Lim2017], eq. 6.

    >>> float(critic_loss(torch.tensor([1.0, 3.0]), torch.tensor([0.0, -2.0])))
    0.5
    """
    return nn.functional.relu(1 - real).mean() + nn.functional.relu(1 + fake).mean()


def autoencoder_loss(images: Tensor, drawn: Tensor, mean: Tensor, log_variance: Tensor, noise: float) -> Tensor:
    """Negative evidence bound, up to a constant, divided by the number of pixels. [Kingma2014], eq. 10.

    Args:
        images: `(n, c, h, w)` in [0, 1].
        drawn: the decoder's images of latents drawn from the encoder's distribution.
        mean, log_variance: of that distribution, `(n, latent_size)`.
        noise: standard deviation of a pixel around its reconstruction.
    """
    error = (drawn - images).square().flatten(1).sum(1) / (2 * noise**2)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return (error + divergence).mean() / images[0].numel()
