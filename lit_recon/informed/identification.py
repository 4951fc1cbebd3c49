"""Which of finitely many candidates a model was trained on: the attack that bounds for finite priors are about.

The adversary trains on every candidate as the released model was trained, but without noise, and takes the one whose
model explains the released one best. For noise that is equally strong in all directions this is the likeliest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.errors import ConfigError, ShapeError


def identified(observed: Tensor, expected: Tensor, n_candidates: int, generator: torch.Generator) -> Tensor:
    """Whether the attack names the true image, once per released model.

    Candidates of model `i` are its own image and `n_candidates - 1` of the other models' images, drawn at random, all
    equally likely: without the model the chance is `1 / n_candidates`.

    Args:
        observed: differences of the released models' weights from the reference, `(m, p)`.
        expected: of the noise-free models of the same images, `(m, p)`.
        n_candidates: from 2 to `m`.
        generator: of the draw.

    Returns:
        Bool `(m,)`.

    Raises:
        ConfigError: `n_candidates` is out of its range.
        ShapeError: the models do not belong together.

    >>> identified(torch.eye(3) + 0.1, torch.eye(3), 3, torch.Generator())
    tensor([True, True, True])
    """
    m = len(observed)
    if observed.shape != expected.shape or observed.dim() != 2:
        raise ShapeError(f"models must be (m, p) both; got {tuple(observed.shape)} and {tuple(expected.shape)}")
    if not 2 <= n_candidates <= m:
        raise ConfigError(f"candidates must lie between 2 and the number of targets, {m}; got {n_candidates}")
    exact = expected.double()
    scores = observed.double() @ exact.T - exact.square().sum(1) / 2
    won = torch.empty(m, dtype=torch.bool)
    for own in range(m):
        others = torch.randperm(m - 1, generator=generator)[: n_candidates - 1]
        others += others >= own
        won[own] = scores[own, own] > scores[own, others].max()
    return won
