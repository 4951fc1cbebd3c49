"""Class counts of a batch, from the gradient of the classifier's head.

With at least as many examples as classes the equations of `lit_recon.attacks.updates.labels.equations` no longer
determine the inputs: other counts can explain the gradient too. Inputs are then projected in turn onto the non-negative
ones (after a ReLU), onto those that give the gradient of the weights (with fixed probabilities) and onto those that
give that of the bias (linearized); the residual after a fixed number of rounds ranks the counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lit_recon.attacks.updates.labels.equations import Fit, HeadEquations, prior_guess
from lit_recon.attacks.updates.labels.head import ROUNDING, HeadGradient

#: Damping of the two linear systems, relative to their mean eigenvalue.
WEIGHT_DAMPING, BIAS_DAMPING = 1e-4, 1e-2
#: Step size of a projection; full steps overshoot, because each equation is solved with the other fixed, and cycle.
RELAXATION = 0.3
#: Rounds of projections.
ROUNDS = 120


class HeadProjections:
    """Alternating projections of the head's inputs, for any number of examples."""

    def __init__(self, head: HeadGradient) -> None:
        self.head = head
        self.gram = head.weight @ head.weight.T

    def solve(self, counts: Tensor, seed: int = 0) -> Fit:
        """Fit for assumed class counts `(k,)`, from a random start; never `explained`: other counts might fit too."""
        head, n = self.head, self.head.n_examples
        targets = torch.eye(len(counts), dtype=torch.float64).repeat_interleave(counts, dim=0)
        inputs = prior_guess(targets, head.weight_gradient, seed)
        for _ in range(ROUNDS):
            inputs = inputs.clamp(min=0) if head.non_negative else inputs
            errors = self._probabilities(inputs) - targets
            excess = errors.T @ inputs - n * head.weight_gradient
            inputs = inputs - RELAXATION * errors @ _damped_solve(errors.T @ errors, excess, WEIGHT_DAMPING)
            p = self._probabilities(inputs)
            surplus = (p - targets).sum(dim=0) - n * head.bias_gradient
            slopes = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
            reach = torch.einsum("iab,icb->ac", slopes @ self.gram, slopes)
            inputs = inputs - RELAXATION * slopes @ _damped_solve(reach, surplus, BIAS_DAMPING) @ head.weight
        inputs = inputs.clamp(min=0) if head.non_negative else inputs
        probabilities = self._probabilities(inputs)
        errors = probabilities - targets
        bias_misfit = (errors.mean(dim=0) - head.bias_gradient).norm() / head.bias_gradient.norm()
        weight_misfit = (errors.T @ inputs / n - head.weight_gradient).norm() / head.weight_gradient.norm()
        residual = float(bias_misfit + weight_misfit)
        return Fit(residual if math.isfinite(residual) else math.inf, residual, probabilities.sum(dim=0), False)

    def _probabilities(self, inputs: Tensor) -> Tensor:
        return torch.softmax(inputs @ self.head.weight.T + self.head.bias, dim=1)


def _damped_solve(matrix: Tensor, right: Tensor, damping: float) -> Tensor:
    # the floor keeps the matrix regular if all probabilities are 0 or 1
    floor = damping * matrix.diagonal().mean() + 1e-12
    solution: Tensor = torch.linalg.solve(matrix + floor * torch.eye(len(matrix), dtype=matrix.dtype), right)
    return solution


#: Largest noise in standard deviations: sufficient for thousands of entries of Laplace noise.
SIGMAS = 12
#: Number of examples above which the equations, with matrices of n^2 rows, are slower than the projections.
MOST_EXAMPLES = 20
#: Number of classes above which projections, of k^3 operations, are too slow for what they improve.
MOST_CLASSES = 64
#: Significance level for unrelated numbers being as near to whole numbers.
CHANCE = 0.01
#: If the equations determine the inputs, a search that has spent this share of the trials without a solution is
#: restarted from the best counts so far and other starting points of the solver, at most so many times.
SHARE_OF_TRIALS, MOST_ATTEMPTS = 3, 8


@dataclass(frozen=True)
class LabelCounts:
    """Class counts `(k,)` that sum to the batch size, and their evidence.

    `bounds`: without noise, only these satisfy the bounds; `explained`: they reproduce the head's gradient up to
    rounding, with fewer examples than classes; `whole`: see `whole_counts`; `estimated`: the best of those tried.
    """

    counts: Tensor
    support: Literal["bounds", "explained", "whole", "estimated"]
    residual: float | None = None
    trials: int = 0


def count_labels(head: HeadGradient, trials: int, seed: int) -> LabelCounts:
    """Class counts of the batch: by bounds if they suffice, else those of up to `trials` that explain the gradient.

    `seed` is that of the solvers' starting points.
    """
    lower = lower_bounds(head)
    counts = first_guess(head, lower)
    if int(lower.sum()) == head.n_examples:
        return LabelCounts(counts, "bounds" if head.clean else "estimated")
    silent = not (head.weight_gradient.any() and head.bias_gradient.any())
    determined = head.n_examples < head.n_classes and head.n_examples <= MOST_EXAMPLES
    whole = None if silent or determined else whole_counts(head, lower)
    if whole is not None:
        return LabelCounts(whole, "whole")
    if silent or trials < 1 or (head.n_classes > MOST_CLASSES and not determined):
        return LabelCounts(counts, "estimated")
    search = _Search(head, lower, HeadEquations(head) if determined else HeadProjections(head))
    share = math.ceil(trials / SHARE_OF_TRIALS) if determined else trials
    for attempt in range(MOST_ATTEMPTS if determined else 1):
        if len(search.tried) < trials:
            search.run(counts, min(share, trials - len(search.tried)), seed + attempt)
        counts, fit = search.best
        if fit.explained and head.clean:
            return LabelCounts(counts, "explained", fit.residual, len(search.tried))
    return LabelCounts(counts, "estimated", fit.residual, len(search.tried))


def counts_by_signs(head: HeadGradient) -> LabelCounts:
    """Class counts from the signs of the head's gradient, which are what Adam leaves of it.

    The bias entry of a class is negative where its images outnumber those that the model expects, early in training
    wherever it has one. Those classes get one image each, most negative first, and the other images by the sums of
    their rows of weights: the more images of a class, the more entries are negative.
    """
    n, order = head.n_examples, head.bias_gradient.argsort(stable=True)
    present = order[: max(1, min(n, int((head.bias_gradient < 0).sum())))]
    counts = torch.zeros(head.n_classes, dtype=torch.int64)
    counts[present] = 1
    sums = -head.weight_gradient[present].sum(dim=1)
    shares = sums.clamp_min(0) + 1e-3 * sums.abs().max() + 1e-12
    exact_shares = (n - len(present)) * shares / shares.sum()
    counts[present] += exact_shares.floor().long()
    left = n - int(counts.sum())
    counts[present[(exact_shares - exact_shares.floor()).argsort(descending=True, stable=True)[:left]]] += 1
    return LabelCounts(counts, "estimated")


def lower_bounds(head: HeadGradient) -> Tensor:
    """Lower bound on the count of each class, `(k,)`.

    The bias entry of class c is `mean_i p_ic - a_c / n` for count a_c, so a_c > -n G_b[c]; where images of some
    mini-batches count more, n is divided by their weight. After a ReLU a class that does not occur has a row of weights
    `mean_i p_ic h_i` without negative entries; a negative one proves it occurs. If noise or pruning makes these bounds
    exceed the batch size, all are zero.

    Source: the first bound is that of [Zhao2020] and [Yin2021] made quantitative; the second extends [Zhao2020].
    """
    n, largest = head.n_examples, head.bias_gradient + SIGMAS * head.bias_noise
    lower = (-n / head.largest_weight * largest - 1e-4).ceil().clamp(min=0).long()
    if head.non_negative:
        lower = torch.maximum(lower, _surely_present(head).long())
    return lower if int(lower.sum()) <= n else torch.zeros_like(lower)


def first_guess(head: HeadGradient, lower: Tensor) -> Tensor:
    """Counts nearest to those for equal class probabilities, within the bounds."""
    expected = head.n_examples * (1 / head.n_classes - head.bias_gradient) - lower
    free = head.n_examples - int(lower.sum())
    shares = _onto_simplex(expected, float(free))
    counts = shares.floor()
    short = free - int(counts.sum())
    counts[(shares - counts).argsort(descending=True)[:short]] += 1
    return lower + counts.long()


def whole_counts(head: HeadGradient, lower: Tensor) -> Tensor | None:
    """Counts `(k,)` if one probability vector, uniform or that of noise images, makes them whole numbers.

    None if they are so far from whole numbers that chance would bring k - 1 unrelated ones as near in one case of a
    hundred, or if they violate the lower bounds: the probabilities then differ between images. None, too, where
    mini-batches count differently: true counts then are not whole, and others may be. Counts that a bias gradient of
    zero would give are taken only where it is small beside the weights': all of the gradient may be scaled down.
    """
    if head.largest_weight > 1 + ROUNDING:
        return None
    tolerance = min(0.4, 0.5 * CHANCE ** (1 / (head.n_classes - 1)))
    for probabilities in (torch.full_like(head.usual, 1 / head.n_classes), head.usual):
        counts = head.n_examples * (probabilities - head.bias_gradient)
        whole = counts.round().long()
        possible = int(whole.sum()) == head.n_examples and bool((whole >= lower).all())
        near = possible and (counts - whole).abs().max() < tolerance
        trivial = torch.equal(whole, (head.n_examples * probabilities).round().long())
        if near and (not trivial or _balanced(head, tolerance)):
            return whole
    return None


def _balanced(head: HeadGradient, tolerance: float) -> bool:
    """Whether the bias gradient is that of equal counts up to `tolerance` images, whatever the gradient's scale.

    With equal counts, what the inputs have in common cancels in the weights' gradient: of n unrelated parts, it has at
    most about the norm of one input over the root of n.
    """
    scale = float(head.weight_gradient.norm()) * math.sqrt(head.n_examples)
    return head.n_examples * float(head.bias_gradient.abs().max()) * head.usual_norm < tolerance * scale


def _surely_present(head: HeadGradient) -> Tensor:
    least = max(1e-5 * head.weight_gradient.abs().max().item(), SIGMAS * head.weight_noise)
    return head.weight_gradient.min(dim=1).values < -least


def _onto_simplex(point: Tensor, total: float) -> Tensor:
    """Nearest non-negative vector with sum `total`."""
    descending = point.sort(descending=True).values
    shift = (descending.cumsum(0) - total) / torch.arange(1, len(point) + 1)
    last = max(int((descending > shift).sum()) - 1, 0)
    return (point - shift[last]).clamp(min=0)


@dataclass
class _Search:
    """Best-first search over counts; neighbours differ by one example that changes class."""

    head: HeadGradient
    lower: Tensor
    solver: HeadEquations | HeadProjections
    tried: list[tuple[Tensor, Fit]] = field(default_factory=list)

    @property
    def best(self) -> tuple[Tensor, Fit]:
        return min(self.tried, key=lambda entry: entry[1].score)

    def run(self, start: Tensor, trials: int, seed: int) -> None:
        """Try `trials` more counts, or fewer if some explain a clean gradient."""
        limit = len(self.tried) + trials
        waiting = {tuple(start.tolist()): self._try(start, seed)}
        met = set(waiting)
        while waiting and not self._done(limit):
            key = min(waiting, key=lambda counts: waiting[counts].score)
            here = waiting.pop(key)
            for counts in self._neighbours(torch.tensor(key), here):
                name = tuple(counts.tolist())
                if name in met:
                    continue
                met.add(name)
                waiting[name] = self._try(counts, seed)
                if self._done(limit):
                    break
                if waiting[name].score < 0.5 * here.score:
                    waiting[key] = here
                    break

    def _try(self, counts: Tensor, seed: int) -> Fit:
        fit = self.solver.solve(counts, seed)
        self.tried.append((counts, fit))
        return fit

    def _done(self, limit: int) -> bool:
        return len(self.tried) >= limit or (self.tried[-1][1].explained and self.head.clean)

    def _neighbours(self, counts: Tensor, fit: Fit) -> Iterator[Tensor]:
        """Neighbours within the bounds; first those towards the counts implied by the fitted probabilities."""
        n = self.head.n_examples
        wanted = fit.expected - n * self.head.bias_gradient - counts
        if self.head.non_negative:
            # classes without evidence of presence come last
            wanted = torch.where(_surely_present(self.head) | (counts > 0), wanted, wanted - n)
        gains = wanted[None, :] - wanted[:, None]
        for move in gains.flatten().argsort(descending=True).tolist():
            source, target = divmod(move, len(counts))
            if source != target and counts[source] > self.lower[source]:
                moved = counts.clone()
                moved[source] -= 1
                moved[target] += 1
                yield moved
