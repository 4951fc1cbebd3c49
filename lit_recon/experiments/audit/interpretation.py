"""Form, sign and scale of an update, and whether they agree with what was claimed; the checks need no image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_recon.attacks.updates.labels.head import HeadGradient, head_gradient
from lit_recon.clients import GradientOperator, LocalSteps
from lit_recon.clients.local_steps import spacing
from lit_recon.clients.record import Circumstances, Sent
from lit_recon.defenses import Defense, GradientDropout, Stage
from lit_recon.defenses.vectors import flatten
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.audit.evidence import (
    Evidence,
    Finding,
    frozen_parameters,
    weights_precision,
    without_frozen,
)
from lit_recon.experiments.audit.head import RoundingErrors, decay_of, held_decay, scale_of, unit_of
from lit_recon.experiments.audit.optimizer import is_reversed, optimizer_facts
from lit_recon.experiments.audit.statistics import batch_norm_facts, dropout_finding, normalization_finding
from lit_recon.models.classifiers.foreign import PublicModel
from lit_recon.records import (
    BatchStatistics,
    ForwardOperator,
    Knowledge,
    Loss,
    Observation,
    Update,
    Weights,
)

#: Cosine with the weights before above which what was sent are weights; updates have less than 0.1.
_WEIGHTS = 0.5
#: Share of scattered zeros above which entries were pruned or dropped.
_SCATTERED = 0.05
#: Entries within a factor of two above the smallest one, per zero, from which on a threshold is taken for its reason.
_THRESHOLD = 0.01
#: Last digits of a weight within which a change counts as nearly rounded away.
_DIGITS = 4
#: Ratio within which a scale counts as the right one.
_ALIKE = 0.75
#: Ratio of a singular value to the largest, above which it is no rounding.
_RANK = 1e-4


@dataclass(frozen=True)
class Interpretation:
    """An update in units of a gradient, and what was found on the way.

    Attributes:
        form: what was sent.
        update: every parameter's; zero where it is not known.
        known: the circumstances, completed.
        statistics: of the client's batch at every BatchNorm layer, where its buffers tell them.
        simulated: what the attacker simulates of a defense: entries that are zero are unknown.
        scattered: among them are entries in scattered places, not only tensors that were not sent.
        findings: what was checked, for the report.
        scaled: the scale of `update` follows from what was given; otherwise it is estimated or unknown.
        precision: of what was sent, see `Evidence`.
        of_weights: precision of the weights that the client trained.
        frozen: parameters that did not change, see `frozen_parameters`.
    """

    form: Sent
    update: Update
    known: Circumstances
    statistics: BatchStatistics | None
    simulated: Defense | None
    scattered: bool
    findings: tuple[Finding, ...]
    scaled: bool = True
    precision: torch.dtype = torch.float32
    of_weights: torch.dtype = torch.float32
    frozen: tuple[str, ...] = ()

    def observation(
        self, public: PublicModel, labels: Tensor | None, defense: Defense | None, loss: Loss = cross_entropy
    ) -> Observation:
        """What an attacker sees; `labels` and `defense` if he knows them."""
        simulated = defense or self.simulated
        knowledge = Knowledge(
            labels=labels is not None,
            batch_norm="running" if self.statistics is None else "batch",
            defense=simulated is not None,
        )
        weights = Weights.of(public.model)
        assert self.known.batch_size is not None
        return Observation(
            public.model,
            weights.parameters,
            weights.buffers,
            self.operator(public.model, loss),
            self.update,
            self.known.batch_size,
            public.image_shape,
            public.n_classes,
            public.normalization,
            knowledge,
            labels,
            self.statistics,
            simulated,
            loss,
        )

    def operator(self, model: nn.Module, loss: Loss) -> ForwardOperator:
        """The client's update rule, in units of a gradient."""
        known = self.known
        mode = known.batch_norm or "train"
        if known.steps == 1 and known.optimizer == "sgd":
            return GradientOperator(model, mode, loss)
        return LocalSteps(
            *(model, known.steps, known.lr or 1.0, known.momentum, None, known.batches, "gradient", mode),
            loss=loss,
            optimizer=known.optimizer,
            frozen=self.frozen,
        )


def interpret(
    public: PublicModel,
    evidence: Evidence,
    form: Sent | None,
    known: Circumstances,
    loss: Loss = cross_entropy,
    defense: Defense | None = None,
) -> Interpretation:
    """Work out what was sent; the public model has the weights before, `defense` is what the client told of its own.

    Raises:
        ConfigError: the number of images is not known, or several local steps or weight decay without a learning rate.
    """
    if known.batch_size is None:
        raise ConfigError("batch_size is not known: give the number of images that the client trained on")
    findings = list(evidence.findings)
    claimed = form
    form, change = _change(evidence, form, findings)
    evidence = without_frozen(evidence, change, findings)
    statistics, known, about = batch_norm_facts(public, evidence, form, known)
    findings += about
    open_ = (normalization_finding(public), dropout_finding(public, defense))
    findings += [told for told in open_ if told is not None]
    if known.steps > known.batches > 1:
        text = "The order of the images in later epochs is not known: the attacks assume that of the first."
        findings.append(Finding("open", text))
    parameters = dict(public.model.named_parameters())
    altered = defense is not None and not keeps_values(
        defense, _in_units(change, parameters, known, form), known.batch_size or 1
    )
    if form == "gradient" or not altered:
        known, about = optimizer_facts(change, known, form)
        findings += about
    update = _in_units(change, parameters, known, form)
    if known.steps > 1 and known.lr is None:
        raise ConfigError(f"lr is not known: {known.steps} local steps cannot be simulated without it")
    if known.weight_decay and known.lr is None and form != "gradient":
        raise ConfigError(
            f"lr is not known: weight decay of {known.weight_decay:g} cannot be taken off {_FORMS[form]} without it; "
            "give the learning rate"
        )
    decay = held_decay(known, form)
    if decay and (defense is None or _keeps_size(defense.without_noise(), update)):
        update = _without_decay(update, parameters, decay)
    elif decay:
        text = f"Weight decay of {decay:g} was not taken off: {defense} scales it with the update by an unknown factor."
        findings.append(Finding("open", text))
    simulated, scattered = _hidden(update, {} if form == "gradient" else change, evidence, findings)
    scaled = form == "gradient" or known.lr is not None
    frozen = frozen_parameters(evidence, change, public.model, known.steps, findings)
    precisions = evidence.precision, weights_precision(evidence, form)
    found = Interpretation(form, update, known, statistics, simulated, scattered, (), scaled, *precisions, frozen)
    if altered:
        named = "" if claimed or form == "weights" else " Give form if it is a gradient: it is taken for a difference."
        what = (
            "Sign, scale, rank and weight decay"
            if form == "gradient"
            else "Optimizer, sign, scale, rank and weight decay"
        )
        text = f"{what} were not checked: {defense} changes the values of the update.{named}"
        if (unit := unit_of(known, form)) != 1:
            text += (
                " The attacks take the defense's strengths for those of a gradient: divide absolute ones of the change "
                f"of the weights by {unit:.4g}, by which a gradient of 1 moves them."
            )
        return replace(found, findings=(*findings, Finding("open", text)))
    try:
        head = head_gradient(found.observation(public, None, None, loss))
    except LitReconError as error:
        findings.append(Finding("open", f"Sign, scale and weight decay could not be checked: {error}"))
    else:
        found = _from_head(found, public, head, claimed) if known.optimizer == "sgd" else _from_signs(found, head)
        findings += found.findings
    return replace(found, findings=tuple(findings))


def keeps_values(defense: Defense, update: Update, n_examples: int) -> bool:
    """Whether entries that left the client have the values that it computed; others may be missing."""
    if not {Stage.PER_EXAMPLE, Stage.UPDATE} & {*defense.stages}:
        return True
    if Stage.PER_EXAMPLE in defense.stages or defense.adds_noise(n_examples):
        return False
    return _keeps_size(defense, update)


def _keeps_size(defense: Defense, update: Update) -> bool:
    """Whether what the defense does to the update, but for noise, leaves the values of entries as they are."""
    # a bound on the size shows in a large multiple, which is exact
    large = {name: 2.0**20 * value for name, value in update.items()}
    return all(torch.equal(value, large[name]) for name, value in defense.simulate(large, update).items())


def _change(evidence: Evidence, form: Sent | None, findings: list[Finding]) -> tuple[Sent, Update]:
    """What was sent, and the weights before minus after, or the gradient."""
    before = {name: evidence.before[name] for name in evidence.sent}
    alike = _cosine(dict(evidence.sent), before)
    looks: Sent = "weights" if alike > _WEIGHTS else "difference"
    if form is None:
        form = looks
        what = "the client's new weights" if form == "weights" else "a change of the weights or a gradient"
        findings.append(
            Finding("found", f"What was sent is {what}: its cosine with the weights before is {alike:.2g}.")
        )
    elif (form == "weights") != (looks == "weights"):
        findings.append(
            Finding(
                "doubt",
                f"What was sent is said to be {_FORMS[form]}, but its cosine with the weights before is {alike:.2g}: "
                f"it is taken for {_FORMS[looks]}.",
            )
        )
        form = looks
    else:
        findings.append(Finding("fits", f"What was sent is {_FORMS[form]}, as claimed."))
    if form != "weights":
        return form, dict(evidence.sent)
    change = {name: before[name] - value for name, value in evidence.sent.items()}
    if not any(value.any() for value in change.values()):
        raise ConfigError("the weights that were sent are those before: the client has not trained, or sent them back")
    return form, change


_FORMS = {"weights": "new weights", "difference": "a difference of weights", "gradient": "a gradient"}


def _in_units(change: Update, parameters: Mapping[str, Tensor], known: Circumstances, form: Sent) -> Update:
    """The change of every parameter in units of a gradient; zero where it is not known."""
    unit = unit_of(known, form)
    return {
        name: (change[name] / unit).to(value.dtype) if name in change else torch.zeros_like(value)
        for name, value in parameters.items()
    }


def _cosine(one: Update, two: Update) -> float:
    first, second = (flatten({name: update[name].double() for name in one}) for update in (one, two))
    return float(nn.functional.cosine_similarity(first, second, dim=0))


def _without_decay(update: Update, parameters: Mapping[str, Tensor], decay: float) -> Update:
    """The update without the part of weight decay, which is the weights themselves; exact for one step."""
    return {
        name: torch.where(value != 0, value - decay * parameters[name].detach(), value)
        for name, value in update.items()
    }


def _hidden(update: Update, moved: Update, evidence: Evidence, findings: list[Finding]) -> tuple[Defense | None, bool]:
    """The attacker's simulation, where entries are missing, and whether scattered ones; `moved`: changes of weights."""
    zeros = entries = rounded = near = 0
    least = 1.0
    sent = {name: update[name] for name in evidence.sent}
    # behind a ReLU the gradient of an inner linear layer has zeros of its own, wherever no image uses input and neuron
    last = [name for name, value in sent.items() if value.dim() == 2][-1:]
    for name, value in sent.items():
        if value.dim() < 3 and name not in last:
            continue
        flat = value.flatten(1)
        matrix = flat != 0
        # inactive neurons and inputs give whole rows and columns of zeros
        flat = flat[matrix.any(dim=1)][:, matrix.any(dim=0)].abs()
        here = int((flat == 0).sum())
        zeros, entries, least = zeros + here, entries + flat.numel(), min(least, here / max(1, flat.numel()))
        if here:
            # pruning leaves a threshold; besides the zeros of sparse maps there are ever smaller values
            near += int(((flat > 0) & (flat <= 2 * flat[flat > 0].min())).sum())
        if name in moved:
            # where weights moved by a few of their last digits, others moved by less than one
            few = _DIGITS * spacing(evidence.before[name])
            rounded += int(((moved[name] != 0) & (moved[name].abs() < few)).sum())
    share = zeros / max(entries, 1) if zeros > rounded else 0.0
    if least <= _SCATTERED and near < _THRESHOLD * zeros:
        share = 0.0
    unsent = sum(value.numel() for name, value in update.items() if name not in evidence.sent)
    total = sum(value.numel() for value in update.values())
    scattered = share > _SCATTERED
    if scattered:
        findings.append(
            Finding(
                "found",
                f"{share:.0%} of the entries are zero in scattered places: the update was pruned or dropped. The "
                "attacker takes them for unknown.",
            )
        )
    if not scattered and not unsent:
        return None, False
    return GradientDropout(min(max(share, unsent / total), 1 - 1e-6)), scattered


def _from_signs(found: Interpretation, head: HeadGradient) -> Interpretation:
    """The interpretation of steps of Adam, of whose head only signs tell."""
    reverse = is_reversed(head)
    if reverse:
        update = {name: -value for name, value in found.update.items()}
        finding = Finding("doubt", f"{_REVERSED} It was turned around.")
        return replace(found, update=update, findings=(finding,))
    text = "Loss and weight decay were not checked: Adam leaves little more of the gradient than its signs."
    told = Finding("open", text if reverse is False else f"Sign, l{text[1:]}")
    return replace(found, findings=(told,))


_REVERSED = "The sign is reversed: what was sent is the weights after minus before."


def _from_head(found: Interpretation, public: PublicModel, head: HeadGradient, claimed: Sent | None) -> Interpretation:
    """The interpretation with the sign and the scale that the head's gradient tells."""
    known, masked, update = found.known, found.simulated is not None, found.update
    n, form = known.batch_size or 1, found.form
    given = scaled = found.scaled
    errors = RoundingErrors.of(head, known, form, found.precision, found.of_weights)
    decay, findings = decay_of(head, known, form, masked, given, errors)
    if decay:
        update = _without_decay(update, dict(public.model.named_parameters()), decay)
        head = replace(
            head,
            weight_gradient=head.weight_gradient - decay * head.weight,
            bias_gradient=head.bias_gradient - decay * head.bias,
        )
    values = torch.linalg.svdvals(head.weight_gradient)
    rank = int((values > max(_RANK * float(values[0]), errors.largest)).sum())
    crowded = known.steps == 1 and not masked and rank > n
    if crowded:
        findings.append(
            Finding(
                "doubt",
                f"The head's gradient has rank {rank}, but {n} image{'s' * (n > 1)} can give rank {n} at most: there "
                "were more images, or noise was added.",
            )
        )
    noisy = not decay and any(one.kind == "doubt" for one in findings)
    # of an unknown number of images, labels are no whole multiples of 1 / n, and behind noise they are none at all
    seen = found.observation(public, None, None)
    scale = None if crowded or noisy else scale_of(head, seen, known.batch_norm or "eval", errors)
    if scale is None:
        text = "Sign and scale could not be checked before the attacks: " + (
            "where the columns do not add to zero, the bias tells no whole numbers of labels."
            if noisy
            else "the network's outputs differ between images, entries of the head's bias are missing or rounded "
            "away, or no whole numbers of labels explain its gradient."
        )
        return replace(found, update=update, findings=(*findings, Finding("open", text)))
    factor, fits = abs(scale), _ALIKE < abs(scale) < 1 / _ALIKE
    divisor = 1.0 if given and fits else factor
    if scale < 0:
        findings.append(Finding("doubt", f"{_REVERSED} It was turned around."))
    if not given:
        findings.append(Finding("found", f"No learning rate was given; {factor:.1e} fits the head's gradient."))
    elif fits:
        findings.append(Finding("fits", "The head's gradient has the scale of a mean over the images."))
    elif claimed is None and form == "difference" and known.lr and _ALIKE < factor * known.lr < 1 / _ALIKE:
        form, divisor = "gradient", 1 / known.lr
        told = Finding("found", "What was sent has the scale of a gradient: the learning rate is left out.")
        if known.weight_decay and known.steps == 1:  # which is not in it, but was taken off as from a difference
            whole = _without_decay(found.update, dict(public.model.named_parameters()), -known.weight_decay)
            own = replace(found, form=form, update={name: value / divisor for name, value in whole.items()})
            again = _from_head(own, public, head_gradient(own.observation(public, None, None)), form)
            return replace(again, findings=(told, *again.findings))
        findings.append(told)
    else:
        scaled = False
        rate = f", and lr would be {known.lr * factor:.2g} instead of {known.lr:g}" if known.lr else ""
        findings.append(
            Finding(
                "doubt",
                f"The update is {factor:.2g} times as large as a mean gradient would be{rate}: a wrong learning rate, "
                f"{'a sum over the images instead of their mean, ' * (n > 1)}or momentum. It was brought to scale.",
            )
        )
    update = {name: value / math.copysign(divisor, scale) for name, value in update.items()}
    return replace(found, form=form, update=update, findings=tuple(findings), scaled=scaled)
