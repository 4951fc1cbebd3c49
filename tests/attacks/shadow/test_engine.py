"""Three ways to train the same models, against each other, float64, and closed forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from lit_recon.attacks.shadow import (
    GradientDescent,
    KnownTraining,
    ShadowPlan,
    deltas,
    fastest_execution,
    train_models,
    train_reference,
    training,
)
from lit_recon.attacks.shadow import plan as plans
from lit_recon.attacks.shadow.engines import batched_mlp as by_hand
from lit_recon.attacks.shadow.engines import general
from lit_recon.attacks.shadow.engines import pixels as products
from lit_recon.attacks.shadow.engines.batched_mlp import chunk_size, train_batched_mlp
from lit_recon.attacks.shadow.engines.general import models_at_a_time, train_vmap
from lit_recon.attacks.shadow.training import flat_weights, unflatten
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.models.released import ReleasedCNN, ReleasedMLP
from tests.attacks.shadow.conftest import known_training, random_images


def initial_weights(network: nn.Module, n: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    rows = []
    for _ in range(n or 1):
        network.initialize(generator)  # type: ignore[operator]
        rows.append(flat_weights(network))
    return rows[0] if n is None else torch.stack(rows)


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("hidden", [[6], [7, 5, 3]])
@pytest.mark.parametrize("own_starts", [False, True])
def test_three_ways_give_the_same_models_in_float64(activation: str, hidden: list[int], own_starts: bool) -> None:
    network = ReleasedMLP((1, 5, 5), 4, hidden, activation).double()  # type: ignore[arg-type]
    fixed, own = random_images(9, 0), random_images(5, 1)
    known = known_training(network.float(), fixed).on("cpu", torch.float64)
    start = initial_weights(network, 5 if own_starts else None).double()
    images = own.pixels().double()
    by_loop = train_models(known, start, images, own.labels, "loop")
    assert (by_loop - start).norm(dim=1).min() > 1e-2
    for found in (
        train_models(known, start, images, own.labels, "batched_mlp"),
        train_batched_mlp(known, start, images, own.labels, chunk=2),
        train_models(known, start, images, own.labels, "vmap"),
        train_vmap(known, start, images, own.labels, chunk=3),
    ):
        # Differences of rounding alone; measured at most 2e-14.
        torch.testing.assert_close(found, by_loop, rtol=0, atol=1e-12)


def test_by_hand_is_as_exact_as_the_loop_in_float32() -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    fixed, own = random_images(40, 0), random_images(8, 1)
    known, start = known_training(network, fixed, steps=100), initial_weights(network)
    exact = train_models(known.on("cpu", torch.float64), start.double(), own.pixels().double(), own.labels, "loop")
    error = {
        way: float((train_models(known, start, own.pixels(), own.labels, way) - exact).norm())  # type: ignore[arg-type]
        for way in ("loop", "batched_mlp", "vmap")
    }
    assert error["batched_mlp"] < 3 * error["loop"]
    assert error["vmap"] < 3 * error["loop"]


def test_convolutions_train_by_vmap_as_by_loop() -> None:
    network = ReleasedCNN((1, 10, 10), 4)
    fixed, own = random_images(6, 0, side=10), random_images(3, 1, side=10)
    known, start = known_training(network, fixed, steps=5), initial_weights(network)
    exact, pixels = known.on("cpu", torch.float64), own.pixels().double()
    loop, vmap = (train_models(exact, start.double(), pixels, own.labels, way) for way in ("loop", "vmap"))  # type: ignore[arg-type]
    torch.testing.assert_close(vmap, loop, rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedModelError, match="got ReleasedCNN: use execution vmap or loop"):
        train_models(known, start, own.pixels(), own.labels, "batched_mlp")
    assert fastest_execution(known, start) in ("loop", "vmap")


def test_gelu_is_left_to_the_other_ways() -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6], "gelu")
    known = known_training(network, random_images(6, 0))
    with pytest.raises(UnsupportedModelError, match="elu, relu, tanh, sigmoid"):
        train_models(known, initial_weights(network), known.images[:1], known.labels[:1], "batched_mlp")


def test_one_step_is_the_gradient() -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    fixed, own = random_images(9, 0), random_images(1, 1)
    known = KnownTraining(network, fixed.pixels(), fixed.labels, GradientDescent(steps=1, lr=0.5))
    start = initial_weights(network)
    network.load_state_dict(unflatten(network, start))
    loss = nn.functional.cross_entropy(network(own.pixels()), own.labels)
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(network.parameters()))])
    found = deltas(train_models(known, start, own.pixels(), own.labels, "batched_mlp"), train_reference(known, start))
    # After one step the reference lacks exactly the image's own share of the mean gradient, up to the rounding of
    # weights of up to 1 in float32, 6e-8.
    torch.testing.assert_close(found[0], -0.5 * gradient / 10, rtol=0, atol=2e-7)


def test_the_reference_is_kept_in_double_precision() -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    fixed, own = random_images(200, 0), random_images(6, 1)
    known, start = known_training(network, fixed, steps=50), initial_weights(network)
    exact = known.on("cpu", torch.float64)
    reference = train_reference(known, start)
    assert reference.dtype == torch.float64
    truth = train_models(exact, start.double(), own.pixels().double(), own.labels, "loop") - reference
    found = deltas(train_models(known, start, own.pixels(), own.labels, "batched_mlp"), reference)
    # Measured 3e-5; a float32 reference would add its own rounding to every difference.
    assert ((found - truth).norm(dim=1) / truth.norm(dim=1)).max() < 2e-4
    torch.testing.assert_close(deltas(reference[None] + 1e-9, reference), torch.full((1, len(reference)), 1e-9))


def test_chunks_fit_the_cache() -> None:
    def chunk(n: int) -> int:
        network = ReleasedMLP((1, 2, 2), 2, [10])
        return chunk_size(KnownTraining(network, torch.zeros(n, 1, 2, 2), torch.zeros(n).long(), GradientDescent()))

    assert chunk(500) == 5 * 2**18 // (500 * 40)
    # Images come in blocks: from some number on, more of them do not make a chunk larger.
    assert chunk(1_000) == chunk(1_000_000) == 32


def test_the_product_falls_back_where_onednn_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(5, 9), torch.randn(4, 9)
    with torch.no_grad():
        ours = products.times_transposed(a, b)
        monkeypatch.setattr(products, "_has_exact_onednn", lambda: False)
        torch.testing.assert_close(products.times_transposed(a, b), ours)
    torch.testing.assert_close(ours, a @ b.T)


def test_an_operator_that_rounds_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, operator: object) -> None:
            self._linear_pointwise = operator

    def rounding(a: Tensor, b: Tensor, *_: object) -> Tensor:
        return (a.bfloat16().float()) @ (b.bfloat16().float()).T

    def failing(*_: object) -> Tensor:
        raise RuntimeError("no such kernel")

    for operator in (rounding, failing):
        monkeypatch.setattr(torch.ops, "mkldnn", Fake(operator), raising=False)
        assert not products._has_exact_onednn.__wrapped__()
    monkeypatch.setattr(torch.ops, "mkldnn", Fake(lambda a, b, *_: a @ b.T), raising=False)
    assert products._has_exact_onednn.__wrapped__() == torch.backends.mkldnn.is_available()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not products._has_exact_onednn.__wrapped__()


def test_the_fastest_way_is_the_one_that_was_measured_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_recon.attacks.shadow import engine

    network = ReleasedMLP((1, 5, 5), 4, [6])
    known, start = known_training(network, random_images(12, 0)), initial_weights(network)
    seen: list[tuple[str, int]] = []

    def seconds(run: object) -> float:
        arguments = run.args  # type: ignore[attr-defined]
        seen.append((arguments[-1], len(arguments[2])))
        return {"batched_mlp": 3.0, "vmap": 1.0, "loop": 0.4}[arguments[-1]]

    monkeypatch.setattr(engine, "_seconds", seconds)
    assert fastest_execution(known, start) == "vmap"  # 1/12 of a second per model, against 3/12 and 0.4
    assert set(seen) == {("batched_mlp", 12), ("vmap", 12), ("loop", 1)}


@pytest.mark.parametrize(("batch_size", "images"), [(None, 6), (2, 2)])
def test_models_are_timed_and_trained_as_many_at_a_time_as_fit(
    monkeypatch: pytest.MonkeyPatch, batch_size: int | None, images: int
) -> None:
    from lit_recon.attacks.shadow import engine

    network = ReleasedMLP((1, 5, 5), 4, [6], "tanh")
    descent = GradientDescent(steps=1, batch_size=batch_size, order="known")
    fixed = random_images(6, 0)
    known, start = KnownTraining(network, fixed.pixels(), fixed.labels, descent), initial_weights(network)
    # inputs, outputs of the hidden layer for tanh and for the product, two kinds of logits, the label
    per_image = 4 * (25 + 6 + 6 + 4 + 4) + 8
    assert general._saved_bytes(known, start, 2) - general._saved_bytes(known, start, 1) == per_image
    assert models_at_a_time(known, start) == 32
    monkeypatch.setattr(general, "_STEP_BYTES", 3 * images * per_image)
    assert models_at_a_time(known, start) == models_at_a_time(known, start.expand(6, -1)) == 3
    sizes: list[int] = []
    descended = general.Descent
    monkeypatch.setattr(general, "Descent", lambda how, own: sizes.append(len(own[0])) or descended(how, own))
    monkeypatch.setattr(engine, "_seconds", lambda run: float(run().sum() * 0 + 1))
    generators = [torch.Generator()] if batch_size else None
    train_vmap(known, start, known.images[:5], known.labels[:5], generators)
    assert sizes == [3, 2]
    sizes.clear()
    fastest_execution(known, start)
    assert set(sizes) == {3}
    monkeypatch.setattr(general, "_STEP_BYTES", 1)
    assert models_at_a_time(known, start) == 1


def test_divergence_and_misfits_are_refused(shadows: ImageSet) -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6], "relu")
    fixed = random_images(9, 0)
    start = initial_weights(network)
    wild = KnownTraining(network, fixed.pixels(), fixed.labels, GradientDescent(steps=60, lr=1e20))
    with pytest.raises(ShapeError, match="models diverged to NaN or infinity: lower descent.lr"):
        train_models(wild, start, shadows.pixels(), shadows.labels, "batched_mlp")
    known = known_training(network, fixed)
    with pytest.raises(ShapeError, match="one image of shape"):
        train_models(known, start, torch.zeros(2, 1, 4, 4), torch.zeros(2).long(), "batched_mlp")
    with pytest.raises(ShapeError, match="initial weights must be"):
        train_models(known, start[1:], shadows.pixels(), shadows.labels, "vmap")
    with pytest.raises(ShapeError, match="hold NaN"):
        train_models(known, start * torch.nan, shadows.pixels(), shadows.labels, "loop")
    with pytest.raises(ShapeError, match="the fixed set must be"):
        KnownTraining(network, fixed.pixels(), fixed.labels[1:], GradientDescent())
    with pytest.raises(ShapeError, match="one dtype"):
        KnownTraining(network, fixed.pixels().double(), fixed.labels, GradientDescent())
    with pytest.raises(ShapeError, match="has 184 parameters"):
        unflatten(network, start[1:])
    assert train_models(known, start, shadows.pixels()[:0], shadows.labels[:0], "loop").shape == (0, 184)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.5)])
def test_networks_that_depend_on_more_than_their_data_are_refused(layer: nn.Module) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), layer)
    with pytest.raises(UnsupportedModelError, match="without buffers and dropout"):
        known_training(network, random_images(3, 0))


def test_networks_with_frozen_weights_are_refused() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(25, 4))
    network[1].bias.requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match=r"requires_grad=False for \['1.bias'\]"):
        known_training(network, random_images(3, 0))


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"lr": 0.0}, {"momentum": 1.0}])
def test_impossible_descent_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="descent.steps must be at least 1"):
        GradientDescent(**arguments)  # type: ignore[arg-type]


def test_by_hand_needs_room_for_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    network = ReleasedMLP((1, 5, 5), 4, [6])
    known, own = known_training(network, random_images(9, 0)), random_images(3, 1)
    whole = train_batched_mlp(known, initial_weights(network), own.pixels(), own.labels)
    monkeypatch.setattr(by_hand, "_LAYER_BYTES", 1)
    assert chunk_size(known) == 1
    torch.testing.assert_close(train_batched_mlp(known, initial_weights(network), own.pixels(), own.labels), whole)


@pytest.mark.parametrize("convolves", [True, False])
def test_gradients_in_parts_are_those_of_all_images(convolves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_IN_CACHE", 4)
    images = random_images(11, 0)
    first: list[nn.Module] = [nn.Conv2d(1, 2, 2), nn.ELU()] if convolves else []
    network = nn.Sequential(*first, nn.Flatten(), nn.LazyLinear(4))
    network(images.pixels())
    sizes: list[int] = []
    network.register_forward_hook(lambda module, given, found: sizes.append(len(found)))
    training.add_gradient(network, images.pixels(), images.labels, 7)
    assert sizes == ([4, 4, 3] if convolves else [11])
    found = [parameter.grad for parameter in network.parameters()]
    loss = nn.functional.cross_entropy(network(images.pixels()), images.labels, reduction="sum") / 7
    torch.testing.assert_close(found, list(torch.autograd.grad(loss, list(network.parameters()))))


def test_a_plan_trains_its_reference_once(plan: ShadowPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, whole = plan.reference(), dataclasses.replace(plan)
    calls: list[KnownTraining] = []

    def counted(known: KnownTraining, initial: Tensor, orders: object) -> Tensor:
        calls.append(known)
        return expected

    monkeypatch.setattr(plans, "train_reference", counted)
    assert torch.equal(whole.reference(), expected)
    assert torch.equal(whole.reference(), expected)
    assert torch.equal(whole.for_purpose("released").reference(), expected)
    assert len(calls) == 1
    assert whole.for_purpose("released").purpose == "released"
    dataclasses.replace(whole, descent=GradientDescent(steps=3)).reference()
    assert len(calls) == 2
