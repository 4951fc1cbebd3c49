"""Use of zero derivatives after a ReLU: images that are certified by the zeros, and a robust fit of all images.

The derivatives of each of `n` images lie in the span of the columns of the gradient D^T X, which has `n` of `m`
dimensions. A vector of that span can be given n - 1 zeros, but not many more unless it is the derivative of one image
alone, zero at every neuron that the image leaves inactive. Such vectors are searched near the derivatives of separated
images. If all are found, X follows; if some are, the other images are separated from mixtures without them.

The robust fit alternates between D, by the public model at images X, and X, by least squares. For a rough guess most
entries of D are nearly right, and neurons with wrong entries are outliers, to which the least squares are robust.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lit_recon.attacks.updates.linear_layer.first_layer import FirstLayer, relative_residual, to_inputs, to_pixels
from lit_recon.attacks.updates.linear_layer.unmixing import Mixtures, mixtures_of, rank
from lit_recon.records import Observation
from lit_recon.solving import least_squares

#: Zeros beyond the number of images that certify a vector; largest entry that counts as zero, relative to the largest.
EXCESS, ZERO = 8, 1e-4
#: Share of a separated image's zeros that is needed too: a mixture of two images has about half.
SHARE = 0.8
#: Number of labels to try per image.
LABELS_TRIED = 2
#: Iterations of the search for zeros; width of the penalty, relative to the mean entry, and its decrease.
ITERATIONS, WIDTH, SHRINKAGE, LEAST_WIDTH = 40, 0.1, 0.6, 1e-6
#: Largest number of entries of a chunk of searches.
CHUNK = 2**24
#: Share of the remaining derivatives that a successful separation finds; number of failures that end the search.
FRUITFUL, PATIENCE = 1 / 8, 2
#: Cosine above which two directions count as equal.
SAME = 1 - 1e-4


def completed(
    guess: Tensor, labels: Tensor, layer: FirstLayer, separate: Callable[[Mixtures, int], Tensor]
) -> tuple[Tensor, int]:
    """Images `(n, c, h, w)` that agree with all derivatives found, and the number of these.

    The guess `(n, c, h, w)` is in [0, 1], labels `(n,)` are in any order, the layer's rank is at least `n`. `separate`
    returns images of mixtures, given the number of the start.

    Source: zeros as proof: Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches in Federated Learning, NeurIPS
    2024; a search in place of samples: Bakarsky et al., SPEAR++: Scaling Gradient Inversion via Sparsely-Used
    Dictionary Learning, 2025. The start and the separation of the rest are ours.
    """
    n, seen = len(guess), layer.seen
    span, values, axes = torch.linalg.svd(layer.rows, full_matrices=False)
    span, rows = span[:, :n], values[:n, None] * axes[:n]
    found, in_vain = _with_zeros(guess, labels, layer, span, span.new_zeros(0, n)), 0
    if not len(found):
        return guess, 0
    candidates = guess
    while len(found) < n and in_vain < PATIENCE:
        # gradient rows without a contribution of the images found
        left = torch.linalg.svd(found, full_matrices=True).Vh[len(found) :] @ rows
        if rank(left) < 2:
            candidates = to_pixels(left[:1, :-1] / left[:1, -1:], seen).clamp(0, 1)
        else:
            candidates = separate(mixtures_of(left[:, :-1], left[:, -1], len(left)), in_vain)
        before, found = len(found), _with_zeros(candidates, labels, layer, span, found)
        in_vain = 0 if len(found) - before >= FRUITFUL * (n - before) else in_vain + 1
    return to_pixels(_inputs(found, candidates, guess, rows, seen), seen).clamp(0, 1), len(found)


def _with_zeros(images: Tensor, labels: Tensor, layer: FirstLayer, span: Tensor, found: Tensor) -> Tensor:
    """`found`, and appended the coordinates in `span` of further vectors certified by their zeros."""
    n = span.shape[1]
    # a neuron that no image activates is zero in every direction and is no evidence
    reached = (layer.weight != 0).any(dim=1)
    classes = labels.unique()
    expected = layer.derivatives_by_class(images, classes)
    projected = expected @ span
    explained = projected.square().sum(dim=2) / expected.square().sum(dim=2).clamp(min=torch.finfo(span.dtype).tiny)
    # the same for all labels
    expected_zeros = (expected == 0)[:, 0, reached].sum(dim=1)
    needed = (SHARE * expected_zeros).clamp(min=n + EXCESS)
    unproved = (expected_zeros >= n) & (projected.square().sum(dim=(1, 2)) > 0)
    tried = explained.topk(min(LABELS_TRIED, len(classes)), dim=1).indices
    for choice in tried.T:
        pending = unproved.nonzero()[:, 0]
        if not len(pending):
            break
        starts = projected[pending, choice[pending]]
        together = starts.split(max(1, CHUNK // span.numel()))
        vectors, zeros = map(torch.cat, zip(*(_sparsest(part, span[reached]) for part in together), strict=True))
        proved = zeros >= needed[pending]
        unproved[pending[proved]] = False
        for vector in vectors[proved]:
            if not ((found @ vector).abs() > SAME).any():
                found = torch.cat([found, vector[None]])
    return found[:n]


def _sparsest(starts: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors `(j, n)` near the starts with many zeros after mapping by `span` `(m, n)`, and numbers of zeros.

    Reweighted least squares minimize the sum of log(|entry|^2 + width^2), with decreasing width.
    """
    starts = torch.nn.functional.normalize(starts, dim=1)
    scale = (starts @ span.T).square().mean(dim=1, keepdim=True).sqrt()
    vectors, width = starts, WIDTH
    for _ in range(ITERATIONS):
        weights = 1 / ((vectors @ span.T).square() + (width * scale).square())
        system = span.T @ (weights[:, :, None] * span)
        solved = torch.linalg.solve(system, starts[:, :, None])[:, :, 0]
        vectors = solved / (solved * starts).sum(dim=1, keepdim=True)
        width = max(width * SHRINKAGE, LEAST_WIDTH)
    entries = (vectors @ span.T).abs()
    zeros = (entries < ZERO * entries.amax(dim=1, keepdim=True)).sum(dim=1)
    return torch.nn.functional.normalize(vectors, dim=1), zeros


def _inputs(found: Tensor, candidates: Tensor, guess: Tensor, rows: Tensor, seen: Observation) -> Tensor:
    """Inputs `(n, d)` that agree with the found derivatives; if some are missing, the nearest to the guess."""
    if len(found) == len(guess):
        exact: Tensor = torch.linalg.solve(found.T, rows)
        return exact[:, :-1] / exact[:, -1:]
    guessed = torch.cat([to_inputs(guess, seen), guess.new_ones(len(guess), 1)], dim=1)
    # one unmixing row per image, orthogonal to the derivatives of all other images
    unmixing = least_squares(rows.T, guessed.T).T
    owners, owned = linear_sum_assignment(-(unmixing @ found.T).abs().numpy())
    rest = torch.ones(len(guess), dtype=torch.bool)
    rest[owners] = False
    lengths = rows.norm(dim=1)
    kept = []
    for owner, own in zip(owners, owned, strict=True):
        others = torch.arange(len(found)) != own
        constraints = torch.cat([found[others], rows[:, -1:].T]) / lengths
        aims = torch.zeros(len(constraints), dtype=rows.dtype)
        aims[-1] = 1
        start = unmixing[owner] * lengths
        move = least_squares(constraints, aims - constraints @ start)
        kept.append(((start + move) / lengths) @ rows)
    left = to_inputs(candidates, seen) if len(candidates) == rest.sum() else guessed[rest, :-1]
    return torch.cat([torch.stack(kept)[:, :-1], left])


#: Relative residual of the gradient below which the solution counts as exact.
SOLVED = 1e-6
#: Relative residual above which the guess is kept.
CONVINCING = 1e-2
#: Reweightings of the robust least squares, and the floor of residuals relative to the median.
REWEIGHTINGS, SMALLEST_RESIDUAL = 15, 1e-3


def refined(
    images: Tensor, labels: Tensor, layer: FirstLayer, iterations: int
) -> tuple[Tensor, Tensor, float, list[float]]:
    """Images, labels in their order, the relative residual of the whole update and its curve, after a fit to it.

    There are at most `iterations` rounds; with 0 only labels are assigned. Far from the solution a round may lower the
    residual and raise the error: only a fit with a residual below `CONVINCING` replaces the images given, in [0, 1].
    """
    seen, separate = layer.seen, _robust_separation(layer, len(images))
    order = _labelled(images, labels, layer)
    residual = relative_residual(images, order, seen)
    guess = best = (images, order, residual)
    curve = [residual]
    for _ in range(iterations):
        if curve[-1] < SOLVED:
            break
        inputs = separate(layer.derivatives(images, order) / len(images))
        images = to_pixels(inputs, seen).clamp(0, 1)
        if not images.isfinite().all():  # LAPACK would not return from the next fit
            break
        order = _labelled(images, labels, layer)
        residual = relative_residual(images, order, seen)
        curve.append(residual)
        if residual < best[2]:
            best = images, order, residual
    return *(best if best[2] < CONVINCING else guess), curve


def _labelled(images: Tensor, labels: Tensor, layer: FirstLayer) -> Tensor:
    inputs = to_inputs(images.double(), layer.seen)
    parts = least_squares(inputs.T, layer.weight.T)
    return layer.assign_labels(images, labels, parts)[0]


def _robust_separation(layer: FirstLayer, n: int) -> Callable[[Tensor], Tensor]:
    """A function from derivatives `(n, m)` to inputs `(n, d)` whose mixtures approximate the gradient.

    Minimizes the sum over neurons of distances, not of their squares, by iteratively reweighted least squares.
    """
    left, values, right = torch.linalg.svd(layer.rows, full_matrices=False)
    left, right = left[:, :n] * values[:n], right[:n]
    # first axis: along the column of the bias, mixtures of ones
    ones = right[:, -1]
    turn = torch.linalg.svd(ones[None], full_matrices=True).Vh
    target, axes = left @ turn.T, turn @ right
    scale = (turn @ ones)[0]

    def separate(parts: Tensor) -> Tensor:
        weights = torch.ones(len(target), dtype=target.dtype)
        coordinates = torch.zeros(len(parts), target.shape[1], dtype=target.dtype)
        for _ in range(REWEIGHTINGS):
            system = (parts * weights).T
            coordinates = least_squares(system, target * weights[:, None])
            errors = (parts.T @ coordinates - target).norm(dim=1)
            floor = SMALLEST_RESIDUAL * errors.median() + torch.finfo(errors.dtype).tiny
            weights = (floor / (errors + floor)).sqrt()
        coordinates[:, 0] = 1 / scale
        inputs: Tensor = (coordinates @ axes)[:, :-1]
        return inputs

    return separate
