"""Training on mixtures of images."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from lit_recon.defenses.base import Batch, Defense, Stage
from lit_recon.defenses.strength import checked_finite
from lit_recon.models import Backbone


class MixUp(Defense):
    """Replaces every image and its label by a mixture with another of the batch, before any gradient.

    `l x_i + (1 - l) x_p(i)`, the labels as probabilities alike, with one weight `l` from Beta(alpha, alpha) and one
    permutation `p` per batch: one `randint` that seeds NumPy's Beta, then one `randperm`. An `alpha` of 0 is the
    identity, for which Beta's limit gives weights 0 and 1 only. A batch of one image stays as it is.

    Every image takes part in two mixtures: followed by `DPSGD`, replacing one image changes two of the clipped
    gradients instead of one, which no accountant knows by itself.

    The attacker's counterpart is the identity: what he reconstructs are the mixtures, with probabilities as labels.

    Args:
        alpha: concentration; 1 gives uniform weights, more gives weights near one half.

    Source: [Zhang2018], eq. 1 and its reference code.
    """

    stages = (Stage.BATCH,)

    def __init__(self, alpha: float = 0.0) -> None:
        self.alpha = checked_finite(self, "alpha", alpha)

    def transform_batch(self, batch: Batch, model: Backbone, generator: torch.Generator) -> Batch:
        if self.alpha == 0:
            return batch
        device = generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        weight = float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
        partner = torch.randperm(len(batch.images), generator=generator, device=device).to(batch.images.device)

        def mixed(values: Tensor) -> Tensor:
            return weight * values + (1 - weight) * values[partner]

        labels = batch.labels
        if labels.dim() == 1:
            labels = nn.functional.one_hot(labels, model.n_classes).to(batch.images.dtype)
        return batch._replace(images=mixed(batch.images), labels=mixed(labels))
