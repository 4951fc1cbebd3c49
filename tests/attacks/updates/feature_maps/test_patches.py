"""Patches of candidates matched to gradients with noise, with hidden entries, and of several local steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.updates import (
    LBFGS,
    FeaturesOnly,
    GradientMatching,
    MapRecovery,
    PatchMatching,
    Pixels,
    TotalVariation,
)
from lit_recon.attacks.updates.feature_maps import patches
from lit_recon.attacks.updates.feature_maps.input_map import likely_contrast
from lit_recon.attacks.updates.feature_maps.patches import PatchPenalty
from lit_recon.clients import Client, GradientOperator
from lit_recon.defenses import (
    DPSGD,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    PercentilePrivacy,
)
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.models.classifiers.foreign import public_model
from lit_recon.records import (
    BatchNormMode,
    ForwardOperator,
    Knowledge,
    Loss,
    Normalization,
    Observation,
    Reconstruction,
)
from tests.attacks.updates.feature_maps.test_matching import Shallow

STD = 3e-4
#: Clips 5 % and 20 % of the entries of the convolution's gradient, with running and with batch statistics.
GAMMA = 0.05
Rule = Callable[[nn.Module, BatchNormMode, Loss], ForwardOperator]


def victim(
    images: Tensor,
    defense: Defense | None,
    known: bool = True,
    mode: str = "eval",
    rule: Rule = GradientOperator,
    activation: nn.Module | None = None,
    knowledge: Knowledge | None = None,
) -> Observation:
    """A convolution with 64 channels at 16 places of an image of 8 x 8 pixels, behind 48 maps."""
    torch.manual_seed(0)
    model = Backbone(Shallow(8, 64), 5, Normalization((0.5,) * 3, (0.25,) * 3)).eval()
    if activation is not None:
        model.trunk.layers[2] = activation
    client = Client(model, mode, defense, rule)  # type: ignore[arg-type]
    labels = torch.arange(len(images)) % 3
    told = knowledge or Knowledge(defense=known)
    return client.observe(images, labels, told, torch.Generator().manual_seed(0))


@pytest.fixture
def images(photographs: Tensor) -> Tensor:
    return photographs[:2, :, ::4, ::4].contiguous()


def by_least_squares(penalty: PatchPenalty, images: Tensor) -> float:
    """The misfit with the most likely derivatives in the outputs, found by a library."""
    total = 0.0
    for rows, given in zip(penalty.rows, penalty.passes(images), strict=True):
        layer = rows.layer
        columns = nn.functional.unfold(given, layer.kernel, padding=layer.padding, stride=layer.stride).double()
        spanning = columns.transpose(1, 2).flatten(0, 1).T
        observed = torch.ones_like(rows.values, dtype=torch.bool) if rows.observed is None else rows.observed
        for gradient, chosen in zip(rows.values.double(), observed, strict=True):
            found = torch.linalg.lstsq(spanning[chosen], gradient[chosen][:, None], driver="gelsd").solution
            total += float((gradient[chosen] - (spanning[chosen] @ found)[:, 0]).square().sum())
    return total / penalty.stds[1] ** 2


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(
    "defense",
    [GaussianNoise(STD), LaplaceNoise(STD), Chain([GradientClipping(0.3), GaussianNoise(STD / 2)])],
    ids=["normal", "laplace", "clipped"],
)
def test_misfit_is_that_of_noise_at_the_truth_alone(images: Tensor, defense: Defense, mode: str) -> None:
    penalty = PatchMatching().prepare(victim(images, defense, mode=mode))
    # the ridge adds up to 9.3e-6, a thousandth of the standard deviation below
    assert float(penalty.misfit(images)) == pytest.approx(by_least_squares(penalty, images), rel=3e-5)
    deviation = (2 * penalty.freedom) ** 0.5
    excess = (float(penalty.misfit(images)) - penalty.freedom) / deviation
    assert abs(excess) < 4  # at most 0.58 measured
    elsewhere = (float(penalty.misfit(images.flip(3))) - penalty.freedom) / deviation
    assert elsewhere > 100  # 299 measured at the least
    first, last = penalty.stds
    nats = float(penalty.penalty(images, images, 1.0)) * (first / last) ** 2
    assert nats * 2 * penalty.pixels == pytest.approx(excess * deviation, rel=1e-3)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(
    "defense",
    [
        GradientPruning(0.7),
        GradientPruning(0.7, "tensor"),
        GradientDropout(0.6),
        Chain([GradientClipping(0.3), GradientPruning(0.7)]),
        PercentilePrivacy(60.0),
        PercentilePrivacy(60.0, gamma=GAMMA),
        PercentilePrivacy(gamma=GAMMA),
    ],
    ids=[
        "pruned",
        "per tensor",
        "dropped",
        "clipped",
        "percentile",
        "percentile and entries clipped",
        "entries clipped",
    ],
)
def test_misfit_of_observed_entries_is_zero_at_the_truth_alone(images: Tensor, defense: Defense, mode: str) -> None:
    penalty = PatchMatching().prepare(victim(images[:1], defense, mode=mode))
    assert penalty.partial
    assert penalty.noise is None
    with torch.no_grad():
        assert float(penalty.residual(images[:1])) < 1e-9 * penalty.size  # at most 8e-11 measured
        elsewhere = float(penalty.misfit(images[1:]))
        assert elsewhere == pytest.approx(by_least_squares(penalty, images[1:]), rel=1e-4)
        assert float(penalty.residual(images[1:])) > 0.05 * penalty.size  # at least 0.17 measured


@pytest.mark.parametrize("known", [True, False])
def test_excluded_variables_matter_only_to_the_layers_they_are_of(images: Tensor, known: bool) -> None:
    for names in ("^head", r"layers\.0"):
        penalty = PatchMatching().prepare(victim(images[:1], ExcludedVariables(names), known))
        with torch.no_grad():
            assert float(penalty.residual(images[:1])) < 1e-9 * penalty.size
            assert float(penalty.residual(images[1:])) > 0.05 * penalty.size
    with pytest.raises(UnsupportedModelError, match="too few entries of the gradients are left: 0 equations"):
        PatchMatching().prepare(victim(images[:1], ExcludedVariables("layers"), known))


@pytest.mark.parametrize("defense", [GaussianNoise(0.01), GradientPruning(0.7)], ids=["noise", "pruned"])
def test_penalty_is_differentiable(images: Tensor, defense: Defense) -> None:
    penalty = PatchMatching().prepare(victim(images[:1], defense))
    for inputs in penalty.passes._inputs:
        vars(inputs).update(vars(inputs.doubled()))
    start = (0.9 * images[:1] + 0.05).double().requires_grad_()
    (slope,) = torch.autograd.grad(penalty.misfit(start), start)
    step = torch.randn(start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = (penalty.misfit(start + sign * 1e-6 * step) for sign in (1, -1))
    assert float((slope * step).sum()) == pytest.approx(float(ahead - behind) / 2e-6, rel=1e-4)


def attack(steps: int = 8, further: int = 0) -> GradientMatching:
    return GradientMatching(
        FeaturesOnly(),
        [TotalVariation(3.0)],
        features=PatchMatching(further=further, approach=100),
        parametrization=Pixels(box=False, spread=0.2, smooth=0.5),
        solver=LBFGS(history=200),
        steps=steps,
    )


@pytest.mark.parametrize(
    "defense", [GradientPruning(0.7), GradientDropout(0.6), None], ids=["pruned", "dropped", "none"]
)
def test_images_behind_hidden_entries(images: Tensor, defense: Defense | None) -> None:
    result = attack(20)(victim(images[1:], defense))
    assert float((result.images - images[1:]).square().mean().sqrt()) < 0.01
    assert result.certified is not None
    assert result.certified.all()


def test_a_search_ends_once_the_gradients_are_explained(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, penalty = [0], PatchPenalty.penalty

    def counted(self: PatchPenalty, candidates: Tensor, targets: Tensor, progress: float) -> Tensor:
        calls[-1] += 1
        return penalty(self, candidates, targets, progress)

    monkeypatch.setattr(PatchPenalty, "penalty", counted)
    seen = victim(images[1:], None)
    for solved in (1e-4, -1.0):
        calls.append(0)
        monkeypatch.setattr(patches, "_SOLVED", solved)
        attack(40)(seen)
    assert calls[-2] < 0.7 * calls[-1], calls


def test_a_search_that_is_stuck_ends_early(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = victim(images[1:], None)
    [whole] = attack(12).begin([seen]).finish()
    monkeypatch.setattr(patches, "_STUCK", 0.0)  # every search is
    [early] = attack(12).begin([seen]).finish()
    assert float(early.loss) > 10 * float(whole.loss)
    # behind noise the gradients leave more than that at the truth
    noisy = PatchMatching().prepare(victim(images[1:], GaussianNoise(STD)))
    assert not noisy.ended(1e9, 1.0)


@pytest.mark.parametrize("defense", [None, GaussianNoise(STD)], ids=["none", "noise"])
def test_contrast_that_the_batch_statistics_hide_is_that_of_public_images(
    images: Tensor, defense: Defense | None
) -> None:
    for mode, hidden in (("train", True), ("eval", False)):
        penalty = PatchMatching().prepare(victim(images[1:], defense, mode=mode))
        mean, std = penalty.observation.normalization.tensors(images)
        pale = mean + 0.2 * (images[1:] - mean)
        settled = (penalty.settled(pale) - mean) / std
        if hidden:
            assert float(settled.square().mean()) == pytest.approx(1.0, rel=1e-4)
            torch.testing.assert_close(settled / settled.norm(), (pale - mean) / (pale - mean).norm())
        else:
            assert torch.equal(penalty.settled(pale), pale)


def test_known_statistics_tell_contrast_and_brightness(images: Tensor) -> None:
    seen = victim(images, None, mode="train", knowledge=Knowledge(batch_norm="batch"))
    other = 0.3 * images + torch.tensor([0.1, -0.05, 0.2]).view(3, 1, 1)
    torch.testing.assert_close(likely_contrast(seen, other), images, atol=1e-4, rtol=0)
    pale = 0.3 * (images - 0.5) + 0.5
    torch.testing.assert_close(PatchMatching().prepare(seen).settled(pale), images, atol=1e-4, rtol=0)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ELU(), nn.SiLU()], ids=["gelu", "elu", "silu"])
def test_images_behind_smooth_activations(images: Tensor, activation: nn.Module) -> None:
    result = attack(20)(victim(images[1:], None, activation=activation))
    assert float((result.images - images[1:]).square().mean().sqrt()) < 0.01
    assert result.certified is not None
    assert result.certified.all()


class Transformer(nn.Module):
    """16 tokens of patches of 4 x 4 pixels, and two blocks of attention between them."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(0.1 * torch.randn(1, 16, width))
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.blocks(tokens).mean(1))
        return logits


def test_images_behind_the_token_layers_of_a_transformer(photographs: Tensor) -> None:
    torch.manual_seed(0)
    image = photographs[3:4, :, ::2, ::2].contiguous()
    model = public_model(Transformer().eval(), (3, 16, 16), Normalization((0.5,) * 3, (0.25,) * 3)).model
    client = Client(model, "eval", GradientDropout(0.3))
    seen = client.observe(image, torch.tensor([3]), Knowledge(defense=True), torch.Generator().manual_seed(0))
    penalty = PatchMatching().prepare(seen)
    names = [rows.layer.name for rows in penalty.rows]
    assert names == ["embed", *(f"blocks.layers.{block}.linear{i}" for block in (0, 1) for i in (1, 2))]
    assert float(penalty.residual(image) / penalty.size) < 1e-12
    assert float(penalty.residual(image.flip(3)) / penalty.size) > 1e-3
    result = attack(20)(seen)
    assert float((result.images - image).square().mean().sqrt()) < 0.15  # 0.07 measured; 0.27 if flat
    assert result.certified is not None
    assert not result.certified.any()


def test_a_start_that_is_stuck_is_followed_by_another(images: Tensor) -> None:
    seen = victim(images[:1], GradientPruning(0.5))
    errors = []
    for further in (0, 1):
        result = attack(20, further)(seen)
        errors.append(float((result.images - images[:1]).square().mean().sqrt()))
    assert errors[1] < 0.2 * errors[0], errors
    assert any(
        note.startswith("further start 1, from images that match the gradient: patches") for note in result.notes
    )


def test_a_search_that_was_too_short_goes_on_once(images: Tensor) -> None:
    penalty = PatchMatching().prepare(victim(images[1:], GradientPruning(0.7)))
    truth, other = (Reconstruction(given, torch.zeros(1), 0.0) for given in (images[1:], images[:1]))
    assert [penalty.goes_on(truth, number) for number in (1, 2)] == [True, False]
    assert not penalty.goes_on(other, 1)
    both = PatchMatching().prepare(victim(images, GradientPruning(0.7)))
    assert both.goes_on(Reconstruction(images.flip(3), torch.zeros(2), 0.0), 2)


def test_images_that_explain_nothing_are_not_certified(images: Tensor) -> None:
    result = attack(1)(victim(images[1:], GradientPruning(0.7)))
    assert float((result.images - images[1:]).square().mean().sqrt()) > 0.05
    assert result.certified is not None
    assert not result.certified.any()
    assert "not certified: patches leave" in result.notes[-1]


def test_images_are_certified_that_leave_far_less_than_with_another_contrast(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = torch.zeros(1, dtype=torch.int64)
    penalty = PatchMatching().prepare(victim(images[:1], GradientPruning(0.7)))
    monkeypatch.setattr(patches, "_LEFT", 1.0)
    contrast = images[:1] - images[:1].mean((2, 3), keepdim=True)
    for size, expected in ((5e-5, True), (1.3e-3, False)):
        near = images[:1] + size * contrast / contrast.square().mean().sqrt()
        certified, final, notes = penalty.certificate(near, label)
        assert certified is not None
        assert certified.tolist() == [expected]
        assert final == expected
        assert len(notes) == 2 - expected
    assert notes[1].startswith("image 1: not certified: with another brightness or contrast (RMSE 0.02)")
    # each image of a batch by itself
    both = PatchMatching().prepare(victim(images, GradientPruning(0.3)))
    assert both._moved(images, [0]) != pytest.approx(both._moved(images, [1]), rel=0.01)
    monkeypatch.setattr(patches, "_DETERMINED", 1.0)
    assert penalty.certificate(near, label)[1]


def test_images_whose_contrast_the_batch_statistics_hide_are_not_certified(images: Tensor) -> None:
    for given in (images[1:], images):
        penalty = PatchMatching().prepare(victim(given, GradientPruning(0.3), mode="train"))
        mean, _ = penalty.observation.normalization.tensors(images)
        paler = mean + 0.9 * (given - mean)
        certified, final, notes = penalty.certificate(paler, torch.arange(len(given)))
        assert certified is not None
        assert not certified.any()
        assert final  # no other start would tell
        assert len(notes) == 1 + len(given)
    # in a batch the contrast of a single image is not hidden, only that of all together
    each, together = penalty._moved(images, [0]), penalty._moved(images, [0, 1])
    assert each > 100 * together, (each, together)


def test_images_whose_contrast_known_statistics_tell_are_certified(images: Tensor) -> None:
    knowledge = Knowledge(defense=True, batch_norm="batch")
    for given in (images[1:], images):
        seen = victim(given, GradientPruning(0.3), mode="train", knowledge=knowledge)
        penalty, labels = PatchMatching().prepare(seen), torch.arange(len(given)) % 3
        certified, final, _ = penalty.certificate(given, labels)
        assert certified is not None
        assert certified.all()
        assert final
        mean, _ = penalty.observation.normalization.tensors(images)
        paler, _, notes = penalty.certificate(mean + 0.9 * (given - mean), labels)
        assert paler is not None
        assert not paler.any()
        assert "with another brightness or contrast" in notes[-1]


def test_images_behind_noise_that_hides_exact_maps(images: Tensor) -> None:
    seen = victim(images[1:], GaussianNoise(STD))
    with pytest.raises(UnsupportedModelError, match="no convolution determines the maps"):
        MapRecovery()(seen)
    result = attack()(seen)
    assert float((result.images - images[1:]).square().mean().sqrt()) < 0.003  # 0.0007 measured; 0.177 if flat
    assert result.certified is None
    assert any("known standard deviation 0.0003" in note for note in result.notes)
    assert "is that of the noise" in result.notes[-1]


def test_local_minimum_is_noticed(images: Tensor) -> None:
    # almost flat
    result = attack()(victim(images[:1], GaussianNoise(STD)))
    assert "more than noise: the search ended too early or in a local minimum" in result.notes[-1]


def test_scale_that_the_attacker_does_not_know(images: Tensor) -> None:
    defense = Chain([GradientClipping(1.0), GaussianNoise(STD)])
    penalty = PatchMatching().prepare(victim(images[:1], defense, known=False))
    # a quarter of the singular values is signal: 6 % too high
    assert penalty.noise.std == pytest.approx(STD, rel=0.12)
    assert "estimated standard deviation" in penalty.notes[0]


def test_nothing_stands_out_of_the_noise(images: Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing is left of the maps: .* above noise of known"):
        PatchMatching().prepare(victim(images[:1], DPSGD(1.0, 100.0)))
    with pytest.raises(UnsupportedModelError, match="nothing is left of the maps: .* above noise of estimated"):
        PatchMatching().prepare(victim(images[:1], DPSGD(1.0, 100.0), known=False))


@pytest.mark.parametrize("known", [True, False])
def test_too_few_entries_are_left(images: Tensor, known: bool) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"too few entries of the gradients are left: \d+ equations for 192 pixels"
    ):
        PatchMatching().prepare(victim(images[:1], GradientPruning(0.998), known=known))


def test_images_that_do_not_explain_the_gradients_are_noticed(images: Tensor) -> None:
    penalty = PatchMatching().prepare(victim(images[:1], GaussianNoise(STD)))
    labels = torch.zeros(1, dtype=torch.int64)
    assert "is that of the noise" in penalty.certificate(images[:1], labels)[2][0]
    assert "ended too early" in penalty.certificate(images[1:], labels)[2][0]


def test_layers_that_do_not_fit(photographs: Tensor, images: Tensor) -> None:
    seen = victim(images[:1], None)
    with pytest.raises(ConfigError, match=r"'head' is no convolution .*: trunk.layers.0, trunk.layers.3"):
        PatchMatching(["head"]).prepare(seen)
    crowded = victim(photographs[:30, :, ::4, ::4].contiguous(), None)
    with pytest.raises(UnsupportedModelError, match="fewer patches in a batch of 30"):
        PatchMatching().prepare(crowded)
    for settings in (
        {"layers": []},
        {"weight": 0.0},
        {"tempered": 0.0},
        {"tempered": 1.5},
        {"further": -1},
        {"approach": -1},
    ):
        with pytest.raises(ConfigError, match="PatchMatching needs (a weight above 0, tempered|further and approach)"):
            PatchMatching(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="but not on maps or patches"):
        PatchMatching().prepare(seen).condition(torch.zeros(1))
