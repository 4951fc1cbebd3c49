"""Informed membership inference: train the models of all games, score every attack, and write the files of a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import lit_recon._torchvision

import numpy as np
import torch
from pytorch_lightning import Trainer
from safetensors.torch import save
from torch import Tensor

from lit_recon.attacks import membership as attacks
from lit_recon.attacks.membership import MembershipGames, distances
from lit_recon.attacks.released.base import Background, ReconstructedTargets, Reconstructor, ShadowSizes
from lit_recon.attacks.shadow import GradientDescent, ShadowPlan
from lit_recon.data import ImageSet
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.experiments.membership.page import ATTACKS, GAMES, KINDS, LOSSES, write_page
from lit_recon.experiments.membership.settings import MembershipSettings
from lit_recon.experiments.released_attack.score import write_targets
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.train.shadows import announce
from lit_recon.io.files import write_bytes, write_text
from lit_recon.measures import Measure
from lit_recon.metrics import MeanImage, NearestPublic
from lit_recon.metrics.membership import Estimate, advantage, area_under_roc, true_positive_rate
from lit_recon.modules.shadows import train_store
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.wording import percent, short
from lit_recon.reporting.writing import Scalar, csv_text, write_metrics
from lit_recon.training.trainer import is_first_process

#: Shadow models whose losses on a candidate calibrate the released model's loss.
_CALIBRATION = 100


@dataclass(frozen=True, eq=False)
class PlayedGames:
    """All games with one kind of initial weights."""

    scores: dict[str, Tensor]  # of every attack by name, `(m,)`; above 0 it guesses the second candidate
    found: ReconstructedTargets
    losses: list[tuple[Tensor, Tensor]]  # per image of the histograms, of models trained on it `(s,)`, others `(t,)`
    copy_error: float  # see `_copy_error`


@dataclass(frozen=True, eq=False)
class MembershipExperiment:
    """Trains the models of all games and keeps them in the run folder."""

    trainer: Trainer
    settings: MembershipSettings
    shadows: ShadowSettings
    split: InformedSplit
    games: MembershipGames
    folder: RunFolder

    def reconstructor(self, plan: ShadowPlan) -> Reconstructor:
        """The reconstruction attack, bound to the training procedure of a plan; raises as `Reconstructor.bind`."""
        state = self.folder.checkpoints / f"{plan.initialization}_reconstructor"
        sizes = ShadowSizes.of(plan, len(self.split.shadow))
        return self.settings.reconstructor.bind(Background(plan, state, sizes=sizes))

    def play(self, plan: ShadowPlan) -> PlayedGames | None:
        """Train the models that are missing, then run every attack; None in all processes but the first."""
        games, split, shadows = self.games, self.split, self.shadows
        store = self.folder.checkpoints / f"{plan.initialization}_shadow"
        if is_first_process():
            print(f"start       {plan.initialization} initial weights")
            announce(store, plan, len(split.shadow))
        shadow = train_store(self.trainer, plan, split.shadow, store, shadows.execution, shadows.shard_size)
        way, again = shadow.execution, self.settings.adversary_execution
        released = self._trained(plan, "released", games.chosen, way, "released models")
        own_way = way if again == "auto" else again
        quiet = plan.without_noise  # noise of the adversary's own would only blur the distances
        first = self._trained(quiet, "own", games.first, own_way, "adversary's, first candidates", "first")
        second = self._trained(quiet, "own", games.second, own_way, "adversary's, second candidates", "second")
        n = 1 if plan.is_repeatable else self.settings.histogram.models  # equal models are trained once
        members = [
            self._trained(plan, f"with_{i}", games.second.subset(torch.full((n,), i)), way, f"models with image {i}")
            for i in range(self.settings.histogram.images)
        ]
        if not is_first_process():
            return None
        differences, images = shadow.read(split.shadow), split.shadow
        learner = self.reconstructor(plan)
        fitted = learner.fitted(differences, images.pixels(), images.labels, split.fixed.n_classes)
        found = fitted.reconstruct(released)
        network, reference = copy.deepcopy(plan.network).double().cpu(), plan.reference()
        candidates = [(part.pixels().double(), part.labels) for part in (games.first, games.second)]
        losses = [attacks.own_losses(network, released.double() + reference, *part) for part in candidates]
        others = differences.double() + reference
        calibration = [attacks.all_losses(network, others[:_CALIBRATION], *part) for part in candidates]
        chosen, labels = (part[: len(members)] for part in candidates[1])
        without = attacks.all_losses(network, others, chosen, labels)
        having = [
            attacks.all_losses(network, models.double() + reference, chosen[[index]], labels[[index]])[:, 0]
            for index, models in enumerate(members)
        ]
        return PlayedGames(
            scores={
                "train_both": attacks.compare_trained(released, first, second),
                "loss": attacks.compare_losses(*losses),
                "calibrated_loss": attacks.compare_losses(*losses, *calibration),
                "reconstruction": attacks.compare_reconstructions(
                    found.images, games.first.pixels(), games.second.pixels()
                ),
            },
            found=found,
            losses=list(zip(having, without.T, strict=True)),
            copy_error=_copy_error(released, first, second, games.bits),
        )

    def _trained(
        self, plan: ShadowPlan, purpose: str, images: ImageSet, way: str, label: str, part: str = ""
    ) -> Tensor:
        """Weight differences of one model per image, `(m, p)`.

        Fresh initial weights depend on the purpose and on the model's number: the adversary's two models of a game
        share theirs, the released model has others.
        """
        place = self.folder.checkpoints / "_".join(filter(None, (plan.initialization, purpose, part)))
        owner = plan.for_purpose(purpose)
        store = train_store(self.trainer, owner, images, place, way, self.shadows.shard_size, label)
        return store.read(images) if is_first_process() else torch.empty(0)


def _copy_error(released: Tensor, first: Tensor, second: Tensor, bits: Tensor) -> float:
    """Largest distance of a released model to the adversary's of the true candidate, over that to the other one."""
    trained, places = torch.stack([first, second]).double(), torch.arange(len(bits))
    right, wrong = ((released - trained[choice, places]).norm(dim=1) for choice in (bits, 1 - bits))
    # candidates whose models are equal, such as equal images, are equally near, at a distance of 0 too
    return float(torch.where(right == wrong, 1.0, right / wrong).max())


def write_membership(
    folder: RunFolder,
    settings: MembershipSettings,
    split: InformedSplit,
    games: MembershipGames,
    played: Mapping[str, PlayedGames],
    descent: GradientDescent,
    facts: Mapping[str, Scalar],
) -> dict[str, Scalar]:
    """Score all attacks on games by kind of initial weights, write the files, the metrics last, and return these."""
    truth, bits = games.chosen, games.bits.numpy()
    pixels = truth.pixels()
    apart = distances(games.first.pixels(), games.second.pixels())
    held = torch.cat([split.fixed.images, split.shadow.images])
    nearest, mean = NearestPublic(held).query(pixels)[1], MeanImage.from_images(held).query(pixels)
    metrics: dict[str, Scalar] = {"n": len(bits), "n_batches": len(bits), "n_members": int(bits.sum())}
    columns = {
        "member": games.bits,
        "candidates_apart": apart,
        "mean_image_rmse": distances(mean, pixels),
        "nearest_public_rmse": distances(nearest, pixels),
    }
    measures, implied = [], dict[str, float]()
    for kind, one in played.items():
        for name, scores in one.scores.items():
            key, of = f"{kind}.{name}", f", {ATTACKS[name]}, {KINDS[kind]}"
            columns[key] = scores
            measures.append(Measure(f"{key}.advantage", f"Advantage{of}", higher_is_better=True, decimals=2))
            measures.append(Measure(f"{key}.auc", f"AUC{of}", higher_is_better=True))
            found = {"advantage": advantage(scores.numpy(), bits), "auc": area_under_roc(scores.numpy(), bits)}
            for rate in settings.false_positive_rates:
                found[f"tpr_at_{rate:g}"] = true_positive_rate(scores.numpy(), bits, rate)
            for measured, estimate in found.items():
                metrics |= _named(f"{key}.{measured}", estimate)
        columns[f"{kind}.rmse"] = errors = distances(one.found.images, pixels)
        sure = attacks.implies_membership(errors, apart)
        implied[kind] = float(sure.double().mean())
        right = (one.scores["reconstruction"] > 0) == (games.bits == 1)
        measures.append(Measure(f"{kind}.reconstruction.rmse", f"RMSE, {KINDS[kind]}", higher_is_better=False))
        metrics |= {
            f"{kind}.reconstruction.rmse": float(errors.mean()),
            f"{kind}.reconstruction.implied_share": implied[kind],
            f"{kind}.reconstruction.implied_right": float(right[sure].double().mean()) if sure.any() else None,
            f"{kind}.copy_error": one.copy_error,
        }
        for index, (having, others) in enumerate(one.losses):
            members = np.concatenate([np.ones(len(having)), np.zeros(len(others))])
            auc = area_under_roc(-torch.cat([having, others]).numpy(), members)
            metrics |= _named(f"{kind}.histogram_{index}.auc", auc)
    known = played["known"].found
    metrics |= {
        "candidates_apart": float(apart.mean()),
        "baseline_mean_image_rmse": float(columns["mean_image_rmse"].mean()),
        "baseline_nearest_public_rmse": float(columns["nearest_public_rmse"].mean()),
        "notes": _notes(descent, played["known"].copy_error, implied["known"]),
        **facts,
    }
    write_targets(folder, known, truth, nearest, columns)
    pictures = {"first": games.first.pixels(), "second": games.second.pixels()}
    pictures |= {f"{kind}.reconstruction": one.found.images for kind, one in played.items()}
    write_bytes(folder.path / GAMES, save({name: images.contiguous() for name, images in pictures.items()}))
    write_text(folder.path / LOSSES, _losses(played))
    write_metrics(folder, metrics, measures)
    write_page(folder.path)
    return metrics


def _named(key: str, estimate: Estimate) -> dict[str, Scalar]:
    return {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}


def _losses(played: Mapping[str, PlayedGames]) -> str:
    """Losses with and without each image of the histograms, as CSV."""
    rows = (
        [kind, index, member, value]
        for kind, one in played.items()
        for index, (having, others) in enumerate(one.losses)
        for member, values in ((1, having), (0, others))
        for value in values.tolist()
    )
    return csv_text(["initialization", "image", "member", "loss"], rows)


def _training_note(descent: GradientDescent, copy_error: float) -> str:
    distance = (
        "with known initial weights the distance of the adversary's copy to the released model is at most "
        f"{short(copy_error, 1)} of that of the model trained on the other candidate"
    )
    if descent.is_noisy or descent.has_own_order:
        drawn = "draws mini-batches in an order"
        if descent.is_noisy:
            drawn = "but the adversary's own two of each game draws noise"
        hides = "which can hide the candidate as unknown initial weights do"
        return f"Every training {drawn} of its own, {hides}: {distance}."
    batches = "full-batch gradient descent"
    if descent.batch_size is not None:
        batches = "gradient descent on mini-batches that the adversary knows"
    return (
        f"Training is {batches} without further randomness: {distance}. Mini-batches, dropout or noise with an unknown "
        "seed would hide the candidate, as unknown initial weights do."
    )


def _notes(descent: GradientDescent, copy_error: float, implied: float) -> list[str]:
    """Caveats for readers of the page."""
    return [
        _training_note(descent, copy_error),
        (
            f"For {percent(implied)} of the games with known initial weights the reconstruction error was below half "
            "the distance between the candidates, so that the guess had to be right. Other guesses may be right, too."
        ),
        (
            "Models of the histograms trained without the image have another image in its place: with known initial "
            "weights and nothing else that differs, all these models would be equal."
        ),
    ]
