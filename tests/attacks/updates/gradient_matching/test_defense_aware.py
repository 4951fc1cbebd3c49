"""An attacker who knows the defense is at least as strong as one who does not."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import avg_pool2d

from lit_recon.attacks.updates import Adam, GradientMatching, KnownLabels, TotalVariation
from lit_recon.clients import Client
from lit_recon.defenses import Defense, GradientDropout, GradientPruning, PerExampleClipping
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Knowledge, Normalization

SHAPE = (1, 8, 8)


def mean_rmse(defense: Defense, aware: bool, execution: str = "vmap") -> float:
    """Over five single-image clients of a small smooth network."""
    torch.manual_seed(0)
    model = Backbone(ConvNet(SHAPE, widths=[8, 8], norm="none", activation="tanh"), 5, Normalization((0.5,), (0.25,)))
    client = Client(model, defense=defense)
    attack = GradientMatching(
        priors=[TotalVariation(1e-3)], solver=Adam(lr=0.1), labels=KnownLabels(), steps=150, execution=execution
    )
    images = avg_pool2d(torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(1)), 3, 1, 1)
    seen = [
        client.observe(
            images[i : i + 1],
            torch.tensor([i]),
            Knowledge(labels=True, defense=aware),
            torch.Generator().manual_seed(i),
        )
        for i in range(5)
    ]
    found = torch.cat([result.images for result in attack.many(seen)])
    return float((found - images).square().flatten(1).mean(1).sqrt().mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defense", "share"),
    [(GradientPruning(0.9), 0.5), (GradientDropout(0.7), 0.3), (PerExampleClipping(0.05), 1.05)],
    ids=["pruning", "dropout", "clipping"],
)
def test_aware_is_at_least_as_strong(defense: Defense, share: float) -> None:
    # shares of the unaware error seen when written: 0.75, 0.26 and 1.0
    assert mean_rmse(defense, aware=True) < share * mean_rmse(defense, aware=False)


@pytest.mark.slow
def test_victims_together_or_one_by_one() -> None:
    one_by_one, together = (mean_rmse(GradientPruning(0.5), aware=True, execution=form) for form in ("loop", "vmap"))
    assert together == pytest.approx(one_by_one, rel=0.05)
