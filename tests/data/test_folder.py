"""Folders of image files of all the kinds that people have lying about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_recon.data.sources import ImageFolder
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, ShapeError


def noise(seed: int, width: int = 6, height: int = 4) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def fill(root: Path, classes: tuple[str, ...] = ("ant", "bee"), n: int = 4) -> Path:
    for position, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(n):
            noise(10 * position + number).save(root / name / f"{number}.png")
    return root


def whole(root: Path, **settings: object) -> dict[int, torch.Tensor]:
    """All images of training and test split by label, in the order of their files, of which each class has one."""
    train, test = ImageFolder(root, **settings).load()  # type: ignore[arg-type]  # settings of several types
    return {int(label): image for part in (train, test) for image, label in zip(part.images, part.labels, strict=True)}


def test_reads_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    train, test = ImageFolder(fill(tmp_path / "zoo", ("cat", "ant", "bee"))).load()
    assert train.class_names == ["ant", "bee", "cat"]
    assert train.image_shape == (3, 4, 6)
    assert (train.name, test.name) == ("zoo train", "zoo test")
    assert test.labels.tolist() == [0, 1, 2]
    assert train.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    written = {noise(seed).tobytes() for seed in [*range(4), *range(10, 14), *range(20, 24)]}
    found = {image.permute(1, 2, 0).numpy().tobytes() for part in (train, test) for image in part.images}
    assert found == written


def test_reads_given_splits(tmp_path: Path) -> None:
    fill(tmp_path / "train", ("ant", "bee", "cat"), n=3)
    fill(tmp_path / "test", ("bee",), n=2)
    train, test = ImageFolder(tmp_path).load()
    assert len(train) == 9
    assert test.labels.tolist() == [1, 1]
    assert test.class_names == train.class_names


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_validation_images_are_the_test_images_where_there_are_no_others(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / name, n=2)
    train, test = ImageFolder(tmp_path).load()
    assert train.class_names == test.class_names == ["ant", "bee"]
    assert (len(train), len(test)) == (8, 4)
    fill(tmp_path / "test", n=1)
    assert len(ImageFolder(tmp_path).load()[1]) == 2


@pytest.mark.parametrize("names", [("Train", "Val"), ("test", "val"), ("train", "rest"), ("training", "testing")])
def test_other_splits_are_refused_and_are_no_classes(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        fill(tmp_path / name)
    with pytest.raises(MissingDataError, match=r"expected the images of a class.*name the splits train and test"):
        ImageFolder(tmp_path).load()


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    fill(tmp_path, ("bus", "train"))
    assert ImageFolder(tmp_path).load()[0].class_names == ["bus", "train"]


def test_a_test_class_without_training_images(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / "test", ("bee", "wasp"))
    with pytest.raises(ShapeError, match=r"expected one of the training classes .*got 'wasp'"):
        ImageFolder(tmp_path).load()


def two_classes(root: Path, image: Image.Image, name: str = "x.png", **save: object) -> Path:
    """One class with noise, one with two copies of the image under test (one of them is held out)."""
    fill(root, ("a",), n=2)
    (root / "b").mkdir()
    for number in range(2):
        image.save(root / "b" / f"{number}{name}", **save)
    return root


def test_gray_images_become_three_equal_channels(tmp_path: Path) -> None:
    gray = noise(1).convert("L")
    image = whole(two_classes(tmp_path, gray))[1]
    assert all(np.array_equal(channel.numpy(), np.asarray(gray)) for channel in image)


def test_color_images_become_gray_on_request(tmp_path: Path) -> None:
    image = whole(two_classes(tmp_path, noise(1)), grayscale=True)[1]
    assert image.shape == (1, 4, 6)
    luma = np.asarray(noise(1)).astype(float) @ [0.299, 0.587, 0.114]  # ITU-R BT.601
    np.testing.assert_allclose(image[0].numpy(), luma, atol=1)


def test_transparent_pixels_become_white(tmp_path: Path) -> None:
    color = np.asarray(noise(1))
    alpha = np.zeros((4, 6, 1), np.uint8)
    alpha[:, :3] = 255
    image = whole(two_classes(tmp_path, Image.fromarray(np.concatenate([color, alpha], axis=2))))[1]
    assert np.array_equal(image[:, :, :3].numpy(), color[:, :3].transpose(2, 0, 1))
    assert (image[:, :, 3:] == 255).all()


def test_palette_images_keep_their_colors(tmp_path: Path) -> None:
    flat = Image.new("RGB", (6, 4), (10, 200, 30))
    image = whole(two_classes(tmp_path, flat.convert("P", palette=Image.Palette.ADAPTIVE)))[1]
    assert image[:, 2, 3].tolist() == [10, 200, 30]


def test_cameras_that_were_held_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the sensor was turned by a quarter
    image = whole(two_classes(tmp_path, noise(1, width=4, height=6), exif=exif))[1]
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.rot90(np.asarray(noise(1, width=4, height=6)), -1))


def test_mixed_sizes_need_a_size(tmp_path: Path) -> None:
    two_classes(tmp_path, noise(1, width=9, height=7))
    with pytest.raises(ShapeError, match=r"0\.png is 6x4 and .*0x\.png is 9x7: pass size="):
        ImageFolder(tmp_path).load()
    assert ImageFolder(tmp_path, size=8).load()[0].image_shape == (3, 8, 8)


def test_resizing_crops_the_center(tmp_path: Path) -> None:
    stripes = np.zeros((10, 30, 3), np.uint8)
    stripes[:, 10:20] = 200
    image = whole(two_classes(tmp_path, Image.fromarray(stripes)), size=5)[1]
    assert (image[:, :, 2] == 200).all()
    assert image.min() > 150  # near the border the interpolation sees some of what was cropped off


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "ant" / "._0.png").write_bytes(b"what one operating system leaves behind")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "ant" / ".ipynb_checkpoints").mkdir()
    noise(0).save(tmp_path / "ant" / ".ipynb_checkpoints" / "0-checkpoint.png")
    (tmp_path / "ant" / "young").mkdir()
    (tmp_path / "ant" / "0.png").rename(tmp_path / "ant" / "young" / "0.png")
    (tmp_path / "readme.png").write_text("not in a class")
    train, test = ImageFolder(tmp_path).load()
    assert len(train) + len(test) == 8
    assert train.class_names == ["ant", "bee"]


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif"])
def test_a_damaged_image_is_named(tmp_path: Path, suffix: str) -> None:
    fill(tmp_path)
    path = tmp_path / "bee" / f"damaged.{suffix}"
    noise(5, 40, 40).save(path)
    path.write_bytes(path.read_bytes()[:150])
    with pytest.raises(CorruptFileError, match=rf"damaged\.{suffix}: cannot be decoded as an image"):
        ImageFolder(tmp_path).load()


def test_a_text_file_named_like_an_image(tmp_path: Path) -> None:
    (fill(tmp_path) / "bee" / "page.png").write_text("<html>")
    with pytest.raises(CorruptFileError, match=r"page\.png: cannot be decoded"):
        ImageFolder(tmp_path).load()


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    two_classes(tmp_path, Image.fromarray(np.full((4, 6), 40_000, np.uint16)))
    with pytest.raises(ShapeError, match="expected 8 bits per channel; got mode 'I;16'"):
        ImageFolder(tmp_path).load()


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="expected a folder with one sub-folder"):
        ImageFolder(tmp_path / "nowhere").load()
    noise(0).save(tmp_path / "0.png")
    with pytest.raises(MissingDataError, match="there are no sub-folders"):
        ImageFolder(tmp_path).load()
    fill(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingDataError, match=r"empty: expected image files \(\.bmp, .*\); there are none"):
        ImageFolder(tmp_path).load()


def test_one_class_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="at least two classes"):
        ImageFolder(fill(tmp_path, ("ant",))).load()


def test_refuses_no_size() -> None:
    with pytest.raises(ConfigError, match="size must be at least 1 pixel; got 0"):
        ImageFolder(Path("x"), size=0)
