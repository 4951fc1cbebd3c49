"""Images that can be read off the gradient of a fully connected first layer by algebra alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates.labels.head import find_head, require_cross_entropy
from lit_recon.attacks.updates.labels.recovery import HeadCounts, LabelRecovery
from lit_recon.attacks.updates.linear_layer.first_layer import (
    ROUNDING,
    FirstLayer,
    derivatives,
    first_layer,
    relative_residual,
    to_pixels,
)
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.records import Observation, Reconstruction


class AnalyticInversion(Attack):
    """The image of a batch of one, or one image per label, from the gradient of a first fully connected layer.

    * One image: every row of the weight's gradient is the image times the entry of the bias's gradient. All rows are
      used, weighted as least squares wants it. Exact.
    * A batch behind a layer whose outputs are the logits (softmax regression), labels distinct: the row of a label is
      dominated by its own image. From there, derivatives at the logits and images are computed from each other in
      turn; exact where that converges, which the relative residual (`loss`) tells.

    Rows of a hidden layer mix all images of a batch: `CocktailPartyAttack` separates them.

    Args:
        labels: how the batch's labels are found.
        iterations: of derivatives and images in turn, at most.

    Raises:
        ConfigError: negative `iterations`, or labels to be optimised.

    Source: [Phong2018] and [Geiping2020] for one image; the rows of labels and the iteration are ours.
    """

    def __init__(self, labels: LabelRecovery | None = None, iterations: int = 50) -> None:
        if iterations < 0:
            raise ConfigError(f"AnalyticInversion needs iterations of at least 0; got {iterations}")
        self.labels = labels if labels is not None else HeadCounts()
        self.iterations = iterations
        if self.labels.optimised:
            raise ConfigError("AnalyticInversion cannot optimise labels: use HeadCounts, IDLG or KnownLabels")

    def check(self, observations: Sequence[Observation]) -> None:
        """Refuse models without a fully connected first layer, and batches that a hidden layer would mix.

        Raises:
            UnsupportedModelError: no linear layer with bias sees the pixels.
            ThreatModelError: several images behind a hidden layer, or more than there are classes.
        """
        super().check(observations)
        for seen in observations:
            layer = first_layer(seen)
            if seen.n_examples > 1:
                require_cross_entropy(seen, "AnalyticInversion of several images", "attack one image at a time")
                if find_head(seen, "AnalyticInversion of several images")[0] != layer.weight_name:
                    raise ThreatModelError(
                        f"every row of a hidden layer's gradient mixes all {seen.n_examples} images of the client, and "
                        "no row belongs to a label: attack single images, or use CocktailPartyAttack"
                    )
            self.labels.check(seen)
            if seen.n_examples > seen.n_classes:
                raise ThreatModelError(
                    f"AnalyticInversion reads one image per label; {seen.n_examples} images have at most "
                    f"{seen.n_classes} labels: attack smaller batches, or use CocktailPartyAttack"
                )
            if seen.labels is not None:
                _require_distinct(seen.labels)

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        """One reconstruction per observation."""
        return [self._invert(seen) for seen in observations]

    def _invert(self, seen: Observation) -> Reconstruction:
        layer = first_layer(seen)
        labels, notes = self.labels(seen)
        _require_distinct(labels)
        if seen.n_examples == 1:
            images, steps = to_pixels(_rank_one(layer), seen), 0
        else:
            images, steps = self._by_labels(layer, labels, seen)
        loss = relative_residual(images, labels, seen)
        if not layer.bias.any():
            notes = (*notes, "the first layer's gradient is zero: the image is a guess")
        if seen.n_examples > 1:
            notes = (*notes, f"one image per label, after {steps} iterations a relative residual of {loss:.0e}")
        return Reconstruction(images.to(next(iter(seen.update.values()))), labels, loss, notes=notes)

    def _by_labels(self, layer: FirstLayer, labels: Tensor, seen: Observation) -> tuple[Tensor, int]:
        """Images in the order of `labels`, and the iteration that they are from: the one of least residual."""
        rows = labels.cpu()
        inputs = layer.weight[rows] / _away_from_zero(layer.bias[rows])[:, None]
        images = to_pixels(inputs, seen)
        best, least, at = images, relative_residual(images, labels, seen), 0
        for iteration in range(1, self.iterations + 1):
            effects = derivatives(images, labels, layer.bias_name, seen) / len(labels)
            images = to_pixels(torch.linalg.lstsq(effects.T, layer.weight).solution, seen)
            residual = relative_residual(images, labels, seen)
            if residual < least:
                best, least, at = images, residual, iteration
            if residual < ROUNDING:
                break
        return best, at


def _require_distinct(labels: Tensor) -> None:
    if len(labels.unique()) < len(labels):
        raise ThreatModelError(
            f"AnalyticInversion reads one image per label, and the labels {labels.tolist()} repeat: "
            "attack batches of distinct labels, or use CocktailPartyAttack"
        )


def _rank_one(layer: FirstLayer) -> Tensor:
    """The input `(1, d)` for which input times bias gradient is closest to the weight gradient."""
    return (layer.bias @ layer.weight / _away_from_zero(layer.bias @ layer.bias))[None]


def _away_from_zero(values: Tensor) -> Tensor:
    tiny = torch.finfo(values.dtype).tiny
    return torch.where(values.abs() < tiny, torch.full_like(values, tiny), values)
