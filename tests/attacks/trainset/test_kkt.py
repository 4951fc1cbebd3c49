"""The conditions of stationarity against finite differences, least squares and the images that they are made of."""

from __future__ import annotations

import io
from functools import cache
from typing import Any, cast

import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from lit_recon.attacks.trainset.base import Candidates, ReleasedModel
from lit_recon.attacks.trainset.kkt import MarginKKT, SmoothedReLU, Stationarity, smoothed
from lit_recon.attacks.trainset.selection import similarities
from lit_recon.attacks.trainset.training import Task, Training, losses, margins
from lit_recon.data.sources.bundled import Digits
from lit_recon.errors import ConfigError, LitReconError, ShapeError, ThreatModelError, UnsupportedModelError
from lit_recon.models.centered import CenteredMLP

SHAPE = (1, 8, 8)


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten digits with the labels even and odd in turn, ten others, and the mean image of further ones."""
    train, _ = Digits().read()
    images, labels = train.images.double() / 255, train.labels % 2
    chosen = torch.cat([torch.nonzero(labels[:200] == label).flatten()[:10] for label in (0, 1)]).view(2, 10)
    victims, others = chosen[:, :5].T.flatten(), chosen[:, 5:].T.flatten()
    return images[victims], labels[victims], images[others], images[200:].mean(dim=0)


@cache
def released(weight_decay: float = 0.0, hidden: tuple[int, ...] = (60,)) -> ReleasedModel:
    """A network trained on the ten digits, to a loss of 1e-4 or with weight decay."""
    images, labels, _, mean = digits()
    model = CenteredMLP(SHAPE, 1, hidden, mean=mean).double()
    model.initialize(torch.Generator().manual_seed(0))
    start = dict(model.named_parameters())
    if weight_decay:
        training = Training(steps=800, lr=0.5, momentum=0.9, weight_decay=weight_decay)
    else:
        training = Training(steps=1000, lr=2.0, until=1e-4)
    trained = training.run(model, images, labels, start)
    return ReleasedModel(
        model, trained.weights, "binary", SHAPE, 2, mean, len(labels), weight_decay=weight_decay, loss=trained.loss
    )


def tiny(task: Task, n_outputs: int, **known: Any) -> ReleasedModel:
    """A random network on 2x2 pixels."""
    mean = torch.rand(1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = CenteredMLP((1, 2, 2), n_outputs, [3, 4], initial_std=None, mean=mean).double()
    model.initialize(torch.Generator().manual_seed(2))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return ReleasedModel(model, weights, task, (1, 2, 2), max(2, n_outputs), mean, 4, **known)


def noise(seen: ReleasedModel, m: int, scale: float, seed: int = 0) -> Candidates:
    """Candidates around the mean image, with balanced labels."""
    drawn = torch.randn(m, *seen.image_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Candidates(seen, seen.mean + scale * drawn, torch.arange(m) % seen.n_classes, seed)


def numeric_gradient(seen: ReleasedModel, function: Any) -> dict[str, Tensor]:
    """Central differences of a function of the weights."""
    gradients = {}
    for name, weight in seen.weights.items():
        gradient = torch.zeros_like(weight).flatten()
        for i in range(weight.numel()):
            values = []
            for change in (1e-6, -1e-6):
                moved = weight.clone()
                moved.view(-1)[i] += change
                values.append(float(function({**seen.weights, name: moved})))
            gradient[i] = (values[0] - values[1]) / 2e-6
        gradients[name] = gradient.view_as(weight)
    return gradients


TASKS = [("binary", 1), ("multiclass", 3), ("regression", 1)]


@pytest.mark.parametrize(("task", "n_outputs"), TASKS)
def test_margin_residual_against_finite_differences(task: Task, n_outputs: int) -> None:
    seen = tiny(task, n_outputs, weight_decay=0.1)
    start = noise(seen, 5, 0.5)
    attack = MarginKKT(alpha=1e6)  # so steep that no neuron of these candidates is in between
    state = attack.init(start)
    multipliers = state["multipliers"].detach()
    gradients = numeric_gradient(
        seen, lambda weights: (multipliers * margins(task, seen.outputs(weights, start.images), start.labels)).mean()
    )
    wanted = sum((seen.weights[name] - gradient).square().sum() for name, gradient in gradients.items())
    assert float(attack.residual(state).detach()) == pytest.approx(float(wanted), rel=1e-9)  # measured: 1e-11


@pytest.mark.parametrize(("task", "n_outputs"), TASKS)
def test_loss_residual_against_finite_differences(task: Task, n_outputs: int) -> None:
    seen = tiny(task, n_outputs, weight_decay=0.1)
    start = noise(seen, 5, 0.5)
    attack = Stationarity(alpha=1e6)
    gradients = numeric_gradient(
        seen, lambda weights: losses(task, seen.outputs(weights, start.images), start.labels).mean()
    )
    wanted = sum((0.1 * seen.weights[name] + gradient).square().sum() for name, gradient in gradients.items()) / 0.1**2
    found = float(attack.residual(attack.init(start)).detach())
    # errors of the differences: 4e-10 on one processor, 1.1e-9 on another; a wrong factor is far beyond
    assert found == pytest.approx(float(wanted), rel=1e-8)


def test_gradient_of_the_residual_against_the_closed_form() -> None:
    """Of two layers, with the gradients of the margins written out, so that one derivative is left to autograd."""
    seen, alpha = released(), 20.0
    start = noise(seen, 20, 0.3)
    attack = MarginKKT(alpha=alpha)
    state = attack.init(start)
    variables = [state["pixels"], state["multipliers"]]
    found = torch.autograd.grad(attack.residual(state), variables)

    first, bias, last = (seen.weights[name] for name in ("layers.1.weight", "layers.1.bias", "layers.3.weight"))
    inputs = variables[0].flatten(1)
    u = inputs @ first.T + bias
    slope = torch.sigmoid(alpha * u)
    hidden = u.relu().detach() + slope.detach() * (u - u.detach())
    signed = ((start.labels * 2 - 1) * variables[1] / 20)[:, None]
    to_hidden = signed * last * slope
    parts = [(first, to_hidden.T @ inputs), (bias, to_hidden.sum(dim=0)), (last, signed.T @ hidden)]
    residual = torch.stack([(weight - gradient).square().sum() for weight, gradient in parts]).sum()
    for one, other in zip(found, torch.autograd.grad(residual, variables), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def columns(seen: ReleasedModel, images: Tensor, labels: Tensor) -> Tensor:
    """Gradients of the margins in all weights, `(weights, n)`, by autograd through the network itself."""
    weights = {name: weight.clone().requires_grad_() for name, weight in seen.weights.items()}
    rows = []
    for image, label in zip(images, labels, strict=True):
        margin = margins(seen.task, seen.outputs(weights, image[None]), label[None])[0]
        rows.append(torch.cat([part.flatten() for part in torch.autograd.grad(margin, list(weights.values()))]))
    return torch.stack(rows, dim=1)


def test_true_images_fulfil_the_condition_with_multipliers_from_least_squares() -> None:
    images, labels, others, _ = digits()
    seen = released()
    theta = torch.cat([weight.flatten() for weight in seen.weights.values()])
    attack = MarginKKT(alpha=1e9)
    relative = []
    for candidates in (images, others):
        multipliers, distance = nnls(columns(seen, candidates, labels).numpy(), theta.numpy())
        state = attack.init(Candidates(seen, candidates, labels))
        state["multipliers"].data.copy_(torch.from_numpy(multipliers) * len(labels))
        relative.append(attack.result(state).loss)
        assert relative[-1] == pytest.approx(distance**2 / float(theta.square().sum()), rel=1e-9)  # measured: 1e-14
    assert relative[0] < 0.08  # measured: 0.05
    assert relative[1] > 0.35  # measured: 0.48


@pytest.mark.parametrize(
    ("hidden", "most"),
    # ReLU networks end where neurons are at 0 for some images, and have no gradient there; measured: 7e-31 and 0.06
    [((), 1e-25), ((60,), 0.1)],
)
def test_true_images_are_stationary_with_weight_decay(hidden: tuple[int, ...], most: float) -> None:
    images, labels, others, _ = digits()
    seen = released(weight_decay=0.01, hidden=hidden)
    attack = Stationarity(alpha=1e9)
    at_truth, elsewhere = (
        attack.result(attack.init(Candidates(seen, candidates, labels))).loss for candidates in (images, others)
    )
    assert at_truth < most
    assert elsewhere > 30  # measured: 50 and 373


def test_residual_depends_neither_on_the_order_nor_on_copies() -> None:
    seen, attack = released(), MarginKKT()
    start = noise(seen, 10, 0.3)
    state = attack.init(start)
    wanted = float(attack.residual(state).detach())
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).repeat(2)
    copies = attack.init(Candidates(seen, start.images[order], start.labels[order]))
    copies["multipliers"].data.copy_(state["multipliers"].detach()[order])
    assert float(attack.residual(copies).detach()) == pytest.approx(wanted, rel=1e-12)


def test_box_and_bound_by_hand() -> None:
    seen = released()
    start = noise(seen, 10, 0.0)
    start.images[3, 0, 2, 2] += 1.5
    start.images[4, 0, 2, 2] -= 1.25
    attack = MarginKKT(min_multiplier=0.5, steps=1)
    state = attack.init(start)
    state["multipliers"].data.fill_(1.0)
    state["multipliers"].data[:2] = torch.tensor([0.2, -0.5])
    residual = float(attack.residual(state).detach())
    attack.step(state)
    curve = state.curves[0][0]
    assert curve["box"][0] == pytest.approx(0.25 + 0.0625)
    assert curve["bound"][0] == pytest.approx(5 * (0.3**2 + 1.0**2))
    assert curve["loss"][0] == pytest.approx(residual + 0.3125 + 5 * 1.09)


def test_multipliers_of_regression_have_any_sign_and_no_bound() -> None:
    attack = MarginKKT(min_multiplier=0.5, steps=1)
    state = attack.init(noise(tiny("regression", 1, weight_decay=0.1), 40, 0.1))
    assert float(state["multipliers"].detach().min()) < -1
    attack.step(state)
    assert state.curves[0][0]["bound"] == [0.0]


def test_sgd_has_momentum_and_a_rate_for_images_and_multipliers_each() -> None:
    attack = MarginKKT(optimizer="sgd", lr=1e-3, multiplier_lr=1e-2, min_multiplier=0.0, steps=2)
    state = attack.init(noise(released(), 10, 0.01))
    variables, rates = [state["pixels"], state["multipliers"]], [1e-3, 1e-2]
    speeds = [torch.zeros_like(variable) for variable in variables]
    for _ in range(2):
        gradients = torch.autograd.grad(attack.residual(state), variables)
        speeds = [0.9 * speed + gradient for speed, gradient in zip(speeds, gradients, strict=True)]
        wanted = [
            variable.detach() - rate * speed for variable, rate, speed in zip(variables, rates, speeds, strict=True)
        ]
        attack.step(state)
        for variable, value in zip(variables, wanted, strict=True):
            torch.testing.assert_close(variable.detach(), value)


def likeness(images: Tensor, candidates: Tensor) -> float:
    """Mean similarity of images to their nearest candidates, beyond what they share with the mean image."""
    mean = digits()[3]
    return float(similarities(images - mean, candidates - mean).amax(dim=1).mean())


@pytest.mark.parametrize("subspace", [False, True])
def test_a_run_finds_images_like_the_true_ones(subspace: bool) -> None:
    images, _, others, _ = digits()
    start = noise(released(), 20, 0.001)
    found = MarginKKT(steps=300, lr=0.01, subspace=subspace)(start)
    # measured: 0.26 at the start, 0.51 and in the span 0.47 after it; other digits 0.30 and 0.33
    assert likeness(images, found.images) > likeness(images, start.images) + 0.12
    assert likeness(images, found.images) > likeness(others, found.images) + 0.08
    assert found.trace["residual"][-1] < 0.05 * found.trace["residual"][0]  # measured: 0.025
    assert found.trace["residual"][-1] == pytest.approx(found.loss, rel=1e-3)  # measured: 2e-4
    assert torch.equal(found.labels, start.labels)
    assert len(found.notes) == (2 if subspace else 1)


def test_a_run_with_weight_decay_finds_images_like_the_true_ones() -> None:
    images, _, others, _ = digits()
    start = noise(released(weight_decay=0.01), 10, 0.1)
    found = Stationarity(steps=150, lr=0.02)(start)
    # measured: 0.21 at the start, 0.35 after it; other digits 0.23
    assert likeness(images, found.images) > likeness(images, start.images) + 0.08
    assert likeness(images, found.images) > likeness(others, found.images) + 0.07
    [note] = found.notes
    assert note == "weights taken as stationary for the mean loss with weight decay 0.01, which is not checked"
    assert "taken as stationary" in MarginKKT()._assumptions(start.seen)[0]


@pytest.mark.parametrize("attack", [MarginKKT(steps=6, subspace=True), Stationarity(steps=6)])
def test_a_saved_state_goes_on_bit_for_bit(attack: MarginKKT | Stationarity) -> None:
    start = noise(released(weight_decay=0.01), 10, 0.1)
    run, buffer = attack.begin([start]), io.BytesIO()
    assert run.state is not None
    for _ in range(6):
        if run.state.step == 3:
            torch.save(run.state.state_dict(), buffer)
        run.advance()
    again = attack.begin([start])
    assert again.state is not None
    buffer.seek(0)
    again.state.load_state_dict(torch.load(buffer, weights_only=True))
    while again.state.step < again.n_steps:
        again.advance()
    assert torch.equal(run.results()[0].images, again.results()[0].images)
    assert run.results()[0].trace == again.results()[0].trace


def test_smoothed_relu_has_the_value_of_relu_and_a_sigmoid_as_derivative() -> None:
    u = torch.linspace(-3, 3, 61, dtype=torch.float64).requires_grad_()
    value = SmoothedReLU(5.0)(u)
    assert torch.equal(value, u.relu())
    (slope,) = torch.autograd.grad(value.sum(), u, create_graph=True)
    # softplus is linear beyond 20 / alpha
    torch.testing.assert_close(slope, torch.sigmoid(5 * u), rtol=0, atol=3e-9)
    (curvature,) = torch.autograd.grad(slope.sum(), u)
    inner = u.abs().detach() < 4
    sigmoid = torch.sigmoid(5 * u.detach())
    torch.testing.assert_close(curvature[inner], (5 * sigmoid * (1 - sigmoid))[inner], rtol=0, atol=2e-8)


def test_smoothing_leaves_the_network_as_it_is() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU()), nn.Tanh())
    copy = smoothed(network, 10.0)
    inner = cast(nn.Sequential, copy[1])
    assert isinstance(inner[0], SmoothedReLU)
    assert isinstance(cast(nn.Sequential, network[1])[0], nn.ReLU)
    assert isinstance(smoothed(nn.ReLU(), 10.0), SmoothedReLU)


def test_a_relu_with_several_places_is_smoothed_in_all_of_them() -> None:
    relu = nn.ReLU()
    copy = smoothed(nn.Sequential(nn.Linear(2, 3), relu, nn.Linear(3, 3), relu, nn.Sequential(relu)), 10.0)
    assert sum(isinstance(module, SmoothedReLU) for module in copy.modules()) == 3
    assert not any(isinstance(module, nn.ReLU) for module in copy.modules())


class _Functional(nn.Sequential):
    """A network that calls ReLU as a function."""

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self[1](self[0](images.flatten(1)).relu())
        return outputs


def test_a_network_in_which_nothing_is_smoothed_is_noted_unless_it_is_affine() -> None:
    functional, affine = _Functional(nn.Linear(4, 3, bias=False), nn.Linear(3, 1, bias=False)), nn.Linear(4, 1)
    for model, noted in ((functional, 1), (nn.Sequential(nn.Flatten(), affine), 0), (tiny("binary", 1).model, 0)):
        model = model.double()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        seen = ReleasedModel(model, weights, "binary", (1, 2, 2), 2, torch.zeros(1, 2, 2), 4, weight_decay=0.1)
        found = Stationarity(steps=1)(noise(seen, 4, 0.1))
        assert sum("nothing was smoothed" in note for note in found.notes) == noted


def _other(**changed: Any) -> ReleasedModel:
    return ReleasedModel(**{**vars(released()), **changed})


def _of_classes(n: int, loss: float | None) -> ReleasedModel:
    return tiny("multiclass", n, weight_decay=0.01, loss=loss)


def _not_homogeneous() -> ReleasedModel:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    weights = {name: weight.detach() + 0.1 for name, weight in model.named_parameters()}
    return ReleasedModel(model, weights, "binary", SHAPE, 2, torch.zeros(SHAPE), 4, loss=0.0)


@pytest.mark.parametrize(
    ("attack", "seen", "error", "message"),
    [
        (MarginKKT(), lambda: _other(loss=None), ThreatModelError, "loss of this model is unknown"),
        (MarginKKT(), lambda: _other(loss=0.3), ThreatModelError, "is 0.3, and at most max_loss=0.01"),
        (MarginKKT(), lambda: _other(loss=float("nan")), ThreatModelError, "is nan"),
        (MarginKKT(), _not_homogeneous, UnsupportedModelError, "homogeneous"),
        (MarginKKT(), lambda: _other(n_examples=11), ShapeError, "all 11 training images, which 10 candidates"),
        (MarginKKT(), lambda: _of_classes(3, 0.5), ThreatModelError, "with 3 classes also under weight decay; .* 0.5"),
        (MarginKKT(), lambda: _of_classes(3, None), ThreatModelError, "is unknown.* use Stationarity"),
        (MarginKKT(), lambda: _other(task="regression"), ThreatModelError, "here it is 0"),
        (MarginKKT(), lambda: _other(task="regression", weight_decay=None), ThreatModelError, "here it is unknown"),
        (Stationarity(), lambda: _other(weight_decay=None), ThreatModelError, "here it is unknown"),
        (Stationarity(), released, ThreatModelError, "here it is 0"),
    ],
)
def test_assumptions_that_do_not_hold(
    attack: MarginKKT | Stationarity, seen: Any, error: type[LitReconError], message: str
) -> None:
    with pytest.raises(error, match=message):
        attack.begin([noise(seen(), 10, 0.1)])


def test_the_loss_may_be_unknown_with_weight_decay() -> None:
    seen = _other(loss=None, weight_decay=0.01)
    MarginKKT().check(noise(seen, 10, 0.1))
    MarginKKT().check(noise(_of_classes(2, None), 4, 0.1))
    MarginKKT().check(noise(_of_classes(3, 1e-3), 4, 0.1))


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"lr": 0.0},
        {"alpha": -1.0},
        {"optimizer": "lbfgs"},
        {"multiplier_lr": 0.0},
        {"multiplier_scale": 0.0},
        {"min_multiplier": -0.1},
        {"max_loss": 0.0},
    ],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MarginKKT(**settings)
