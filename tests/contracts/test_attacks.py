"""What every attack promises: images of the right shape and range, determinism, an observation left as it was.

A new attack, or a new way to compose one, joins the table; a test below notices an attack that did not.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import (
    LBFGS,
    Adam,
    AnalyticInversion,
    BatchNormPrior,
    CocktailPartyAttack,
    DeepImagePrior,
    FirstApplicable,
    GradientMatching,
    GroupConsistency,
    HeadCounts,
    KnownLabels,
    LayerwiseCosine,
    NormReweightedCosine,
    Pixels,
    RobbingTheFed,
    SimpleState,
    SquaredError,
    SteppableAttack,
    TotalVariation,
)
from lit_recon.clients import Client
from lit_recon.errors import ShapeError
from lit_recon.models import MLP, Backbone, ConvNet, Imprint
from lit_recon.records import Batch, Knowledge, Normalization, Observation, Reconstruction
from tests.contracts.discovery import missing


class PixelDescent(SteppableAttack[SimpleState]):
    """Adam on pixels against the squared error of the update: an attack as someone writes it outside the package."""

    def __init__(self, steps: int = 20, lr: float = 0.1) -> None:
        self.steps, self.lr = steps, lr

    def init(self, observations: Sequence[Observation]) -> SimpleState:
        images = [torch.full((seen.n_examples, *seen.image_shape), 0.5).requires_grad_() for seen in observations]
        labels = [KnownLabels()(seen)[0] for seen in observations]
        return SimpleState(observations, images=images, labels=labels, optimizer=torch.optim.Adam(images, self.lr))

    def step(self, state: SimpleState) -> None:
        state["optimizer"].zero_grad()
        losses = []
        for seen, images, labels in zip(state.observations, state["images"], state["labels"], strict=True):
            update = seen.operator(seen.weights, Batch(images, labels), "autograd")
            losses.append(torch.stack([(update[name] - seen.update[name]).square().sum() for name in update]).sum())
        torch.stack(losses).sum().backward()
        state["optimizer"].step()
        state.note(loss=torch.stack(losses))

    def result(self, state: SimpleState) -> list[Reconstruction]:
        return [
            Reconstruction(images, labels, curve["loss"][-1], curve)
            for images, labels, (curve,) in zip(state["images"], state["labels"], state.curves, strict=True)
        ]


ATTACKS: dict[str, Attack] = {
    "an attack from outside the package": PixelDescent(),
    "global cosine, total variation": GradientMatching(
        priors=[TotalVariation(0.01)], labels=HeadCounts(), steps=3, execution="loop"
    ),
    "L-BFGS on the squared error": GradientMatching(
        objective=SquaredError(),
        parametrization=Pixels(box=False),
        solver=LBFGS(inner=2),
        labels=KnownLabels(),
        steps=2,
    ),
    "BatchNorm statistics and group consistency": GradientMatching(
        objective=LayerwiseCosine(),
        priors=[BatchNormPrior(0.1), GroupConsistency(0.01, start=0.0)],
        labels=KnownLabels(),
        restarts=2,
        steps=3,
        execution="vmap",
    ),
    "deep image prior": GradientMatching(
        objective=NormReweightedCosine(),
        parametrization=DeepImagePrior(channels=8, multipliers=[1, 1], attention_resolutions=[4]),
        solver=Adam(lr=0.001),
        labels=KnownLabels(),
        steps=2,
        execution="loop",  # `auto` times two ways that differ by rounding
    ),
    "analytic": AnalyticInversion(),
    "imprint": RobbingTheFed(labels=KnownLabels()),
    "cocktail party": CocktailPartyAttack(labels=KnownLabels(), steps=30, refinements=1),
    "the first applicable": FirstApplicable(
        [RobbingTheFed(labels=KnownLabels()), GradientMatching(labels=KnownLabels(), steps=3, execution="loop")]
    ),
}


@pytest.fixture(params=ATTACKS.values(), ids=ATTACKS.keys())
def attack(request: pytest.FixtureRequest) -> Attack:
    """An attack that has not run yet, whatever it may remember from one run to the next."""
    return copy.deepcopy(request.param)


@pytest.fixture
def observations(attack: Attack) -> list[Observation]:
    """Two batches of images from one client, of a model and a size that suit the attack."""
    torch.manual_seed(0)
    fully_connected = isinstance(attack, AnalyticInversion | CocktailPartyAttack)
    trunk = MLP((3, 8, 8), [16]) if fully_connected else ConvNet((3, 8, 8), widths=[4, 8], activation="gelu")
    model = Backbone(trunk, 6, Normalization((0.5,) * 3, (0.25,) * 3))
    malicious = isinstance(attack, RobbingTheFed)
    client = Client(Imprint(n_bins=64).modify(model) if malicious else model, batch_norm="eval")
    labels = torch.tensor([4] if isinstance(attack, AnalyticInversion) else [1, 4])
    knowledge = Knowledge(labels=True)
    return [client.observe(torch.rand(len(labels), 3, 8, 8), labels, knowledge) for _ in range(2)]


def test_the_table_holds_every_attack() -> None:
    assert missing(Attack, ATTACKS.values()) == []


def tensors(seen: Observation) -> dict[str, Tensor]:
    parts = {"parameters": seen.parameters, "buffers": seen.buffers, "update": seen.update}
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def test_returns_images_in_range_and_classes(attack: Attack, observations: list[Observation]) -> None:
    seen = observations[0]
    result = attack(seen)
    assert result.images.shape == (seen.n_examples, 3, 8, 8)
    assert result.images.dtype == torch.float32
    assert result.images.amin() >= 0
    assert result.images.amax() <= 1
    assert not result.images.requires_grad
    assert result.labels.dtype == torch.int64
    assert seen.labels is not None
    assert sorted(result.labels.tolist()) == seen.labels.tolist()
    assert len({len(curve) for curve in result.trace.values()}) <= 1


def test_leaves_the_observation_as_it_was(attack: Attack, observations: list[Observation]) -> None:
    before = copy.deepcopy(tensors(observations[0]))
    model = copy.deepcopy(observations[0].model.state_dict())
    attack(observations[0])
    assert all(torch.equal(value, before[name]) for name, value in tensors(observations[0]).items())
    assert all(torch.equal(value, model[name]) for name, value in observations[0].model.state_dict().items())
    assert not any(value.requires_grad for value in tensors(observations[0]).values())


def test_is_deterministic_whatever_the_global_generator(attack: Attack, observations: list[Observation]) -> None:
    first = attack(observations[0])
    torch.manual_seed(123)
    second = attack(observations[0])
    assert torch.equal(first.images, second.images)
    assert first.loss == second.loss
    assert first.trace == second.trace


def test_leaves_the_global_generator_alone(attack: Attack, observations: list[Observation]) -> None:
    state = torch.get_rng_state()
    attack(observations[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_victims_attacked_together_and_alone_agree(attack: Attack, observations: list[Observation]) -> None:
    together = attack.many(observations)
    alone = [attack(seen) for seen in observations]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.images, other.images, atol=1e-3, rtol=0)
        assert one.loss == pytest.approx(other.loss, rel=1e-3)


def test_refuses_nothing_to_attack(attack: Attack) -> None:
    with pytest.raises(ShapeError, match="at least one observation"):
        attack.many([])


def test_a_steppable_attack_goes_on_from_its_saved_state(attack: Attack, observations: list[Observation]) -> None:
    whole, killed = attack.begin(observations), attack.begin(observations)
    if killed.state is None:
        pytest.skip("the attack computes in one piece")
    killed.advance()
    file = io.BytesIO()
    torch.save(killed.state.state_dict(), file)
    file.seek(0)
    resumed = attack.begin(observations)
    assert resumed.state is not None
    resumed.state.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.state.step == 1
    for ours, theirs in zip(resumed.finish(), whole.finish(), strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert ours.trace == theirs.trace
    assert whole.state is not None
    assert resumed.state.curves == whole.state.curves
    assert len(resumed.state.curves) == len(observations)


def test_losses_and_states_of_other_victims_are_refused() -> None:
    state = SimpleState([], images=torch.zeros(2))
    with pytest.raises(ShapeError, match=r"one value per victim, 0 each; got \{'loss': 1\}"):
        state.note([1.0])
    with pytest.raises(ValueError, match="images"):
        SimpleState([], pixels=torch.zeros(2)).load_state_dict(state.state_dict())
