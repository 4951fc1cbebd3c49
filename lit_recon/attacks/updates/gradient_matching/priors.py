"""Penalties added to the matching objective: on images, on their statistics, and on quantities recovered before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Self

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.records import BatchStatistics, LayerStatistics, Normalization, Observation, Reconstruction

#: Least variance that others are relative to, as a share of the mean over the layer's channels.
_SMALL = 1e-3


class Prior(ABC):
    """A penalty on candidate images; `weight` multiplies it."""

    #: Share of the iterations before the penalty starts.
    start: float = 0.0

    def __init__(self, weight: float) -> None:
        if weight < 0:
            raise ConfigError(f"{type(self).__name__} needs a weight of at least 0; got {weight:g}")
        self.weight = weight

    @abstractmethod
    def __call__(self, images: Tensor, normalization: Normalization, restarts: int, progress: float) -> Tensor:
        """Unweighted penalty `(p,)` of images `(p, n, c, h, w)` in [0, 1], restarts of a victim in sequence.

        `progress` in [0, 1] is the share of iterations done.
        """


class TotalVariation(Prior):
    """Mean absolute difference of neighbouring pixels, summed over both directions, in normalized units.

    A direction in which images have one pixel does not count.

    Args:
        weight: multiplies the penalty.
        until: share of the iterations over which the penalty falls linearly to 0; default: it does not fall.

    Source: [Geiping2020] (anisotropic total variation).
    """

    def __init__(self, weight: float, until: float | None = None) -> None:
        super().__init__(weight)
        if until is not None and not 0 < until <= 1:
            raise ConfigError(f"TotalVariation needs `until` above 0 and at most 1; got {until:g}")
        self.until = until

    def __call__(self, images: Tensor, normalization: Normalization, restarts: int, progress: float) -> Tensor:
        share = 1.0 if self.until is None else max(0.0, 1 - progress / self.until)
        scaled = images / normalization.tensors(images)[1]
        differences = (scaled.diff(dim=axis).abs().flatten(1) for axis in (-1, -2))
        values = (part.mean(1) for part in differences if part.numel())
        return share * sum(values, images.new_zeros(len(images)))


class SquaredNorm(Prior):
    """Mean squared normalized pixel: keeps candidates near the mean image. Source: [Yin2021]."""

    def __call__(self, images: Tensor, normalization: Normalization, restarts: int, progress: float) -> Tensor:
        mean, std = normalization.tensors(images)
        return ((images - mean) / std).square().flatten(1).mean(1)


class GroupConsistency(Prior):
    """Mean squared distance, in normalized units, of a restart's images to the mean over its victim's restarts.

    Args:
        weight: multiplies the penalty.
        start: share of the iterations before the penalty starts.

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
        distance: Tensor = (scaled - scaled.detach().mean(1, keepdim=True)).square()
        return distance.flatten(0, 1).flatten(1).mean(1)


class BatchNormPrior:
    """Distance of a candidate batch's BatchNorm statistics to known ones: of the client's batch, else running ones.

    `sum_l f_l (|mu_l - mu_l*| + |var_l - var_l*|)` with f = `first_layer` for the first layer and 1 for the others.

    Args:
        weight: multiplies the penalty.
        first_layer: factor of the BatchNorm layer closest to the image.
        relative: the mean squares of the differences instead, of means relative to the known standard deviation, of
            variances to twice the known variance: as smooth at the true images as quasi-Newton steps need.

    Source: [Yin2021]; exact statistics as in [Jeon2021] and [Liu2025].
    """

    def __init__(self, weight: float, first_layer: float = 1.0, relative: bool = False) -> None:
        if weight < 0 or first_layer < 0:
            raise ConfigError(f"BatchNormPrior needs weights of at least 0; got {weight:g} and {first_layer:g}")
        self.weight, self.first_layer, self.relative = weight, first_layer, relative

    def targets(self, observation: Observation) -> BatchStatistics:
        """The known statistics, or a `ThreatModelError` if there are none or the model has no BatchNorm."""
        if observation.knowledge.batch_norm == "none":
            raise ThreatModelError(
                "BatchNormPrior needs BatchNorm statistics, and knowledge.batch_norm is 'none': "
                "set it to 'running' or 'batch', or drop the prior"
            )
        known, buffers, suffix = observation.batch_statistics, observation.buffers, ".running_mean"
        if known is None:
            names = [name.removesuffix(suffix) for name in buffers if name.endswith(suffix)]
            known = {name: LayerStatistics(buffers[name + suffix], buffers[name + ".running_var"]) for name in names}
        if not known:
            raise ThreatModelError(
                "BatchNormPrior needs a model with BatchNorm layers; this one has none: drop the prior"
            )
        return known

    def __call__(self, statistics: BatchStatistics, targets: BatchStatistics) -> Tensor:
        """Unweighted penalty of one problem, a scalar."""
        distance = relative_misfit if self.relative else _absolute
        terms = [distance(statistics[name], known) for name, known in targets.items()]
        terms[0] = terms[0] * self.first_layer
        return torch.stack(terms).sum()


def _absolute(ours: LayerStatistics, known: LayerStatistics) -> Tensor:
    return _norm(ours.mean - known.mean) + _norm(ours.var - known.var)


def relative_misfit(ours: LayerStatistics, known: LayerStatistics) -> Tensor:
    """Mean squared differences: of means in standard deviations, of variances in twice the known variance."""
    # channels that are zero everywhere have no variance
    scale = known.var + _SMALL * known.var.mean() + torch.finfo(known.var.dtype).tiny
    return ((ours.mean - known.mean).square() / scale).mean() + ((ours.var - known.var) / scale).square().mean() / 4


def _norm(values: Tensor) -> Tensor:
    """Euclidean norm with derivative zero at zero instead of NaN."""
    return (values.square().sum() + torch.finfo(values.dtype).tiny).sqrt()


@dataclass(frozen=True)
class Part:
    """A search for some of the images of a batch.

    Attributes:
        places: numbers `(m,)` of these images in the batch.
        penalty: of candidates for them alone.
        drawn: it begins with random images, and not with those found.
    """

    places: Tensor
    penalty: Penalty
    drawn: bool = False


class Penalty(ABC):
    """What quantities recovered from the update ask of one victim's candidate images; defaults ask nothing more."""

    #: How the quantities were found.
    notes: tuple[str, ...]

    @property
    def start(self) -> float:
        """Share of the iterations before the penalty starts."""
        return 0.0

    @property
    def features(self) -> Tensor | None:
        """Recovered features `(r, d)`, by which the attack is scored."""
        return None

    @property
    def known_labels(self) -> Tensor | None:
        """Labels `(n,)` that are as certain as the quantities are; None: they are not known from them."""
        return None

    @property
    def partial(self) -> bool:
        """Whether entries of the update are hidden."""
        return False

    @abstractmethod
    def penalty(self, images: Tensor, targets: Tensor, progress: float) -> Tensor:
        """Weighted penalty of candidates `(n, c, h, w)` after a share of the iterations, a differentiable scalar."""

    def penalties(self, images: Tensor) -> Tensor:
        """The penalties `(p,)` of candidates `(p, c, h, w)` for one image each, of a part that is not drawn."""
        raise NotImplementedError

    def with_labels(self, labels: Tensor) -> Self:
        """The penalty once the batch's labels `(n,)` are recovered."""
        return self

    def for_restart(self, number: int) -> Self:
        """The penalty of one restart, counted from 0."""
        return self

    def renews(self, progress: float, fell: float) -> bool:
        """Whether from here on every iteration begins with `renewed`; the arguments are those of `ended`."""
        return False

    def renewed(self, images: Tensor) -> Self:
        """The penalty of an iteration that begins with candidates `(n, c, h, w)`."""
        return self

    def for_further_start(self, found: Reconstruction, going: bool) -> Self:
        """The penalty of a further start after images that are not certified; `going`: it begins with them."""
        return self

    def in_parts(self) -> Self:
        """The penalty of a search after which images may be sought in `parts`."""
        return self

    def parts(self, found: Reconstruction, number: int) -> list[Part]:
        """Searches of further start `number`, from 1, for some of the images each; empty: all are sought together."""
        return []

    def kept(self, found: Reconstruction) -> Tensor | None:
        """Which of the images found stay as they are in further searches, `(n,)` bool; None: none."""
        return None

    def misplaced(self, found: Reconstruction) -> Tensor | None:
        """Which of the images found are no images of the batch, `(n,)` bool: others take their place; None: none."""
        return None

    def goes_on(self, found: Reconstruction, fresh: bool) -> bool:
        """Whether a further start begins with the images found and not elsewhere; `fresh`: none has begun with them."""
        return False

    def prior_share(self, progress: float) -> float:
        """What priors count for after a share of the iterations."""
        return 1.0

    @property
    def refines(self) -> bool:
        """Whether the solver may go on with refined variables, see `Parametrization.refined`."""
        return True

    def ended(self, loss: float, progress: float, fell: float = inf, enough: float | None = None) -> bool:
        """Whether further iterations are not worth their time.

        Args:
            loss: the least so far.
            progress: share of the iterations done.
            fell: by how much every step of a line search lowered it in the last iteration; infinite: not known.
            enough: what the search goes on to, see `stricter`; None: the penalty's own.
        """
        return False

    def stricter(self, loss: float, images: Tensor, labels: Tensor) -> float | None:
        """What is `enough` for a search to go on to from images whose loss would end it; None: it ends."""
        return None

    def in_order(self, images: Tensor) -> Tensor:
        """The order `(n,)` in which images are candidates: as they are."""
        return torch.arange(len(images), device=images.device)

    def targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """The second argument of `penalty`, given the first candidates; called once."""
        return images.new_zeros(())

    def condition(self, labels: Tensor) -> Tensor:
        """One recovered feature `(n, d)` per candidate.

        Raises:
            ConfigError: there are none.
        """
        raise ConfigError(
            "a network can be conditioned on features but not on maps or patches: set conditioned to false"
        )

    def labels(self, images: Tensor, labels: Tensor) -> Tensor:
        """The batch's labels `(n,)` in the order of the reconstructed images."""
        return labels

    def settled(self, images: Tensor) -> Tensor:
        """Found images `(n, c, h, w)`, with what the update does not tell about them as in public images."""
        return images

    def certificate(self, images: Tensor, labels: Tensor) -> tuple[Tensor | None, bool, tuple[str, ...]]:
        """Which images are certified, `(n,)` or None, whether no other start can do better, and notes."""
        return None, False, ()

    def closer(self, before: Reconstruction, after: Reconstruction, what: str) -> Reconstruction:
        """The better of two reconstructions; `what` names the second in notes."""
        return after
