"""Robbing the Fed: images decoded from the gradient of a block that a malicious server put before the network.

The weight gradient of the layer after the block's neurons is a product V^T A of the derivatives V `(n, d)` of every
image's loss with respect to the layer's output and the activations A `(n, m)` of the neurons, which follow from the
decoded images. This gives V image by image. Its direction depends on the label, and per-example clipping keeps it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.attacks.updates.imprint.rows import Hits, filled, separate_rows, step_rows, wiener
from lit_recon.attacks.updates.labels.head import exact
from lit_recon.attacks.updates.labels.recovery import LabelRecovery
from lit_recon.attacks.updates.linear_layer.first_layer import (
    FirstLayer,
    LabelledAttack,
    log_misfit,
    mean_color,
    relative_residual,
    to_inputs,
    to_pixels,
)
from lit_recon.clients.aggregate import several_steps
from lit_recon.errors import ThreatModelError
from lit_recon.models.classifiers.imprint import ImprintBlock, find_imprint
from lit_recon.records import Observation, Reconstruction
from lit_recon.solving import least_squares

#: Margin in explained share of a derivative by which the best label must exceed the second to count as certain.
CLEARLY = 0.1
#: Correlation above which two neighbouring hits count as one image that moved between bins.
SAME_IMAGE = 0.98
#: Largest relative error at which a hit's derivative is attributed to a single image.
EXPLAINED = 0.02
#: Absolute value of the functional below which it does not determine the scale.
LEAST_FUNCTIONAL = 0.05


class RobbingTheFed(LabelledAttack):
    """Decodes every image that is alone in its bin of the imprint block; exact without a defense.

    An image x adds g x to a row of the weight's gradient and g to that of the bias: x is their quotient. Several images
    in one bin give a weighted mean of them. If fewer bins are hit than there are images, the rest is returned as the
    data's mean color; if more, the largest steps of the gradient are used.

    Args:
        labels: recovery of the batch's labels; they are assigned to images by their effect on the gradient. Labels that
            the gradient of the layer after the block determines take precedence.
        denoise: reduce noise in the gradient by a Wiener filter with the spectrum of photographs.

    Source: [Fowl2022]; differences of neighbouring rows are here least-squares steps.
    """

    def __init__(self, labels: LabelRecovery | None = None, denoise: bool = True) -> None:
        super().__init__(labels)
        self.denoise = denoise

    def check_one(self, seen: Observation) -> None:
        _block(seen)
        self.labels.check(seen)

    def reconstruct(self, seen: Observation) -> Reconstruction:
        name, block = _block(seen)
        layer = FirstLayer.of(seen, f"{name}.measure")
        # functional and edges are the server's own, not affected by the client's defense
        functional, edges = exact(block.functional), exact(block.edges)
        sparse = block.activation == "hardtanh"
        hits = (separate_rows if sparse else step_rows)(layer.rows, seen.n_examples)
        scales = _scales(hits, functional, edges, moving=several_steps(seen.operator) is not None)
        shape = (-1, *seen.image_shape)
        inputs = filled((hits.rows[:, :-1] / scales[:, None]).view(shape), hits.known[:, :-1].view(shape))
        if self.denoise:
            inputs = wiener(inputs, hits.noise / scales.abs())
        images = to_pixels(inputs, seen).clamp(0, 1)
        kept = _one_each(images, hits.bins, seen.n_examples)
        images, scales, bins = images[kept], scales[kept], hits.bins[kept]
        images = torch.cat([images, mean_color(seen.n_examples - len(images), seen)])
        signatures = torch.zeros(seen.n_examples, len(layer.weight), dtype=torch.float64)
        for signature, which, scale in zip(signatures, bins.tolist(), scales.tolist(), strict=False):
            signature[slice(which, which + 1) if sparse else slice(0, which + 1)] = scale
        labels, notes = self.labels(seen)
        labels, evidence = _labels_told(images[: len(bins)], labels, name, block, seen)
        labels, misfit = layer.assign_labels(images, labels, signatures, evidence)
        loss = relative_residual(images, labels, seen)
        alone = int((misfit < EXPLAINED).sum())
        notes = (*notes, *_notes(len(hits.bins), len(bins), alone, len(edges) - 1, seen))
        return Reconstruction(images.to(seen.like), labels, loss, notes=notes)


def _block(seen: Observation) -> tuple[str, ImprintBlock]:
    found = find_imprint(seen.model)
    if found is None:
        raise ThreatModelError(
            "RobbingTheFed needs a malicious server that has put an imprint block into the model; "
            f"{type(seen.model).__name__} holds none: set `server` to lit_recon.models.Imprint, or use an attack of an "
            "honest-but-curious server, such as GradientMatching"
        )
    return found


def _labels_told(
    decoded: Tensor, labels: Tensor, name: str, block: ImprintBlock, seen: Observation
) -> tuple[Tensor, Tensor]:
    """Candidate labels of the decoded images `(j, c, h, w)`, and costs of assigning them by directions of derivatives.

    Known labels are complete. Recovered counts may be wrong if a defense has changed the gradient: labels found from
    derivatives are added to them.

    Returns:
        Labels `(l,)` with `l >= n`, and costs `(n, l)`: 0 in rows of images whose label is not certain.
    """
    known = seen.labels is not None
    classes = labels.unique() if known else torch.arange(seen.n_classes, device=labels.device)
    explained = _explained(decoded, classes, name, block, seen)
    best = torch.cat([explained, explained.new_zeros(len(decoded), 1)], dim=1).topk(2, dim=1)
    certain = best.values[:, 0] - best.values[:, 1] > CLEARLY
    if not known:
        found, counted = (
            torch.bincount(given.cpu(), minlength=seen.n_classes) for given in (best.indices[certain, 0], labels)
        )
        labels = torch.cat([labels, classes.repeat_interleave((found - counted).clamp(min=0).to(labels.device))])
    costs = log_misfit((1 - explained).sqrt())[:, torch.searchsorted(classes, labels).cpu()]
    evidence = costs.new_zeros(seen.n_examples, len(labels))
    evidence[: len(decoded)] = torch.where(certain[:, None], costs, 0.0)
    return labels, evidence


def _explained(images: Tensor, classes: Tensor, name: str, block: ImprintBlock, seen: Observation) -> Tensor:
    """Share `(j, q)` of each image's squared derivative that each of the labels explains."""
    if not len(images):
        return torch.zeros(0, len(classes), dtype=torch.float64)
    weight, bias = (exact(seen.parameters[f"{name}.measure.{part}"]) for part in ("weight", "bias"))
    active = block.activate(to_inputs(images.double(), seen) @ weight.T + bias)
    layer = FirstLayer.of(seen, f"{name}.spread")
    observed = least_squares(active.T, layer.weight.T)
    expected = layer.derivatives_by_class(images, classes)
    cosines: Tensor = torch.nn.functional.cosine_similarity(expected, observed[:, None], dim=2)
    return cosines.clamp(min=0, max=1).square()


def _scales(hits: Hits, functional: Tensor, edges: Tensor, moving: bool = False) -> Tensor:
    """Factor with which each hit's image enters the gradient, `(j,)`: the bias gradient.

    If by that factor the functional of the image lies outside the image's bin, because of noise or pruning, the
    functional, a sum over all pixels, gives the factor. Images that are `moving` may lie there: then it does so only
    where the bias gradient is 0.
    """
    known = hits.known[:, :-1]
    share = (known * functional.square()).sum(dim=1) / functional.square().sum()
    measured = hits.rows[:, :-1] @ functional / share.clamp(min=1e-3)
    lower, upper = edges[hits.bins], edges[hits.bins + 1]
    told = hits.rows[:, -1]
    value = torch.where(told == 0, (lower + upper) / 2, measured / told)
    inside = torch.minimum(torch.maximum(value, lower), upper)
    # tolerance: rounding of an image on an edge; near zero the functional does not determine the factor
    outside = (value - inside).abs() > 1e-3 * (1 + inside.abs())
    contradicted = (outside & (not moving)) | (told == 0)
    usable = contradicted & (inside.abs() > LEAST_FUNCTIONAL)
    scales = torch.where(usable, measured / torch.where(usable, inside, 1.0), told)
    tiny = torch.finfo(scales.dtype).tiny
    return torch.where(scales.abs() < tiny, tiny, scales)


def _one_each(images: Tensor, bins: Tensor, n: int) -> list[int]:
    """Indices of the hits to return: all if at most `n`, else the largest without repetitions."""
    if len(images) <= n:
        return list(range(len(images)))
    flat = images.flatten(1)
    directions = torch.nn.functional.normalize(flat - flat.mean(dim=1, keepdim=True), dim=1)
    same = (directions @ directions.T > SAME_IMAGE) & ((bins[:, None] - bins[None, :]).abs() <= 1)
    kept: list[int] = []
    for i in range(len(images)):
        if not same[i, kept].any():
            kept.append(i)
    return kept[:n]


def _notes(found: int, kept: int, alone: int, n_bins: int, seen: Observation) -> tuple[str, ...]:
    n = seen.n_examples
    notes = [f"imprint: {found} of {n_bins} bins hit by {n} images"]
    # an image that moves between bins during local steps hits several
    if n_bins > 1 and found <= n and several_steps(seen.operator) is None:
        notes.append(f"imprint: at least {max(0, 2 * kept - n)} and at most {kept} images are alone in their bin")
    notes.append(f"imprint: {alone} decoded images explain their part of the gradient alone")
    if found > kept:
        notes.append(f"imprint: {found - kept} hits left out, repetitions first, then the smallest")
    if kept < n:
        notes.append(f"imprint: {n - kept} of {n} images returned as the data's mean color")
    return tuple(notes)
