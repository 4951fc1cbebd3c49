"""The labels of a batch: known, recovered from the head's gradient, or optimized together with the images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn, final

import torch
from torch import Tensor

from lit_recon.attacks.updates.labels.counts import LabelCounts, count_labels, counts_by_signs
from lit_recon.attacks.updates.labels.head import (
    find_head,
    head_gradient,
    keeps_magnitudes,
    probe_inputs,
    require_cross_entropy,
)
from lit_recon.clients.aggregate import parts_of
from lit_recon.clients.gradient import checked_loss
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Observation


class LabelRecovery(ABC):
    """Finds the labels of a batch: subclasses recover those that the attacker does not know.

    Labels given in the observation are returned by every subclass. The order of others is unknown, so they are sorted;
    given ones of several mini-batches or clients are in the client's order, which tells where each image was.
    """

    #: Where labels are not given, the attack starts from `initial_logits` and optimizes label probabilities with the
    #: images; the labels returned by a call are placeholders.
    can_optimize: bool = False
    #: Labels that an attack knows from exact features are better than those of a call.
    estimated: bool = False

    @final
    def __call__(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        """Labels `(n,)`, int64 on the device of the update, and notes for the report; raises the errors of `check`."""
        self.check(observation)
        labels = observation.labels
        if labels is None:
            return self.recover(observation)
        return (labels if parts_of(observation) > 1 else labels.sort().values), ()

    @final
    def check(self, observation: Observation) -> None:
        """Raise an error, before any computation, for observations whose labels are neither given nor can be found.

        Raises:
            ThreatModelError: a batch, a loss or knowledge that the method cannot use.
            UnsupportedModelError: the model lacks the head that the method needs.
        """
        if observation.labels is None:
            self.require(observation)

    @abstractmethod
    def recover(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        """Labels that are not given, and notes, of an observation that has what `require` asks for."""

    def require(self, observation: Observation) -> None:  # noqa: B027 most methods have no requirement
        """Raise the errors of `check` for an observation without labels."""

    def optimizes(self, observation: Observation) -> bool:
        """Whether the attack optimizes the labels of this observation."""
        return self.can_optimize and observation.labels is None

    def initial_logits(self, observation: Observation, generator: torch.Generator) -> Tensor:
        """Initial logits `(n, k)`; raises a `ConfigError` if labels are not optimized."""
        raise ConfigError(f"{type(self).__name__} recovers classes and has no logits to optimize: use JointLabels")


class KnownLabels(LabelRecovery):
    """The labels given in the observation; a `ThreatModelError` without them."""

    def require(self, observation: Observation) -> NoReturn:
        raise ThreatModelError(
            "KnownLabels needs an observation with knowledge.labels=true, but this one hides the labels: "
            "reveal them, or recover them with HeadCounts, IDLG (one image) or JointLabels"
        )

    def recover(self, observation: Observation) -> NoReturn:
        self.require(observation)


class IDLG(LabelRecovery):
    """The label of one image, exact for an undefended gradient of the cross-entropy on a linear head.

    The head's bias gradient is p - e_y: negative at the label only. The row c of its weight gradient is (p - e_y)_c
    times the head's input, and the entries of p - e_y sum to zero; hence with three classes or more the label's row
    is the longest, for inputs of any sign, and with two classes after a ReLU, or after Adam, it is the negative one.
    Rows tell where the head has no bias, or the label's entry of it was not sent: none is then clearly negative.

    Source: [Zhao2020], whose rule (inner products of rows, or signs) is restated by norms.
    """

    def require(self, observation: Observation) -> None:
        if observation.n_examples != 1:
            raise ThreatModelError(
                f"IDLG recovers the label of one image; this client has {observation.n_examples}: use HeadCounts"
            )
        require_cross_entropy(observation, "IDLG", "reveal the labels and use KnownLabels")
        weight, bias = find_head(observation, "IDLG")
        # a bias may be frozen, or its gradient not sent
        without_bias = bias is None or (observation.update[weight].any() and not observation.update[bias].any())
        if without_bias and not _row_norms_tell(observation) and (probe_inputs(observation) < 0).any():
            raise UnsupportedModelError(
                "IDLG for two classes, or after Adam, needs the gradient of the head's bias, or non-negative inputs (a "
                "ReLU before it); here is neither: reveal the labels and use KnownLabels, or optimize them with "
                "JointLabels"
            )

    def recover(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        weight, bias = find_head(observation, "IDLG")
        rows = observation.update[weight]
        entries = rows.new_zeros(len(rows)) if bias is None else observation.update[bias]
        # the label's entry is minus the sum of the others, of which one is enough with two classes
        if entries.any() and (observation.n_classes == 2 or entries.max() < -2 * entries.min()):
            return entries.argmin().view(1), ()
        guess = ("labels: the gradient of the head does not tell the label, which is a guess",)
        if not rows.any():
            return entries.argmin().view(1), guess
        if _row_norms_tell(observation):
            return rows.norm(dim=1).argmax().view(1), ()
        return rows.sum(dim=1).argmin().view(1), guess if (probe_inputs(observation) < 0).any() else ()


def _row_norms_tell(observation: Observation) -> bool:
    """Whether the longest row of the head's weight gradient is the label's."""
    return observation.n_classes > 2 and keeps_magnitudes(observation)


class HeadCounts(LabelRecovery):
    """Class counts of the batch, from the head's gradient, the batch size and the public model.

    1. Lower bounds on each count (see `lower_bounds`), which often leave one possibility.
    2. Else a search for counts under which some inputs of the head reproduce its whole gradient. With fewer examples
       than classes (up to 20) the equations are overdetermined: counts that solve them up to rounding were correct in
       every measurement, at any stage of training.
    3. With more examples: the counts implied by equal probabilities of all images, if these are whole numbers (before
       training); else, as an estimate, those of least residual, or beyond 64 classes a first guess.

    The update is the gradient of the mean cross-entropy on a linear head with bias; of several local steps, the mean
    gradient or the difference of weights. Notes say which case it was. Noise, seen in columns that should sum to zero,
    widens the bounds. From the steps of Adam, whose signs are those of the gradient, counts are estimated.

    Args:
        trials: largest number of counts to try; 0.05 to 0.5 seconds each on one core at 10 classes. 0: first guess.
        seed: of the solvers' starting points.

    Source: Step 1 extends [Zhao2020] and [Yin2021]. Step 2 replaces the class averages of [Wainakh2021] and [Ma2023] by
    equations for every example.
    """

    estimated = True

    def __init__(self, trials: int = 120, seed: int = 0) -> None:
        if trials < 0:
            raise ConfigError(f"HeadCounts needs trials of at least 0; got {trials}")
        self.trials, self.seed = trials, seed

    def require(self, observation: Observation) -> None:
        if observation.n_examples == 1:
            IDLG().require(observation)
        else:
            head_gradient(observation)

    def recover(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        if observation.n_examples == 1:
            return IDLG().recover(observation)
        head = head_gradient(observation)
        known = keeps_magnitudes(observation)
        found = count_labels(head, self.trials, self.seed) if known else counts_by_signs(head)
        labels = torch.arange(len(found.counts)).repeat_interleave(found.counts)
        return labels.to(observation.like.device), (_note(found),)


def _note(found: LabelCounts) -> str:
    if found.support == "bounds":
        how = "are the only ones within the bounds of the head's gradient"
    elif found.support == "whole":
        how = "are whole numbers if the model gives all images the same class probabilities"
    elif found.residual is None:
        how = "estimated from the head's gradient, without a search"
    elif found.support == "explained":
        how = f"explain the head's gradient up to rounding (relative residual {found.residual:.0e})"
    else:
        how = (
            f"estimated; the best of {found.trials} tried explain the head's gradient up to a relative residual of "
            f"{found.residual:.0e}"
        )
    return f"labels: class counts {how}"


class JointLabels(LabelRecovery):
    """Label probabilities of every image, optimized together with the pixels from logits drawn from N(0, 1).

    Source: [Zhu2019].
    """

    can_optimize = True

    def require(self, observation: Observation) -> None:
        try:
            checked_loss(observation.loss, observation.n_classes, observation.like, probabilities=True)
        except ConfigError as error:
            raise ThreatModelError(
                f"JointLabels optimizes class probabilities, but {error}: reveal the labels and use KnownLabels"
            ) from error

    def recover(self, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
        placeholders = torch.zeros(observation.n_examples, dtype=torch.int64, device=observation.like.device)
        return placeholders, ("labels: optimized together with the images",)

    def initial_logits(self, observation: Observation, generator: torch.Generator) -> Tensor:
        self.check(observation)
        shape, like = (observation.n_examples, observation.n_classes), observation.like
        return torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)
