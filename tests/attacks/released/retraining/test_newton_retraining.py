"""Newton's method in image space ends in the unknown image itself, and the adversary can tell: no shadow models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.released import Background, NewtonRetraining, Reconstructor
from lit_recon.attacks.released.retraining import newton as module
from lit_recon.attacks.released.retraining import repetition
from lit_recon.attacks.released.retraining.newton import Expected, Rounds
from lit_recon.attacks.shadow import GradientDescent, PrivateDescent, ShadowPlan, train_models
from lit_recon.attacks.shadow.path_response import PathResponse, ResponseSettings
from lit_recon.data import ImageSet, InformedSplit, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Digits
from lit_recon.errors import ConfigError, CorruptFileError, ShapeError, ThreatModelError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP, ReleasedNetwork, initialize_lecun

N = 6
#: A coarse prediction, and short searches.
COARSE = NewtonRetraining(evaluations=40, response=ResponseSettings(rank=100, steps=6, images=100))


@pytest.fixture(scope="module")
def split() -> InformedSplit:
    return draw_informed_split(Digits(), InformedSplitSettings(fixed=100, shadow=2, targets=N, pool="all"))


@pytest.fixture(scope="module")
def plan(split: InformedSplit) -> ShadowPlan:
    return ShadowPlan(ReleasedMLP((1, 8, 8), 10, [10]), split.fixed, GradientDescent(steps=40))


@pytest.fixture(scope="module")
def released(plan: ShadowPlan, split: InformedSplit) -> Tensor:
    return plan.train(split.targets, range(N), "loop", plan.reference())


def fit(attack: NewtonRetraining, plan: ShadowPlan, state: Path | None = None) -> Reconstructor:
    """It learns nothing from shadow models."""
    nothing = torch.ones(2, 3), torch.zeros(2, 1, 8, 8), torch.tensor([0, 9]), 10
    return attack.bind(Background(plan, state)).fitted(*nothing)


@pytest.mark.slow
def test_what_is_certified_is_the_image_itself(plan: ShadowPlan, split: InformedSplit, released: Tensor) -> None:
    fitted = fit(NewtonRetraining(together=4), plan)
    found = fitted.reconstruct(released)
    errors = (found.images - split.targets.pixels()).square().mean((1, 2, 3))
    assert found.certified is not None
    assert found.certified.all()
    assert errors.max() < 1e-5  # measured 4e-7
    assert torch.equal(found.labels, split.targets.labels)
    assert "certified if the trained weights differ" in fitted.notes[-1]
    again = train_models(plan.known, plan.initial_weights(), found.images, found.labels, "loop")
    left = (again.double() - plan.reference() - released.double()).norm(dim=1) / released.double().norm(dim=1)
    torch.testing.assert_close(left, found.uncertainty, rtol=0.05, atol=2e-4)  # independent of the search


def test_what_has_not_converged_is_not_certified(plan: ShadowPlan, released: Tensor) -> None:
    found = fit(dataclasses.replace(COARSE, trainings=1), plan).reconstruct(released)
    assert found.certified is not None
    assert not found.certified.any()
    assert found.uncertainty.min() > 0.01


def test_nothing_is_certified_where_pixels_do_not_enter_the_network() -> None:
    """Convolutions with a stride of 2 leave out the last row and column of images with odd sides."""
    generator = torch.Generator().manual_seed(0)
    for side, unseen in ((10, 0), (11, 21)):
        images = torch.rand(12, 1, side, side, generator=generator)
        fixed = ImageSet((255 * images).byte(), torch.arange(12) % 3, ["a", "b", "c"], "noise")
        plan = ShadowPlan(ReleasedCNN((1, side, side), 3), fixed, GradientDescent(steps=2))
        bound = COARSE.bind(Background(plan, None))
        assert bool(bound.undetermined) == (unseen > 0)
        assert ("21 of 121 pixels do not enter the network" in bound.notes[-1]) == (unseen > 0)


def test_a_misfit_is_that_of_the_image_in_range(plan: ShadowPlan, released: Tensor) -> None:
    attack = dataclasses.replace(COARSE, trainings=0)
    found = fit(attack, plan).reconstruct(released)
    response = PathResponse.of(plan.known, plan.initial_weights(), attack.response)
    predicted = response.differences(found.images, found.labels)
    expected = (predicted - released).double().norm(dim=1) / released.double().norm(dim=1)
    torch.testing.assert_close(found.uncertainty, expected, rtol=1e-3, atol=1e-5)


def test_without_a_training_there_is_a_guess_and_no_certificate(
    plan: ShadowPlan, split: InformedSplit, released: Tensor
) -> None:
    fitted = fit(dataclasses.replace(COARSE, trainings=0), plan)
    found = fitted.reconstruct(released)
    assert found.certified is None
    assert "none was checked" in fitted.notes[0]
    truth = split.targets.pixels()
    mean = split.fixed.pixels().mean(0)
    assert (found.images - truth).square().mean() < 0.7 * (mean - truth).square().mean()


@pytest.mark.slow
def test_what_earlier_trainings_show_saves_trainings(
    plan: ShadowPlan, released: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = dataclasses.replace(COARSE, trainings=6, tolerance=1e-6)
    with_them = fit(attack, plan).reconstruct(released).uncertainty
    of = Expected.of.__func__  # type: ignore[attr-defined]

    def without(released: Tensor, rounds: Rounds | None, device: str) -> Expected:
        found: Expected = of(Expected, released, rounds, device)
        return dataclasses.replace(found, changes=torch.zeros_like(found.changes))

    monkeypatch.setattr(Expected, "of", without)
    assert with_them.log().mean() < fit(attack, plan).reconstruct(released).uncertainty.log().mean() - 0.5


def test_an_expected_rest_is_that_of_the_trainings_done() -> None:
    torch.manual_seed(0)
    released, predicted, trained = torch.randn(2, 9), torch.randn(2, 3, 9), torch.randn(2, 3, 9)
    distances = torch.tensor([[0.9, 0.2, 0.5], [0.1, 0.8, 0.7]], dtype=torch.float64)
    rounds = Rounds(torch.zeros(2, 3, 1, 2, 2), torch.tensor([0, 1]), predicted, trained, distances)
    expected = Expected.of(released, rounds, "cpu")
    for k in range(3):
        left = (trained[:, k] - released).square().sum(1) / released.square().sum(1)
        torch.testing.assert_close(expected(predicted[:, k]), left, rtol=1e-3, atol=1e-5)
    # along anything else, the prediction is taken for right
    aside = torch.linalg.svd(predicted - predicted[:, :1])[2][:, -1]
    before = trained[torch.arange(2), rounds.best] - released
    left = (before + aside).square().sum(1) / released.square().sum(1)
    torch.testing.assert_close(expected(predicted[torch.arange(2), rounds.best] + aside), left, rtol=1e-3, atol=1e-5)


def counting(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[Tensor]:
    """The images of all trainings from now on; a training beyond the limit is interrupted."""
    trained: list[Tensor] = []
    original = module.training_of

    def training_of(plan: ShadowPlan, shape: torch.Size) -> Callable[[Tensor, Tensor], Tensor]:
        train = original(plan, shape)

        def counted(images: Tensor, labels: Tensor) -> Tensor:
            if stop_after is not None and len(trained) == stop_after:
                raise KeyboardInterrupt
            trained.append(images)
            return train(images, labels)

        return counted

    monkeypatch.setattr(module, "training_of", training_of)
    return trained


@pytest.mark.slow
def test_a_killed_search_goes_on_where_it_stopped(
    plan: ShadowPlan, released: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = dataclasses.replace(COARSE, trainings=3, together=3)
    whole = fit(attack, plan).reconstruct(released)
    with monkeypatch.context() as patch:
        done = counting(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            fit(attack, plan, tmp_path).reconstruct(released)
        assert len(done) == 4
    left = counting(monkeypatch)
    again = fit(attack, plan, tmp_path).reconstruct(released)
    assert len(left) == 2
    for one, other in ((again.images, whole.images), (again.uncertainty, whole.uncertainty)):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    with monkeypatch.context() as patch:
        patch.setattr(PathResponse, "of", pytest.fail)  # a finished search needs no prediction, which takes minutes
        torch.testing.assert_close(fit(attack, plan, tmp_path).reconstruct(released).images, whole.images)
    (path, *_) = sorted(tmp_path.glob("newton_*.safetensors"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptFileError, match="truncated or not the state of a search"):
        fit(attack, plan, tmp_path).reconstruct(released)


def test_only_targets_that_are_not_done_are_trained_again(
    plan: ShadowPlan, released: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = counting(monkeypatch)
    attack = dataclasses.replace(COARSE, trainings=8, tolerance=1e-2, together=N)
    found = fit(attack, plan).reconstruct(released)
    sizes = [len(images) for images in trained]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < N
    again = train_models(plan.known, plan.initial_weights(), found.images, found.labels, "loop")
    left = (again.double() - plan.reference() - released.double()).norm(dim=1) / released.double().norm(dim=1)
    torch.testing.assert_close(left, found.uncertainty, rtol=0.05, atol=2e-4)


def test_a_guess_that_came_no_nearer_is_followed_by_half_a_step(
    plan: ShadowPlan, released: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed = 0.25  # of the way that every search proposes

    def search(self: NewtonRetraining, response: object, expected: object, starts: Tensor, *_: object) -> object:
        return starts + proposed, torch.zeros(len(starts), dtype=torch.float64)

    def training_of(plan: ShadowPlan, shape: torch.Size) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda images, labels: released[: len(images)] + len(trained) * released[: len(images)].norm()

    monkeypatch.setattr(NewtonRetraining, "_search", search)
    monkeypatch.setattr(module, "training_of", training_of)  # every training is further off than the one before
    trained = counting(monkeypatch)
    fit(dataclasses.replace(COARSE, trainings=4), plan).reconstruct(released[:2])
    moves = [float((images - trained[0]).mean()) for images in trained[1:]]
    assert moves == pytest.approx([proposed, proposed / 2, proposed / 4], abs=1e-5)


def test_what_cannot_be_repeated_is_refused(plan: ShadowPlan) -> None:
    with pytest.raises(ThreatModelError, match="NewtonRetraining needs an adversary who sees the whole model"):
        NewtonRetraining().bind(Background())
    private = GradientDescent(steps=4, dp=PrivateDescent(1.0, noise_multiplier=1.0))
    for descent in (private, GradientDescent(batch_size=5, epochs=1), GradientDescent(optimizer="adam")):
        with pytest.raises(ConfigError, match="NewtonRetraining needs"):
            NewtonRetraining().bind(Background(dataclasses.replace(plan, descent=descent)))


@pytest.mark.parametrize("wrong", ["zero", "nan", "another network"])
def test_differences_that_no_image_can_explain_are_refused(plan: ShadowPlan, released: Tensor, wrong: str) -> None:
    given = {"zero": 0 * released, "nan": released.where(released > 0, torch.nan), "another network": released[:, 1:]}
    with pytest.raises(
        ShapeError, match=r"must be finite and not zero, \(m, 760\) of models of this network; got \(6, "
    ):
        fit(COARSE, plan).reconstruct(given[wrong])


@pytest.mark.parametrize(
    "wrong", [{"trainings": -1}, {"evaluations": 0}, {"together": 0}, {"tolerance": 0.1}, {"tolerance": 0.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="trainings must be 0 or more|tolerance and certain must"):
        NewtonRetraining(**wrong)  # type: ignore[arg-type]


def test_large_fixed_sets_are_trained_one_by_one_on_a_gpu_too(
    split: InformedSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def trained(known: object, initial: Tensor, images: Tensor, labels: Tensor, execution: str) -> Tensor:
        asked.append(execution)
        return torch.zeros(len(images), 1)

    monkeypatch.setattr(repetition, "train_models", trained)
    monkeypatch.setattr(ShadowPlan, "reference", lambda plan: torch.zeros(1))
    images, few = torch.zeros(2, 3 * 100), len(split.fixed)
    for device, enough in (("cpu", few + 1), ("meta", few + 1), ("meta", few)):  # no GPU is needed to ask for one
        monkeypatch.setattr(repetition, "_ONE_BY_ONE", enough)
        plan = ShadowPlan(ReleasedCNN((3, 10, 10), 10), split.fixed, GradientDescent(1), device=device)
        repetition.training_of(plan, torch.Size([3, 10, 10]))(images, torch.zeros(2, dtype=torch.int64))
    assert asked == ["loop", "vmap", "loop"]


class Pooled(ReleasedNetwork):
    """A convolution and the means of its maps: 50 weights for 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        maps = (nn.Conv2d(1, 2, 3), nn.ELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.layers = nn.Sequential(*maps, nn.Linear(2, 10))

    def initialize(self, generator: torch.Generator) -> None:
        initialize_lecun(self, generator)


@pytest.mark.slow
def test_weights_that_do_not_determine_the_pixels_certify_nothing(split: InformedSplit) -> None:
    """Other images give the same weights: they are found, and are not the unknown ones."""
    plan = ShadowPlan(Pooled(), split.fixed, GradientDescent(steps=5))
    released = plan.train(split.targets, range(N), "loop", plan.reference())
    fitted = fit(dataclasses.replace(COARSE, trainings=6), plan)
    found = fitted.reconstruct(released)
    assert (found.uncertainty < 0.01).any()
    assert found.certified is not None
    assert not found.certified.any()
    assert fitted.notes[-1] == "No image is certified: 50 weights do not determine 64 pixels."
