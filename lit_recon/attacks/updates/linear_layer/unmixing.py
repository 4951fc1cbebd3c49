"""Blind source separation of images by contrast functions, smoothness, bounds and volume."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ShapeError

#: E[log cosh z] of a standard normal z, the reference of negentropy; Gauss-Hermite quadrature with 200 nodes.
GAUSSIAN_LOG_COSH = 0.3745672074
#: Singular values below this share of the largest count as zero in a float32 gradient.
RANK_TOLERANCE = 6e-7
#: Initial radius of sources in white coordinates: about the contrast of a normalized photograph.
START_RADIUS = 0.8
#: Factor by which the weight of the bounds grows during the search, which may start outside them.
BOUNDS_GROWTH = 100.0


@dataclass(frozen=True)
class Mixtures:
    """The possible `j` sources of linear mixtures: offset + C basis, with unknown C.

    Attributes:
        offset: `(d,)`.
        basis: `(q, d)`; rows have variance 1 and are uncorrelated over the `d` coordinates, with any mean.
        constant: with a bias the sources' coefficients sum to one: `q = j - 1`; else `q = j`.
    """

    offset: Tensor
    basis: Tensor
    constant: bool

    @property
    def n_sources(self) -> int:
        """The number `j`."""
        return len(self.basis) + self.constant


def rank(rows: Tensor) -> int:
    """Number of independent mixtures, up to the rounding of a float32 gradient."""
    values = torch.linalg.svdvals(rows.double())
    return int((values > RANK_TOLERANCE * values[0]).sum())


def mixtures_of(weight: Tensor, bias: Tensor | None, n: int) -> Mixtures:
    """Whitened mixtures of at most `n` sources; fewer if the mixtures have a lower rank.

    Each row of a layer's weight gradient `(m, d)` is a mixture. The bias's gradient `(m,)`, the same mixture of ones,
    determines scale, sign and offset of the sources; without it sources are known up to a factor, and centered rows are
    whitened. A `ShapeError` says that fewer than two mixtures (without bias, one) are independent.

    Source: centering and whitening as in [Kariyappa2023]; the use of the bias is ours.
    """
    mixed = weight.double()
    mean = mixed.mean(dim=1, keepdim=True)
    rows = mixed - mean if bias is None else torch.cat([mixed, bias.double()[:, None]], dim=1)
    n_sources = min(n, rank(rows))
    if n_sources < (1 if bias is None else 2):
        raise ShapeError(f"separation needs two independent mixtures with a bias, one without; got {n_sources}")
    left, values, directions = torch.linalg.svd(rows, full_matrices=False)
    directions = directions[:n_sources]
    if bias is None:
        means = (left[:, :n_sources] / values[:n_sources]).T @ mean
        return Mixtures(torch.zeros_like(rows[0]), (directions + means) * math.sqrt(rows.shape[1]), constant=False)
    ones = directions[:, -1]
    offset = (ones @ directions / ones.square().sum())[:-1]
    differences = (torch.linalg.svd(ones[None], full_matrices=True).Vh[1:] @ directions)[:, :-1]
    centered = differences - differences.mean(dim=1, keepdim=True)
    eigenvalues, vectors = torch.linalg.eigh(centered @ centered.T / centered.shape[1])
    whitening = (vectors / eigenvalues.clamp(min=torch.finfo(rows.dtype).tiny).sqrt()).T
    basis, white = whitening @ differences, whitening @ centered
    offset = offset - (white @ (offset - offset.mean()) / len(offset)) @ basis
    return Mixtures(offset, basis, constant=True)


@dataclass(frozen=True)
class UnmixingTerms:
    """Weights of penalties on sources, at least 0 and one above; 0 switches a term off.

    The terms down to `sparsity` are published and act, except `non_negativity`, on sources of mean 0 and variance 1.
    The others act on sources in their own scale.

    Attributes:
        negentropy: distance of a source's distribution from a normal one, (E log cosh s - E log cosh z)^2, maximized.
        decorrelation: mean of `exp(T |correlation|) - 1` over pairs of sources.
        temperature: T.
        total_variation: mean absolute difference of neighbouring pixels.
        sparsity: mean absolute value.
        non_negativity: mean norm of a source's negative or positive part, whichever is smaller: for outputs of a
            ReLU, up to sign. Not for normalized pixels, which have both signs.
        volume: log determinant of the coefficients per source, maximized: keeps sources different without the
            assumption that they are uncorrelated.
        smoothness: total variation of the sources in their own scale.
        bounds: mean square of what lies outside of [0, 1] pixels; grows a hundredfold during the search.

    Source: [Kariyappa2023] and its code for the published terms; `volume` and `bounds` are a criterion of bounded
    component analysis: Erdogan, A class of bounded component analysis algorithms for the separation of both independent
    and dependent sources, IEEE Transactions on Signal Processing 2013.
    """

    negentropy: float = 1.0
    decorrelation: float = 0.0
    temperature: float = 12.4
    total_variation: float = 0.0
    sparsity: float = 0.0
    non_negativity: float = 0.0
    volume: float = 0.3
    smoothness: float = 0.75
    bounds: float = 100.0

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 0 or not any(w for name, w in vars(self).items() if name != "temperature"):
            raise ConfigError(f"the weights of an unmixing must be at least 0, and one of them positive; got {self}")


def unmix(
    mixtures: Mixtures,
    terms: UnmixingTerms,
    shape: tuple[int, ...],
    bounds: tuple[Tensor, Tensor] | None = None,
    steps: int = 1200,
    lr: float = 0.02,
    seed: int = 0,
) -> Tensor:
    """Sources `(j, d)` of least penalty, by Adam with a cosine schedule from random coefficients.

    The last two axes of a source of this shape are spatial. The term `bounds` keeps coordinates between the two
    `bounds`, each `(d,)`.
    """
    offset, basis = mixtures.offset.float(), mixtures.basis.float()
    limits = None if bounds is None else (bounds[0].to(basis), bounds[1].to(basis))
    drawn = torch.randn(mixtures.n_sources, len(basis), generator=torch.Generator().manual_seed(seed))
    coefficients = (START_RADIUS * torch.nn.functional.normalize(drawn, dim=1).to(basis)).requires_grad_()
    optimizer = torch.optim.Adam([coefficients], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        sources = offset + coefficients @ basis
        loss = scale_free(sources, terms, shape) + in_scale(sources, coefficients, mixtures.constant, terms, shape)
        if limits is not None and terms.bounds:
            excess = (sources - limits[1]).relu() + (limits[0] - sources).relu()
            loss = loss + terms.bounds * BOUNDS_GROWTH ** (step / steps) * excess.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return mixtures.offset + coefficients.detach().double() @ mixtures.basis


def negentropy(sources: Tensor, reference: float = GAUSSIAN_LOG_COSH) -> Tensor:
    """Approximate negentropy `(j,)` of sources `(j, d)` of mean 0 and variance 1, up to a factor; 0 if normal.

    The published code has no Gaussian reference (0) and favors flat distributions over peaked ones.

    Source: [Kariyappa2023]; the approximation by one contrast function, here log cosh, is Hyvärinen's (1998).
    """
    # log cosh without overflow
    contrast = sources.abs() + torch.nn.functional.softplus(-2 * sources.abs()) - math.log(2)
    return (contrast.mean(dim=1) - reference).square()


def decorrelation(cosines: Tensor, temperature: float) -> Tensor:
    """Mean over all pairs `(i, j)` of exp(T |cosine|) - 1, where i = j counts as 0; cosines are `(j, j)`.

    Source: [Kariyappa2023] and its code.
    """
    apart = 1 - torch.eye(len(cosines), dtype=cosines.dtype, device=cosines.device)
    return (torch.expm1(temperature * cosines.abs()) * apart).mean()


def non_negativity(sources: Tensor) -> Tensor:
    """Mean over sources `(j, d)` of the norm of the negative or the positive part, whichever is smaller.

    Source: the published code of [Kariyappa2023].
    """
    return torch.minimum(sources.relu().norm(dim=1), (-sources).relu().norm(dim=1)).mean()


def scale_free(sources: Tensor, terms: UnmixingTerms, shape: tuple[int, ...]) -> Tensor:
    """The scale-independent, published penalties of sources `(j, d)`."""
    loss = sources.new_zeros(())
    centered = sources - sources.mean(dim=1, keepdim=True)
    unit = centered * torch.rsqrt(centered.square().mean(dim=1, keepdim=True) + torch.finfo(sources.dtype).tiny)
    if terms.negentropy:
        loss = loss - terms.negentropy * negentropy(unit).mean()
    if terms.decorrelation:
        loss = loss + terms.decorrelation * decorrelation(unit @ unit.T / unit.shape[1], terms.temperature)
    if terms.total_variation:
        loss = loss + terms.total_variation * _total_variation(unit.view(-1, *shape))
    if terms.sparsity:
        loss = loss + terms.sparsity * unit.abs().mean()
    return loss


def in_scale(
    sources: Tensor, coefficients: Tensor, constant: bool, terms: UnmixingTerms, shape: tuple[int, ...]
) -> Tensor:
    """The scale-dependent penalties of sources `(j, d)` and their coefficients, except the bounds."""
    loss = sources.new_zeros(())
    if terms.non_negativity:
        loss = loss + terms.non_negativity * non_negativity(sources)
    if terms.volume:
        ones = coefficients.new_ones(len(coefficients), 1)
        frame = torch.cat([coefficients, ones], dim=1) if constant else coefficients
        loss = loss - terms.volume * torch.linalg.slogdet(frame).logabsdet / len(frame)
    if terms.smoothness:
        loss = loss + terms.smoothness * _total_variation(sources.view(-1, *shape))
    return loss


def _total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbours, both directions added; 0 along an axis of length one."""
    across, down = images.diff(dim=-1).abs(), images.diff(dim=-2).abs()
    return sum((part.mean() for part in (across, down) if part.numel()), images.new_zeros(()))
