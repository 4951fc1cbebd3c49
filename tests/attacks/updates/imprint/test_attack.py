"""Robbing the Fed against batches whose bins the tests know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates import HeadCounts, JointLabels, KnownLabels, RobbingTheFed
from lit_recon.attacks.updates.imprint.rows import separate_rows, step_rows
from lit_recon.clients import Client, ClientSettings, LocalTraining
from lit_recon.data import Digits
from lit_recon.defenses import (
    Defense,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    PerExampleClipping,
)
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.models import Backbone, ConvNet, Imprint
from lit_recon.models.classifiers.imprint import find_imprint
from lit_recon.records import Knowledge, Normalization, Observation, Reconstruction

NORMALIZATION = Normalization((0.45, 0.43, 0.41), (0.25, 0.25, 0.27))
SIZE = 10


@pytest.fixture(name="photographs", scope="module")
def small_photographs(photographs: Tensor) -> Tensor:
    """At half size."""
    return torch.nn.functional.avg_pool2d(photographs, 2)


@pytest.fixture(scope="module")
def server() -> Callable[..., Backbone]:
    def modified(public: Tensor, **settings: object) -> Backbone:
        torch.manual_seed(0)
        model = Backbone(ConvNet((3, 16, 16), widths=[4, 8]), 10, NORMALIZATION).eval()
        return Imprint(**{"n_bins": 128, "bins": "public", **settings}).modify(model, public)

    return modified


def bins(model: Backbone, images: Tensor) -> Tensor:
    found = find_imprint(model)
    assert found is not None
    mean, std = NORMALIZATION.tensors(images)
    values = ((images - mean) / std).flatten(1) @ found[1].functional
    return torch.bucketize(values, found[1].edges) - 1


def is_alone(model: Backbone, images: Tensor) -> Tensor:
    own = bins(model, images)
    alone: Tensor = (own[:, None] == own[None, :]).sum(dim=1) == 1
    return alone


def labels_of(n: int) -> Tensor:
    return torch.arange(n) * 3 % 4


def observe(model: Backbone, images: Tensor, defense: Defense | None = None, known: bool = True) -> Observation:
    knowledge = Knowledge(labels=known)
    return Client(model, defense=defense).observe(images, labels_of(len(images)), knowledge)


def psnr(result: Reconstruction, images: Tensor) -> tuple[Tensor, Tensor]:
    """Best PSNR in dB of every image, and by which reconstruction."""
    error = (images[:, None] - result.images[None]).square().flatten(2).mean(2)
    best = error.min(dim=1)
    return -10 * best.values.clamp(min=1e-15).log10(), best.indices


def test_secure_aggregation_hides_no_image(server: Callable[..., Backbone], photographs: Tensor) -> None:
    model, images = server(photographs[100:]), photographs[:SIZE]
    client = ClientSettings(n_clients=2).client(model, None)
    result = RobbingTheFed(KnownLabels())(client.observe(images, labels_of(SIZE), Knowledge(labels=True)))
    alone = is_alone(model, images)
    quality, which = psnr(result, images)
    assert quality[alone].min() > 60
    assert torch.equal(result.labels[which][alone], labels_of(SIZE)[alone])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation": "hardtanh"},
        {"connection": "add"},
        {"functional": "cosine", "bins": "laplace"},
        {"bins": "gaussian", "gain": 1.0},
    ],
)
def test_every_image_alone_in_its_bin_is_recovered(
    settings: dict[str, object], server: Callable[..., Backbone], photographs: Tensor
) -> None:
    model, images = server(photographs[100:], **settings), photographs[:SIZE]
    alone = is_alone(model, images)
    result = RobbingTheFed(KnownLabels())(observe(model, images))
    quality, which = psnr(result, images)
    assert alone.sum() > SIZE / 4
    assert quality[alone].min() > 60
    assert torch.equal(result.labels[which][alone], labels_of(SIZE)[alone])
    hit = len(bins(model, images).unique())
    assert f"{hit} of " in result.notes[0]
    assert f"at least {max(0, 2 * hit - SIZE)} and at most {hit} images are alone" in result.notes[1]


def test_the_number_recovered_is_that_of_random_images_alone_in_their_bins(
    server: Callable[..., Backbone], photographs: Tensor
) -> None:
    model = server(photographs[120:])
    counts = torch.bincount(bins(model, photographs[:120]), minlength=128).double()
    share = counts / counts.sum()
    n, seeds = 16, 4
    # of images drawn with replacement
    expected = n * (share * (1 - share) ** (n - 1)).sum()
    found = []
    for seed in range(seeds):
        images = photographs[torch.randint(120, (n,), generator=torch.Generator().manual_seed(seed))]
        exact = psnr(RobbingTheFed(KnownLabels(), denoise=False)(observe(model, images)), images)[0] > 60
        alone = is_alone(model, images)
        assert exact[alone].all()
        # others only where the images of a bin are one image, drawn repeatedly
        repeated = (images[:, None] == images[None]).flatten(2).all(2).sum(1) > 1
        assert not exact[~alone & ~repeated].any()
        found.append((exact & ~repeated).sum())
    recovered = torch.stack(found).double()
    # over 20 batches 12.2 with a standard error of 0.51, 11.9 expected: 2.3 for one batch, and three standard errors
    assert (recovered.mean() - expected).abs() < 3 * 2.3 / seeds**0.5


@pytest.mark.parametrize("activation", ["relu", "hardtanh"])
@pytest.mark.parametrize(
    ("defense", "least_median"),
    [
        (GaussianNoise(1e-6, relative=True), 90.0),
        (GaussianNoise(1e-3, relative=True), 50.0),
        (GaussianNoise(1e-1, relative=True), 20.0),
        (GradientPruning(0.5), 60.0),
        (GradientDropout(0.3), 24.0),
        (GradientClipping(1.0), 90.0),
        (PerExampleClipping(0.1), 90.0),
    ],
    ids=repr,
)
def test_defenses_cost_no_more_than_they_must(
    activation: str, defense: Defense, least_median: float, server: Callable[..., Backbone], photographs: Tensor
) -> None:
    model, images = server(photographs[100:], activation=activation), photographs[:SIZE]
    alone = is_alone(model, images)
    result = RobbingTheFed(KnownLabels())(observe(model, images, defense))
    quality, _ = psnr(result, images)
    assert quality[alone].median() > least_median
    if isinstance(defense, GaussianNoise) and defense.std == 1e-6:
        assert (quality[alone] > 50).double().mean() >= 0.95


def test_denoising_helps_under_noise(server: Callable[..., Backbone], photographs: Tensor) -> None:
    model, images = server(photographs[100:]), photographs[:SIZE]
    seen = observe(model, images, GaussianNoise(0.1, relative=True))
    alone = is_alone(model, images)
    with_prior, without = (
        psnr(RobbingTheFed(KnownLabels(), denoise)(seen), images)[0][alone].mean() for denoise in (True, False)
    )
    assert with_prior > without + 0.3


def test_fewer_bins_than_images_are_filled_with_the_mean_color(
    server: Callable[..., Backbone], photographs: Tensor
) -> None:
    images, labels = photographs[:1].repeat(3, 1, 1, 1), torch.full((3,), 2)
    client = Client(server(photographs[100:]))
    result = RobbingTheFed(KnownLabels())(client.observe(images, labels, Knowledge(labels=True)))
    assert "2 of 3 images returned as the data's mean color" in result.notes[-1]
    expected = torch.tensor(NORMALIZATION.mean)[None, :, None, None].expand(2, 3, 16, 16)
    torch.testing.assert_close(result.images[1:], expected)
    assert psnr(result, images[:1])[0].item() > 60


def test_one_shot_finds_the_image_in_its_bin(server: Callable[..., Backbone], photographs: Tensor) -> None:
    model = server(photographs, one_shot=24)
    inside = bins(model, photographs) == 0
    images = torch.cat([photographs[~inside & (bins(model, photographs) >= -1)][:23], photographs[inside][:1]])
    result = RobbingTheFed(KnownLabels())(observe(model, images))
    assert psnr(result, images)[0][-1] > 50
    assert "1 of 1 bins hit by 24 images" in result.notes[0]
    assert "imprint: 1 decoded images explain their part of the gradient alone" in result.notes
    assert "23 of 24 images returned as the data's mean color" in result.notes[-1]


def test_mean_color_outside_of_the_only_bin_explains_nothing(
    server: Callable[..., Backbone], photographs: Tensor
) -> None:
    model = server(photographs, one_shot=24, activation="hardtanh")
    mean = torch.tensor(NORMALIZATION.mean)[None, :, None, None].expand(1, 3, 16, 16)
    assert bins(model, mean) != 0  # its derivative is zero there, as is that of an image that was not found
    result = RobbingTheFed(KnownLabels())(observe(model, photographs[bins(model, photographs) != 0][:4]))
    assert result.notes[:2] == (
        "imprint: 0 of 1 bins hit by 4 images",
        "imprint: 0 decoded images explain their part of the gradient alone",
    )


def test_an_image_that_spreads_over_two_bins_is_returned_once(
    server: Callable[..., Backbone], photographs: Tensor
) -> None:
    """As after local steps, during which the functional moves: half of an image's gradient ends up one bin higher."""
    model, images = server(photographs[100:]), photographs[:3]
    seen = observe(model, images)
    own = int(bins(model, images)[0])
    for part in ("weight", "bias"):
        rows = seen.update[f"trunk.imprint.measure.{part}"]
        rows[own + 1] += 0.5 * (rows[own] - rows[own + 1])
    result = RobbingTheFed(KnownLabels())(seen)
    assert (psnr(result, images)[0] > 50).all()
    assert "1 hits left out" in result.notes[-1]
    assert not any("alone in their bin" in note for note in result.notes)


def test_an_image_that_moves_during_local_steps_comes_back() -> None:
    """A single image's rows are all multiples of it; its functional lies outside the bins that it moved to."""
    public, test = Digits().load()
    torch.manual_seed(0)
    network = ConvNet(test.image_shape, widths=[8, 16], norm="group", activation="elu")
    model = Backbone(network, 10, Normalization((0.3,), (0.38,)))
    modified = Imprint(n_bins=32, functional="mean", bins="public").modify(model, public.pixels(torch.arange(1438)))
    client = ClientSettings(local_steps=LocalTraining(steps=3, lr=0.02)).client(modified, None)
    for index in range(10):
        image, label = test.pixels(torch.tensor([index])), test.labels[index : index + 1]
        result = RobbingTheFed(KnownLabels())(client.observe(image, label, Knowledge(labels=True)))
        assert float(psnr(result, image)[0]) > 50


@pytest.mark.parametrize("steps", [1, 2])
def test_images_alone_in_their_bins_are_counted_only_where_none_moves(
    steps: int, server: Callable[..., Backbone], photographs: Tensor
) -> None:
    client = ClientSettings(local_steps=LocalTraining(steps=steps, lr=0.01)).client(server(photographs[100:]), None)
    result = RobbingTheFed(KnownLabels())(client.observe(photographs[:3], labels_of(3), Knowledge(labels=True)))
    assert any("alone in their bin" in note for note in result.notes) == (steps == 1)


def test_labels_are_counted_where_they_are_hidden(server: Callable[..., Backbone], photographs: Tensor) -> None:
    model, images = server(photographs[100:]), photographs[:4]
    result = RobbingTheFed(HeadCounts())(observe(model, images, known=False))
    _, which = psnr(result, images)
    alone = is_alone(model, images)
    assert torch.equal(result.labels[which][alone], labels_of(4)[alone])


def test_no_gradient_gives_the_mean_color(server: Callable[..., Backbone], photographs: Tensor) -> None:
    for activation in ("relu", "hardtanh"):
        seen = observe(server(photographs[100:], activation=activation), photographs[:2])
        for value in seen.update.values():
            value.zero_()
        result = RobbingTheFed(KnownLabels())(seen)
        assert result.images.flatten(2).std(dim=2).max() < 1e-6


def test_honest_servers_are_refused(photographs: Tensor) -> None:
    model = Backbone(ConvNet((3, 16, 16), widths=[4]), 10, NORMALIZATION)
    labels = labels_of(2)
    with pytest.raises(ThreatModelError, match="malicious server .* imprint block .*; Backbone holds none"):
        RobbingTheFed().check([Client(model).observe(photographs[:2], labels)])


def test_labels_cannot_be_optimized() -> None:
    with pytest.raises(ConfigError, match="cannot optimize labels"):
        RobbingTheFed(JointLabels())


def staircase(steps: dict[int, float], m: int = 24, d: int = 60) -> Tensor:
    """Rows that fall by a random vector of the given length after each index."""
    rows = torch.zeros(m, d, dtype=torch.float64)
    for at, length in steps.items():
        direction = torch.randn(d, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
        rows[: at + 1] += length * direction / direction.norm()
    return rows


def noise(rows: Tensor, std: float) -> Tensor:
    return rows + std * torch.randn(rows.shape, generator=torch.Generator().manual_seed(99), dtype=rows.dtype)


def test_steps_are_found_by_size() -> None:
    hits = step_rows(staircase({3: 1.0, 4: 3.0, 15: 2.0}), n=5)
    assert hits.bins.tolist() == [4, 15, 3]
    torch.testing.assert_close(hits.rows.norm(dim=1), torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    assert hits.noise.max() < 1e-9


def test_noise_is_measured_and_makes_no_hits() -> None:
    hits = step_rows(noise(staircase({5: 3.0, 15: 2.0}), 0.05), n=6)
    assert hits.bins.tolist() == [5, 15]
    # rows 6 to 15 and 16 to 23 are averaged
    assert hits.noise[1].item() == pytest.approx(0.05 * (1 / 10 + 1 / 8) ** 0.5, rel=0.1)
    assert step_rows(noise(staircase({}), 0.05), n=6).bins.tolist() == []


def test_rounding_along_one_image_makes_no_hits() -> None:
    """As where opposite gradients of two images in a bin cancel: what is left varies in one dimension only."""
    rows, generator = staircase({20: 1.0, 60: 2.0, 90: 0.5}, m=129), torch.Generator().manual_seed(3)
    direction = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
    amounts = torch.randn(91, 1, generator=generator, dtype=torch.float64)
    rows[:91] += 1e-4 * amounts * direction / direction.norm()
    # taken for noise that varies in all dimensions, it makes some twenty more
    assert sorted(step_rows(rows, n=16).bins.tolist()) == [20, 60, 90]


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "hardtanh"])
def test_clipping_of_single_examples_hides_no_label(
    activation: str, server: Callable[..., Backbone], photographs: Tensor
) -> None:
    model, images = server(photographs[100:], activation=activation), photographs[:SIZE]
    result = RobbingTheFed()(observe(model, images, PerExampleClipping(0.1), known=False))
    alone = is_alone(model, images)
    _, which = psnr(result, images)
    # measured 1.0; by the length of the derivatives alone 0.3
    assert (result.labels[which] == labels_of(SIZE))[alone].double().mean() > 0.9


def test_sparse_rows_tell_hits_from_noise() -> None:
    rows = torch.zeros(24, 60, dtype=torch.float64)
    rows[7], rows[20] = 1.0, -0.5
    assert separate_rows(rows, n=5).bins.tolist() == [7, 20]
    noisy = separate_rows(noise(rows, 0.05), n=5)
    assert noisy.bins.tolist() == [7, 20]
    assert noisy.noise[0].item() == pytest.approx(0.05, rel=0.2)


def test_dropped_entries_come_from_other_rows() -> None:
    rows = staircase({5: 3.0, 15: 2.0})
    kept = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) > 0.4
    hits = step_rows(rows * kept, n=4)
    truth = step_rows(rows, n=4)
    assert hits.bins.tolist() == [5, 15]
    assert hits.known.double().mean() > 0.9
    torch.testing.assert_close(hits.rows, torch.where(hits.known, truth.rows, 0.0), rtol=0.0, atol=1e-12)
