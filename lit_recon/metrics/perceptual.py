"""LPIPS, the learned perceptual distance; optional, because its ImageNet backbone has to be downloaded.

Sources:
    [Zhang2018] Zhang, Isola, Efros, Shechtman, Wang: The Unreasonable Effectiveness of Deep Features as a Perceptual
    Metric. Calibrated linear weights v0.1, as shipped with the `lpips` package.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import lit_recon._torchvision

import torch
from torch import Tensor, nn

from lit_recon.errors import CorruptFileError, ShapeError
from lit_recon.metrics.backbone_weights import LpipsNetwork, Unavailable, cached_weights, download_weights, read_weights
from lit_recon.metrics.images import check_pairs

#: Side in pixels from which images are taken as they are; AlexNet fails below 31.
_MINIMUM_SIDE = 32
#: Side in pixels of the patches that [Zhang2018] calibrated on; smaller images than the minimum are brought up to it.
_PATCH_SIDE = 64
#: Pairs that pass through the backbone at a time, so that memory does not grow with the number of victims.
_CHUNK = 32


class Lpips:
    """LPIPS of matched pairs.

    Images with a side below 32 pixels are first resized, bilinearly, to a shorter side of 64.

    Args:
        network: the backbone's name, for reports.
        weights: the backbone's convolutions by torchvision's names, see `read_weights`.

    Raises:
        CorruptFileError: if the weights are not those of this backbone.

    Source: [Zhang2018], section 3.
    """

    def __init__(self, network: LpipsNetwork, weights: Mapping[str, Tensor]) -> None:
        self.network = network
        self._distance = _build(network, weights)

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """Distance of each pair.

        Args:
            images: `(n, c, h, w)` in [0, 1]; a grey image is repeated to three channels.
            targets: the same shape; `targets[i]` is the truth of `images[i]`.

        Returns:
            `(n,)` float64, 0 for equal images.

        Raises:
            ShapeError: if the batches differ in shape, leave [0, 1], or have neither one channel nor three.
        """
        check_pairs(images, targets)
        if images.shape[1] not in (1, 3):
            raise ShapeError(f"LPIPS needs grey or color images, c = 1 or 3; got c = {images.shape[1]}")
        if not len(images):
            return images.new_zeros(0).double()
        chunks = zip(torch.split(images, _CHUNK), torch.split(targets, _CHUNK), strict=True)
        with torch.no_grad():
            return torch.cat([self.loss(some, truth) for some, truth in chunks]).double()

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """The same of a batch as a whole and unchecked, differentiable by the images: `(n,)` float32."""
        self._distance.to(images.device)
        distances: Tensor = self._distance(_color(images), _color(targets), normalize=True)
        return distances.flatten()

    def __repr__(self) -> str:
        return f"Lpips(network={self.network!r})"


def load_lpips(
    network: LpipsNetwork = "alex", weights: Path | None = None, download: bool = True
) -> Lpips | Unavailable:
    """LPIPS with the weights that can be had: the given file, else torch.hub's cache, else a download.

    Args:
        network: backbone; `alex` is the one that its authors recommend for scores.
        weights: torchvision's ImageNet weights of that backbone, .safetensors or a torch state dict.
        download: whether to try the network (once per process, ten seconds of silence at most) when nothing is cached.

    Returns:
        The score, or why it cannot be had: a run goes on without it and reports the reason.

    Raises:
        MissingDataError, CorruptFileError: only about a file that was asked for by `weights`.
    """
    if weights is not None:
        return Lpips(network, read_weights(weights))
    found: Path | Unavailable = cached_weights(network)
    if not cached_weights(network).is_file():
        found = download_weights(network) if download else _not_cached(network)
    if isinstance(found, Unavailable):
        return found
    try:
        return Lpips(network, read_weights(found))
    except CorruptFileError as error:
        return Unavailable(f"{error}; delete the cached file first")


def _not_cached(network: LpipsNetwork) -> Unavailable:
    return Unavailable(
        f"the ImageNet weights of the LPIPS backbone '{network}' are not at {cached_weights(network)}, and downloading "
        "is off: allow it by download=true, or give a file by weights="
    )


def _build(network: LpipsNetwork, weights: Mapping[str, Tensor]) -> nn.Module:
    """The package's LPIPS module with the given backbone; its slices keep the layer numbers of `features`."""
    import lpips

    # The backbone is born random; the draw must not move the seeds of the run that asks for a score.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(pretrained|weight enum).*", category=UserWarning)
        distance: nn.Module = lpips.LPIPS(net=network, pnet_rand=True, verbose=False)
    backbone = distance.get_submodule("net")
    names = {name: f"features.{name.partition('.')[2]}" for name in backbone.state_dict()}
    absent = sorted(set(names.values()) - set(weights))
    if absent:
        raise CorruptFileError(
            f"LPIPS weights: not a torchvision '{network}' backbone; {absent[0]!r} is not among them"
        )
    try:
        backbone.load_state_dict({name: weights[source] for name, source in names.items()})
    except RuntimeError as error:
        raise CorruptFileError(f"LPIPS weights: shapes are not those of '{network}': {error}") from error
    return distance.eval().requires_grad_(False)


def _color(images: Tensor) -> Tensor:
    """Three channels, float32, large enough for the backbone."""
    color = images.float().expand(-1, 3, -1, -1)
    side = min(color.shape[2:])
    if side >= _MINIMUM_SIDE:
        return color
    size = [round(length * _PATCH_SIDE / side) for length in color.shape[2:]]
    return nn.functional.interpolate(color, size=size, mode="bilinear", align_corners=False)
