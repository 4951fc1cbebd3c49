"""The noise in an observed update, known with the client's defense or estimated, and the density of the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lit_recon.clients import LocalSteps
from lit_recon.clients.aggregate import one_client
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.records import Noise, NoiseFamily, Observation, Update

#: Least number of rows and of columns of a matrix whose singular values show the noise.
_LEAST = 16
#: Mean of -log density at the truth, at scale 1: 1/2 + log(2 pi)/2 for the normal, 1 + log 2 for the Laplace.
_ENTROPY = {"gaussian": 0.5 + 0.5 * math.log(2 * math.pi), "laplace": 1 + math.log(2)}
#: Median absolute value of Student's t with 2 degrees of freedom.
_STUDENT_MEDIAN = (2 / 3) ** 0.5
#: Share of the squares of signs in a low rank from which on a matrix is more signal than noise; the multiple of the
#: median of a row at which its entries are then cut off first; and rounds of a robust fit, of low rank or of patches.
_SIGNS, _CUT, _ROUNDS, _ROUNDS_OF_PATCHES = 0.3, 6.0, 4, 3


def noise_of(
    observation: Observation, family: NoiseFamily = "gaussian", exact: bool = True
) -> tuple[Noise | None, bool]:
    """The noise in a victim's update, or None, and whether that is known.

    `(None, True)`: the attacker knows that there is none; `(None, False)`: it is neither known nor can be estimated.

    Without knowledge of the defense, or where it adds none, the scale is estimated, see `estimated_std`: rounding
    counts as noise. Where no exact density is needed, a gradient behind a defense that is known to add none has none.

    Args:
        observation: of the victim.
        family: of the noise if the attacker does not know the defense.
        exact: the density of the update is needed; otherwise noise of another kind is estimated too.

    Raises:
        ThreatModelError: the noise of the defense is of another kind, and it has to be exact.
    """
    if observation.defense is not None:
        try:
            noise = observation.defense.released_noise(observation.n_examples)
        except ConfigError as error:
            if exact:
                raise ThreatModelError(f"the update has no known density: {error}") from error
        else:
            # a difference of weights has their rounding
            if noise is not None or not (exact or isinstance(one_client(observation.operator)[0], LocalSteps)):
                return noise, True
    std = estimated_std(observation.update)
    if std is None:
        return None, False
    return Noise(family, std if family == "gaussian" else std / 2**0.5), False


def estimated_std(update: Update) -> float | None:
    """Standard deviation of noise on every coordinate; None if no tensor is a matrix of at least 16 x 16.

    Of the gradients of convolutions and linear layers as matrices `(outputs, ...)`, those behind few patches have a
    rank far below half their number of rows. Half of their singular values then come from the noise, with a median that
    is known (Marchenko and Pastur 1967), as Gavish and Donoho (2014) use it. The least estimate of all is taken: other
    matrices overestimate.
    """
    matrices = [value.detach().flatten(1).cpu().double() for value in update.values() if value.dim() > 1]
    found = [_std(matrix) for matrix in matrices if min(matrix.shape) >= _LEAST]
    found = [std for std in found if std > 0]
    return min(found) if found else None


def _std(matrix: Tensor) -> float:
    """Standard deviation of the noise in a float64 matrix of low rank, from its median singular value."""
    return float(singular_values(matrix).median()) / math.sqrt(_median(*matrix.shape) * max(matrix.shape))


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values, rising, of a float64 matrix, from its smaller Gram matrix."""
    smaller = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    values: Tensor = torch.linalg.eigvalsh(smaller)
    return values.clamp_min(0).sqrt()


def edge(rows: int, columns: int) -> float:
    """The largest singular value of a matrix of independent noise of standard deviation 1, in the limit."""
    return math.sqrt(rows) + math.sqrt(columns)


def hidden_shares(values: Tensor, rows: int, columns: int, std: float) -> Tensor:
    """Expected share of each row-space direction of a noisy matrix that noise hides, from its singular `values`.

    The squared sine of the angle between the right singular vectors with and without the noise, in the limit of large
    matrices ([BenaychGeorges2012]); 1 for values that are no larger than those of noise.

    Args:
        values: float64 singular values of the noisy `(rows, columns)` matrix.
        rows, columns: its shape.
        std: standard deviation of the noise.
    """
    ratio, squares = rows / columns, values.square() / (std**2 * columns)
    rest = squares - 1 - ratio
    signal = 0.5 * (rest + (rest.square() - 4 * ratio).clamp_min(0).sqrt())
    shares = (ratio + signal) / (signal * (signal + 1)).clamp_min(1e-300)
    return torch.where(values > std * edge(rows, columns), shares, 1.0)


class RobustRows(NamedTuple):
    """Rows of low rank whose noise had heavy tails, with outliers pulled in.

    Attributes:
        values: `(rows, columns)`, every row in units of its noise, which then has a standard deviation of about 1.
        units: `(rows, 1)`, standard deviations of what is left of the noise of the rows.
        gain: mean log-density of this fit and noise, for low rank less that of a plain fit and normal noise, in nats
            per entry.
    """

    values: Tensor
    units: Tensor
    gain: float

    @property
    def scale(self) -> float:
        """Median standard deviation of what is left of the noise of the rows."""
        return float(self.units.median())


def robust_rows(matrix: Tensor, rank: int) -> RobustRows:
    """The rows, other than zeros, of a matrix of low rank with noise of heavy tails, which hides less after this.

    Noise whose variance is divided by the size of an entry, as in Chen and Lei's defense, has the tails of Student's t
    with 2 degrees of freedom: single entries are many times larger than most. Around a fit of low rank, residuals are
    replaced by the derivative of that likelihood in units of its mean slope: least squares with these rows then has
    the optimum and the curvature of the likelihood (pseudo-values, [Cox1983]). The fit and the scale of every row are
    found in turn. Where most signs are explained by a low rank, the fit begins with rows that are cut off at six times
    their median size or, if noise is then more likely, as they are; else, so that it never follows outliers, from zero.
    Entries of exactly zero have no noise.

    Args:
        matrix: `(rows, columns)`.
        rank: of the matrix without noise, at most.
    """
    values = matrix[(matrix != 0).any(1)].detach().float()
    seen, rank = values != 0, min(rank, min(values.shape) // 2)
    if rank == 0:
        return RobustRows(matrix, matrix.new_zeros(len(matrix), 1), 0.0)
    signs, fits = values.sign(), [_low_rank(values, _std(values.double()), rank)]
    normal = -0.5 * (1 + math.log(2 * math.pi)) - (values - fits[0])[seen].square().mean().sqrt().log()
    if _low_rank(signs, 1.0, rank).square().sum() <= _SIGNS * seen.sum():
        fits = [torch.zeros_like(values)]
    else:
        cut = _cut(values, seen)
        fits.append(_low_rank(cut, _std(cut.double()), rank))
    fitted = partial(_low_rank, rank=rank)
    found = max((_robust_fit(values, seen, fit, fitted, _ROUNDS) for fit in fits), key=lambda one: one.gain)
    return found._replace(gain=found.gain - float(normal))


def robust_rows_near(matrix: Tensor, patches: Tensor, begun: RobustRows) -> RobustRows:
    """The rows of `robust_rows` around the best fit of patches `(m, columns)` of images near the true ones.

    Rows of any low rank can follow outliers, those of given patches hardly.

    Args:
        matrix: `(rows, columns)`.
        patches: of the images.
        begun: rows whose fit by these patches is near the best one; these rows lead closer to it.
    """
    values = matrix[(matrix != 0).any(1)].detach().float()
    seen, basis = values != 0, torch.linalg.qr(patches.double().T)[0].to(values)

    def fitted(rows: Tensor, std: float) -> Tensor:
        inside: Tensor = (rows @ basis) @ basis.T
        return inside

    return _robust_fit(values, seen, fitted(begun.values * begun.units, 0.0), fitted, _ROUNDS_OF_PATCHES)


def _cut(values: Tensor, seen: Tensor) -> Tensor:
    """The entries of rows, none above a multiple of their median size."""
    cut: Tensor = torch.minimum(values.abs(), _CUT * _medians(values, seen)) * values.sign()
    return cut


def _robust_fit(
    values: Tensor, seen: Tensor, fit: Tensor, fitted: Callable[[Tensor, float], Tensor], rounds: int
) -> RobustRows:
    """The rows by a fit that begins with `fit`; `gain` is the mean log-density of their noise alone."""
    for _ in range(rounds):
        rest = values - fit
        scales = _medians(rest, seen) / _STUDENT_MEDIAN
        # a row that the fit follows would seem to have little noise, and then be followed even more
        scales = scales.clamp_min(max(float(scales.median()), torch.finfo(torch.float32).tiny))
        units = rest / scales
        weights = 1 / (1 + units.square() / 2)
        slope = (2 * weights.square() - weights)[seen].mean()
        pulled = torch.where(seen, weights * units / slope, 0.0)
        std = float(pulled[seen].square().mean().sqrt())
        rows = torch.where(seen, fit / scales + pulled, 0.0)
        fit = fitted(rows, std) * scales
    density = -1.5 * (units.square() / 2).log1p() - 1.5 * math.log(2) - scales.log()
    return RobustRows(rows / std, scales * std, float(density[seen].mean()))


def _medians(rows: Tensor, seen: Tensor) -> Tensor:
    """Median size `(rows, 1)` of the entries of each row that are seen."""
    medians: Tensor = rows.abs().masked_fill(~seen, math.nan).nanmedian(1, keepdim=True).values
    return medians


def _low_rank(matrix: Tensor, std: float, rank: int) -> Tensor:
    """What is left of a matrix by optimal shrinkage of its largest singular values behind noise ([Gavish2017])."""
    rows, columns = matrix.shape
    if rows > columns:
        return _low_rank(matrix.T, std, rank).T
    squares, vectors = torch.linalg.eigh(matrix.double() @ matrix.double().T)
    # without any noise nothing is shrunk
    std = max(std, 1e-6 * float(squares[-1] / columns) ** 0.5)
    ratio, squares, vectors = rows / columns, squares[-rank:] / (std**2 * columns), vectors[:, -rank:]
    signal = ((squares - 1 - ratio).square() - 4 * ratio).clamp_min(0).sqrt() / squares.clamp_min(1e-12)
    # finite matrices have singular values a little above the edge
    kept = torch.where(squares > (1.05 * (1 + ratio**0.5)) ** 2, signal, 0.0)
    low: Tensor = (vectors * kept).to(matrix) @ (vectors.T.to(matrix) @ matrix)
    return low


def _median(rows: int, columns: int) -> float:
    """Median of the Marchenko-Pastur law: of the squared singular values, divided by the larger dimension."""
    ratio = min(rows, columns) / max(rows, columns)
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    # on x = low + (high - low) sin^2(t) the density has no poles at the ends
    t = torch.linspace(0, math.pi / 2, 20001, dtype=torch.float64)
    points = low + (high - low) * t.sin().square()
    density = ((high - points) * (points - low)).clamp_min(0).sqrt() / points.clamp_min(1e-300)
    mass = torch.cumulative_trapezoid(density * (2 * t).sin(), t)
    return float(points[1:][mass >= mass[-1] / 2][0])


def log_likelihood(
    candidate: Update, observed: Update, noise: Noise | None, family: NoiseFamily = "gaussian"
) -> Tensor:
    """Log-density, a float64 scalar, of the observed update's coordinates other than zero, around `candidate`.

    Differentiable in the candidate, and works under `torch.func.vmap`. Coordinates observed as exactly zero were
    dropped; noise has none of them.

    Args:
        candidate: the update before the noise, as the defense's `simulate` computes it.
        observed: as released.
        noise: of the release, see `Defense.released_noise`; None: the scale is unknown, and the one that maximizes the
            density is taken (profile likelihood).
        family: of noise of unknown scale.

    >>> zero, seen = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, -1.0])}
    >>> round(float(log_likelihood(zero, seen, Noise("laplace", 1.0))), 6)  # 2 (-log 2 - 1)
    -3.386294
    """
    if noise is not None and not noise.scale > 0:
        raise ConfigError(f"a likelihood needs noise of a scale above 0; got {noise.scale:g}")
    name = family if noise is None else noise.family
    if name not in _ENTROPY:
        raise ConfigError(f"a likelihood needs noise of the family 'gaussian' or 'laplace'; got {name!r}")
    count, total = _misfit(candidate, observed, squared=name == "gaussian")
    power = 0.5 if name == "gaussian" else 1.0
    if noise is None:  # mean square or mean absolute value: its power-th power is the scale
        mean = (total / count.clamp_min(1)).clamp_min(torch.finfo(torch.float64).tiny)
        return -count * (_ENTROPY[name] + power * mean.log())
    unit = noise.scale**2 if name == "gaussian" else noise.scale
    excess = total / unit - count
    return -count * (_ENTROPY[name] + math.log(noise.scale)) - power * excess


def expected_log_likelihood(observed: Update, noise: Noise) -> Tensor:
    """Mean of `log_likelihood` of the true update, a float64 scalar: minus the entropy of the noise."""
    return -_observed(observed) * (_ENTROPY[noise.family] + math.log(noise.scale))


def _observed(observed: Update) -> Tensor:
    return torch.stack([(value != 0).sum() for value in observed.values()]).sum().double()


def _misfit(candidate: Update, observed: Update, squared: bool) -> tuple[Tensor, Tensor]:
    """Number of observed coordinates, and the sum of squared or absolute residuals there."""
    parts = []
    for name, value in observed.items():
        residual = torch.where(value != 0, candidate[name] - value, 0.0)
        parts.append((residual.square() if squared else residual.abs()).sum().double())
    return _observed(observed), torch.stack(parts).sum()
