"""Parametrizations of candidate images: pixels, weights of an untrained network, or latents of a generator."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, CorruptFileError, ShapeError
from lit_recon.io.tensors import read_tensors
from lit_recon.models import UNet
from lit_recon.models.generative.generator import load_generator
from lit_recon.records import Observation

#: Leaf tensors that a solver optimizes, by name.
Variables = dict[str, Tensor]


class Restart(NamedTuple):
    """A victim, the restart's seed, and one feature per image, `(n, d)` of unit norm, if images are `conditioned`."""

    observation: Observation
    seed: int
    features: Tensor | None = None


class Parametrization(ABC):
    """A map from variables to images `(n, c, h, w)` in [0, 1]."""

    #: Variables whose gradient sign-based solvers replace by its sign.
    signed: tuple[str, ...] = ()
    #: Images depend on recovered features, which the attack must provide.
    conditioned: bool = False
    #: Share of the iterations after which only a victim's best restart continues; 1: all continue.
    narrows_at: float = 1.0
    #: Share of the iterations after which the solver begins anew with the variables `refined`; 1: it never does.
    refines_at: float = 1.0
    #: Whether images may be recorded on a GPU, see `DifferentiableRecorded`; set by the attack.
    records: bool = False

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        """See `Attack.training_images`; nothing by default."""
        return {}

    @property
    def refused(self) -> set[str]:
        """See `Matching`; nothing by default."""
        return set()

    @abstractmethod
    def start(self, restart: Restart) -> Variables:
        """Fresh variables."""

    @abstractmethod
    def images(self, variables: Variables, restart: Restart) -> Tensor:
        """The images of the variables; differentiable."""

    def moves(self, name: str, progress: float) -> bool:
        """Whether the solver updates the variable `name` at the share `progress` of iterations; by default always."""
        return True

    def refined(self, variables: Variables) -> Variables:
        """Variables of the same images for the rest of the iterations; the same ones if they are such already."""
        return variables

    def project(self, variables: Variables, observation: Observation) -> None:  # noqa: B027 - most have no constraint
        """Project the variables to the feasible set, in place, after a solver's step; nothing by default."""


class Pixels(Parametrization):
    """Normalized pixels, initialized from N(0, spread^2), clamped to the range of valid images after every step.

    Args:
        box: clamp after every step, which disturbs the curvature estimates of quasi-Newton solvers; otherwise only the
            returned images are clamped.
        spread: of the start in normalized units.
        smooth: at least 0; above 0 the solver moves coefficients of a cosine transform (DCT-II), scaled by frequency
            (1 + f)^-smooth, f in half periods per image, so that it changes coarse structure first, and the start is
            as smooth. Natural images fall off about as 1/f.
        coarse: share of the iterations after which the solver moves the pixels themselves, without memory of its steps
            so far: scaled frequencies find coarse structure sooner, and fine structure later.

    Source: [Geiping2020]; without the box [Zhu2019]; scaled frequencies [Olah2017].
    """

    signed = ("pixels", "fine")

    def __init__(self, box: bool = True, spread: float = 1.0, smooth: float = 0.0, coarse: float = 1.0) -> None:
        if not spread > 0 or not smooth >= 0:
            raise ConfigError(f"Pixels needs a spread above 0 and smooth of at least 0; got {spread:g} and {smooth:g}")
        if not 0 <= coarse <= 1 or (coarse < 1 and not smooth):
            raise ConfigError(
                f"Pixels needs coarse in [0, 1], a share of the iterations, and below 1 a smooth above 0; got "
                f"{coarse:g} with smooth {smooth:g}"
            )
        self.box, self.spread, self.smooth = box, spread, smooth
        self.coarse = self.refines_at = coarse

    def start(self, restart: Restart) -> Variables:
        seen, generator = restart.observation, torch.Generator().manual_seed(restart.seed)
        noise = self.spread * torch.randn(seen.n_examples, *seen.image_shape, generator=generator)
        variables = {"pixels": noise.to(seen.like.device)}
        self.project(variables, seen)
        return variables

    def of(self, images: Tensor, observation: Observation) -> Variables:
        """The variables of images `(n, c, h, w)`."""
        mean, std = observation.normalization.tensors(images)
        return {"pixels": self._coefficients((images - mean) / std).to(observation.like.device)}

    def images(self, variables: Variables, restart: Restart) -> Tensor:
        pixels = self._pixels(variables)
        mean, std = restart.observation.normalization.tensors(pixels)
        return pixels * std + mean

    @torch.no_grad()
    def refined(self, variables: Variables) -> Variables:
        if "fine" in variables:
            return variables
        others = {name: value for name, value in variables.items() if name != "pixels"}
        return {**others, "fine": self._pixels(variables).clone()}

    def project(self, variables: Variables, observation: Observation) -> None:
        if self.box:
            with torch.no_grad():
                pixels = self._pixels(variables)
                mean, std = observation.normalization.tensors(pixels)
                inside = pixels.clamp(min=-mean / std, max=(1 - mean) / std)
                if "fine" in variables:
                    variables["fine"].copy_(inside)
                else:
                    variables["pixels"].copy_(self._coefficients(inside))

    def _pixels(self, variables: Variables) -> Tensor:
        """Normalized pixels `(n, c, h, w)` of what the solver moves."""
        if "fine" in variables:
            return variables["fine"]
        coefficients = variables["pixels"]
        if not self.smooth:
            return coefficients
        down, across, scale = self._transform(coefficients)
        pixels: Tensor = down.T @ (coefficients * scale) @ across
        return pixels

    def _coefficients(self, pixels: Tensor) -> Tensor:
        """The inverse of `_pixels`."""
        if not self.smooth:
            return pixels
        down, across, scale = self._transform(pixels)
        coefficients: Tensor = (down @ pixels @ across.T) / scale
        return coefficients

    def _transform(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Orthonormal cosine transforms of columns and rows, and the scales `(h, w)` of frequencies, mean square 1."""
        down, across = (cosines(side).to(like) for side in like.shape[-2:])
        frequencies = torch.cartesian_prod(*(torch.arange(float(side)) for side in like.shape[-2:])).norm(dim=1)
        scale = (1 + frequencies).pow(-self.smooth).view(*like.shape[-2:]).to(like)
        return down, across, scale / scale.square().mean().sqrt()


@cache
def cosines(side: int) -> Tensor:
    """The matrix `(side, side)` of the orthonormal DCT-II, one frequency per row."""
    places, frequencies = torch.arange(side) + 0.5, torch.arange(side)[:, None]
    rows: Tensor = torch.cos(math.pi / side * frequencies * places) * (2 / side) ** 0.5
    rows[0] /= 2**0.5
    return rows


class DeepImagePrior(Parametrization):
    """The weights of an untrained U-Net that maps one fixed noise image per example to an image.

    Args:
        channels: width of the U-Net at full resolution.
        multipliers: width of each resolution over `channels`; each resolution is half the previous one.
        blocks_per_level: residual blocks at every resolution.
        attention_resolutions: resolutions with self-attention between the blocks.
        noise_channels: channels of the noise images.
        conditioned: recovered features are inputs of every residual block; needs an attack with `features`.

    Source: [Liu2025], section 4 and appendix F; [Ulyanov2018].
    """

    def __init__(
        self,
        channels: int = 32,
        multipliers: list[int] | None = None,
        blocks_per_level: int = 2,
        attention_resolutions: list[int] | None = None,
        noise_channels: int = 32,
        conditioned: bool = False,
    ) -> None:
        self.conditioned = conditioned
        self.channels, self.blocks_per_level, self.noise_channels = channels, blocks_per_level, noise_channels
        self.multipliers, self.attention_resolutions = multipliers, attention_resolutions
        self._networks: dict[tuple[int, ...], nn.Module] = {}
        self._recorded: dict[tuple[int, ...], Callable[..., Tensor]] = {}
        self._noise: dict[tuple[int | str, ...], Tensor] = {}

    @property
    def refused(self) -> set[str]:
        return {reason for one in self._recorded.values() if (reason := getattr(one, "refused", None))}

    def start(self, restart: Restart) -> Variables:
        device = restart.observation.like.device
        return {name: value.detach().clone().to(device) for name, value in self._build(restart).named_parameters()}

    def images(self, variables: Variables, restart: Restart) -> Tensor:
        seen, seed, features = restart
        layout = seen.image_shape if features is None else (*seen.image_shape, features.shape[1])
        if layout not in self._networks:
            self._networks[layout] = self._build(restart)
        like = next(iter(variables.values()))
        size = (seen.n_examples, self.noise_channels, *seen.image_shape[1:])
        key = (*size, seed, str(like.device))
        if key not in self._noise:
            self._noise[key] = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(like)
        # entries of unit size, as the network's other inputs
        scaled = None if features is None else features.to(like) * features.shape[1] ** 0.5
        noise, network = self._noise[key], self._networks[layout]
        if not (self.records and like.is_cuda and torch.is_grad_enabled()):
            return self._drawn(network, list(variables), noise, scaled, *variables.values())
        if layout not in self._recorded:
            from lit_recon.attacks.updates.gradient_matching.recording import DifferentiableRecorded

            self._recorded[layout] = DifferentiableRecorded(partial(self._drawn, network, list(variables)))
        return self._recorded[layout](noise, scaled, *variables.values())

    @staticmethod
    def _drawn(network: nn.Module, names: list[str], noise: Tensor, scaled: Tensor | None, *values: Tensor) -> Tensor:
        drawn: Tensor = torch.func.functional_call(network, dict(zip(names, values, strict=True)), (noise, scaled))
        return drawn

    def _build(self, restart: Restart) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator
            torch.manual_seed(restart.seed)
            return UNet(
                image_shape=restart.observation.image_shape,
                channels=self.channels,
                multipliers=self.multipliers,
                blocks_per_level=self.blocks_per_level,
                attention_resolutions=self.attention_resolutions,
                input_channels=self.noise_channels,
                feature_size=None if restart.features is None else restart.features.shape[1],
            )


#: Name of the latents, and prefix of the names of weights.
_LATENTS, _WEIGHTS = "latents", "weights."
#: Tolerance for pixels outside [0, 1] by rounding.
_TOLERANCE = 1e-3


class GenerativePrior(Parametrization):
    """Latents of a generator, then, with the latents of the best restart fixed, the generator's weights.

    Args:
        checkpoint: a `generator.safetensors` of `train.py generator`, or the weights of `network`.
        network: makes a user's generator, a module from latents `(n, latent_size)` to images `(n, c, h, w)` in
            [0, 1], each a function of its own latent; default: the network described by `checkpoint`.
        latent_size: of a user's generator; default: its attribute of that name.
        latent_share: share of the iterations, in [0, 1], that update latents; the rest update the weights.
        copies: one copy of the weights per image instead of one for the batch.

    Source: [Jeon2021] and its code.
    """

    def __init__(
        self,
        checkpoint: Path,
        network: Callable[[], nn.Module] | None = None,
        latent_size: int | None = None,
        latent_share: float = 1 / 11,
        copies: bool = True,
    ) -> None:
        if not 0 <= latent_share <= 1:
            raise ConfigError(f"latent_share must be in [0, 1], a share of the iterations; got {latent_share:g}")
        self.checkpoint, self.copies = Path(checkpoint), copies
        self.narrows_at = latent_share
        self.seen: Tensor | None = None  # unknown for a user's own generator
        self.network: nn.Module
        if network is None:
            known = load_generator(self.checkpoint)
            self.network, self.seen = known.generator, known.seen
        else:
            self.network = _own(network, self.checkpoint)
        self.network.requires_grad_(False)
        size = latent_size if latent_size is not None else getattr(self.network, "latent_size", None)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{type(self.network).__name__} has no attribute latent_size: give latent_size")
        self.latent_size = size

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        return {} if self.seen is None else {str(self.checkpoint): self.seen}

    def start(self, restart: Restart) -> Variables:
        like, n = restart.observation.like, restart.observation.n_examples
        self.network.to(like)
        self._check(restart.observation)
        latents = torch.randn(n, self.latent_size, generator=torch.Generator().manual_seed(restart.seed))
        variables = {_LATENTS: latents.to(like)}
        if self.narrows_at < 1:
            for name, value in self.network.named_parameters():
                copied = value.expand(n, *value.shape) if self.copies else value
                variables[_WEIGHTS + name] = copied.clone()
        return variables

    def images(self, variables: Variables, restart: Restart) -> Tensor:
        latents = variables[_LATENTS]
        weights = {name.removeprefix(_WEIGHTS): value for name, value in variables.items() if name.startswith(_WEIGHTS)}
        if not self.copies or not weights:
            return self._drawn(weights, latents)
        if latents.is_cuda:  # one set of kernels for all copies; on a CPU, single images are faster
            return torch.func.vmap(lambda own, latent: self._drawn(own, latent[None])[0])(weights, latents)
        copies = [{name: value[i] for name, value in weights.items()} for i in range(len(latents))]
        return torch.cat([self._drawn(own, latents[i : i + 1]) for i, own in enumerate(copies)])

    def moves(self, name: str, progress: float) -> bool:
        if name == _LATENTS:
            return progress < self.narrows_at
        return not name.startswith(_WEIGHTS) or progress >= self.narrows_at

    def _drawn(self, weights: Variables, latents: Tensor) -> Tensor:
        drawn: Tensor = torch.func.functional_call(self.network, weights, (latents,))
        return drawn

    @torch.no_grad()
    def _check(self, observation: Observation) -> None:
        """Raise an error for a generator of images of another shape or range."""
        drawn = self.network(observation.like.new_zeros(2, self.latent_size))
        if tuple(drawn.shape) != (2, *observation.image_shape):
            raise ShapeError(
                f"{self.checkpoint} makes images {tuple(drawn.shape[1:])}, the client's are {observation.image_shape}: "
                "take a generator of images of this shape"
            )
        low, high = float(drawn.min()), float(drawn.max())
        if low < -_TOLERANCE or high > 1 + _TOLERANCE:
            raise ConfigError(
                f"a generator must make pixels in [0, 1]; {type(self.network).__name__} made {low:.2g} to {high:.2g}: "
                "wrap it, for example (x + 1) / 2 after a tanh"
            )


def _own(network: Callable[[], nn.Module], checkpoint: Path) -> nn.Module:
    """The user's generator with its weights; the global random state does not change."""
    tensors = read_tensors(checkpoint, "generator", "train one with `python train.py generator`")
    with torch.random.fork_rng(devices=[]):
        made = network()
    try:
        made.load_state_dict(tensors)
    except RuntimeError as error:
        raise CorruptFileError(
            f"{checkpoint} does not fit {type(made).__name__} ({' '.join(str(error).split())[:200]}): give the file "
            "and the class that belong together"
        ) from error
    return made.eval()
