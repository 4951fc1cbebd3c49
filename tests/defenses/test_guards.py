"""Guards, and values at the edge of their range."""

from __future__ import annotations

import pytest
import torch

from lit_recon.defenses import GaussianNoise, GradientDropout, NetworkDropout, Round
from lit_recon.defenses.combined import seen_in_mean
from lit_recon.defenses.release import per_example_gradients
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Batch, Differentiable, Update


def test_single_examples_need_no_transform() -> None:
    asked: list[tuple[int, Differentiable]] = []

    def gradient(batch: Batch, differentiable: Differentiable = "no") -> Update:
        asked.append((len(batch.images), differentiable))
        return {"weight": batch.images.mean(dim=(0, 1, 2))}

    batch = Batch(torch.rand(3, 1, 2, 5), torch.tensor([0, 1, 2]))
    pieces = list(per_example_gradients(gradient, batch))
    assert asked == [(1, "no")] * 3
    torch.testing.assert_close(torch.cat([piece["weight"] for piece in pieces]), batch.images.mean(dim=(1, 2)))


def test_no_dropout_draws_nothing(model: Backbone, batch: Batch) -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    defense = NetworkDropout(0.0)
    assert defense.transform_batch(batch, defense.prepare(model), generator) is batch
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_masks_that_drop_nothing_or_everything_are_not_random(rate: float) -> None:
    assert seen_in_mean(GradientDropout(rate), 4).released_std(8) == 0.0
    with pytest.raises(ConfigError, match="only the union of masks is seen"):
        seen_in_mean(GradientDropout(0.5), 4).released_std(8)


def test_noise_of_standard_deviation_one_is_added() -> None:
    update = {"weight": torch.zeros(4000)}
    round_ = Round(Batch(torch.rand(1, 1, 2, 2), torch.tensor([0])), lambda batch, differentiable="no": update)
    released = GaussianNoise(1.0).transform_update(update, round_, torch.Generator().manual_seed(0))
    assert 0.95 < float(released["weight"].std()) < 1.05  # 4.5 standard errors
