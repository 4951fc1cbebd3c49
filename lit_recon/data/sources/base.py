"""The interface of image sources."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lit_recon.data.dataset import ImageSet
from lit_recon.data.splits import hold_out
from lit_recon.errors import ShapeError


class ImageSource(ABC):
    """A source of images. A subclass implements `read` and, if it has to fetch its files, `prepare`."""

    @property
    def name(self) -> str:
        """Lower-case name for messages and reports."""
        return type(self).__name__.lower()

    def load(self) -> tuple[ImageSet, ImageSet]:
        """The public (training) and the test images.

        Raises:
            MissingDataError: the files are not there and cannot be fetched.
            CorruptFileError: a file is truncated or not what its name promises.
            ShapeError: arrays are not images and labels, the two sets do not match, or there is only one class.
        """
        self.prepare()
        try:
            train, test = self.read()
            if train.image_shape != test.image_shape or train.class_names != test.class_names:
                raise ShapeError(
                    f"{self.name}: training and test images must agree in shape and classes; got {train} and {test}: "
                    "change one of them"
                )
            if train.n_classes < 2:
                raise ShapeError(
                    f"{self.name}: a classifier needs at least two classes; got {train.class_names}: add one"
                )
        except ShapeError as error:  # of a set of images, which does not know its file
            root = getattr(self, "root", None)
            if root is None or str(root) in str(error):
                raise
            raise ShapeError(f"{root}: {error}") from error
        return train, test

    def prepare(self) -> None:  # noqa: B027  (most sources have nothing to fetch)
        """Fetch what `read` needs and is not there yet."""

    @abstractmethod
    def read(self) -> tuple[ImageSet, ImageSet]:
        """Read training and test images from files that are there."""

    def _held_out(self, images: ImageSet, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
        """Training and test images, cut from one set by `hold_out`."""
        train, test = hold_out(images.labels, fraction, seed)
        return images.subset(train, f"{self.name} train"), images.subset(test, f"{self.name} test")
