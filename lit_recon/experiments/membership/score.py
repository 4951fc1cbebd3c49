"""What comes of informed membership games: every attack's figures with their intervals, and the files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

import lit_recon._torchvision

import numpy as np
import torch
from safetensors.torch import save

from lit_recon.attacks.membership import MembershipGames, distances, implies_membership
from lit_recon.data.informed_splits import InformedSplit
from lit_recon.experiments.membership.games import PlayedGames
from lit_recon.experiments.membership.page import GAMES, LOSSES, write_page
from lit_recon.experiments.membership.settings import MembershipSettings
from lit_recon.io.files import write_bytes, write_text
from lit_recon.metrics import MeanImage, NearestPublic
from lit_recon.metrics.membership import Estimate, advantage, area_under_roc, true_positive_rate
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar, VictimRow, write_metrics, write_tensors, write_victims


def write_membership(
    folder: RunFolder,
    settings: MembershipSettings,
    split: InformedSplit,
    games: MembershipGames,
    played: Mapping[str, PlayedGames],
    facts: Mapping[str, Scalar],
) -> dict[str, Scalar]:
    """Score, and write everything; the figures come last and mark the run as complete. Returns the figures.

    Args:
        folder: of the run.
        settings: of the run.
        split: whose fixed set and shadow targets the adversary holds.
        games: with the secret bits.
        played: all games by the kind of initial weights.
        facts: further entries of the record.
    """
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
    for kind, one in played.items():
        for name, scores in one.scores.items():
            metrics |= _figures(f"{kind}.{name}", scores.numpy(), bits, settings.false_positive_rates)
            columns[f"{kind}.{name}"] = scores
        errors = distances(one.found.images, pixels)
        columns[f"{kind}.rmse"] = errors
        sure = implies_membership(errors, apart)
        right = (one.scores["reconstruction"] > 0) == (games.bits == 1)
        metrics |= {
            f"{kind}.reconstruction.rmse": float(errors.mean()),
            f"{kind}.reconstruction.implied_share": float(sure.double().mean()),
            f"{kind}.reconstruction.implied_right": float(right[sure].double().mean()) if sure.any() else None,
            f"{kind}.copy_error": one.copy_error,
        }
        for index, (having, others) in enumerate(one.losses):
            labels = np.concatenate([np.ones(len(having)), np.zeros(len(others))])
            auc = area_under_roc(-torch.cat([having, others]).numpy(), labels)
            metrics |= _named(f"{kind}.histogram_{index}.auc", auc)
    metrics |= {
        "candidates_apart": float(apart.mean()),
        "baseline_mean_image_rmse": float(columns["mean_image_rmse"].mean()),
        "baseline_nearest_public_rmse": float(columns["nearest_public_rmse"].mean()),
        "notes": _notes(metrics),
        **facts,
    }
    known = played["known"].found
    write_tensors(
        folder,
        reconstructions=known.images,
        targets=pixels,
        nearest_public=nearest,
        labels=truth.labels,
        recovered_labels=known.labels,
        class_names=truth.class_names,
    )
    pictures = {"first": games.first.pixels(), "second": games.second.pixels()}
    pictures |= {f"{kind}.reconstruction": one.found.images for kind, one in played.items()}
    write_bytes(folder.path / GAMES, save({name: images.contiguous() for name, images in pictures.items()}))
    write_text(folder.path / LOSSES, _losses(played))
    write_victims(
        folder,
        [
            VictimRow(
                batch=index,
                id=index,
                label=int(label),
                recovered_label=int(known.labels[index]),
                loss=float(known.uncertainty[index]),
                scores={name: float(values[index]) for name, values in columns.items()},
            )
            for index, label in enumerate(truth.labels)
        ],
    )
    write_metrics(folder, metrics)
    write_page(folder.path)
    return metrics


def _figures(key: str, scores: np.ndarray, bits: np.ndarray, rates: list[float]) -> dict[str, Scalar]:
    figures = _named(f"{key}.advantage", advantage(scores, bits)) | _named(f"{key}.auc", area_under_roc(scores, bits))
    for rate in rates:
        figures |= _named(f"{key}.tpr_at_{rate:g}", true_positive_rate(scores, bits, rate))
    return figures


def _named(key: str, estimate: Estimate) -> dict[str, Scalar]:
    return {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}


def _losses(played: Mapping[str, PlayedGames]) -> str:
    """Losses with and without each image of the histograms, as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["initialization", "image", "member", "loss"])
    for kind, one in played.items():
        for index, (having, others) in enumerate(one.losses):
            for member, values in ((1, having), (0, others)):
                writer.writerows([kind, index, member, value] for value in values.tolist())
    return buffer.getvalue()


def _notes(metrics: Mapping[str, Scalar]) -> list[str]:
    """What a reader of the figures should know."""
    copies, share = metrics["known.copy_error"], metrics["known.reconstruction.implied_share"]
    deterministic = (
        "Training is full-batch descent without randomness of its own: with known initial weights the adversary's copy "
        f"of a released model differs from it by at most {copies:.1g} of what his other model does. Mini-batches, "
        "dropout or noise of unknown seed would be a further secret, as unknown initial weights are."
    )
    implied = (
        f"For {share:.0%} of the games with known initial weights the reconstruction was nearer to the truth than half "
        "the distance of the candidates, so that its guess could not be wrong. The others may still be right."
    )
    replaced = (
        "Models of the histograms that lack the image have another one in its place: with known initial weights and "
        "nothing else that differs, all models would be one and the same."
    )
    return [deterministic, implied, replaced]
