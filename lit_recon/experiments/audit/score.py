"""The result of an audit: what came back, how that is known, and the files of its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.experiments.audit.attacks import Outcome, best
from lit_recon.experiments.audit.evidence import Finding
from lit_recon.experiments.audit.page import AUDIT_FILE, effect, write_page
from lit_recon.experiments.audit.protection import Protected, plain_error
from lit_recon.io.files import write_bytes, write_text
from lit_recon.metrics import metrics_of, score_batch
from lit_recon.metrics.scores import BatchScores
from lit_recon.records import Batch, Observation
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder, marked
from lit_recon.reporting.writing import Scalar, write_metrics

#: Length of the update of the images found, over that of the observed one, that counts as the same.
_ALIKE = 0.05
#: Distance (1 - cosine) of updates below which images count as the true ones.
_EXPLAINED = 1e-3
#: Share of pixels of an exact attack that were cut to [0, 1] above which the normalization is wrong.
_CUT = 0.1


@dataclass(frozen=True)
class AuditResult:
    """What an audit found. Printing it shows the findings in sentences; `save` writes report and files.

    Attributes:
        findings: what was sent, and whether it agrees with what was claimed.
        outcomes: of all attacks, in the order of their cost.
        protection: what defenses of the update would have changed.
        n_images: that the client trained on.
        truth: its images `(n, c, h, w)` and, if they were given, labels `(n,)`; used only after the attacks.
        settings: of the run, for the report.
    """

    findings: Sequence[Finding]
    outcomes: Sequence[Outcome]
    protection: Sequence[Protected]
    n_images: int
    truth: tuple[Tensor, Tensor | None] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def best(self) -> Outcome | None:
        """The outcome that the attacker would believe, chosen without the true images; None: nothing came back."""
        return best(self.outcomes)

    @property
    def images(self) -> Tensor | None:
        """Images that came back, `(n, c, h, w)` in [0, 1]; with the truth, each at the place of its true image."""
        chosen = self.best
        if chosen is None or chosen.found is None:
            return None
        scores = self._scores(chosen)
        return chosen.found.images if scores is None else scores.reconstructions

    def rmse(self, outcome: Outcome) -> Tensor | None:
        """Error of every true image, `(n,)`; None without truth or images."""
        scores = self._scores(outcome)
        return None if scores is None else scores.per_image["rmse"]

    def _scores(self, outcome: Outcome) -> BatchScores | None:
        return self._scored.get(outcome.name)

    @cached_property
    def _scored(self) -> dict[str, BatchScores]:
        """Scores by the name of the attack; empty without truth."""
        if self.truth is None:
            return {}
        metrics, images = metrics_of(["rmse"]), self.truth[0]
        found = {one.name: one.found for one in self.outcomes if one.found is not None}
        # of images alone: the labels do not matter
        return {name: score_batch(own.images, images, own.labels, own.labels, metrics) for name, own in found.items()}

    def metrics(self) -> dict[str, Scalar]:
        """Entries of `metrics.json`."""
        chosen, doubts = self.best, [finding.text for finding in self.findings if finding.kind == "doubt"]
        record: dict[str, Scalar] = {
            "n_images": self.n_images,
            "n_doubts": len(doubts),
            "doubts": " ".join(doubts),
        }
        if chosen is None:
            return {**record, "attack": None, "attack_reason": "no attack returned images", "n_certified": 0}
        record |= {"attack": chosen.name, "n_certified": chosen.certified, "distance": chosen.distance}
        errors = self.rmse(chosen)
        if errors is None or self.truth is None:
            return {**record, "rmse": None, "rmse_reason": "the true images were not given"}
        plain = plain_error(self.truth[0])
        worst = float(errors.max())
        return {**record, "rmse": float(errors.mean()), "rmse_worst": worst, "baseline_mean_color_rmse": plain}

    def __str__(self) -> str:
        lines = [f"{_MARKS[finding.kind]} {finding.text}" for finding in self.findings]
        for outcome in self.outcomes:
            errors = self.rmse(outcome)
            told = outcome.reason or f"{outcome.certified} of {self.n_images} certified, {outcome.seconds:.0f} s"
            lines.append(f"{outcome.title}: {told}" + ("" if errors is None else f", RMSE {float(errors.mean()):.3g}"))
        for own in self.protection:
            told = own.reason or f"RMSE {own.rmse:.3g}, {effect(own.stopped, own.cut, own.known)}"
            lines.append(f"with {own.title.lower()}, {own.strength}: {told}")
        return "\n".join(lines)

    def save(self, folder: Path | str, overwrite: bool = False) -> Path:
        """Write a run folder into a new or empty folder; returns the path of the report."""
        config = "# Audited from Python: model and update are not in this file.\n"
        config += yaml.safe_dump(dict(self.settings), sort_keys=False)
        opened = RunFolder.open(folder, marked(config, "attack.py audit"), overwrite, more=(AUDIT_FILE,))
        self.write(opened, {})
        return opened.report

    def write(self, folder: RunFolder, facts: Mapping[str, Scalar]) -> None:
        """Write all files; `metrics.json` is the last and marks the run as complete, the page is built from them."""
        tensors: dict[str, Tensor] = {}
        chosen, images = self.best, self.images
        if chosen is not None and chosen.found is not None and images is not None:
            scores = self._scores(chosen)
            order = torch.arange(len(images)) if scores is None else scores.order
            tensors |= {"reconstructions": images, "recovered_labels": chosen.found.labels.cpu()[order]}
            if chosen.found.certified is not None:
                tensors["certified"] = chosen.found.certified.cpu()[order].to(torch.uint8)
            if scores is not None:
                tensors["rmse"] = scores.per_image["rmse"]
        if self.truth is not None:
            parts = zip(("targets", "labels"), self.truth, strict=True)
            tensors |= {name: value.cpu() for name, value in parts if value is not None}
        if tensors:
            write_bytes(folder.reconstructions, save({name: value.contiguous() for name, value in tensors.items()}))
        write_text(folder.path / AUDIT_FILE, json.dumps(self._content(), indent=2, ensure_ascii=False) + "\n")
        write_metrics(folder, {**self.metrics(), **facts, **environment()})
        write_page(folder.path)

    def _content(self) -> dict[str, Any]:
        attacks = []
        for one in self.outcomes:
            errors = self.rmse(one)
            own = {key: getattr(one, key) for key in _SHOWN}
            distance = one.distance if one.found is not None else None
            rmse = None if errors is None else float(errors.mean())
            attacks.append({**own, "distance": distance, "rmse": rmse, "notes": list(one.notes)})
        protection = [
            {
                "title": own.title,
                "strength": own.strength,
                "attack": None if own.outcome is None else own.outcome.title,
                "certified": None if own.outcome is None else own.outcome.certified,
                "rmse": own.rmse,
                "stopped": own.stopped,
                "reason": own.reason,
                "cut": own.cut,
                "known": own.known,
            }
            for own in self.protection
        ]
        return {"findings": [asdict(one) for one in self.findings], "attacks": attacks, "protection": protection}


_SHOWN = ("name", "title", "needs", "reason", "seconds", "steps", "certified")
_MARKS = {"fits": "fits ", "found": "found", "doubt": "DOUBT", "open": "open "}


def agreement(seen: Observation, outcome: Outcome, scaled: bool = True) -> Finding | None:
    """Whether the update of the images that came back has the length of the observed one; None: nothing to compare.

    Images of an exact attack that do not explain the update and were cut to [0, 1] had another normalization, or are
    hidden: noise moves dark pixels below 0, and without the gradient of a bias nothing tells how bright an image is.
    `scaled`: the scale of the observed update follows from what was given.
    """
    if outcome.found is None or seen.defense is not None:
        return None
    if outcome.distance > _ALIKE:
        images = outcome.found.images
        cut = float(((images == 0) | (images == 1)).double().mean())
        if outcome.steps or cut < _CUT:
            return None
        return Finding(
            "doubt",
            f"{cut:.0%} of the pixels that came back were cut to [0, 1], and so they do not explain the update: the "
            "given normalization is not the client's, or noise or missing entries of the first layer hide the images.",
        )
    # of an outcome that was kept, on the CPU
    images, labels = (part.to(seen.like.device) for part in (outcome.batch.images, outcome.batch.labels))
    own = seen.operator(seen.weights, Batch(images, labels))
    inner = sum(float((own[name].double() * value.double()).sum()) for name, value in seen.update.items())
    square = sum(float(value.double().square().sum()) for value in own.values())
    factor = inner / max(square, 1e-300)
    if abs(factor - 1) <= _ALIKE:
        return Finding("fits", f"The update of the images that came back has the observed length, within {_ALIKE:.0%}.")
    if outcome.distance > _EXPLAINED:  # the images are not the true ones, and so their update may be shorter
        return None
    why = "the learning rate is not the given one, or there were other images or steps"
    if not scaled:
        why = "its scale was not known exactly"
    return Finding(
        "doubt" if scaled else "found",
        f"The images that came back explain the direction of the update, which is {factor:.3g} times as long as "
        f"theirs: {why}.",
    )


def checked_truth(
    images: Tensor, labels: Tensor | None, n: int, image_shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor | None]:
    """True images and labels, if these are known, of a client of `n` images; a ShapeError if they are not."""
    if tuple(images.shape) != (n, *image_shape) or (labels is not None and tuple(labels.shape) != (n,)):
        told = "no labels" if labels is None else f"{tuple(labels.shape)}"
        raise ShapeError(
            f"the true images must be {(n, *image_shape)} with one label each, or none; got {tuple(images.shape)} and "
            f"{told}: give those of this update, or none"
        )
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    if not ((pixels >= 0) & (pixels <= 1)).all():  # NaN neither
        raise ShapeError(
            f"the true images must have pixels in [0, 1]; got {float(pixels.min()):.3g} to {float(pixels.max()):.3g}: "
            "undo their normalization"
        )
    return pixels, None if labels is None else labels.long()
