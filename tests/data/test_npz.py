"""Archives: what is read, what is held out, and what a damaged or unusual file leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_recon.data.sources import Npz
from lit_recon.errors import CorruptFileError, LitReconError, MissingDataError, ShapeError

RNG = np.random.default_rng(0)


def arrays(n: int = 30, n_classes: int = 3, prefix: str = "train") -> dict[str, np.ndarray]:
    return {
        f"{prefix}_images": RNG.integers(0, 256, (n, 6, 5, 3), dtype=np.uint8),
        f"{prefix}_labels": (np.arange(n) % n_classes).astype(np.uint8),
    }


def write(folder: Path, content: dict[str, Any], name: str = "toy.npz") -> Path:
    np.savez(folder / name, **content)
    return folder / name


def test_reads_both_splits(tmp_path: Path) -> None:
    content = arrays() | arrays(12, prefix="test")
    train, test = Npz(write(tmp_path, content)).load()
    assert (train.name, test.name) == ("toy train", "toy test")
    assert np.array_equal(train.images.permute(0, 2, 3, 1).numpy(), content["train_images"])
    assert np.array_equal(test.images.permute(0, 2, 3, 1).numpy(), content["test_images"])
    assert train.labels.tolist() == content["train_labels"].tolist()
    assert test.labels.tolist() == content["test_labels"].tolist()
    assert train.class_names == ["0", "1", "2"]


def test_holds_out_a_seeded_tenth_without_a_test_split(tmp_path: Path) -> None:
    path = write(tmp_path, arrays(60))
    train, test = Npz(path).load()
    assert (len(train), len(test)) == (54, 6)
    assert test.labels.bincount().tolist() == [2, 2, 2]
    assert np.array_equal(test.images.numpy(), Npz(path).load()[1].images.numpy())
    assert not np.array_equal(test.images.numpy(), Npz(path, seed=1).load()[1].images.numpy())
    assert len(Npz(path, holdout=0.5).load()[1]) == 30


def test_reads_gray_images_without_a_channel_axis(tmp_path: Path) -> None:
    content = arrays()
    content["train_images"] = content["train_images"][..., 0]
    assert Npz(write(tmp_path, content)).load()[0].image_shape == (1, 6, 5)


def test_class_names_from_the_file_or_the_caller(tmp_path: Path) -> None:
    path = write(tmp_path, arrays() | {"class_names": np.array(["ant", "bee", "cat"])})
    assert Npz(path).load()[0].class_names == ["ant", "bee", "cat"]
    assert Npz(path, class_names=["x", "y", "z", "unseen"]).load()[0].class_names == ["x", "y", "z", "unseen"]


def test_other_arrays_are_ignored(tmp_path: Path) -> None:
    content = arrays()
    plain = Npz(write(tmp_path, content)).load()
    more = Npz(write(tmp_path, content | {"train_index": np.arange(30)}, "more.npz")).load()
    for one, other in zip(plain, more, strict=True):
        assert np.array_equal(one.images, other.images)
        assert one.labels.tolist() == other.labels.tolist()


def test_takes_text_for_a_path(tmp_path: Path) -> None:
    assert len(Npz(str(write(tmp_path, arrays()))).load()[0]) == 27  # type: ignore[arg-type]  # what YAML-free callers do


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, arrays(), "other.npz")
    for path in (tmp_path / "toy.npz", tmp_path):
        with pytest.raises(MissingDataError, match=r"expected an \.npz file; .*other\.npz"):
            Npz(path).load()
    with pytest.raises(MissingDataError, match=r"nowhere: none\)"):
        Npz(tmp_path / "nowhere" / "toy.npz").load()


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file(tmp_path: Path, kept: float) -> None:
    path = write(tmp_path, arrays())
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CorruptFileError, match=r"toy\.npz: cannot be read as an \.npz file .* truncated"):
        Npz(path).load()


def test_a_file_with_flipped_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, arrays())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"cannot be read as an \.npz file .*CRC"):
        Npz(path).load()


def test_a_file_of_another_format(tmp_path: Path) -> None:
    path = tmp_path / "toy.npz"
    path.write_text("train_images,train_labels\n")
    with pytest.raises(CorruptFileError, match=r"arrays \(it begins with b'train_'\); .* of another format") as error:
        Npz(path).load()
    assert "pickle" not in str(error.value)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(CorruptFileError, match=r"got a single array: use np\.savez"):
        Npz(path).load()


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    content = arrays() | {"train_labels": np.array([{"a": 1}] * 30, dtype=object)}
    with pytest.raises(CorruptFileError, match="Object arrays cannot be loaded"):
        Npz(write(tmp_path, content)).load()


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        ({"x": np.zeros(1)}, "train_images, train_labels missing, found x"),
        ({}, "train_images, train_labels missing, found none"),
        ({"train_images": arrays()["train_images"]}, "train_labels missing, found train_images"),
        (arrays() | {"test_images": arrays()["train_images"]}, "test_labels missing"),
        (arrays() | {"test_labels": arrays()["train_labels"]}, "test_images missing"),
    ],
)
def test_missing_arrays_are_named(tmp_path: Path, content: dict[str, np.ndarray], missing: str) -> None:
    with pytest.raises(CorruptFileError, match=missing):
        Npz(write(tmp_path, content)).load()


LABELS = arrays()["train_labels"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_images": np.zeros((30, 6, 5, 3), np.float32)}, "toy train: images must be uint8"),
        ({"train_images": np.zeros((30, 3, 6, 5), np.uint8)}, r"transpose\(0, 2, 3, 1\)"),
        ({"train_labels": LABELS[:20]}, r"labels must be int64 \(30,\), one per image; got torch.int64 \(20,\)"),
        ({"train_labels": LABELS + 1}, "training labels must be 0 to k - 1 .* got 3 different labels"),
        ({"train_labels": np.where(LABELS == 2, 255, LABELS)}, r"from \[0\] to \[255\]: renumber them"),
        ({"train_labels": LABELS.astype(int) - 1}, r"from \[-1\] to \[1\]"),
        ({"train_labels": np.eye(3, dtype=np.uint8)[LABELS]}, "one-hot"),
        ({"train_labels": np.zeros(30, np.uint8)}, "at least two classes"),
        (
            {"train_labels": np.zeros(0, np.uint8), "train_images": np.zeros((0, 6, 5, 3), np.uint8)},
            "at least one image",
        ),
        ({"class_names": np.array(["a", "b"])}, "labels must be 0 to 1.* got 0 to 2"),
        (
            {"test_labels": np.array([0, 1, 3]), "test_images": np.zeros((3, 6, 5, 3), np.uint8)},
            "toy test: labels must be",
        ),
        ({"test_labels": np.array([0, 1]), "test_images": np.zeros((2, 6, 6, 3), np.uint8)}, "agree in shape"),
    ],
)
def test_arrays_that_are_not_labeled_images(tmp_path: Path, changed: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ShapeError, match=message) as caught:
        Npz(write(tmp_path, arrays() | changed)).load()
    assert isinstance(caught.value, LitReconError)
