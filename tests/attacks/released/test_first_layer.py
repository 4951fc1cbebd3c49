"""What an image itself left in the first layer is found exactly, and shows it better than the whole model does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.released import first_layer
from lit_recon.attacks.released.base import Background, Reconstructor
from lit_recon.attacks.released.first_layer import FirstLayerRidge, WhitenedFirstLayer
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.kernel_systems import BlockSolver
from lit_recon.attacks.shadow import GradientDescent, PrivateDescent, ShadowPlan
from lit_recon.attacks.shadow.path_response import PathResponse, ResponseSettings
from lit_recon.attacks.shadow.training import unflatten
from lit_recon.data import ImageSet, InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, LitReconError, ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP


def small_split(fixed: int = 30, shadow: int = 250, targets: int = 40) -> InformedSplit:
    return draw_informed_split(Digits(), InformedSplitSettings(fixed, shadow, targets))


@pytest.fixture(scope="module")
def split() -> InformedSplit:
    return small_split()


@pytest.fixture(scope="module")
def plan(split: InformedSplit) -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 8, 8), 10, [10]), split.fixed, GradientDescent(steps=40))


def fit(attack: Reconstructor, plan: ShadowPlan, split: InformedSplit, shadows: Tensor) -> Reconstructor:
    informed = attack.bind(Background(plan))
    return informed.fitted(shadows, split.shadow.pixels(), split.shadow.labels, 10)


@pytest.mark.parametrize("n", [30, 200])
def test_whitening_makes_the_fixed_set_alike_in_all_directions(plan: ShadowPlan, n: int) -> None:
    """With fewer images than pixels and with more, which takes two ways."""
    images = small_split(fixed=n, shadow=2, targets=1).fixed
    whitening = WhitenedFirstLayer.of(dataclasses.replace(plan, fixed=images)).whiten(torch.eye(64))
    fixed = images.pixels().flatten(1).double()
    moments = fixed.T @ fixed / len(fixed)
    mean, one = moments.diagonal().mean(), torch.eye(64).double()
    torch.testing.assert_close(whitening, whitening.T)
    # Independent of the decomposition: second moments with the floor become the identity times their mean.
    torch.testing.assert_close(whitening @ (moments + 1e-2 * mean * one) @ whitening, mean * one, rtol=0, atol=1e-6)


def test_outside_the_fixed_set_there_is_the_image_alone(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    trace = WhitenedFirstLayer.of(plan).trace(models[0])
    fixed, own = split.fixed.pixels().flatten(1).double(), split.shadow.pixels().flatten(1).double()

    def outside(images: Tensor) -> Tensor:
        return images - torch.linalg.lstsq(fixed.T, images.T, driver="gelsd").solution.T @ fixed

    cosine = torch.nn.functional.cosine_similarity(outside(trace.image), outside(own)).abs()
    assert cosine.min() > 0.999  # measured 1.0000
    assert trace.share.median() > 0.9


def test_the_weight_of_the_image_in_every_neuron_is_found(plan: ShadowPlan, split: InformedSplit) -> None:
    layer = WhitenedFirstLayer.of(plan)
    images = split.fixed.pixels().flatten(1)
    generator = torch.Generator().manual_seed(0)
    own, weights = torch.rand(64, generator=generator), torch.randn(10, generator=generator)
    # What fixed images add has the covariance of the fixed set squared, as where their change is linear in the image.
    added = 1e-2 * torch.randn(10, 64, generator=generator) @ (images.T @ images / len(images))
    rest = torch.randn(plan.known.n_parameters - 640, generator=generator)
    difference = torch.cat([(weights[:, None] * own + added).flatten(), rest])[None]
    trace = layer.trace(difference)
    sign = torch.sign((trace.neurons[0] * weights).sum())
    torch.testing.assert_close(sign * trace.neurons[0], (weights / weights.norm()).double(), rtol=0, atol=1e-2)
    torch.testing.assert_close(layer.weights(layer.rows(difference), own[None])[0], weights.double(), rtol=0, atol=1e-2)
    torch.testing.assert_close(trace.others[0], rest.double())
    parts = trace.neurons[0, :, None] * trace.image[0] + trace.remainder[0].view(10, 64)
    torch.testing.assert_close(parts, difference[0, :640].view(10, 64).double(), rtol=0, atol=1e-6)


def test_the_sign_turns_the_rank_one_part_alone(plan: ShadowPlan, models: tuple[Tensor, Tensor]) -> None:
    trace, one = WhitenedFirstLayer.of(plan).trace(models[1]), torch.ones(40)
    plus, minus = (FirstLayerRidge(remainder=0.5).features(trace, sign * one) for sign in (1, -1))
    torch.testing.assert_close(plus[:, :74], -minus[:, :74])
    torch.testing.assert_close(plus[:, 74:], minus[:, 74:])
    lengths = [float(part.norm(dim=1).mean()) for part in plus.split([64, 10, models[1].shape[1] - 640, 640], dim=1)]
    assert lengths == pytest.approx([1, 1, 1, 0.5], abs=1e-5)


def test_it_beats_kernel_ridge_on_whole_models(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    targets = split.targets.pixels()
    errors = {}
    for name, attack in {"whole": KernelRidge(), "layer": FirstLayerRidge()}.items():
        fitted = fit(attack, plan, split, models[0])
        found = fitted.reconstruct(models[1])
        errors[name] = float((found.images - targets).square().mean())
        assert found.labels.shape == (40,)
    assert errors["layer"] < 0.7 * errors["whole"]
    assert fitted.facts["rank_one_share"] > 0.9
    assert fitted.facts["validation_mse"] > 0
    assert fitted.notes == ()


def test_many_shadow_models_are_solved_in_blocks(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    whole = fit(FirstLayerRidge(), plan, split, models[0]).reconstruct(models[1])
    fitted = fit(FirstLayerRidge(solver=BlockSolver(block=64)), plan, split, models[0])
    found = fitted.reconstruct(models[1])
    torch.testing.assert_close(found.images, whole.images, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.uncertainty, whole.uncertainty, rtol=0, atol=1e-4)
    assert "250 shadow models was solved by a Cholesky factorization in blocks" in fitted.notes[0]
    assert fitted.facts["kernel_residual"] < 1e-6


def test_features_do_not_depend_on_the_models_at_a_time(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(FirstLayerRidge(), plan, split, models[0]).reconstruct(models[1])
    monkeypatch.setattr(first_layer, "_CHUNK", 60)
    found = fit(FirstLayerRidge(), plan, split, models[0]).reconstruct(models[1])
    torch.testing.assert_close(found.images, whole.images, rtol=0, atol=1e-4)


def test_signs_of_released_models_are_found(
    plan: ShadowPlan, split: InformedSplit, models: tuple[Tensor, Tensor]
) -> None:
    fitted = fit(FirstLayerRidge(), plan, split, models[0])
    found = fitted.reconstruct(models[0])
    # Of a shadow model both signs are tried, too; the right one gives its own image back.
    assert (found.images - split.shadow.pixels()).abs().max() < 0.05
    assert torch.equal(found.labels, split.shadow.labels)


def test_what_it_cannot_work_on_is_refused(plan: ShadowPlan, split: InformedSplit) -> None:
    def refused(error: type[LitReconError], match: str, **changes: object) -> None:
        with pytest.raises(error, match=match):
            FirstLayerRidge().bind(Background(dataclasses.replace(plan, **changes)))  # type: ignore[arg-type]

    refused(ConfigError, "got fresh weights", initialization="fresh")
    refused(ConfigError, "adam", descent=GradientDescent(optimizer="adam"))
    noisy = GradientDescent(dp=PrivateDescent(noise_multiplier=1.0))
    refused(ConfigError, "with known initial weights and without noise", descent=noisy)
    with pytest.raises(UnsupportedModelError, match="whose first layer is linear, ReleasedMLP; got ReleasedCNN"):
        WhitenedFirstLayer.of(dataclasses.replace(plan, network=ReleasedCNN((1, 10, 10))))
    with pytest.raises(ThreatModelError, match="sees the whole model"):
        FirstLayerRidge().bind(Background())
    with pytest.raises(ThreatModelError, match=r"call bind\(Background\(plan\)\) before"):
        FirstLayerRidge().fitted(torch.zeros(2, 3), split.shadow.pixels()[:2], split.shadow.labels[:2], 10)
    with pytest.raises(ConfigError, match="remainder must be 0 or more"):
        FirstLayerRidge(remainder=-0.1)
    with pytest.raises(ConfigError, match="set the solver of inner instead"):
        FirstLayerRidge(KernelRidge(), solver=BlockSolver(4.0))
    with pytest.raises(ShapeError, match="whole models"):
        WhitenedFirstLayer.of(plan).trace(torch.zeros(2, 7))


def padded(images: ImageSet) -> ImageSet:
    """Digits as large as the convolutions need them."""
    return dataclasses.replace(images, images=torch.nn.functional.pad(images.images, (1, 1, 1, 1)))


def test_behind_convolutions_the_rank_one_part_is_the_input_of_the_linear_layer(split: InformedSplit) -> None:
    descent = GradientDescent(steps=1, lr=0.1, momentum=0.0)
    plan = ShadowPlan(ReleasedCNN((1, 10, 10)), padded(split.fixed), descent)
    released = plan.train(padded(split.targets), range(5), "loop", plan.reference())
    layer = WhitenedFirstLayer.of(plan, convolutions=True)
    trace = layer.trace(released)
    network = ReleasedCNN((1, 10, 10))
    network.load_state_dict(unflatten(network, plan.initial_weights()))
    with torch.no_grad():
        expected = network.layers[:5](padded(split.targets).pixels()[:5]).double()
    assert torch.cosine_similarity(trace.image, expected).abs().min() > 0.9999
    # nothing is lost or counted twice
    rows = (trace.neurons[:, :, None] * trace.image[:, None]).flatten(1) + trace.remainder
    whole = torch.cat([trace.others[:, : layer.start], rows, trace.others[:, layer.start :]], dim=1)
    torch.testing.assert_close(whole.float(), released)


def test_behind_convolutions_it_finds_images_better_than_from_whole_differences(split: InformedSplit) -> None:
    """MSE 0.0066 from the linear layer, 0.0103 from whole differences; the mean image has 0.047."""
    descent = GradientDescent(steps=20, lr=0.02)
    plan = ShadowPlan(ReleasedCNN((1, 10, 10)), padded(small_split(fixed=200).fixed), descent)
    own, targets = padded(split.shadow), padded(split.targets)
    response = PathResponse.of(plan.known, plan.initial_weights(), ResponseSettings(100, 5, 200))
    shadows = response.differences(own.pixels(), own.labels)
    released = plan.train(targets, range(20), "loop", plan.reference())

    def error(attack: Reconstructor) -> float:
        fitted = attack.bind(Background(plan)).fitted(shadows, own.pixels(), own.labels, 10)
        return float((fitted.reconstruct(released).images - targets.pixels()[:20]).square().mean())

    assert error(FirstLayerRidge()) < 0.8 * error(KernelRidge())


def test_binding_trains_nothing(split: InformedSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused is refused at once; the reference, which a training takes, is for `fit`."""

    def refuse(self: ShadowPlan) -> Tensor:
        raise AssertionError("the reference is trained")

    monkeypatch.setattr(ShadowPlan, "reference", refuse)
    plan = ShadowPlan(ReleasedCNN((1, 10, 10)), padded(split.fixed), GradientDescent(steps=1))
    bound = FirstLayerRidge().bind(Background(plan))
    with pytest.raises(AssertionError, match="the reference is trained"):
        bound.fitted(torch.zeros(2, 9), padded(split.shadow).pixels()[:2], split.shadow.labels[:2], 10)


def test_models_of_another_training_are_refused(plan: ShadowPlan, split: InformedSplit) -> None:
    noise = torch.randn(250, plan.known.n_parameters, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match=r"a median share of \d+\.\d%"):
        fit(FirstLayerRidge(), plan, split, noise)
