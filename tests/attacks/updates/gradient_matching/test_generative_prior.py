"""The generative prior: what moves when, which restart goes on, and whose generators are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_recon.attacks.updates import (
    LBFGS,
    Adam,
    GenerativePrior,
    GlobalCosine,
    GradientMatching,
    GroupConsistency,
    KnownLabels,
    Observed,
    SquaredError,
    StepDecay,
    TwoStages,
)
from lit_recon.attacks.updates.gradient_matching.objectives import ObservedUpdate
from lit_recon.attacks.updates.gradient_matching.parametrizations import Restart
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, ShapeError
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, save_generator
from lit_recon.records import Observation

Observe = Callable[..., Observation]
STEPS, SHARE = 10, 0.4


class Tanh(nn.Module):
    """A user's generator, of 3x8x8 images."""

    def __init__(self, scale: float = 0.5, side: int = 8) -> None:
        super().__init__()
        self.layer, self.scale, self.side = nn.Linear(6, 3 * side * side), scale, side

    def forward(self, latents: Tensor) -> Tensor:
        images: Tensor = self.scale * (torch.tanh(self.layer(latents)) + 1)
        return images.reshape(-1, 3, self.side, self.side)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    path = tmp_path / "generator.safetensors"
    save_generator(path, GeneratorCheckpoint(ConvGenerator((3, 8, 8), 6, 4), "made up", "00", torch.tensor([1]), 1))
    return path


def attack(prior: GenerativePrior, restarts: int = 2, lr: float = 0.1) -> GradientMatching:
    solver = Adam(lr, signed=False, schedule=TwoStages(SHARE, 0.1))
    return GradientMatching(
        parametrization=prior, solver=solver, labels=KnownLabels(), steps=STEPS, restarts=restarts, execution="loop"
    )


def snapshot(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in variables.items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name.split(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}


def test_latents_move_first_then_weights_of_the_best_restart_alone(checkpoint: Path, observe: Observe) -> None:
    attacking = attack(GenerativePrior(checkpoint, latent_share=SHARE), restarts=3)
    state = attacking.init([observe()])
    began = [snapshot(problem.variables) for problem in state.problems]
    while state.step < SHARE * STEPS:
        attacking.advance(state)
    after_latents = [snapshot(problem.variables) for problem in state.problems]
    assert [moved(*pair) for pair in zip(began, after_latents, strict=True)] == [{"latents"}] * 3
    best = min(range(3), key=lambda i: state.problems[i].best_matching)
    while state.step < STEPS:
        attacking.advance(state)
    ended = [snapshot(problem.variables) for problem in state.problems]
    expected = [{"weights"} if i == best else set() for i in range(3)]
    assert [moved(*pair) for pair in zip(after_latents, ended, strict=True)] == expected
    assert [problem.set_aside for problem in state.problems] == [i != best for i in range(3)]
    assert state.loss == state.problems[best].best_loss
    [result] = attacking.result(state)
    assert result.loss == state.problems[best].best_matching
    assert torch.equal(result.images, state.problems[best].best_images)  # type: ignore[arg-type]  # there is one


def test_latents_stay_where_they_are_under_a_quasi_newton_solver(checkpoint: Path, observe: Observe) -> None:
    """Its history of the latents' iterations would go on moving them."""
    prior = GenerativePrior(checkpoint, latent_share=SHARE)
    attacking = GradientMatching(parametrization=prior, solver=LBFGS(inner=5), labels=KnownLabels(), steps=STEPS)
    state = attacking.init([observe()])
    while state.step < STEPS:
        before = snapshot(state.problems[0].variables)
        attacking.advance(state)
        expected = {"latents"} if state.step <= SHARE * STEPS else {"weights"}
        assert moved(before, state.problems[0].variables) == expected


def test_weights_differ_between_images_only_in_copies(checkpoint: Path, observe: Observe) -> None:
    for copies in (True, False):
        attacking = attack(GenerativePrior(checkpoint, latent_share=SHARE, copies=copies), restarts=1)
        state = attacking.init([observe()])
        while state.step < STEPS:
            attacking.advance(state)
        weight = state.problems[0].variables["weights.coarse.weight"]
        assert weight.shape == ((2,) if copies else ()) + (4 * 2 * 16, 6)
        if copies:
            assert not torch.equal(weight[0], weight[1])


def test_a_copy_feels_its_own_image_alone(checkpoint: Path, observe: Observe) -> None:
    prior, seen = GenerativePrior(checkpoint), observe()
    variables = {name: value.requires_grad_() for name, value in prior.start(Restart(seen, 0)).items()}
    prior.images(variables, Restart(seen, 0))[0].sum().backward()
    for value in variables.values():
        assert value.grad is not None
        assert float(value.grad[0].abs().max()) > 0
        assert float(value.grad[1].abs().max()) == 0


def test_copies_draw_what_the_generator_draws(checkpoint: Path, observe: Observe) -> None:
    prior, seen = GenerativePrior(checkpoint), observe()
    variables = prior.start(Restart(seen, 5))
    drawn = prior.images(variables, Restart(seen, 5))
    torch.testing.assert_close(drawn, prior.network(variables["latents"]))
    weights = {name.removeprefix("weights."): value for name, value in variables.items() if name != "latents"}
    as_on_a_gpu = torch.func.vmap(lambda own, latent: prior._drawn(own, latent[None])[0])
    mapped = as_on_a_gpu(weights, variables["latents"])
    torch.testing.assert_close(drawn, mapped)
    assert not torch.equal(prior.start(Restart(seen, 6))["latents"], variables["latents"])


def test_latents_alone(checkpoint: Path, observe: Observe) -> None:
    prior, seen = GenerativePrior(checkpoint, latent_share=1), observe()
    assert list(prior.start(Restart(seen, 0))) == ["latents"]
    attacking = GradientMatching(parametrization=prior, labels=KnownLabels(), steps=3, restarts=2)
    state = attacking.init([seen])
    while state.step < 3:
        attacking.advance(state)
    assert not any(problem.set_aside for problem in state.problems)


def test_an_interrupted_attack_ends_the_same(checkpoint: Path, observe: Observe) -> None:
    seen = observe()
    [whole] = attack(GenerativePrior(checkpoint, latent_share=SHARE)).run([seen])
    for stop in (4, 5):  # before the restarts narrow, and after
        first = attack(GenerativePrior(checkpoint, latent_share=SHARE))
        state = first.init([seen])
        while state.step < stop:
            first.advance(state)
        saved = state.state_dict()
        second = attack(GenerativePrior(checkpoint, latent_share=SHARE))
        resumed = second.init([seen])
        resumed.load_state_dict(saved)
        while resumed.step < STEPS:
            second.advance(resumed)
        [result] = second.result(resumed)
        assert torch.equal(result.images, whole.images), f"stopped after {stop}"


def test_weights_reach_what_latents_cannot(checkpoint: Path, observe: Observe) -> None:
    """The true images are not among what the untrained generator draws."""
    seen = observe("mlp")
    losses = {}
    for share in (0.25, 1.0):
        schedule = TwoStages(share, 0.3) if share < 1 else StepDecay()
        attacking = GradientMatching(
            parametrization=GenerativePrior(checkpoint, latent_share=share),
            solver=Adam(0.05, signed=False, schedule=schedule),
            labels=KnownLabels(),
            steps=40,
        )
        losses[share] = attacking.run([seen])[0].loss
    assert losses[0.25] < 0.5 * losses[1.0]


def test_a_users_generator(tmp_path: Path, observe: Observe) -> None:
    torch.manual_seed(0)
    trained, path = Tanh(), tmp_path / "own.safetensors"
    save_file(trained.state_dict(), path)
    before = torch.random.get_rng_state()
    prior = GenerativePrior(path, Tanh, latent_size=6, latent_share=SHARE)
    assert torch.equal(torch.random.get_rng_state(), before)
    seen = observe()
    assert prior.seen is None
    variables = prior.start(Restart(seen, 0))
    torch.testing.assert_close(prior.images(variables, Restart(seen, 0)), trained(variables["latents"]))
    assert attack(prior)(seen).images.shape == (2, 3, 8, 8)
    with pytest.raises(ConfigError, match="latent_size"):
        GenerativePrior(path, Tanh)
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        GenerativePrior(path, lambda: Tanh(scale=1.0), latent_size=6).start(Restart(seen, 0))
    with pytest.raises(CorruptFileError, match="belong together"):
        GenerativePrior(path, lambda: Tanh(side=4), latent_size=6)
    with pytest.raises(CorruptFileError, match="as `network`"):
        GenerativePrior(path)


def test_generators_of_other_images_are_refused(tmp_path: Path, observe: Observe) -> None:
    path = tmp_path / "small.safetensors"
    save_generator(path, GeneratorCheckpoint(ConvGenerator((1, 8, 8), 6, 4), "", "", torch.tensor([1]), 1))
    with pytest.raises(ShapeError, match=r"\(1, 8, 8\), the client's are \(3, 8, 8\)"):
        attack(GenerativePrior(path, latent_share=SHARE))(observe())


def test_settings_are_checked(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="latent_share"):
        GenerativePrior(checkpoint, latent_share=1.5)
    with pytest.raises(MissingDataError):
        GenerativePrior(checkpoint.with_name("none"))
    with pytest.raises(ConfigError, match="keeps only the best"):
        GradientMatching(parametrization=GenerativePrior(checkpoint), priors=[GroupConsistency(1.0)], restarts=2)
    with pytest.raises(ConfigError, match=r"at 0\.4 .* at 0\.5"):
        attack(GenerativePrior(checkpoint, latent_share=0.5))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        TwoStages(1.0, 0.1)


def test_two_stages_run_a_schedule_twice() -> None:
    schedule, decay = TwoStages(0.25, 0.1), StepDecay()
    for progress in (0.0, 0.3, 0.5, 0.9):
        assert math.isclose(schedule(0.25 * progress), decay(progress))
        assert math.isclose(schedule(0.25 + 0.75 * progress), 0.1 * decay(progress))


def test_pruned_coordinates_do_not_count() -> None:
    """Of an update that a client has pruned, the true gradient has distance 0, as the pruned one itself."""
    random = torch.Generator().manual_seed(0)
    true = {"a": torch.randn(40, generator=random), "b": torch.randn(5, 6, generator=random)}
    pruned = {name: value.masked_fill(value.abs() < 1, 0.0) for name, value in true.items()}
    target = ObservedUpdate.of(pruned)
    for objective in (GlobalCosine(), SquaredError()):
        assert float(objective(true, target)) > 0.05
        assert abs(float(Observed(objective)(true, target))) < 1e-6
    other = {name: value + 1 for name, value in true.items()}
    flat = torch.cat([other[name][pruned[name] != 0] for name in true])
    seen = torch.cat([pruned[name][pruned[name] != 0] for name in true])
    expected = 1 - torch.nn.functional.cosine_similarity(flat, seen, dim=0)
    torch.testing.assert_close(Observed(GlobalCosine())(other, target), expected)
