"""How good a generator is, without a score of another network's taste: distances between images, in pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_recon.data.dataset import ImageSet
from lit_recon.data.seeding import seeded_generator
from lit_recon.data.victims import sample_victims
from lit_recon.metrics.baselines import MeanImage, NearestPublic
from lit_recon.metrics.fidelity import pairwise_mse, rmse
from lit_recon.models.generator import ConvGenerator, draw_samples

#: Learning rate of the search for latents, and the scale of its start: near the mean, from where all are near.
_LR, _START = 0.05, 0.3


@dataclass(frozen=True)
class Quality:
    """Figures, and the images behind them.

    Attributes:
        figures: means over samples or held-out images, RMSE of pixels in [0, 1]:
            `sample_nearest_rmse`, of samples to the nearest training image, beside `held_out_nearest_rmse`, that of
            real images which the generator has not seen: far less would be memorisation, far more no images at all;
            `sample_spread_rmse`, between two samples, beside `held_out_spread_rmse`: far less is a collapse;
            `search_rmse`, of held-out images to what the generator can draw of them, beside
            `search_mean_image_rmse`: the error that a search for latents alone cannot go below.
        images: `(n, c, h, w)` by name: `samples`, `sample_nearest`, `held_out`, `held_out_nearest`, `found`.
    """

    figures: dict[str, float]
    images: dict[str, Tensor]


def measure_quality(
    generator: ConvGenerator, train: ImageSet, test: ImageSet, n: int, search_steps: int, seed: int
) -> Quality:
    """Quality by `n` samples and `n` held-out images.

    Args:
        generator: on the CPU.
        train: what it was trained on.
        test: images that it has not seen; a stratified sample is taken.
        n: at least 2, at most the number of test images.
        search_steps: iterations of the search for latents.
        seed: of samples, of the choice and of the search.
    """
    samples = draw_samples(generator, generator.latent_size, n, seeded_generator(seed, "samples"))
    held_out = test.pixels(sample_victims(test.labels, n, seed))
    found = search_latents(generator, held_out, search_steps, seed)
    public = NearestPublic(train.images)
    near_samples, near_held_out = public.query(samples)[1], public.query(held_out)[1]
    mean = MeanImage.from_images(train.images).query(held_out)
    figures = {
        "sample_nearest_rmse": _mean(rmse(samples, near_samples)),
        "held_out_nearest_rmse": _mean(rmse(held_out, near_held_out)),
        "sample_spread_rmse": _spread(samples),
        "held_out_spread_rmse": _spread(held_out),
        "search_rmse": _mean(rmse(found, held_out)),
        "search_mean_image_rmse": _mean(rmse(mean, held_out)),
    }
    images = {
        "samples": samples,
        "sample_nearest": near_samples,
        "held_out": held_out,
        "held_out_nearest": near_held_out,
        "found": found,
    }
    return Quality(figures, images)


def search_latents(generator: ConvGenerator, images: Tensor, steps: int, seed: int) -> Tensor:
    """What a generator can draw of images `(n, c, h, w)`: the least squared error over latents, by Adam."""
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


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _spread(images: Tensor) -> float:
    """Mean RMSE between two different images."""
    n = len(images)
    between = pairwise_mse(images.double(), images.double()).clamp_min(0).sqrt()
    return float(between.fill_diagonal_(0).sum() / (n * (n - 1)))
