"""Guards, and values at the edge of their range."""

from __future__ import annotations

import pytest
import torch

from lit_recon.attacks.updates import LBFGS, Adam, GradientMatching, KnownLabels
from lit_recon.attacks.updates.gradient_matching.priors import SquaredNorm
from lit_recon.attacks.updates.gradient_matching.solvers import CosineDecay
from lit_recon.clients import Client
from lit_recon.errors import ConfigError
from lit_recon.models import MLP, Backbone
from lit_recon.records import Knowledge, Normalization


def test_squared_norm_is_the_mean_square_of_normalized_pixels() -> None:
    images = torch.tensor([0.6, 0.3]).view(1, 1, 2, 1, 1).expand(2, 3, 2, 4, 4)
    penalty = SquaredNorm(weight=1.0)(images, Normalization((0.5, 0.4), (0.25, 0.2)), 1, 0.0)
    # 0.1 / 0.25 and 0.1 / 0.2
    torch.testing.assert_close(penalty, torch.full((2,), (0.4**2 + 0.5**2) / 2))


@pytest.mark.parametrize(
    "shares", [{"warmup": 1.0}, {"warmup": 1.5}, {"warmup": -0.1}, {"floor": 1.1}, {"floor": -0.1}]
)
def test_a_cosine_decay_needs_shares(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="CosineDecay needs warmup"):
        CosineDecay(**shares)
    CosineDecay(warmup=0.0, floor=1.0)


def test_a_line_search_takes_restarts_one_by_one() -> None:
    assert GradientMatching(solver=LBFGS(), execution="vmap").execution == "loop"
    assert GradientMatching(solver=Adam(), execution="vmap").execution == "vmap"


def test_the_curve_begins_at_step_zero() -> None:
    torch.manual_seed(0)
    model = Backbone(MLP((1, 4, 4), [8]), 3, Normalization((0.5,), (0.25,)))
    seen = Client(model).observe(torch.rand(1, 1, 4, 4), torch.tensor([1]), Knowledge(labels=True))
    result = GradientMatching(labels=KnownLabels(), steps=3, log_every=1, execution="loop")(seen)
    assert result.trace["step"] == [0.0, 1.0, 2.0, 3.0]
