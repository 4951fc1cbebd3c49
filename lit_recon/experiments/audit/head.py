"""Checks of the head's gradient without an image: loss, weight decay, sign and scale.

Under cross-entropy it is a mean of (p_i - y_i) h_i^T: its columns add to zero, which shows weight decay and other
losses; its rank is at most the number of images; and its bias part is the mean of p_i - y_i, in which y_i are whole
numbers, which shows sign and scale as long as the probabilities p_i are those of any image, early in training.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from lit_recon.attacks.updates.labels.head import HeadGradient, probe_inputs
from lit_recon.clients.local_steps import path_length
from lit_recon.clients.record import Circumstances, Sent
from lit_recon.experiments.audit.evidence import Finding, spacing_in
from lit_recon.records import BatchNormMode, Observation

#: Cosine between the sums of the head's columns and those of its weights above which they are weight decay.
_DECAY = 0.9
#: Relative difference of weight decays that count as the same.
_SAME = 0.1
#: Share of a gradient above which errors hide what follows from it.
_HIDDEN = 0.2
#: Difference of log-likelihoods that counts as evidence for another scale, and largest squared deviation per class.
_EVIDENCE, _DEVIATION = 10.0, 9.0
#: Spread of the number of labels of a class up to which whole numbers can be told from others.
_WHOLE = 0.3


def unit_of(known: Circumstances, form: Sent) -> float:
    """By what a change of the weights is divided to have the size of a gradient; 1 if the rate is not known."""
    return 1.0 if form == "gradient" or known.lr is None else known.lr * path_length(known.steps, known.momentum)


class RoundingErrors(NamedTuple):
    """How large errors of the rounding of what was sent are, at most, in units of the head's gradient.

    Attributes:
        largest: singular value of those of the weights.
        of_sums: norm of their sums over the columns.
        of_bias: root mean square of those of the bias.
    """

    largest: float
    of_sums: float
    of_bias: float

    @classmethod
    def of(
        cls, head: HeadGradient, known: Circumstances, form: Sent, precision: torch.dtype, of_weights: torch.dtype
    ) -> RoundingErrors:
        """From half the distance of neighboring numbers: at what was sent, and at the weights whose change it is."""
        sent, unit = torch.finfo(precision), unit_of(known, form)

        def error(gradient: Tensor, weight: Tensor) -> float:
            every = torch.zeros_like(gradient)
            if form != "weights":
                every += spacing_in(gradient, precision).clamp_min(sent.smallest_normal * sent.eps / unit)
            if form != "gradient":
                every += known.steps / unit * spacing_in(weight, of_weights)
            return 0.5 * float(every.square().mean().sqrt())

        entry, (rows, columns) = error(head.weight_gradient, head.weight), head.weight.shape
        largest = entry * (math.sqrt(rows) + math.sqrt(columns))
        return cls(largest, 2 * entry * math.sqrt(rows * columns), error(head.bias_gradient, head.bias))


def held_decay(known: Circumstances, form: Sent) -> float:
    """The told weight decay, where what was sent holds it: an optimizer adds it to what `backward()` computes."""
    return 0.0 if form == "gradient" and known.steps == 1 else known.weight_decay


def decay_of(
    head: HeadGradient, known: Circumstances, form: Sent, masked: bool, given: bool, errors: RoundingErrors
) -> tuple[float, list[Finding]]:
    """Weight decay in the update beyond `held_decay`, and whether the loss can be cross-entropy."""
    if masked:
        text = "Loss and weight decay were not checked: entries of the update are missing."
        return 0.0, [Finding("open", text)]
    sums, own = head.weight_gradient.sum(dim=0), head.weight.sum(dim=0)
    size = float(head.weight_gradient.norm()) / math.sqrt(head.n_classes)
    if errors.of_sums > _HIDDEN * size:
        text = "Loss and weight decay were not checked: rounding left few digits of the head's gradient."
        return 0.0, [Finding("open", text)]
    if float(sums.norm()) <= max(1e-3 * size, errors.of_sums):
        text = "The columns of the head's gradient add to zero, as under cross-entropy."
        return 0.0, [Finding("fits", text)]
    slope = float(sums @ own / own.square().sum().clamp_min(1e-300))
    alike = abs(float(sums @ own / (sums.norm() * own.norm()).clamp_min(1e-300)))
    if alike > _DECAY and known.steps == 1 and given:
        found = held_decay(known, form) + slope
        if abs(found - known.weight_decay) <= _SAME * known.weight_decay:
            return slope, [Finding("found", "The gradient holds the weight decay that was told: it was taken off.")]
        text = f"The update holds weight decay of {found:.2g}, but {known.weight_decay:g} is claimed: it was taken off."
        return slope, [Finding("doubt", text)]
    noise = float(sums.norm()) / math.sqrt(len(sums) * head.n_classes)
    text = (
        "The columns of the head's gradient do not add to zero, as they do under cross-entropy: noise of about "
        f"{noise:.1e} per entry, another loss, or weight decay over several steps."
    )
    return 0.0, [Finding("doubt", text)]


def scale_of(head: HeadGradient, seen: Observation, batch_norm: BatchNormMode, errors: RoundingErrors) -> float | None:
    """Factor of the gradient's bias part, signed; 1 unless another is far more likely, None where nothing can be told.

    In b = s (p - m / n) the numbers m of labels are whole, and the probabilities p are those of noise images up to
    their spread: where that is small, the likelihood of b tells s.
    """
    n = seen.n_examples
    # of an update with missing entries, zeros are not values
    kept = torch.ones_like(head.bias_gradient, dtype=torch.bool) if seen.defense is None else head.bias_gradient != 0
    if kept.double().mean() <= 0.5 or errors.of_bias > _HIDDEN * float(head.bias_gradient.square().mean().sqrt()):
        return None
    # statistics of a batch are those of as many images as the client had
    inputs = probe_inputs(seen, batch_norm=batch_norm, together=max(2, n)).double()
    each = torch.softmax(nn.functional.linear(inputs, head.weight, head.bias), dim=1)
    usual, deviation = each.mean(dim=0), each.std(dim=0)
    spread = (deviation * max(2 / math.sqrt(n), 0.25)).clamp_min(0.02 / head.n_classes)
    if n * float(spread.median()) > _WHOLE:
        return None

    def fit(scale: float) -> tuple[float, float]:
        counts = n * (usual - head.bias_gradient / scale)
        deviations = ((counts - counts.round().clamp_min(0)) / (n * spread))[kept].square()
        return -0.5 * float(deviations.sum()) - len(deviations) * math.log(abs(scale)), float(deviations.mean())

    scales = [sign * 10 ** (power / 20) for sign in (1, -1) for power in range(-140, 61)]
    rough = max(scales, key=lambda scale: fit(scale)[0])
    # the grid's steps of 12 % are too coarse; the peak lies between the neighbors
    peak = minimize_scalar(lambda power: -fit(rough * 10**power)[0], bounds=(-1 / 20, 1 / 20), method="bounded")
    best = max(rough, rough * 10 ** float(peak.x), key=lambda scale: fit(scale)[0])
    if fit(best)[1] > _DEVIATION:
        return None
    likely, misfit = fit(1.0)
    return 1.0 if likely > fit(best)[0] - _EVIDENCE and misfit <= _DEVIATION else best
