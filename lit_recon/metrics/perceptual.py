"""LPIPS, the learned perceptual distance; optional, because its ImageNet backbone has to be downloaded."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import urllib.request
import warnings
from collections.abc import Mapping
from functools import cache, cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Literal

import lit_recon._torchvision

import torch
from torch import Tensor, nn

from lit_recon.errors import CorruptFileError, MissingDataError, ShapeError
from lit_recon.io.tensors import read_state
from lit_recon.measures import MEASURES
from lit_recon.metrics.registry import Metric, check_pairs, register
from lit_recon.metrics.registry import Unavailable as Unavailable

#: Backbones that LPIPS has calibrated weights for.
LpipsNetwork = Literal["alex", "squeeze", "vgg"]

#: torchvision's files; the digits after the dash begin the file's SHA-256.
_FILES: dict[LpipsNetwork, str] = {
    "alex": "alexnet-owt-7be5be79.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
    "vgg": "vgg16-397923af.pth",
}
_SERVER = "https://download.pytorch.org/models/"
_TIMEOUT = 10.0  # seconds without a single byte after which a download is given up
_BLOCK = 1 << 20

_log = logging.getLogger(__name__)


def cached_weights(network: LpipsNetwork) -> Path:
    """Where torch.hub, and so every torchvision program on this machine, keeps the weights of this backbone."""
    return Path(torch.hub.get_dir()) / "checkpoints" / _FILES[network]


@cache
def download_weights(network: LpipsNetwork) -> Path | Unavailable:
    """Fetch the backbone's weights into the cache of torch.hub, atomically and checked; tried once per process."""
    path, url = cached_weights(network), _SERVER + _FILES[network]
    _log.warning("downloading the ImageNet weights of LPIPS from %s to %s", url, path)
    digest = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder) / path.name
            with urllib.request.urlopen(url, timeout=_TIMEOUT) as response, partial.open("wb") as file:
                while block := response.read(_BLOCK):
                    digest.update(block)
                    file.write(block)
            if not digest.hexdigest().startswith(path.stem.rpartition("-")[2]):
                return Unavailable(f"{url} arrived damaged (its SHA-256 begins {digest.hexdigest()[:8]}): try again")
            os.replace(partial, path)
    except (OSError, HTTPException) as error:
        return Unavailable(
            f"the ImageNet weights of the LPIPS backbone '{network}' could not be downloaded ({error}): place {url} "
            f"at {path}, or give a file by weights="
        )
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """The convolutions of a torchvision classifier, `features.0.weight` and so on, from a file as for `read_state`."""
    state = read_state(path, "file of LPIPS weights", "check the path, fetch it again or leave weights out")
    return {str(name): value for name, value in state.items() if str(name).startswith("features.")}


_MINIMUM_SIDE = 32  # pixels; images with a smaller side are enlarged, since AlexNet fails below 31
_PATCH_SIDE = 64  # shorter side after that, which is the side of the patches that [Zhang2018] calibrated on
_CHUNK = 32  # pairs that pass through the backbone at a time, so that memory does not grow with the number of victims


class Lpips:
    """LPIPS of matched pairs, with a backbone's convolutions as from `read_weights`; a CorruptFileError for others.

    Images with a side below 32 pixels are first resized, bilinearly, to a shorter side of 64.

    Source: [Zhang2018], section 3; calibrated linear weights v0.1, as shipped with the `lpips` package.
    """

    def __init__(self, network: LpipsNetwork, weights: Mapping[str, Tensor]) -> None:
        self.network = network
        self._distance = _build(network, weights)

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """Distance of each pair `(n, c, h, w)` in [0, 1], `(n,)` float64; a grey image is repeated to three channels.

        A ShapeError says that the batches differ in shape, leave [0, 1], or have neither one channel nor three.
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
        """The same without checks and chunks, differentiable by the images: `(n,)` float32."""
        self._distance.to(images.device)
        distances: Tensor = self._distance(_color(images), _color(targets), normalize=True)
        return distances.flatten()

    def __repr__(self) -> str:
        return f"Lpips(network={self.network!r})"


def load_lpips(
    network: LpipsNetwork = "alex", weights: Path | None = None, download: bool = True
) -> Lpips | Unavailable:
    """LPIPS, or why its weights are missing; arguments as for `PerceptualDistance`.

    Raises:
        MissingDataError, CorruptFileError: only about a file that was asked for by `weights`.
    """
    if weights is not None:
        return Lpips(network, read_weights(weights))
    path = cached_weights(network)
    if not path.is_file() and not download:
        return Unavailable(
            f"the ImageNet weights of the LPIPS backbone '{network}' are not at {path}, and downloading is off: allow "
            "it by download=true, or give a file by weights="
        )
    found = path if path.is_file() else download_weights(network)
    if isinstance(found, Unavailable):
        return found
    try:
        return Lpips(network, read_weights(found))
    except CorruptFileError as error:
        return Unavailable(f"{error}; delete the cached file first")


@register
class PerceptualDistance(Metric):
    """LPIPS; weights that are not given as a file are looked for when they are first needed.

    Args:
        network: backbone, of which its authors recommend `alex` for scores; `none` switches the metric off.
        weights: file of torchvision's ImageNet weights of the backbone, .safetensors or a torch state dict, read at
            once; default: the cache of torch.hub.
        download: fetch the weights if they are not in the cache.

    Raises:
        MissingDataError, CorruptFileError: there is no such file, or it does not hold the backbone's weights.
    """

    measure = MEASURES["lpips"]

    def __init__(
        self, network: LpipsNetwork | Literal["none"] = "alex", weights: Path | None = None, download: bool = True
    ) -> None:
        self.network, self.weights, self.download = network, weights, download
        if weights is not None:
            self.unavailable()  # reads the file

    def unavailable(self) -> str:
        return self._loaded.reason if isinstance(self._loaded, Unavailable) else ""

    def __call__(self, found: Tensor, truth: Tensor) -> Tensor:
        if isinstance(self._loaded, Unavailable):
            raise MissingDataError(self._loaded.reason)
        return self._loaded(found, truth)

    @cached_property
    def _loaded(self) -> Lpips | Unavailable:
        if self.network == "none":
            return Unavailable("switched off by lpips.network")
        return load_lpips(self.network, self.weights, self.download)


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
