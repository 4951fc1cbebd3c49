"""Which defense would have stopped the attacks: defenses applied to the same update, attacked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.data.dataset import seeded_generator
from lit_recon.defenses import (
    Batch,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientDropout,
    GradientPruning,
    Round,
    Stage,
)
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.audit.attacks import NO_TIME, Outcome, best, check_kept, run_attacks
from lit_recon.experiments.audit.interpretation import Interpretation
from lit_recon.experiments.audit.page import effect
from lit_recon.metrics import metrics_of, score_batch
from lit_recon.records import Differentiable, Observation, Update


class DefenseInWords(NamedTuple):
    """A defense of the update, with its name and its strength in words."""

    title: str
    words: str
    defense: Defense


#: The defenses that an audit measures.
DEFENSES = (
    *(DefenseInWords("Pruning", f"{part:.0%} of the entries", GradientPruning(part)) for part in (0.5, 0.9, 0.99)),
    *(DefenseInWords("Gradient dropout", f"{part:.0%} of the entries", GradientDropout(part)) for part in (0.5, 0.9)),
    *(
        DefenseInWords("Gaussian noise", f"{part:g} of the entries' root mean square", GaussianNoise(part, True))
        for part in (0.01, 0.1, 1.0, 10.0)
    ),
)


@dataclass(frozen=True)
class Protected:
    """A defense at one strength, and what came back from the defended update.

    Attributes:
        title, strength: of the defense, in words.
        outcome: of the attack that is to be believed most; None: none returned images.
        rmse: of its images and the reference, each image matched.
        stopped: the images are no closer to the reference than plain images of its mean colors; None: not measured, as
            it failed, or an attack had no time or broke off that could have come closer.
        reason: why it was not measured.
        cut: it stopped them in the time there was, which did not do for all iterations of every attack.
        known: the reference shows the client's images; otherwise it is only known whether other images came back.
    """

    title: str
    strength: str
    outcome: Outcome | None = None
    rmse: float | None = None
    stopped: bool | None = None
    reason: str = ""
    cut: bool = False
    known: bool = True


def measure_protection(
    seen: Observation,
    reference: Tensor,
    labels: Tensor,
    names: Sequence[str],
    minutes: float,
    folder: Path | None = None,
    defenses: Sequence[DefenseInWords] = DEFENSES,
    progress: Callable[[str], None] = print,
    identity: str = "",
    known: bool = True,
) -> list[Protected]:
    """Defend the observed update, and run the attacks with these names on it.

    Args:
        seen: the undefended update.
        reference: images `(n, c, h, w)` to compare with: the true ones, or those that came back without a defense.
        labels: of these images.
        names: of the attacks, those that found something, or might have.
        minutes: for all defenses together.
        folder: where outcomes are kept.
        defenses: of the update.
        progress: gets a line per defense.
        identity: of the undefended update, see `check_protection`.
        known: whether the reference shows the client's images, as the true ones do, and those that are all certified.
    """
    if folder is not None:
        check_protection(folder, identity, defenses)
    found, plain = [], plain_error(reference)
    for number, (title, strength, defense) in enumerate(defenses):
        try:
            defended = defend(seen, defense, reference, labels)
            own = None if folder is None else folder / f"{number}"
            outcomes = run_attacks(
                defended, minutes / len(defenses), own, names, lambda line: None, _behind(identity, defense)
            )
        except LitReconError as error:
            found.append(Protected(title, strength, reason=str(error), known=known))
            continue
        believed, missing = best(outcomes), [one for one in outcomes if one.missing]
        images = None if believed is None or believed.found is None else believed.found.images
        rmse = None if images is None else error_of(images, reference)
        stopped: bool | None = rmse is None or rmse >= plain
        reason = "; ".join(dict.fromkeys(one.reason for one in outcomes)) if rmse is None else ""
        if stopped and missing:
            late = ", ".join(one.title for one in missing if one.reason.startswith(NO_TIME))
            told = [f"{NO_TIME} for {late}: raise protection_minutes"] if late else []
            told += [f"{one.title}: {one.reason}" for one in missing if not one.reason.startswith(NO_TIME)]
            stopped, reason = None, "; ".join(told)
        cut = bool(stopped) and any(one.cut for one in outcomes)
        found.append(Protected(title, strength, believed, rmse, stopped, reason, cut, known))
        progress(f"{title} {strength}: {_told(found[-1])}")
    return found


def check_protection(folder: Path, identity: str, defenses: Sequence[DefenseInWords] = DEFENSES) -> None:
    """A ConfigError if an outcome in the folder is of another update or defense, see `check_kept`."""
    for number, (_, _, defense) in enumerate(defenses):
        check_kept(folder / f"{number}", _behind(identity, defense))


def known_defense(found: Interpretation, given: Defense | None) -> Defense | None:
    """What the attacker simulates: the given defense of the client, and that tensors, or entries, were not sent.

    With noise, no density is known for what is left out after it: entries in scattered places are then compared, and
    where the noise is that of DP-SGD, or follows a defense of the batch, tensors that were not sent, too.
    """
    if given is None or found.simulated is None or given.reads_zeros:
        return given or found.simulated
    assert found.known.batch_size is not None
    noisy = given.adds_noise(found.known.batch_size)
    unsent = [name for name, value in found.update.items() if not value.any()]
    excluded = [ExcludedVariables(unsent)] if unsent else []
    if {*given.stages} <= {Stage.UPDATE}:
        chained: list[Defense] = [*excluded, given]
    else:
        chained = [given] if noisy else [given, *excluded]
    chained += [found.simulated] if found.scattered and not noisy else []
    return Chain(chained) if len(chained) > 1 else given


def _behind(identity: str, defense: Defense) -> str:
    return f"{identity} behind {defense!r}"


def defend(seen: Observation, defense: Defense, images: Tensor, labels: Tensor) -> Observation:
    """The observation if the client had used this defense of what it sent, too, which the attacker knows.

    What did not leave the client stays zero, and does not count for relative strengths. A ConfigError for a defense of
    the batch or of single examples: only the update is there to be defended.
    """
    if [*defense.stages] not in ([], [Stage.UPDATE]):
        raise ConfigError(f"{defense} acts before the update is computed: measure it with attack.py evaluate")
    own = seen.defense
    assert own is None or isinstance(own, Defense)  # given by the user, or of the interpretation
    places = _sent(seen.update, own)

    def sent(update: Update) -> Update:
        return {name: update[name].flatten()[where] for name, where in places.items()}

    def gradient(batch: Batch, differentiable: Differentiable = "no") -> Update:
        return sent(seen.operator(seen.weights, batch, differentiable))

    generator = seeded_generator(0, "audit", repr(defense))
    defended = defense.transform_update(sent(seen.update), Round(Batch(images, labels), gradient), generator)
    update = {name: torch.zeros_like(value).contiguous() for name, value in seen.update.items()}
    for name, where in places.items():
        update[name].view(-1)[where] = defended[name]
    unsent = [name for name in update if name not in places]
    before = [*([] if own is None else [own]), *([ExcludedVariables(unsent)] if unsent else [])]
    known = Chain([*before, defense]) if before else defense
    return replace(seen, update=update, defense=known, knowledge=replace(seen.knowledge, defense=True))


def _sent(update: Update, own: Defense | None) -> dict[str, Tensor]:
    """Places of the entries that left the client, by tensor, as the attacker takes them.

    Of a client without a defense that is all. Else tensors of zeros were not sent, and where the attacker takes from
    zeros what was dropped, no zero was: it stays so behind noise, which would hide that from the attack.
    """
    places = {}
    for name, value in update.items():
        sent = torch.ones_like(value, dtype=torch.bool)
        if own is not None:
            sent = value != 0 if own.reads_zeros else sent & value.any()
        if sent.any():
            places[name] = sent.flatten().nonzero().squeeze(1)
    return places


def error_of(images: Tensor, reference: Tensor) -> float:
    """Mean RMSE of images matched with the reference."""
    nothing = torch.zeros(len(images), dtype=torch.int64)
    return float(score_batch(images, reference, nothing, nothing, metrics_of(["rmse"])).per_image["rmse"].mean())


def plain_error(reference: Tensor) -> float:
    """The error of plain images of the mean color of each one of the reference."""
    return error_of(reference.mean(dim=(2, 3), keepdim=True).expand_as(reference), reference)


def _told(found: Protected) -> str:
    if found.stopped is None:
        return f"not measured ({found.reason})"
    if found.rmse is None:
        return f"nothing came back ({found.reason})"
    return f"RMSE {found.rmse:.3g}, {effect(found.stopped, found.cut, found.known)}"
