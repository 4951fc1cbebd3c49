"""What holds for every source: the two sets fit together, and reading needs no heavy import before it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lit_recon.data import ImageSet
from lit_recon.data.sources import Digits, ImageSource, Photos
from lit_recon.errors import ConfigError, ShapeError

ROOT = Path(__file__).parents[2]


def image_set(names: list[str], side: int = 2) -> ImageSet:
    return ImageSet(torch.zeros(2, 1, side, side, dtype=torch.uint8), torch.tensor([0, 0]), names, "toy")


@dataclass
class Pair(ImageSource):
    train: ImageSet
    test: ImageSet
    prepared: bool = False

    def prepare(self) -> None:
        self.prepared = True

    def read(self) -> tuple[ImageSet, ImageSet]:
        assert self.prepared
        return self.train, self.test


def test_loading_prepares_first() -> None:
    pair = Pair(image_set(["a", "b"]), image_set(["a", "b"]))
    assert pair.load() == (pair.train, pair.test)
    assert pair.name == "pair"


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (image_set(["a", "b"]), image_set(["a", "b"], side=3), "must agree in shape and classes"),
        (image_set(["a", "b"]), image_set(["a", "c"]), "must agree in shape and classes"),
        (image_set(["a"]), image_set(["a"]), "at least two classes"),
    ],
)
def test_refuses_sets_that_no_classifier_can_use(train: ImageSet, test: ImageSet, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Pair(train, test).load()


def test_the_room_imports_nothing_heavy() -> None:
    code = "import sys, lit_recon.data; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert not {"PIL", "pytorch_lightning", "sklearn", "torchvision"} & set(done.stdout.split())


def levels_of(images: ImageSet) -> set[tuple[float, ...]]:
    """The original 17 levels of each digit with its label."""
    rows = (images.images.flatten(1).double() * 16 / 255).round()
    return {(*row.tolist(), float(label)) for row, label in zip(rows, images.labels, strict=True)}


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    train, test = Digits().load()
    pixels, labels = load_digits(return_X_y=True)
    assert levels_of(train) | levels_of(test) == {(*row, label) for row, label in zip(pixels, labels, strict=True)}
    assert not levels_of(train) & levels_of(test)
    assert len(train) + len(test) == 1797
    assert train.image_shape == (1, 8, 8)
    assert train.images.max() == 255
    assert train.class_names == list("0123456789")


def test_digits_are_split_by_class_and_seed() -> None:
    train, test = Digits(seed=3).load()
    shares = test.labels.bincount() / (train.labels.bincount() + test.labels.bincount())
    np.testing.assert_allclose(shares, 0.2, atol=0.003)
    assert levels_of(test) == levels_of(Digits(seed=3).load()[1]) != levels_of(Digits().load()[1])


def test_digits_grow() -> None:
    small, large = Digits().load()[1], Digits(size=32).load()[1]
    assert large.image_shape == (1, 32, 32)
    assert torch.equal(small.labels, large.labels)
    shrunk = torch.nn.functional.avg_pool2d(large.pixels(), 4)
    assert (shrunk - small.pixels()).square().mean().sqrt() < 0.08


def test_digits_do_not_shrink() -> None:
    with pytest.raises(ConfigError, match=r"size must be at least 8, .* got 7"):
        Digits(size=7)


def test_a_source_shows_how_to_build_it_again() -> None:
    assert repr(Digits(size=16)) == "Digits(seed=0, size=16)"


def test_photos_are_color_crops_of_two_photographs() -> None:
    train, test = Photos().load()
    assert (len(train), len(test)) == (1064, 24)
    assert train.image_shape == test.image_shape == (3, 32, 32)
    assert train.class_names == [f"{name} {band}" for name in ("china", "flower") for band in (1, 2, 3, 4)]
    assert set(train.labels.tolist()) == set(test.labels.tolist()) == set(range(8))
    assert int(train.images.max()) > 240
    assert int(train.images.min()) < 10


def test_photos_are_the_same_every_time() -> None:
    first, second = Photos(side=16).load(), Photos(side=16).load()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


@pytest.mark.parametrize(("side", "scale", "stride"), [(32, 3, 4), (16, 4, 5), (106, 2, 7), (40, 1, 32)])
def test_no_test_photo_shares_a_pixel_with_a_training_photo(
    monkeypatch: pytest.MonkeyPatch, side: int, scale: int, stride: int
) -> None:
    # the column of every pixel, which survives averaging: columns 0 to 319 belong to test images, the rest to training
    column = np.repeat(np.arange(640)[None, :, None] >= 320, 427, axis=0).repeat(3, axis=2)
    photos = SimpleNamespace(images=[column.astype(np.uint8) * 255] * 2)
    monkeypatch.setattr("sklearn.datasets.load_sample_images", lambda: photos)
    train, test = Photos(side, scale, stride).load()
    assert int(test.images.max()) == 0
    assert int(train.images[..., 1:].min()) == 255


def test_test_photos_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    height, width = np.indices((427, 640))
    place = np.stack([height % 256, width % 256, height // 256 * 2 + width // 256], axis=2).astype(np.uint8)
    monkeypatch.setattr("sklearn.datasets.load_sample_images", lambda: SimpleNamespace(images=[place]))
    _, test = Photos(side=32, scale=1).load()
    pixels = test.images.permute(0, 2, 3, 1).flatten(0, 2)
    assert len(pixels.unique(dim=0)) == len(pixels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"stride": 0}, "at least 1; got side=32"), ({"side": 72, "scale": 3}, "at most 71 at scale=3")],
)
def test_photos_refuse_crops_that_do_not_fit(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Photos(**arguments)
