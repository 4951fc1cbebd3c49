"""Optimization variables of gradient matching: pixels, or the weights of an untrained network that generates them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, CorruptFileError, ShapeError
from lit_recon.io.tensors import read_tensors
from lit_recon.models import UNet
from lit_recon.models.generative.generator import load_generator
from lit_recon.records import Observation

#: Leaf tensors that a solver optimises, by name.
Variables = dict[str, Tensor]


class Parametrization(ABC):
    """A map from variables to images `(n, c, h, w)` in [0, 1]."""

    #: Variables whose gradient a sign-based solver replaces by its sign.
    signed: tuple[str, ...] = ()
    #: Recovered features enter the images; the attack has to recover some.
    conditioned: bool = False
    #: Share of the iterations after which, of a victim's restarts, the best one goes on alone; 1: all go on.
    narrows_at: float = 1.0

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        """See `Attack.training_images`; nothing by default."""
        return {}

    @abstractmethod
    def start(self, observation: Observation, seed: int, features: Tensor | None = None) -> Variables:
        """Fresh variables for one restart; see `images` for `features`."""

    @abstractmethod
    def images(
        self, variables: Variables, observation: Observation, seed: int, features: Tensor | None = None
    ) -> Tensor:
        """The images that the variables stand for; differentiable.

        Args:
            variables: of one restart.
            observation: of the victim.
            seed: of the restart.
            features: `(n, d)` of unit norm, one for every image; only if `conditioned`.
        """

    def moves(self, name: str, progress: float) -> bool:
        """Whether the solver moves the variable `name` at the share `progress` of the iterations; by default always."""
        return True

    def project(self, variables: Variables, observation: Observation) -> None:  # noqa: B027 - most have no constraint
        """Move the variables back into the feasible set, in place, after a solver's step; nothing by default."""


class Pixels(Parametrization):
    """Normalised pixels, started from N(0, spread^2), kept in the box of valid images by clamping after every step.

    Args:
        box: clamp; without it images are only clamped when the attack returns them. A quasi-Newton solver learns the
            wrong curvature from pixels that are moved behind its back.
        spread: of the start in normalised units; small values start from nearly uniform images.

    Source: [Geiping2020]; without the box [Zhu2019].
    """

    signed = ("pixels",)

    def __init__(self, box: bool = True, spread: float = 1.0) -> None:
        if not spread > 0:
            raise ConfigError(f"Pixels needs a spread above 0; got {spread:g}")
        self.box, self.spread = box, spread

    def start(self, observation: Observation, seed: int, features: Tensor | None = None) -> Variables:
        generator = torch.Generator().manual_seed(seed)
        noise = self.spread * torch.randn(observation.n_examples, *observation.image_shape, generator=generator)
        variables = {"pixels": noise.to(next(iter(observation.update.values())).device)}
        self.project(variables, observation)
        return variables

    def images(
        self, variables: Variables, observation: Observation, seed: int, features: Tensor | None = None
    ) -> Tensor:
        mean, std = observation.normalization.tensors(variables["pixels"])
        return variables["pixels"] * std + mean

    def project(self, variables: Variables, observation: Observation) -> None:
        if self.box:
            mean, std = observation.normalization.tensors(variables["pixels"])
            with torch.no_grad():
                variables["pixels"].clamp_(min=-mean / std, max=(1 - mean) / std)


class DeepImagePrior(Parametrization):
    """The weights of an untrained U-Net that maps one fixed noise image per example to an image.

    Args:
        channels: width of the U-Net at full resolution.
        multipliers: width of each resolution over `channels`; resolutions halve from one to the next.
        blocks_per_level: residual blocks at every resolution.
        attention_resolutions: resolutions with self-attention between the blocks.
        noise_channels: channels of the noise images.
        conditioned: recovered features enter every residual block; needs an attack with `features`.

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
        self.multipliers = multipliers if multipliers is not None else [1, 2, 2, 2]
        self.attention_resolutions = attention_resolutions if attention_resolutions is not None else [16]
        self._networks: dict[tuple[int, ...], nn.Module] = {}
        self._noise: dict[tuple[int | str, ...], Tensor] = {}

    def start(self, observation: Observation, seed: int, features: Tensor | None = None) -> Variables:
        device = next(iter(observation.update.values())).device
        network = self._build(observation.image_shape, seed, features)
        return {name: value.detach().clone().to(device) for name, value in network.named_parameters()}

    def images(
        self, variables: Variables, observation: Observation, seed: int, features: Tensor | None = None
    ) -> Tensor:
        shape = observation.image_shape
        layout = shape if features is None else (*shape, features.shape[1])
        if layout not in self._networks:
            self._networks[layout] = self._build(shape, seed, features)
        like = next(iter(variables.values()))
        key = (observation.n_examples, *shape[1:], seed, str(like.device))
        if key not in self._noise:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(observation.n_examples, self.noise_channels, *shape[1:], generator=generator)
            self._noise[key] = drawn.to(like)
        # entries of unit size, as the network's other inputs have
        scaled = None if features is None else features.to(like) * features.shape[1] ** 0.5
        output: Tensor = torch.func.functional_call(self._networks[layout], variables, (self._noise[key], scaled))
        return output

    def _build(self, shape: tuple[int, int, int], seed: int, features: Tensor | None) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator, which is the caller's
            torch.manual_seed(seed)
            return UNet(
                image_shape=shape,
                channels=self.channels,
                multipliers=self.multipliers,
                blocks_per_level=self.blocks_per_level,
                attention_resolutions=self.attention_resolutions,
                input_channels=self.noise_channels,
                feature_size=None if features is None else features.shape[1],
            )


#: Names of the variables: the latents, and what the names of weights begin with.
_LATENTS, _WEIGHTS = "latents", "weights."
#: By how much a user's generator may leave [0, 1] by rounding.
_TOLERANCE = 1e-3


class GenerativePrior(Parametrization):
    """Latents of a generator, then, with the latents of the best restart held, the generator's weights.

    Args:
        checkpoint: a `generator.safetensors` of `train.py generator`, or the weights of `network`.
        network: makes the user's own generator, a module from latents `(n, latent_size)` to images `(n, c, h, w)` in
            [0, 1], each of its own latent alone; default: the network that `checkpoint` describes.
        latent_size: of a user's generator; default: its attribute of that name.
        latent_share: share of the iterations in which latents move; the weights move in the rest. 1: never.
        copies: one copy of the weights per image; otherwise one for the whole batch.

    Attributes:
        seen: fingerprints of the images that the generator was trained on; None for a user's own, which does not tell.

    Raises:
        MissingDataError, CorruptFileError: about the checkpoint.
        ConfigError: a share outside [0, 1], or no latent size.

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
        self.seen: Tensor | None = None
        if network is None:
            known = load_generator(self.checkpoint)
            self.network: nn.Module = known.generator
            self.seen = known.seen
        else:
            self.network = _own(network, self.checkpoint)
        size = latent_size if latent_size is not None else getattr(self.network, "latent_size", None)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{type(self.network).__name__} does not tell the length of its latents: give it as latent_size"
            )
        self.latent_size = size
        self.network.requires_grad_(False)

    @property
    def training_images(self) -> Mapping[str, Tensor]:
        return {} if self.seen is None else {str(self.checkpoint): self.seen}

    def start(self, observation: Observation, seed: int, features: Tensor | None = None) -> Variables:
        like = next(iter(observation.update.values()))
        self.network.to(like)
        self._check(observation, like)
        n = observation.n_examples
        random = torch.Generator().manual_seed(seed)
        variables = {_LATENTS: torch.randn(n, self.latent_size, generator=random).to(like)}
        if self.narrows_at < 1:
            for name, value in self.network.named_parameters():
                copied = value.expand(n, *value.shape) if self.copies else value
                variables[_WEIGHTS + name] = copied.clone()
        return variables

    def images(
        self, variables: Variables, observation: Observation, seed: int, features: Tensor | None = None
    ) -> Tensor:
        latents = variables[_LATENTS]
        weights = {name.removeprefix(_WEIGHTS): value for name, value in variables.items() if name.startswith(_WEIGHTS)}
        if not self.copies or not weights:
            drawn: Tensor = torch.func.functional_call(self.network, weights, (latents,))
            return drawn
        if latents.is_cuda:  # one set of kernels for all copies; on a CPU convolutions of one image each are faster
            return torch.func.vmap(self._single)(weights, latents)
        copies = [{name: value[i] for name, value in weights.items()} for i in range(len(latents))]
        return torch.stack([self._single(own, latent) for own, latent in zip(copies, latents, strict=True)])

    def moves(self, name: str, progress: float) -> bool:
        if name == _LATENTS:
            return progress < self.narrows_at
        return not name.startswith(_WEIGHTS) or progress >= self.narrows_at

    def _single(self, weights: Variables, latent: Tensor) -> Tensor:
        drawn: Tensor = torch.func.functional_call(self.network, weights, (latent[None],))
        return drawn[0]

    @torch.no_grad()
    def _check(self, observation: Observation, like: Tensor) -> None:
        """Refuse a generator of other images."""
        drawn = self.network(like.new_zeros(2, self.latent_size))
        expected = (2, *observation.image_shape)
        if tuple(drawn.shape) != expected:
            raise ShapeError(
                f"{self.checkpoint} draws images {tuple(drawn.shape[1:])}, the client's are {observation.image_shape}: "
                "take a generator of such images"
            )
        low, high = float(drawn.min()), float(drawn.max())
        if low < -_TOLERANCE or high > 1 + _TOLERANCE:
            raise ConfigError(
                f"a generator must draw pixels in [0, 1]; {type(self.network).__name__} drew {low:.2g} to {high:.2g}: "
                "wrap it, for example (x + 1) / 2 after a tanh"
            )


def _own(network: Callable[[], nn.Module], checkpoint: Path) -> nn.Module:
    """The user's generator with its weights; the global random state is left alone."""
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
