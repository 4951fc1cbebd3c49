"""A trained generator as image prior: first its latents are searched, then its weights, for every image a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, CorruptFileError, ShapeError
from lit_recon.inversion.parametrizations import Parametrization, Variables
from lit_recon.models.generator_checkpoint import load_generator, read_tensors
from lit_recon.records import Observation

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
    _, tensors = read_tensors(checkpoint)
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
