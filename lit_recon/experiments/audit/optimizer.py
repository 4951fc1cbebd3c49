"""The client's optimizer, as an update shows it: one step of Adam moves nearly all weights by the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lit_recon.attacks.updates.labels.head import HeadGradient
from lit_recon.clients.record import Circumstances, Sent
from lit_recon.defenses.vectors import flatten
from lit_recon.experiments.audit.evidence import Finding

#: Relative difference of amounts that count as the same, and the share of others that there may be.
_SAME = 0.05
#: Largest step of Adam in units of its rate that is believed; all but erratic gradients stay near 1.
_STEP = 1.5


def optimizer_facts(
    change: Mapping[str, Tensor], known: Circumstances, form: Sent
) -> tuple[Circumstances, list[Finding]]:
    """The circumstances with the optimizer and its rate as the change of the weights shows them, and what was found."""
    if form == "gradient":
        return replace(known, optimizer="sgd"), []
    amount = _amount(change) if known.steps == 1 else None
    if known.optimizer == "sgd":
        if amount is None:
            return known, []
        text = (
            f"Nearly all weights moved by the same amount, {amount:.2g}: the client used Adam with this learning rate, "
            "or sent signs, and no SGD. The attacks simulate one step of Adam."
        )
        return replace(known, optimizer="adam", momentum=0.0, lr=amount), [Finding("doubt", text)]
    if known.steps > 1:
        largest = float(flatten(dict(change)).abs().max())
        if known.lr is None or largest <= _STEP * known.steps * known.lr:
            return known, []
        text = (
            f"{known.steps} steps of Adam at the rate {known.lr:g} move no weight by {largest:.2g}: the rate or the "
            "number of steps is larger."
        )
        return known, [Finding("doubt", text)]
    if amount is None:
        text = (
            "One step of Adam moves nearly all weights by the same amount, and these were not: another optimizer, or "
            "more steps."
        )
        return known, [Finding("doubt", text)]
    if known.lr is None:
        return replace(known, lr=amount), [
            Finding("found", f"All weights moved by {amount:.2g}: Adam's learning rate.")
        ]
    if abs(amount / known.lr - 1) <= _SAME:
        return known, [Finding("fits", "All weights moved by the learning rate, as after one step of Adam.")]
    text = f"All weights moved by {amount:.2g}, and not by Adam's given rate {known.lr:g}: this is taken for the rate."
    return replace(known, lr=amount), [Finding("doubt", text)]


def _amount(change: Mapping[str, Tensor]) -> float | None:
    """The amount by which nearly all weights moved that moved at all; None if amounts differ."""
    moved = flatten(dict(change)).abs()
    moved = moved[moved > 0.1 * moved.max()]  # what is far smaller moved by weight decay alone
    usual = float(moved.median())
    return usual if float(((moved / usual - 1).abs() < _SAME).double().mean()) >= 1 - _SAME else None


def is_reversed(head: HeadGradient) -> bool | None:
    """Whether signs of the head's gradient are turned around; None where they do not tell.

    Behind a ReLU, the row of a class that no image has is a sum of non-negative features: all its signs are positive.
    """
    if not head.non_negative:
        return None
    rows = head.weight_gradient[head.weight_gradient.any(dim=1)]
    positive, negative = int((rows >= 0).all(dim=1).sum()), int((rows <= 0).all(dim=1).sum())
    return None if positive == negative else negative > positive
