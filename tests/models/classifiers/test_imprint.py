"""The imprint block against what its definition says of activations, gradients and quantiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from lit_recon.errors import ConfigError, MissingDataError, ShapeError, UnsupportedModelError
from lit_recon.models import (
    MLP,
    Backbone,
    BackboneCheckpoint,
    ConvNet,
    Imprint,
    ImprintBlock,
    ImprintedTrunk,
    load_backbone,
    save_backbone,
)
from lit_recon.models.classifiers.imprint import find_imprint
from lit_recon.records import Normalization

NORMALIZATION = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def honest() -> Backbone:
    torch.manual_seed(0)
    return Backbone(ConvNet((3, 8, 8), widths=[4, 8]), 5, NORMALIZATION).eval()


def block_of(model: Backbone) -> ImprintBlock:
    found = find_imprint(model)
    assert found is not None
    return found[1]


def images(n: int = 20, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(n, 1, 1, 1, generator=generator) + 0.3 * torch.randn(n, 3, 8, 8, generator=generator)).clamp(
        0, 1
    )


def normalized(pixels: Tensor) -> Tensor:
    mean, std = NORMALIZATION.tensors(pixels)
    return (pixels - mean) / std


def bins(block: ImprintBlock, pixels: Tensor) -> Tensor:
    return torch.bucketize(normalized(pixels).flatten(1) @ block.functional, block.edges) - 1


def test_honest_models_hold_no_block() -> None:
    assert find_imprint(honest()) is None


@pytest.mark.parametrize("activation", ["relu", "hardtanh"])
@pytest.mark.parametrize("functional", ["mean", "cosine"])
def test_an_image_moves_the_neurons_of_its_bin(activation: str, functional: str) -> None:
    block = block_of(Imprint(16, functional, activation=activation, bins="laplace").modify(honest()))
    pixels = images()
    neurons = block.measure(normalized(pixels).flatten(1))
    moved = (neurons > 0) & ((neurons < block.gain) if activation == "hardtanh" else torch.tensor(True))
    places = torch.arange(neurons.shape[1])[None, :]
    own = bins(block, pixels)[:, None]
    assert torch.equal(moved, places == own if activation == "hardtanh" else places <= own)


@pytest.mark.parametrize("activation", ["relu", "hardtanh"])
def test_every_neuron_that_an_image_moves_gets_the_same_derivative(activation: str) -> None:
    model = Imprint(16, activation=activation).modify(honest())
    block = block_of(model)
    torch.nn.functional.cross_entropy(model(images(1)), torch.tensor([2])).backward()
    assert block.measure.bias.grad is not None
    gradient = block.measure.bias.grad
    reached = gradient[gradient != 0]
    assert len(reached) == (1 if activation == "hardtanh" else int(bins(block, images(1))) + 1)
    torch.testing.assert_close(reached, reached[:1].expand_as(reached), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(("name", "reference"), [("gaussian", stats.norm), ("laplace", stats.laplace(scale=0.5**0.5))])
def test_edges_are_quantiles(name: str, reference: stats.rv_continuous) -> None:
    edges = block_of(Imprint(8, bins=name).modify(honest())).edges
    expected = torch.tensor([reference.ppf(i / 8) for i in range(1, 8)], dtype=torch.float32)
    torch.testing.assert_close(edges[1:-1], expected, rtol=1e-5, atol=1e-6)


def test_public_bins_hold_equal_shares() -> None:
    public = images(800)
    block = block_of(Imprint(8, bins="public").modify(honest(), public))
    assert torch.bincount(bins(block, public)).tolist() == pytest.approx([100] * 8, abs=1)


@pytest.mark.parametrize("functional", ["mean", "cosine"])
def test_no_image_lies_beyond_the_outer_edges(functional: str) -> None:
    block = block_of(Imprint(512, functional, frequency=2).modify(honest()))
    signs = (block.functional.view(3, 8, 8) > 0).float()
    extreme = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8), signs, 1 - signs])
    found = bins(block, extreme)
    assert (found >= 0).all()
    assert (found < len(block.edges) - 1).all()
    assert (block.edges.diff() > 0).all()


def test_one_shot_has_one_bin_of_the_wanted_mass() -> None:
    edges = block_of(Imprint(one_shot=100).modify(honest())).edges
    assert len(edges) == 2
    assert stats.norm.cdf(edges[1]) - stats.norm.cdf(edges[0]) == pytest.approx(0.01, rel=1e-4)


def test_the_block_replaces_the_image_or_adds_to_it() -> None:
    pixels = images(2)
    for connection in ("replace", "add"):
        model = Imprint(16, connection=connection).modify(honest())
        seen = block_of(model)(normalized(pixels)) - (normalized(pixels) if connection == "add" else 0)
        flat = seen.flatten(1)
        contrast = flat.norm(dim=1) / flat[0].norm()
        # all images show one pattern
        torch.testing.assert_close(flat, flat[:1] * contrast[:, None], rtol=1e-4, atol=1e-5)


def test_the_honest_model_stays_as_it_is_and_goes_on_behind_the_block() -> None:
    model = honest()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    modified = Imprint(16).modify(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(modified.trunk, ImprintedTrunk)
    assert not modified.training
    inner = modified.trunk.trunk.state_dict()
    assert all(torch.equal(inner[name], value) for name, value in model.trunk.state_dict().items())
    assert torch.equal(modified.head.weight, model.head.weight)


def test_a_modified_model_survives_its_file(tmp_path: Path) -> None:
    modified = Imprint(16, activation="hardtanh", connection="add", gain=0.1).modify(honest())
    save_backbone(tmp_path / "model", BackboneCheckpoint(modified, list("abcde"), "hash", 1))
    loaded = load_backbone(tmp_path / "model").model
    pixels = images(3)
    torch.testing.assert_close(loaded(pixels), modified(pixels), rtol=0.0, atol=0.0)
    assert block_of(loaded).gain == 0.1


@pytest.mark.parametrize(
    "settings",
    [{"n_bins": 0}, {"frequency": 0}, {"one_shot": 1}, {"functional": "median"}, {"bins": "uniform"}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="Imprint needs"):
        Imprint(**settings)


@pytest.mark.parametrize("settings", [{"gain": 0.0}, {"activation": "tanh"}, {"connection": "cat"}, {"n_edges": 1}])
def test_block_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="imprint block needs"):
        ImprintBlock((1, 4, 4), **{"n_edges": 3, **settings})


def test_public_bins_need_images_of_the_right_shape() -> None:
    with pytest.raises(MissingDataError, match="public images"):
        Imprint(bins="public").modify(honest())
    with pytest.raises(ShapeError, match=r"must be \(n, \(3, 8, 8\)\)"):
        Imprint(bins="public").modify(honest(), torch.rand(4, 3, 4, 4))


def test_edges_must_ascend() -> None:
    block = ImprintBlock((1, 2, 2), 3)
    with pytest.raises(ShapeError, match="3 ascending edges"):
        block.place(torch.ones(4), torch.tensor([0.0, 2.0, 1.0]), torch.ones(4))


def test_unknown_trunks_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"the trunk 'Transformer' cannot be imported"):
        ImprintedTrunk((1, 4, 4), "Transformer", "{}", 3)


def test_double_precision_is_kept() -> None:
    model = Imprint(4).modify(Backbone(MLP((3, 4, 4), [4]), 3, NORMALIZATION).double())
    assert {value.dtype for value in model.parameters()} == {torch.float64}
