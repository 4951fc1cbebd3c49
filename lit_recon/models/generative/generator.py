"""Small image generators, and the critic and encoder networks that train them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_recon.errors import ConfigError, CorruptFileError, ShapeError
from lit_recon.io.tensors import NoLarger, TensorFormat
from lit_recon.models.classifiers.backbone import Argument
from lit_recon.models.generative.unet import n_levels
from lit_recon.models.layers import checked_shape, norm_layer

#: Widths double with every halving of the resolution, up to this multiple of the width at full resolution.
_LARGEST_MULTIPLIER = 4


def level_widths(image_shape: Sequence[int], width: int) -> list[int]:
    """Channels at every resolution, the finest first.

    >>> level_widths((3, 32, 32), 16), level_widths((1, 8, 8), 16)
    ([16, 32, 64, 64], [16, 32])
    """
    return [width * min(2**level, _LARGEST_MULTIPLIER) for level in range(n_levels(min(image_shape[1:])))]


class ConvGenerator(nn.Module):
    """Images in [0, 1] from latents: a DCGAN with GroupNorm, so that an image depends on its own latent alone.

    Maps begin with sides of 4 to 7 pixels; images whose sides are no multiple are drawn larger and cropped.

    Args:
        image_shape: `(c, h, w)`.
        latent_size: length of a latent, standard normal in training.
        width: channels at full resolution before the last layer; up to four times as many at lower ones.

    Source: [Radford2016] for the layout, [Wu2018] for the norm.
    """

    def __init__(self, image_shape: Sequence[int], latent_size: int = 128, width: int = 32) -> None:
        super().__init__()
        channels, rows, columns = checked_shape(image_shape)
        if latent_size < 1 or width < 1:
            raise ConfigError(f"ConvGenerator needs latent_size and width of at least 1; got {latent_size} and {width}")
        self.image_shape, self.latent_size = (channels, rows, columns), latent_size
        self.arguments: dict[str, Argument] = {
            "image_shape": [*image_shape],
            "latent_size": latent_size,
            "width": width,
        }
        widths = level_widths(image_shape, width)[::-1]
        step = 2 ** (len(widths) - 1)
        coarse = (widths[0], -(-rows // step), -(-columns // step))
        self.coarse = nn.Linear(latent_size, prod(coarse))
        self.unflatten = nn.Unflatten(1, coarse)
        layers: list[nn.Module] = [norm_layer("group", widths[0]), nn.SiLU()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), norm_layer("group", outputs), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], channels, 3, padding=1), nn.Sigmoid())

    def forward(self, latents: Tensor) -> Tensor:
        """Images `(n, c, h, w)` in [0, 1] of latents `(n, latent_size)`; a ShapeError for another shape."""
        if latents.dim() != 2 or latents.shape[1] != self.latent_size:
            raise ShapeError(f"latents must be (n, {self.latent_size}); got {tuple(latents.shape)}")
        canvas: Tensor = self.layers(self.unflatten(self.coarse(latents)))
        return canvas[..., : self.image_shape[1], : self.image_shape[2]]


class ConvCritic(nn.Module):
    """Convolutional network with `n_outputs` numbers per image: `ConvGenerator` reversed, without norms.

    A critic with one output and spectral norm; an encoder with two outputs per latent dimension, without.

    Args:
        width: channels at full resolution.
        lipschitz: spectral norm on every layer, which bounds a critic's Lipschitz constant.

    Source: [Radford2016]; [Miyato2018] for spectral norm.
    """

    def __init__(self, image_shape: Sequence[int], n_outputs: int, width: int = 32, lipschitz: bool = True) -> None:
        super().__init__()
        channels, rows, columns = checked_shape(image_shape)

        def layer(made: nn.Module) -> nn.Module:
            return spectral_norm(made) if lipschitz else made

        widths = level_widths(image_shape, width)
        layers: list[nn.Module] = [layer(nn.Conv2d(channels, widths[0], 3, padding=1)), nn.LeakyReLU(0.2)]
        for inputs, outputs in pairwise(widths):
            layers += [layer(nn.Conv2d(inputs, outputs, 4, 2, 1)), nn.LeakyReLU(0.2)]
            rows, columns = rows // 2, columns // 2
        self.layers = nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear(widths[-1] * rows * columns, n_outputs)))

    def forward(self, images: Tensor) -> Tensor:
        """`(n, n_outputs)` of images `(n, c, h, w)` in [0, 1]."""
        outputs: Tensor = self.layers(2 * images - 1)
        return outputs


@torch.no_grad()
def draw_samples(generator: nn.Module, latent_size: int, n: int, random: torch.Generator, chunk: int = 256) -> Tensor:
    """`n` images `(n, c, h, w)` of standard normal latents drawn from `random`, on the CPU."""
    latents = torch.randn(n, latent_size, generator=random)
    device = next(generator.parameters()).device
    return torch.cat([generator(part.to(device)).cpu() for part in latents.split(chunk)])


FORMAT = TensorFormat(
    "lit_recon.generator",
    "generator",
    "train one with `python train.py generator --config configs/train/generator_digits.yaml`, or give the class that "
    "the file belongs to as `network`",
)
#: Prefix of the generator's tensors in the file, and the name of the tensor of training fingerprints.
_PREFIX, _SEEN = "generator.", "seen"


@dataclass(frozen=True)
class GeneratorCheckpoint:
    """A generator and a record of its training data, to check that victims were not in it.

    Attributes:
        data: name of the images it was trained on.
        split_hash: of the training and test split of these images.
        seen: fingerprints `(N,)`, int64, of the images it was trained on.
        epoch: full epochs trained.
    """

    generator: ConvGenerator
    data: str
    split_hash: str
    seen: Tensor
    epoch: int


def save_generator(path: Path, checkpoint: GeneratorCheckpoint) -> None:
    """Write `checkpoint` to `path` atomically; a missing folder is created."""
    header = {
        "arguments": checkpoint.generator.arguments,
        "data": checkpoint.data,
        "split_hash": checkpoint.split_hash,
        "epoch": checkpoint.epoch,
    }
    state = {_PREFIX + name: value for name, value in checkpoint.generator.state_dict().items()}
    FORMAT.write(path, {**state, _SEEN: checkpoint.seen}, header)


def load_generator(path: Path) -> GeneratorCheckpoint:
    """Rebuild a generator, in evaluation mode and on the CPU; the global random state does not change.

    Raises:
        MissingDataError: no file at `path`.
        CorruptFileError: truncated, of another release, no generator of this package, or one with NaN or infinity.
    """
    header, tensors = FORMAT.read(path)
    try:
        seen, arguments = tensors.pop(_SEEN), header["arguments"]
        if seen.dtype != torch.int64 or seen.dim() != 1 or type(header["epoch"]) is not int:
            raise ValueError(f"{_SEEN} must be int64 (N,) and epoch a whole number")
        with torch.random.fork_rng(devices=[]), NoLarger(arguments, tensors.values()):
            generator = ConvGenerator(**arguments)
        generator.load_state_dict({name.removeprefix(_PREFIX): value for name, value in tensors.items()})
        if not all(value.isfinite().all() for value in generator.state_dict().values()):
            raise ValueError("they hold NaN or infinite values")
        data, split_hash = header["data"], header["split_hash"]
        if not isinstance(data, str) or not isinstance(split_hash, str):
            raise ValueError("data and split_hash must be text")
        return GeneratorCheckpoint(generator.eval(), data, split_hash, seen, header["epoch"])
    except Exception as error:  # constructors raise errors of many kinds
        raise CorruptFileError(
            f"{path} does not describe a generator that its own tensors fit ({error}): train it again"
        ) from error
