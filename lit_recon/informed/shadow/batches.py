"""Which images each step takes: all of them, or mini-batches in an order that models share or draw for themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lit_recon.informed.shadow.training import KnownTraining


class Batches:
    """The mini-batches of many models; images are numbered, the fixed set from 0 on and the model's own as the last.

    Args:
        known: the training.
        generators: of the order: one where it is known, one per model where it is not, none for full batches.
    """

    def __init__(self, known: KnownTraining, generators: Sequence[torch.Generator] | None) -> None:
        self.known, self.generators = known, list(generators or ())

    def of(self, members: slice) -> Iterator[Tensor | None]:
        """For every step of some of the models the numbers of its images.

        Yields:
            None for all images; `(b,)` for a batch that all models share; `(s, b)` where each has its own.
        """
        descent, left = self.known.descent, self.known.n_steps
        if descent.batch_size is None:
            yield from [None] * left
            return
        drawing = self.generators[members] if descent.has_own_order else [self.generators[0].clone_state()]
        while left:
            orders = torch.stack([torch.randperm(len(self.known.images) + 1, generator=own) for own in drawing])
            for batch in orders.split(descent.batch_size, dim=1)[:left]:
                left -= 1
                numbers = batch.to(self.known.images.device)
                yield numbers if descent.has_own_order else numbers[0]


def gathered(fixed: Tensor, own: Tensor, numbers: Tensor) -> Tensor:
    """What the models' own batches hold, `(s, b, ...)`.

    Args:
        fixed: of the fixed set, `(n, ...)`.
        own: of the models' own images, `(s, ...)`.
        numbers: `(s, b)`; `n` stands for the own image.

    >>> gathered(torch.tensor([10, 11, 12]), torch.tensor([7, 8]), torch.tensor([[0, 3], [2, 1]])).tolist()
    [[10, 7], [12, 11]]
    """
    is_own = numbers == len(fixed)
    found = fixed[numbers.clamp(max=len(fixed) - 1)]
    found[is_own] = own[is_own.nonzero()[:, 0]]
    return found
