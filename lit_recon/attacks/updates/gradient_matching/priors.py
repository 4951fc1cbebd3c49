"""Image priors: terms that are added to the matching objective.

Priors act on candidate images `(p, n, c, h, w)` in [0, 1] of `p` independent problems at once, `r` restarts of every
victim following each other, and return one value per problem.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.records import BatchStatistics, LayerStatistics, Normalization, Observation


class Prior(ABC):
    """A penalty on candidate images; `weight` multiplies it."""

    def __init__(self, weight: float) -> None:
        if weight < 0:
            raise ConfigError(f"{type(self).__name__} needs a weight of at least 0; got {weight:g}")
        self.weight = weight

    @abstractmethod
    def __call__(self, images: Tensor, normalization: Normalization, restarts: int, progress: float) -> Tensor:
        """Unweighted penalty of every problem, `(p,)`; `progress` in [0, 1] is the share of iterations done."""


class TotalVariation(Prior):
    """Mean absolute difference of neighbouring pixels, both directions added, in normalised units.

    Differences are divided by the channels' standard deviations, so that weights mean what they mean in the literature,
    where the penalty acts on normalised images.

    Source: [Geiping2020] (anisotropic total variation).
    """

    def __call__(self, images: Tensor, normalization: Normalization, restarts: int, progress: float) -> Tensor:
        scaled = images / normalization.tensors(images)[1]
        across = (scaled[..., 1:] - scaled[..., :-1]).abs().flatten(1).mean(1)
        down = (scaled[..., 1:, :] - scaled[..., :-1, :]).abs().flatten(1).mean(1)
        return across + down


class SquaredNorm(Prior):
    """Mean squared normalised pixel: keeps candidates near the mean image. Source: [Yin2021]."""

    def __call__(self, images: Tensor, normalization: Normalization, restarts: int, progress: float) -> Tensor:
        mean, std = normalization.tensors(images)
        return ((images - mean) / std).square().flatten(1).mean(1)


class GroupConsistency(Prior):
    """Mean squared distance, in normalised units, of a restart's images to the mean over all restarts of its victim.

    Args:
        weight: multiplies the penalty.
        start: share of the iterations after which the penalty sets in; restarts first have to differ.

    Source: [Yin2021], with the pixel-wise mean in place of registered images.
    """

    def __init__(self, weight: float, start: float = 0.1) -> None:
        super().__init__(weight)
        if not 0 <= start < 1:
            raise ConfigError(f"GroupConsistency needs a start in [0, 1); got {start:g}")
        self.start = start

    def __call__(self, images: Tensor, normalization: Normalization, restarts: int, progress: float) -> Tensor:
        if progress < self.start:
            return images.new_zeros(len(images))
        scaled = (images / normalization.tensors(images)[1]).unflatten(0, (-1, restarts))
        consensus = scaled.detach().mean(1, keepdim=True)
        distance: Tensor = (scaled - consensus).square().flatten(0, 1)
        return distance.flatten(1).mean(1)


class BatchNormPrior:
    """Distance of a candidate batch's BatchNorm statistics to known ones, summed over layers.

    sum_l f_l (|mu_l - mu_l*| + |var_l - var_l*|) with f = `first_layer` for the first layer and 1 for the others. The
    targets are the statistics of the client's batch where the attacker knows them (`Knowledge.batch_norm = batch`),
    else the server's running statistics.

    Args:
        weight: multiplies the penalty.
        first_layer: factor of the first BatchNorm layer, the one closest to the image.

    Source: [Yin2021]; exact statistics as in [Jeon2021] and [Liu2025].
    """

    def __init__(self, weight: float, first_layer: float = 1.0) -> None:
        if weight < 0 or first_layer < 0:
            raise ConfigError(f"BatchNormPrior needs weights of at least 0; got {weight:g} and {first_layer:g}")
        self.weight, self.first_layer = weight, first_layer

    def targets(self, observation: Observation) -> BatchStatistics:
        """The statistics to come close to.

        Raises:
            ThreatModelError: if the attacker knows neither batch nor running statistics, or the model has no BatchNorm.
        """
        if observation.knowledge.batch_norm == "none":
            raise ThreatModelError(
                "BatchNormPrior needs BatchNorm statistics, and knowledge.batch_norm is 'none': "
                "set it to 'running' or 'batch', or drop the prior"
            )
        if observation.batch_statistics is not None:
            known = observation.batch_statistics
        else:
            suffix, buffers = ".running_mean", observation.buffers
            names = [name.removesuffix(suffix) for name in buffers if name.endswith(suffix)]
            known = {name: LayerStatistics(buffers[name + suffix], buffers[name + ".running_var"]) for name in names}
        if not known:
            raise ThreatModelError(
                "BatchNormPrior needs a model with BatchNorm layers; this one has none: drop the prior"
            )
        return known

    def __call__(self, statistics: BatchStatistics, targets: BatchStatistics) -> Tensor:
        """Unweighted penalty of one problem, a scalar."""
        terms: list[Tensor] = []
        for position, (name, known) in enumerate(targets.items()):
            ours = statistics[name]
            distance = _norm(ours.mean - known.mean) + _norm(ours.var - known.var)
            terms.append(distance * self.first_layer if position == 0 else distance)
        return torch.stack(terms).sum()


def _norm(values: Tensor) -> Tensor:
    """Euclidean norm whose derivative at zero is zero instead of NaN."""
    return (values.square().sum() + torch.finfo(values.dtype).tiny).sqrt()


def split_priors(priors: Sequence[Prior | BatchNormPrior]) -> tuple[list[Prior], BatchNormPrior | None]:
    """Priors on images, and the one on the network's statistics.

    Raises:
        ConfigError: if more than one BatchNormPrior is given.
    """
    network = [prior for prior in priors if isinstance(prior, BatchNormPrior)]
    if len(network) > 1:
        raise ConfigError(f"an attack takes at most one BatchNormPrior; got {len(network)}")
    return [prior for prior in priors if isinstance(prior, Prior)], network[0] if network else None
