"""The gradient of a fully connected first layer, and inversion of it for single images and distinct labels.

For a layer z = W x + b with inputs X `(n, d)` and derivatives D `(n, m)` of the mean loss with respect to z,

    G_W = D^T X        G_b = D^T 1

so X determines D, and D determines X. The attacks on a first layer differ in how they obtain one of the two. The patch
embedding of a vision transformer is such a layer, with one image's patches for X; the gradient of the learned positions
is D.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import chi2
from torch import Tensor

from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates.feature_maps.convolutions import PatchEmbedding, find_patch_embedding, unseen_pixels
from lit_recon.attacks.updates.gradient_matching.matching import simulated_release
from lit_recon.attacks.updates.labels.head import (
    ROUNDING,
    exact,
    find_head,
    linear_calls,
    mean_gradient,
    require_cross_entropy,
    require_magnitudes,
)
from lit_recon.attacks.updates.labels.recovery import HeadCounts, LabelRecovery
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Batch, Observation, Reconstruction, Update
from lit_recon.solving import least_squares

#: Relative error assigned to an image without a contribution to the gradient.
WITHOUT_PART = 1e6
#: Relative errors below this count as rounding.
PERFECT = 1e-4
#: Number of alternations between labels and the gradient's scale.
FACTOR_ITERATIONS = 4
#: Factor of evidence, larger than any other cost of a label.
DECISIVE = 100.0
#: Largest RMSE of an image for it to be certified, and share of draws of the noise in which it may be larger.
CERTAIN, _DOUBT = 0.01, 1e-3
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class FirstLayer:
    """A fully connected layer in an observation.

    Attributes:
        seen: the observation.
        name: of the layer.
        weight, bias: its gradient, `(m, d)` and `(m,)`, in double precision on the CPU; the mean one of local steps.
    """

    seen: Observation
    name: str
    weight: Tensor
    bias: Tensor

    @staticmethod
    def of(seen: Observation, name: str) -> FirstLayer:
        """The layer of this name."""
        gradient = mean_gradient(seen.update, seen)
        return FirstLayer(seen, name, exact(gradient[f"{name}.weight"]), exact(gradient[f"{name}.bias"]))

    @property
    def rows(self) -> Tensor:
        """Gradient of the weight and, in the last column, of the bias, `(m, d + 1)`."""
        return torch.cat([self.weight, self.bias[:, None]], dim=1)

    def derivatives(self, images: Tensor, labels: Tensor) -> Tensor:
        """Derivatives `(n, m)` of every image's own loss with respect to the layer's outputs: its own bias gradient.

        Exact for one gradient, unless BatchNorm uses the statistics of the batch.
        """
        # every client, and every mini-batch, gets the image
        parts = self.seen.operator.parts
        alike = (
            (image.expand(parts, *image.shape), label.expand(parts))
            for image, label in zip(images, labels, strict=True)
        )
        singles = (mean_gradient(_update(*one, self.seen), self.seen) for one in alike)
        return exact(torch.stack([gradient[f"{self.name}.bias"] for gradient in singles]))

    def derivatives_by_class(self, images: Tensor, classes: Tensor) -> Tensor:
        """The same for every image and each of the classes `(q,)`: `(n, q, m)`."""
        return torch.stack([self.derivatives(images, label.expand(len(images))) for label in classes], dim=1)

    def assign_labels(
        self, images: Tensor, labels: Tensor, observed: Tensor, evidence: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The labels in the order of the images, by how well they explain each image's part of the bias gradient.

        Args:
            images: `(n, c, h, w)`.
            labels: `(l,)`, at least as many as images, in any order.
            observed: `(n, m)`: derivatives of the mean loss with respect to the layer's outputs, image by image.
            evidence: `(n, l)`: costs of labels per image from another source, which take precedence in nonzero rows.

        The second result are the labels' relative errors `(n,)`; 1e6 for an image without a contribution.
        """
        classes = labels.unique()
        expected = self.derivatives_by_class(images, classes)[:, torch.searchsorted(classes, labels).cpu()]
        part = observed.norm(dim=1)
        # a clipped gradient is smaller by an unknown factor, the same for all images
        factor = part[part > 0].median() / expected.norm(dim=2).median() if part.any() else torch.tensor(1.0)
        for _ in range(FACTOR_ITERATIONS):
            misfit = (expected * factor - observed[:, None]).norm(dim=2) / part[:, None].clamp(min=TINY)
            misfit = misfit.nan_to_num(WITHOUT_PART).clamp(max=WITHOUT_PART)
            misfit[part == 0] = WITHOUT_PART  # also where none is expected
            cost = log_misfit(misfit)
            if evidence is not None:
                cost = torch.where(evidence.any(dim=1, keepdim=True), DECISIVE * evidence, cost)
            order, chosen = (torch.as_tensor(found) for found in linear_sum_assignment(cost.numpy()))
            ratios = part / expected[order, chosen].norm(dim=1).clamp(min=TINY)
            factor = ratios[part > 0].median() if part.any() else factor
        return labels[chosen.to(labels.device)], misfit[order, chosen]


def first_layer(observation: Observation) -> FirstLayer:
    """The linear layer with bias whose input is the normalized image, or an `UnsupportedModelError` without one."""
    drawn = torch.rand(2, *observation.image_shape, generator=torch.Generator().manual_seed(0))
    _, calls = linear_calls(observation, drawn)
    found, model = None, type(observation.model).__name__
    for name, given in ((name, given) for name, layer in calls.items() for given, _ in layer):
        expected = to_inputs(drawn.to(given), observation)
        if given.shape == expected.shape and torch.allclose(given, expected, atol=1e-5):
            found = name
            break
    if found is None:
        raise UnsupportedModelError(
            f"this attack needs the gradient of a fully connected layer whose input is the normalized pixels, or of a "
            f"patch embedding with learned positions; {model} has none, another layer comes first: use a trunk that "
            "begins with one (MLP), or attack it with GradientMatching"
        )
    if f"{found}.bias" not in observation.update:
        raise UnsupportedModelError(
            f"this attack needs the gradient of a bias, which gives the scale and the sign of an image; layer "
            f"{found!r} of {model} has none: attack it with GradientMatching"
        )
    return FirstLayer.of(observation, found)


def to_pixels(inputs: Tensor, observation: Observation) -> Tensor:
    """Images `(n, c, h, w)`, in [0, 1] for valid inputs, of normalized, flattened inputs `(n, d)`."""
    images = inputs.view(-1, *observation.image_shape)
    mean, std = observation.normalization.tensors(images)
    return images * std + mean


def to_inputs(images: Tensor, observation: Observation) -> Tensor:
    """Normalized, flattened inputs `(n, d)` of images `(n, c, h, w)` in [0, 1]."""
    mean, std = observation.normalization.tensors(images)
    return ((images - mean) / std).flatten(1)


def mean_color(n: int, observation: Observation) -> Tensor:
    """`n` images `(c, h, w)` of the data's mean color, returned for images that an attack does not find."""
    mean = torch.tensor(observation.normalization.mean, dtype=torch.float64)
    return mean[:, None, None].expand(n, *observation.image_shape)


def log_misfit(misfit: Tensor) -> Tensor:
    """Cost of relative errors, 0 if nothing is explained: inevitable bad fits do not outweigh a perfect one."""
    return (misfit + PERFECT).log().clamp(max=0)


def relative_residual(images: Tensor, labels: Tensor, observation: Observation) -> float:
    """Norm of the candidate's update minus the observed one, over the norm of the latter."""
    candidate, observed = _update(images, labels, observation), observation.update
    difference = sum(float((candidate[name] - value).square().sum()) for name, value in observed.items())
    total = sum(float(value.square().sum()) for value in observed.values())
    return float((difference / total) ** 0.5) if total > 0 else float(difference**0.5)


def _update(images: Tensor, labels: Tensor, observation: Observation) -> Update:
    candidates = images.clamp(0, 1).to(observation.like)
    return observation.operator(observation.weights, Batch(candidates, labels.to(candidates.device)))


class LabelledAttack(Attack):
    """An attack that recovers labels separately and computes one victim after the other, without iterations.

    Args:
        labels: their recovery; default: `HeadCounts`. Labels to be optimized are a `ConfigError`.
    """

    def __init__(self, labels: LabelRecovery | None = None) -> None:
        self.labels = labels or HeadCounts()
        if self.labels.can_optimize:
            raise ConfigError(f"{type(self).__name__} cannot optimize labels: use HeadCounts, IDLG or KnownLabels")

    def check(self, observations: Sequence[Observation]) -> None:
        super().check(observations)
        for seen in observations:
            require_magnitudes(seen, type(self).__name__)
            self.check_one(seen)

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        return [self.reconstruct(seen) for seen in observations]

    @abstractmethod
    def check_one(self, seen: Observation) -> None:
        """The check of one observation, see `Attack.check`."""

    @abstractmethod
    def reconstruct(self, seen: Observation) -> Reconstruction:
        """The attack on one observation."""


class Inverted(NamedTuple):
    """Inputs of a layer `(t, d)`, and their largest likely root mean square error; infinite where noise hides some."""

    inputs: Tensor
    error: float


def invert(derivatives: Tensor, weight: Tensor) -> Inverted:
    """Inputs X from derivatives D `(t, m)` and the gradient of the weight D^T X `(m, d)` by least squares.

    What the fit leaves over shows the noise of both; zeros in place of entries count as noise.

    >>> inputs, derivatives = torch.eye(2, 5), torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    >>> bool((invert(derivatives, derivatives.T @ inputs).inputs - inputs).abs().max() < 1e-6)
    True
    """
    (t, m), d = derivatives.shape, weight.shape[1]
    inputs = least_squares(derivatives.T, weight)
    if t >= m:
        return Inverted(inputs, torch.inf)
    products = inputs @ inputs.T / d
    size = products.trace()
    # noise of the derivatives enters the fit times the inputs, and adds to the eigenvalues, which shrinks the inputs
    variance = (derivatives.T @ inputs - weight).square().sum() / ((m - t) * d) / (1 + size)
    values = torch.linalg.eigvalsh(derivatives @ derivatives.T) - m * variance
    if values.min() <= 0:
        return Inverted(inputs, torch.inf)
    # all inputs have it in common: a weighted sum of few squares, approximated as in [Satterthwaite1946]
    few = (values.reciprocal().sum() * size).square() / (values.pow(-2).sum() * products.square().sum())
    degrees = float(few.nan_to_num(1.0))
    noise = variance / values * (1 + size * chi2.isf(_DOUBT, degrees) / degrees)
    shrunk = (m * variance / values).square() * size / t
    return Inverted(inputs, float(noise.mean().sqrt() + shrunk.mean().sqrt()))


class AnalyticInversion(LabelledAttack):
    """The image of a batch of one, or one image per label, from the gradient of a first fully connected layer.

    * One image: every row of the weight's gradient is the image times the bias's entry. A least-squares fit to all
      rows is exact.
    * One image and a vision transformer: the gradient of learned positions is the derivative in the patches' tokens,
      so that the gradient of the patch embedding determines all patches, at most as many as a token has entries.
    * A batch with distinct labels and a layer whose outputs are the logits (softmax regression): a label's row is
      dominated by its own image. From there, derivatives at the logits and images are computed from each other in
      turn; exact if that converges, as shown by the relative residual (`loss`).

    The layer takes the pixels and has a bias, or is a convolution of patches without overlap. Rows of a hidden layer
    mix all images of a batch: `CocktailPartyAttack` separates them. A single image is certified where what the fit
    leaves over says that its RMSE is at most 0.01, but for about 1 in 1,000 draws of the noise. Where entries seem to
    be cut off or hidden, it also has to explain the direction of the whole update to within 1 %. And all tensors have
    to be those of the image times one factor: two that were clipped apart give the image another contrast.

    Args:
        labels: recovery of the batch's labels.
        iterations: largest number of alternations.

    Source: [Phong2018] and [Geiping2020] for one image, [Lu2022] for vision transformers; the rows of labels, the
    iteration and the certificate are ours.
    """

    def __init__(self, labels: LabelRecovery | None = None, iterations: int = 50) -> None:
        if iterations < 0:
            raise ConfigError(f"AnalyticInversion needs iterations of at least 0; got {iterations}")
        super().__init__(labels)
        self.iterations = iterations

    def check_one(self, seen: Observation) -> None:
        if (embedding := find_patch_embedding(seen)) is not None:
            _require_few_patches(embedding, seen)
            self.labels.check(seen)
            return
        layer = first_layer(seen)
        if seen.n_examples > 1:
            require_cross_entropy(seen, "AnalyticInversion of several images", "attack one image at a time")
            if find_head(seen, "AnalyticInversion of several images")[0] != f"{layer.name}.weight":
                raise ThreatModelError(
                    f"every row of a hidden layer's gradient mixes all {seen.n_examples} images of the client, and "
                    "no row belongs to a label: attack single images, or use CocktailPartyAttack"
                )
        self.labels.check(seen)
        if seen.n_examples > seen.n_classes:
            raise ThreatModelError(
                f"AnalyticInversion finds one image per label; {seen.n_examples} images have at most "
                f"{seen.n_classes} labels: attack smaller batches, or use CocktailPartyAttack"
            )
        if seen.labels is not None:
            _require_distinct(seen.labels)

    def reconstruct(self, seen: Observation) -> Reconstruction:
        if seen.n_examples == 1:
            return self._single(seen)
        labels, notes = self.labels(seen)
        _require_distinct(labels)
        images, steps = self._by_labels(first_layer(seen), labels)
        loss = relative_residual(images, labels, seen)
        note = f"one image per label, after {steps} iterations a relative residual of {loss:.0e}"
        return Reconstruction(images.to(seen.like), labels, loss, notes=(*notes, note))

    def _single(self, seen: Observation) -> Reconstruction:
        # loaded only where an image is found
        from lit_recon.attacks.updates.linear_layer.agreement import disagreement, distorted, unexplained

        if (embedding := find_patch_embedding(seen)) is None:
            layer = first_layer(seen)
            derivatives, weight, name = layer.bias[None], layer.weight, f"{layer.name}.bias"
        else:
            gradient = mean_gradient(seen.update, seen)
            name, derivatives = embedding.positions, embedding.derivatives(exact(gradient[embedding.positions]))
            weight = exact(gradient[f"{embedding.convolution.name}.weight"]).flatten(1)
        labels, notes = self.labels(seen)
        inputs, error = invert(derivatives, weight)
        if embedding is not None:
            inputs = embedding.convolution.fold(inputs.T[None])
        images = to_pixels(inputs, seen)
        unit = float(seen.normalization.tensors(images)[1].square().mean().sqrt())
        error *= unit
        unseen = "" if embedding is None else unseen_pixels(seen)
        certified, apart = error <= CERTAIN and not unseen, ""
        if certified and distorted(derivatives, weight, CERTAIN / unit):
            certified = unexplained(_update(images, labels, seen), seen.update) < CERTAIN
        if certified:
            # a brighter or darker image within the allowed error
            allowed = CERTAIN / unit / float(inputs.square().mean().sqrt() + TINY)
            own = simulated_release(seen, images.clamp(0, 1).to(seen.like), labels)
            apart = disagreement(own, seen.update, name, allowed, error / unit)
            certified = not apart
        if not derivatives.any():
            notes = (*notes, "the first layer's gradient is zero: the image is a guess")
        elif error > CERTAIN:
            left = f"leave an RMSE of up to {error:.2g}" if error < torch.inf else "do not tell the image from noise"
            notes = (*notes, f"not certified: the gradients of the first layer {left}")
        elif unseen:
            notes = (*notes, f"not certified: {unseen}, which are left at the mean color")
        elif apart:
            notes = (*notes, f"not certified: {apart}")
        elif not certified:
            hidden = "entries of the first layer's gradient seem to be cut off or hidden"
            notes = (*notes, f"not certified: {hidden}, and the image does not explain the whole update")
        loss = relative_residual(images, labels, seen)
        return Reconstruction(images.to(seen.like), labels, loss, notes=notes, certified=torch.tensor([certified]))

    def _by_labels(self, layer: FirstLayer, labels: Tensor) -> tuple[Tensor, int]:
        """Images in the order of `labels` from the iteration of least residual, and its number."""
        rows, seen = labels.cpu(), layer.seen
        away = torch.where(layer.bias[rows].abs() < TINY, TINY, layer.bias[rows])
        images = to_pixels(layer.weight[rows] / away[:, None], seen)
        best, least, at = images, relative_residual(images, labels, seen), 0
        for iteration in range(1, self.iterations + 1):
            effects = layer.derivatives(images, labels) / len(labels)
            images = to_pixels(least_squares(effects.T, layer.weight), seen)
            residual = relative_residual(images, labels, seen)
            if residual < least:
                best, least, at = images, residual, iteration
            if residual < ROUNDING:
                break
        return best, at


def _require_few_patches(embedding: PatchEmbedding, seen: Observation) -> None:
    layer = embedding.convolution
    if seen.n_examples > 1:
        raise ThreatModelError(
            f"the gradient of the positions in {type(seen.model).__name__} is a sum over all {seen.n_examples} images "
            "of the client: AnalyticInversion needs single images there; attack batches with GradientMatching"
        )
    if layer.places > layer.channels:
        raise UnsupportedModelError(
            f"the gradients of the {layer.places} tokens, {layer.channels} entries each, do not determine the patches: "
            "AnalyticInversion needs at most as many tokens as entries; attack it with GradientMatching"
        )


def _require_distinct(labels: Tensor) -> None:
    if len(labels.unique()) < len(labels):
        raise ThreatModelError(
            f"AnalyticInversion finds one image per label, and the labels {labels.tolist()} repeat: "
            "attack batches of distinct labels, or use CocktailPartyAttack"
        )
