"""Behind secure aggregation every client defends its own update, and the attacker simulates the mean of these."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from lit_recon.attacks.updates import Adam, GradientMatching, KnownLabels, TotalVariation
from lit_recon.bounds import autograd_jacobian
from lit_recon.clients import Client, ClientSettings, GradientOperator, LocalTraining
from lit_recon.defenses import (
    DPSGD,
    AveragedDefense,
    Batch,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    MixUp,
    NetworkDropout,
    OptimalGradientPruning,
    PercentilePrivacy,
    PerExampleClipping,
    Round,
    SVTPrivacy,
    simulated_gradient,
)
from lit_recon.errors import ConfigError
from lit_recon.models import MLP, Backbone
from lit_recon.records import Knowledge, Normalization, Observation, Update, Weights

SHAPE, CLIENTS = (1, 8, 8), 4
FOUR = ClientSettings(n_clients=CLIENTS)
KNOWN = Knowledge(labels=True, defense=True)


def network() -> Backbone:
    """A small smooth network."""
    torch.manual_seed(0)
    return Backbone(MLP(SHAPE, [48], activation="tanh"), 5, Normalization((0.5,), (0.25,)))


@pytest.fixture
def model() -> Backbone:
    torch.manual_seed(0)
    return Backbone(MLP(SHAPE, [64]), 10, Normalization((0.5,), (0.25,)))


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(8, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.arange(8)


@pytest.fixture
def smooth() -> Tensor:
    return avg_pool2d(torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1)), 3, 1, 1)


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(update: Update) -> Tensor:
    return torch.cat([value.flatten() for value in update.values()])


def own_updates(model: Backbone, batch: tuple[Tensor, Tensor], clients: int = CLIENTS) -> Tensor:
    """The undefended updates `(clients, p)` of clients with equal shares, each by a client of its own."""
    size = len(batch[0]) // clients
    parts = [(batch[0][i : i + size], batch[1][i : i + size]) for i in range(0, len(batch[0]), size)]
    return torch.stack([flat(Client(model).release(*part).update) for part in parts])


def simulated(seen: Observation, batch: Batch) -> Tensor:
    assert seen.defense is not None
    weights = Weights(seen.parameters, seen.defense.simulate_buffers(seen.buffers, seen.update, seen.n_examples))
    one = GradientOperator(seen.model)
    update = simulated_gradient(
        seen.defense, lambda part, form="no": one(weights, part, form), batch, seen.update, clients=CLIENTS
    )
    return flat(update)


def test_the_mean_of_four_noises_has_half_the_size(model: Backbone, batch: tuple) -> None:
    noise = flat(FOUR.client(model, GaussianNoise(0.1)).release(*batch, generator()).update)
    noise = noise - flat(FOUR.client(model).release(*batch).update)
    # four standard errors of a standard deviation; 4810 coordinates: 4.1 %
    assert float(noise.std()) == pytest.approx(0.05, rel=4 / math.sqrt(2 * len(noise)))


def test_clients_draw_from_streams_of_their_own(model: Backbone, batch: tuple) -> None:
    client = FOUR.client(model, GaussianNoise(0.1))
    first, again, other = (flat(client.release(*batch, generator(seed)).update) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # clients with the same numbers would have noise of 0.1 in the mean: see above; nor is it one client's
    single = flat(ClientSettings().client(model, GaussianNoise(0.1)).release(*batch, generator()).update)
    assert not torch.allclose(first, single, atol=0.01)


def test_the_mean_of_four_prunings_is_the_mean_of_four_prunings(model: Backbone, batch: tuple) -> None:
    own = own_updates(model, batch)
    kept = round(0.1 * own.shape[1])
    reference = torch.stack([torch.zeros_like(g).index_copy(0, i := g.abs().topk(kept).indices, g[i]) for g in own])
    mean = flat(FOUR.client(model, GradientPruning(0.9)).release(*batch).update)
    torch.testing.assert_close(mean, reference.mean(0), rtol=0, atol=1e-8)
    assert torch.equal(mean == 0, (reference == 0).all(0))
    # 0.682 when written; 0.9^4 = 0.656 for masks independent of each other, 0.9 if the mean is pruned
    assert float((mean == 0).float().mean()) == pytest.approx(0.67, abs=0.04)


def test_four_random_masks_leave_the_zeros_common_to_all(model: Backbone, batch: tuple) -> None:
    # four standard errors, over the coordinates that no client has zero without a defense
    mean = flat(FOUR.client(model, GradientDropout(0.9)).release(*batch, generator()).update)
    undefended = (own_updates(model, batch) != 0).all(0)
    zeros = float((mean[undefended] == 0).float().mean())
    assert zeros == pytest.approx(0.9**4, abs=4 * math.sqrt(0.656 * 0.344 / int(undefended.sum())))


def test_every_client_clips_its_own_update(model: Backbone, batch: tuple) -> None:
    own = own_updates(model, batch)
    bound = float(own.norm(dim=1).median())  # two of four are clipped
    reference = (own * (bound / own.norm(dim=1, keepdim=True)).clamp_max(1)).mean(0)
    mean = flat(FOUR.client(model, GradientClipping(bound)).release(*batch).update)
    torch.testing.assert_close(mean, reference, rtol=0, atol=1e-7)


def test_images_are_not_mixed_across_clients(model: Backbone, batch: tuple) -> None:
    alone = ClientSettings(n_clients=8)  # one image each: nothing to mix with
    mixed, plain = (alone.client(model, defense).release(*batch).update for defense in (MixUp(1.0), Defense()))
    torch.testing.assert_close(flat(mixed), flat(plain), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "defense",
    [
        GradientPruning(0.9),
        GradientPruning(0.7, "tensor"),
        GradientClipping(0.5),
        PerExampleClipping(0.5),
        Chain([PerExampleClipping(0.5), GradientPruning(0.8)]),
        Chain([GradientClipping(0.5), GradientPruning(0.8)]),
        PercentilePrivacy(70.0),
        PercentilePrivacy(70.0, gamma=0.02),
        # entries that clients cut off at opposite signs cancel in the mean
        Chain([GradientPruning(0.3), PercentilePrivacy(gamma=1e-3)]),
        ExcludedVariables("^head"),
    ],
    ids=repr,
)
def test_the_attacker_simulates_the_mean_exactly(defense: Defense, model: Backbone, batch: tuple) -> None:
    seen = FOUR.client(model, defense).observe(*batch, KNOWN, generator())
    torch.testing.assert_close(simulated(seen, Batch(*batch)), flat(seen.update), rtol=0, atol=1e-7)


@pytest.mark.parametrize("rescale", [False, True])
def test_random_masks_are_replaced_by_their_expectation(rescale: bool, model: Backbone, batch: tuple) -> None:
    seen = FOUR.client(model, GradientDropout(0.5, rescale)).observe(*batch, KNOWN, generator())
    plain, released = flat(FOUR.client(model).release(*batch).update), flat(seen.update)
    factor = (1.0 if rescale else 0.5) / (1 - 0.5**4)
    expected = torch.where(released != 0, factor * plain, 0.0)
    torch.testing.assert_close(simulated(seen, Batch(*batch)), expected, rtol=0, atol=1e-7)
    # unbiased over the masks: slope of the release on the simulation; 1.017 when written
    assert float(released @ expected / (expected @ expected)) == pytest.approx(1, abs=0.05)


def test_masks_of_the_network_are_those_of_all_examples(batch: tuple) -> None:
    client = FOUR.client(network(), NetworkDropout(0.5))
    seen = client.observe(*(part[:4] % 5 for part in batch), KNOWN, generator())
    mask = seen.defense.simulate_buffers(seen.buffers, seen.update, 4)["head.dropout_mask"]
    torch.testing.assert_close(mask.max(), torch.tensor(1 / (1 - 0.5**4)))


def test_noise_of_the_mean_in_bounds() -> None:
    assert AveragedDefense(GaussianNoise(0.1), 4).released_std(8) == pytest.approx(0.05)
    # 1.5 * 0.5 / 2 examples of each client, over the root of 4
    assert AveragedDefense(DPSGD(0.5, 1.5), 4).released_std(8) == pytest.approx(0.1875)
    assert AveragedDefense(GaussianNoise(0.1, before_averaging=True), 4).released_std(8) == pytest.approx(0.1 / 8**0.5)
    with pytest.raises(ConfigError, match="union of masks"):
        AveragedDefense(Chain([GradientDropout(0.5), GaussianNoise(0.1)]), 4).released_std(8)


def test_information_of_a_noisy_mean(model: Backbone, batch: tuple) -> None:
    model, images, labels = model.double(), batch[0].double(), batch[1]
    weights, operator = Weights.of(model), GradientOperator(model)
    jacobian = autograd_jacobian(lambda x: operator(weights, Batch(x, labels), "functional"), images)
    round_ = Round(Batch(images, labels), lambda part, form="no": operator(weights, part, form))
    arguments = jacobian, round_, 0.0, generator()
    mean = AveragedDefense(GaussianNoise(0.1), 4).released_information(*arguments)
    torch.testing.assert_close(mean.information, jacobian.gram() / 0.05**2)
    with pytest.raises(ConfigError, match="no bound is known for the mean of 4 updates"):
        AveragedDefense(GradientClipping(0.1), 4).released_information(*arguments)


class OwnMask(Defense):
    """From outside the package, with a simulation that reads the one client's update."""

    def simulate(self, candidate: Update, observed: Update) -> Update:
        return {name: value * (observed[name] != 0) for name, value in candidate.items()}


@pytest.mark.parametrize(
    "defense", [OptimalGradientPruning(0.5), SVTPrivacy(), OwnMask(), Chain([OwnMask()])], ids=repr
)
def test_what_cannot_be_simulated_for_a_mean_is_refused(defense: Defense, model: Backbone, batch: tuple) -> None:
    client = FOUR.client(model, defense)
    with pytest.raises(ConfigError, match=r"knowledge\.defense"):
        client.observe(*batch, KNOWN)
    assert client.observe(*batch).defense is None
    assert ClientSettings().client(model, defense).observe(*batch, KNOWN).defense is defense


def test_single_examples_are_clipped_by_each_client_but_not_after_local_steps(model: Backbone, batch: tuple) -> None:
    # the mean of means of equal size is the mean of all clipped gradients
    mean, whole = (
        one.client(model, PerExampleClipping(0.5)).release(*batch).update for one in (FOUR, ClientSettings())
    )
    torch.testing.assert_close(flat(mean), flat(whole), rtol=0, atol=1e-7)
    with pytest.raises(ConfigError, match="GradientClipping"):
        ClientSettings(local_steps=LocalTraining(), n_clients=2).client(model, PerExampleClipping(0.5))


def reconstructed(defense: Defense, images: Tensor, *, steps: int, execution: str = "loop", means: int = 1) -> Tensor:
    """Images found in means of two clients with one image each."""
    client = ClientSettings(n_clients=2).client(network(), defense)
    attack = GradientMatching(
        priors=[TotalVariation(1e-3)], solver=Adam(lr=0.2), labels=KnownLabels(), steps=steps, execution=execution
    )
    pairs = [images[i : i + 2] for i in range(0, 2 * means, 2)]
    seen = [client.observe(pair, torch.arange(2), KNOWN, generator(i)) for i, pair in enumerate(pairs)]
    return torch.cat([result.images for result in attack.many(seen)])


def test_an_attack_that_knows_the_pruning_of_each_client_finds_the_images(smooth: Tensor) -> None:
    found = reconstructed(GradientPruning(0.7), smooth[:2], steps=150)
    # RMSE 0.0086 when written; 0.0196 for an attacker who does not know the defense
    assert float((found - smooth[:2]).square().mean().sqrt()) < 0.013


def test_means_are_attacked_together_as_one_by_one(smooth: Tensor) -> None:
    one_by_one, together = (
        reconstructed(GradientPruning(0.8), smooth, steps=5, execution=form, means=2) for form in ("loop", "vmap")
    )
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-4)
