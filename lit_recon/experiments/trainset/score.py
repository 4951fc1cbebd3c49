"""Scores of reconstructed training sets: nearest candidates, baselines, selections, and whether they show members."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.func import functional_call, grad, vmap

from lit_recon.attacks.trainset.base import ReleasedModel
from lit_recon.attacks.trainset.selection import by_agreement, by_clusters, by_residual, distinct
from lit_recon.attacks.trainset.training import margins
from lit_recon.metrics import NearestPublic, mse, ssim
from lit_recon.metrics.membership import binomial_rate
from lit_recon.records import Reconstruction

#: SSIM above which a reconstruction counts as good, and number of images in the mean of the best ones, as in
#: [Haim2022], whose SSIM has a window of 3 pixels where that of this package has 11: the counts are not comparable.
GOOD, BEST = 0.4, 10
#: RMSE to the nearest training image above which a certified candidate is wrong.
WRONG = 0.05
#: Name of the baseline with as many public images as there are candidates.
SAME_POOL = "as many public images"
#: Public images compared at a time.
_CHUNK = 4096


def normalized(images: Tensor, mean: Tensor) -> Tensor:
    """Deviations from the mean image with mean 0 per channel, scaled to norm 1 per channel: `(n, c h w)`, over root c.

    Products of rows are normalized cross-correlations, in [-1, 1]; constant channels become zero.
    """
    centered = (images - mean).flatten(2)
    centered = centered - centered.mean(dim=2, keepdim=True)
    norms = centered.norm(dim=2, keepdim=True)
    # rounding leaves some 1e-16 per pixel of a constant channel
    scaled = torch.where(norms > 1e-6, centered / norms.clamp(min=1e-12), 0.0)
    rows: Tensor = scaled.flatten(1) / images.shape[1] ** 0.5
    return rows


def correlations(images: Tensor, others: Tensor, mean: Tensor) -> Tensor:
    """Normalized cross-correlation of every pair, mean over channels, `(n, m)` in [-1, 1].

    Images are `(n, c, h, w)` and `(m, c, h, w)`; the mean image `(c, h, w)` is subtracted from both.

    Source: [Haim2022], section 5, on mean-subtracted images.
    """
    return (normalized(images, mean) @ normalized(others, mean).T).clamp(-1, 1)


def stretched(images: Tensor) -> Tensor:
    """Every image scaled so that its least pixel is 0 and its largest 1; constant images become 0.

    >>> stretched(torch.tensor([0.2, 0.4, 0.6]).reshape(1, 1, 1, 3)).flatten()
    tensor([0.0000, 0.5000, 1.0000])
    """
    low, high = (extreme(images, dim=(1, 2, 3), keepdim=True) for extreme in (torch.amin, torch.amax))
    return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-12), 0.0).clamp(0, 1)


@dataclass(frozen=True)
class PairScores:
    """Scores of pairs of images, each `(n,)`.

    Attributes:
        ssim: structural similarity of the images as they are.
        ssim_stretched: the same after `stretched` of the first image, as the literature does before its own SSIM.
        ncc: normalized cross-correlation.
        mse, rmse: mean squared error and its root, unscaled.
    """

    ssim: list[float]
    ssim_stretched: list[float]
    ncc: list[float]
    mse: list[float]
    rmse: list[float]

    @classmethod
    def of(cls, images: Tensor, truth: Tensor, mean: Tensor) -> PairScores:
        """Of pairs `(n, c, h, w)` in [0, 1] with the public mean image `(c, h, w)`."""
        errors = mse(images, truth)
        ncc = (normalized(images, mean) * normalized(truth, mean)).sum(dim=1).clamp(-1, 1)
        columns = ssim(images, truth), ssim(stretched(images), truth), ncc, errors, errors.sqrt()
        return cls(*(column.double().cpu().tolist() for column in columns))

    def summary(self) -> dict[str, float | int]:
        """Number of images, of good ones, mean SSIM of the best ones, and means of all scores."""
        means = {name: sum(values) / len(values) for name, values in asdict(self).items()}
        return {
            "n": len(self.ssim),
            "n_good": sum(value > GOOD for value in self.ssim),
            "n_good_stretched": sum(value > GOOD for value in self.ssim_stretched),
            "best_ssim": _best(self.ssim),
            "best_ssim_stretched": _best(self.ssim_stretched),
            **means,
        }


def _best(values: Sequence[float]) -> float:
    chosen = sorted(values, reverse=True)[:BEST]
    return sum(chosen) / len(chosen)


@dataclass(frozen=True)
class PoolScore:
    """Training images and their nearest candidates: positions `(n,)` in the pool, and scores."""

    nearest: Tensor
    scores: PairScores
    pool: int


def score_pool(truth: Tensor, pool: Tensor, mean: Tensor) -> PoolScore:
    """Match every training image `(n, c, h, w)` with the nearest of the candidates `(m, c, h, w)` by correlation."""
    nearest = correlations(truth, pool, mean).argmax(dim=1)
    return PoolScore(nearest, PairScores.of(pool[nearest], truth, mean), len(pool))


def _errors(images: Tensor, others: Tensor) -> Tensor:
    """RMSE between all images `(n, c, h, w)` and `(m, c, h, w)`, `(n, m)`."""
    # by default sums of products, whose rounding is larger than the errors of exact reconstructions
    apart = torch.cdist(images.flatten(1), others.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    found: Tensor = apart / math.prod(images.shape[1:]) ** 0.5
    return found


def certified(candidates: Tensor, truth: Tensor, known: Tensor) -> dict[str, int]:
    """How many candidates `(m, c, h, w)` an attack certified, and how many of them are wrong.

    `images` counts the training images `(n, c, h, w)` that a candidate within `WRONG` shows. Candidates that show one
    of the `known` ones `(j, c, h, w)` are not wrong, and count for nothing.
    """
    members = torch.cat([truth, known])
    right = _errors(candidates, members) <= WRONG
    shown = right[:, : len(truth)].any(dim=0)
    return {"candidates": len(candidates), "wrong": int((~right.any(dim=1)).sum()), "images": int(shown.sum())}


def baselines(truth: Tensor, public: Tensor, mean: Tensor, pool: int) -> dict[str, PairScores]:
    """Scores of answers that use no model.

    The mean image; the nearest public image `(N, c, h, w)` in bytes, by correlation and by MSE; and the nearest one by
    correlation of as many public images, drawn with a fixed seed, as the pool has candidates; of all where these are
    fewer.
    """
    rows, best, index = normalized(truth, mean), torch.full((len(truth),), -torch.inf), torch.zeros(len(truth)).long()
    for begin, part in zip(range(0, len(public), _CHUNK), public.split(_CHUNK), strict=True):
        values, places = (rows @ normalized(part.to(truth) / 255, mean).T).max(dim=1)
        values, places = values.cpu().to(best), places.cpu() + begin
        index, best = torch.where(values > best, places, index), torch.maximum(values, best)
    _, closest = NearestPublic(public).query(truth)
    few = public[torch.randperm(len(public), generator=torch.Generator().manual_seed(0))[:pool]].to(truth) / 255
    return {
        "mean image": PairScores.of(mean.expand_as(truth), truth, mean),
        SAME_POOL: score_pool(truth, few, mean).scores,
        "nearest public image": PairScores.of(public[index].to(truth) / 255, truth, mean),
        "nearest public image in MSE": PairScores.of(closest.to(truth), truth, mean),
    }


def neighbours(pool: Tensor, members: Tensor, others: Tensor, mean: Tensor) -> dict[str, Any]:
    """Whether candidates `(m, c, h, w)` are closer to training images than to as many other images.

    Means of all scores over the candidates, each with its nearest image of both sets by correlation, and the shares of
    the candidates that are closer to a training image, by correlation and by RMSE, with their intervals.
    """
    found: dict[str, Any] = {}
    values: dict[str, PairScores] = {}
    errors = []
    for name, images in (("members", members), ("others", others)):
        nearest = correlations(pool, images, mean).argmax(dim=1)
        values[name] = PairScores.of(pool, images[nearest], mean)
        found[name] = values[name].summary()
        errors.append(distances(pool, images))
    closer = {
        "ncc": [a > b for a, b in zip(values["members"].ncc, values["others"].ncc, strict=True)],
        "rmse": (errors[0] < errors[1]).tolist(),
    }
    return {**found, **{f"closer_{name}": rate(own) for name, own in closer.items()}}


def selections(restarts: Sequence[Reconstruction], truth: Tensor, mean: Tensor) -> dict[str, dict[str, float | int]]:
    """What an attacker who presents some candidates of several restarts would show; empty for one restart.

    By name of the selection: number and mean scores of its first ones, each compared with the nearest training image.
    `truth` selects by these scores themselves and is no attack.
    """
    if len(restarts) < 2:
        return {}
    ranked = {
        "residual": by_residual(restarts),
        "agreement": by_agreement(restarts, mean),
        "clusters": by_clusters(restarts, mean),
    }
    found: dict[str, dict[str, float | int]] = {}
    for name, candidates in ranked.items():
        images = distinct(candidates, mean).images[:BEST].clamp(0, 1)
        found[name] = {"n": len(images), **(_shown(images, truth, mean).summary() if len(images) else {})}
    pool = distinct(ranked["residual"], mean).images
    order = torch.tensor(_shown(pool, truth, mean).ssim).argsort(descending=True, stable=True)[:BEST]
    return {**found, "truth": _shown(pool[order], truth, mean).summary()}


def _shown(images: Tensor, truth: Tensor, mean: Tensor) -> PairScores:
    return PairScores.of(images, truth[correlations(images, truth, mean).argmax(dim=1)], mean)


#: Gradients of all candidates that are kept at once, in numbers; larger problems are left out.
_GRADIENTS = 2e8


def stationarity(seen: ReleasedModel, images: Tensor, labels: Tensor) -> float | None:
    """Relative distance of the released weights from the nearest combination of the candidates' gradients.

    `min ||theta - sum_i lambda_i grad margin_i(theta)|| / ||theta||` over multipliers of at least 0 (of any sign in
    regression), for images `(m, c, h, w)`: the condition of [Haim2022] with the best multipliers, whatever the attack.
    In [0, 1]; None where the gradients are too large to be kept. Known training images count as candidates. For the
    training images it is 0 only where the training has converged, without noise: with weight decay, for two classes or
    in regression, or in the limit of zero loss.
    """
    if seen.known_images is not None and seen.known_labels is not None:
        images, labels = torch.cat([images, seen.known_images]), torch.cat([labels, seen.known_labels])
    n_weights = sum(weight.numel() for weight in seen.weights.values())
    if len(labels) * n_weights > _GRADIENTS:
        return None

    def margin(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return margins(seen.task, functional_call(seen.model, weights, (image[None],)), label[None])[0]

    found = vmap(grad(margin), in_dims=(None, 0, 0))(
        dict(seen.weights), images.to(seen.like), labels.to(seen.like.device)
    )
    gradients = torch.cat([found[name].flatten(1) for name in seen.weights], dim=1).double().cpu()
    released = torch.cat([weight.flatten() for weight in seen.weights.values()]).double().cpu()
    # the same problem in as many dimensions as there are candidates
    basis, values, directions = torch.linalg.svd(gradients.T, full_matrices=False)
    # candidates that are alike span fewer dimensions; directions beyond these are rounding, not gradients
    kept = values > max(gradients.shape) * torch.finfo(values.dtype).eps * values[0]
    basis, within = basis[:, kept], values[kept, None] * directions[kept]
    inside = basis.T @ released
    outside = (released - basis @ inside).square().sum()
    if seen.task == "regression" or not kept.any():
        rest = 0.0
    else:
        _, rest = nnls(within.numpy(), inside.numpy())
    return float((outside + rest**2).sqrt() / released.norm())


def rate(outcomes: Sequence[bool]) -> dict[str, float | int] | None:
    """A share with its 95 % interval (Clopper and Pearson); None without outcomes.

    >>> found = rate([True, False])
    >>> found["n"], found["value"], round(found["low"], 4), round(found["high"], 4)
    (2, 0.5, 0.0126, 0.9874)
    """
    if not outcomes:
        return None
    found = binomial_rate(sum(outcomes), len(outcomes))
    return {"n": len(outcomes), "value": found.value, "low": found.low, "high": found.high}


@dataclass(frozen=True)
class MemberClaim:
    """One test whether an image was trained on.

    Attributes:
        member: whether it was.
        image: its position among the training or the other images.
        restart: the start whose candidates were compared.
        left_out: position of the training image that the second model was trained without.
        with_rmse, without_rmse: of its nearest candidate, under both models.
        claimed: whether the test says that it was trained on.
    """

    member: bool
    image: int
    restart: int
    left_out: int
    with_rmse: float
    without_rmse: float
    claimed: bool


def distances(images: Tensor, pool: Tensor) -> Tensor:
    """RMSE of every image `(n, c, h, w)` to its nearest candidate, `(n,)`."""
    found: Tensor = _errors(images, pool).amin(dim=1)
    return found


def closest(images: Tensor, pools: Sequence[Tensor], mean: Tensor, n: int) -> list[tuple[int, int]]:
    """Positions of the `n` images with the best correlation to a candidate, and the restart whose pool has it."""
    best = torch.stack([correlations(images, pool, mean).amax(dim=1) for pool in pools])
    values, restarts = best.max(dim=0)
    return [(int(index), int(restarts[index])) for index in values.argsort(descending=True, stable=True)[:n]]
