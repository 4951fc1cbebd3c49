"""Training of a generator: against a critic, as the decoder of an encoder, or both."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lit_recon._torchvision

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn, optim

from lit_recon.data.dataset import ImageSet, fingerprints, seeded_generator
from lit_recon.data.splits import sample_victims
from lit_recon.errors import ConfigError
from lit_recon.metrics.baselines import MeanImage, NearestPublic
from lit_recon.metrics.fidelity import pairwise_mse, rmse
from lit_recon.models.generative.generator import (
    ConvCritic,
    ConvGenerator,
    GeneratorCheckpoint,
    draw_samples,
    load_generator,
    save_generator,
)
from lit_recon.modules.data import BackboneDataModule
from lit_recon.training.module import LAST_CHECKPOINT, ImageBatch, LastCheckpoint, state_to_resume
from lit_recon.training.progress import TrainingProgress
from lit_recon.training.trainer import TrainerSettings, build_trainer

#: Inside a run folder.
GENERATOR_FILE = "generator.safetensors"
#: Minutes between two saves within an epoch.
_SAVE_EVERY = 1.0
#: Steps between two looks at whether the loss is still finite; reading it makes a GPU wait.
_DIVERGENCE_EVERY = 50
#: Moment decays of Adam under which a critic and a generator follow each other.
_BETAS = (0.5, 0.99)
#: Learning rate of the search for latents, and the scale of its start: near the mean, from where all are near.
_LR, _START = 0.05, 0.3


@dataclass(frozen=True)
class GeneratorRecipe:
    """Losses and optimizer of a generator.

    Args:
        adversarial: weight of the hinge loss against a critic with spectral norm; 0: no critic.
        pixel_noise: standard deviation, in pixels of [0, 1], of the Gaussian around a reconstruction, in the loss of a
            variational autoencoder whose decoder is the generator; None: no encoder.
        lr: learning rate of Adam.
        average: decay of the running mean of the weights, which is saved.

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
            raise ConfigError("a generator needs a loss: set adversarial above 0, or give pixel_noise, or both")


class GeneratorModule(LightningModule):
    """Every batch trains the critic on real and generated images, then the generator with its encoder.

    Logs `generator_loss`, and `critic_loss` and `reconstruction_rmse` where there are any. `averaged` is the generator
    with the running mean of its weights. `width` is that of critic and encoder at full resolution; their weights are
    drawn from `seed`, and latents are functions of seed and step.
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
        self.n_optimizers = 1 if self.critic is None else 2  # so often Lightning's step counter advances in a batch
        self.averaged = copy.deepcopy(generator).requires_grad_(False)

    def training_step(self, batch: ImageBatch, batch_idx: int) -> dict[str, Tensor]:
        """One step of every network; manual, as their losses differ."""
        real = batch[0]
        step = self.global_step // self.n_optimizers
        random = seeded_generator(self.seed, "latents", step)
        latents, noise = torch.randn(2, len(real), self.generator.latent_size, generator=random).to(real)
        optimizers = self.optimizers()
        first, *others = optimizers if isinstance(optimizers, list) else [optimizers]
        loss, metrics = real.new_zeros(()), {}
        if self.critic is not None:
            fake = self.generator(latents)
            judged = critic_loss(self.critic(real), self.critic(fake.detach()))
            self._descend(others[0], judged)
            metrics["critic_loss"] = judged.detach()
            self.critic.requires_grad_(False)
            loss = loss - self.recipe.adversarial * self.critic(fake).mean()
            self.critic.requires_grad_(True)
        if self.encoder is not None and self.recipe.pixel_noise is not None:
            mean, log_variance = self.encoder(real).chunk(2, dim=1)
            drawn = self.generator(mean + noise * (0.5 * log_variance).exp())
            loss = loss + autoencoder_loss(real, drawn, mean, log_variance, self.recipe.pixel_noise)
            metrics["reconstruction_rmse"] = (drawn - real).detach().square().mean().sqrt()
        self._descend(first, loss)
        self._average(step)
        metrics["generator_loss"] = loss.detach()
        self.log_dict(metrics, on_step=True, on_epoch=True)
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
    """Hinge loss of a critic with margins 1 for real and -1 for generated images. [Lim2017], eq. 6.

    >>> float(critic_loss(torch.tensor([1.0, 3.0]), torch.tensor([0.0, -2.0])))
    0.5
    """
    return nn.functional.relu(1 - real).mean() + nn.functional.relu(1 + fake).mean()


def autoencoder_loss(images: Tensor, drawn: Tensor, mean: Tensor, log_variance: Tensor, noise: float) -> Tensor:
    """Negative evidence bound, up to a constant, divided by the number of pixels. [Kingma2014], eq. 10.

    `mean` and `log_variance` `(n, latent_size)` are those of the encoder's distribution, `drawn` the decoder's images
    `(n, c, h, w)` of latents drawn from it, and `noise` the standard deviation of a pixel around its reconstruction.
    """
    error = (drawn - images).square().flatten(1).sum(1) / (2 * noise**2)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return (error + divergence).mean() / images[0].numel()


def check_alone(processes: int) -> None:
    """Refuse more than one process by a ConfigError."""
    if processes > 1:
        raise ConfigError(
            f"a generator is trained by one process, as its networks are trained alternately; got {processes}: "
            "start it without torchrun and with trainer.devices: 1"
        )


def train_generator(
    module: GeneratorModule,
    data: BackboneDataModule,
    epochs: int,
    settings: TrainerSettings,
    loggers: Sequence[Logger],
    out: Path,
) -> GeneratorCheckpoint:
    """Train, or resume a killed training, and write the averaged generator to `generator.safetensors` in `out`.

    Raises:
        ConfigError: more than one process, a killed training on other data, or the training diverged.
        CorruptFileError: the state of a killed training cannot be read.
    """
    exported, last = out / GENERATOR_FILE, out / LAST_CHECKPOINT
    resumed = state_to_resume(last)
    last.parent.mkdir(parents=True, exist_ok=True)
    callbacks = [LastCheckpoint(last, _SAVE_EVERY, data.split_hash), TrainingProgress(module.n_optimizers)]
    trainer = build_trainer(settings, loggers, callbacks, max_epochs=epochs)
    check_alone(trainer.world_size)
    trainer.fit(module, data.train_dataloader(), ckpt_path=resumed, weights_only=True)
    averaged, seen = module.averaged.cpu().eval(), fingerprints(data.train)
    if not all(value.isfinite().all() for value in averaged.parameters()):  # since the last look at the loss
        raise ConfigError(f"the training of the generator diverged: lower lr, now {module.recipe.lr:g}")
    save_generator(
        exported, GeneratorCheckpoint(averaged, data.train.name, data.split_hash, seen, trainer.current_epoch)
    )
    return load_generator(exported)


def measure_quality(
    generator: ConvGenerator, train: ImageSet, test: ImageSet, n: int, search_steps: int, seed: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """RMSEs of `n` samples and `n` unseen test images, at least 2, in pixels of [0, 1], and the images `(n, c, h, w)`.

    `sample_nearest_rmse`, of samples to the nearest training image, much below that of real images means memorization,
    much above it unrealistic samples. `sample_spread_rmse`, between two samples, much below that of real images means
    mode collapse. `search_rmse` is the best found by one search of `search_steps` steps; an attack with more steps or
    restarts may do somewhat better.
    """
    samples = draw_samples(generator, generator.latent_size, n, seeded_generator(seed, "samples"))
    held_out = test.pixels(sample_victims(test.labels, n, seed))
    found = search_latents(generator, held_out, search_steps, seed)
    public, mean = NearestPublic(train.images), MeanImage.from_images(train.images).query(held_out)
    images = {
        "samples": samples,
        "sample_nearest": public.query(samples)[1],
        "held_out": held_out,
        "held_out_nearest": public.query(held_out)[1],
        "found": found,
    }
    metrics = {
        "sample_nearest_rmse": rmse(samples, images["sample_nearest"]).mean().item(),
        "held_out_nearest_rmse": rmse(held_out, images["held_out_nearest"]).mean().item(),
        "sample_spread_rmse": _spread(samples),
        "held_out_spread_rmse": _spread(held_out),
        "search_rmse": rmse(found, held_out).mean().item(),
        "search_mean_image_rmse": rmse(mean, held_out).mean().item(),
    }
    return metrics, images


def search_latents(generator: ConvGenerator, images: Tensor, steps: int, seed: int) -> Tensor:
    """The generator's reconstructions of images `(n, c, h, w)` by one search over latents: squared error, by Adam."""
    random = seeded_generator(seed, "search")
    latents = _START * torch.randn(len(images), generator.latent_size, generator=random)
    frozen = {name: value.detach() for name, value in generator.named_parameters()}
    optimizer = torch.optim.Adam([latents.requires_grad_()], lr=_LR)
    for _ in range(steps):
        optimizer.zero_grad()
        drawn = torch.func.functional_call(generator, frozen, (latents,))
        nn.functional.mse_loss(drawn, images, reduction="sum").backward()
        optimizer.step()
    with torch.no_grad():
        found: Tensor = generator(latents)
    return found


def _spread(images: Tensor) -> float:
    """Mean RMSE between two different images."""
    n = len(images)
    between = pairwise_mse(images.double(), images.double()).clamp_min(0).sqrt()
    return float(between.fill_diagonal_(0).sum() / (n * (n - 1)))
