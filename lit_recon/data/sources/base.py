"""The interface of image sources."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lit_recon.data.dataset import ImageSet
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
            MissingDataError: if the files are not there and cannot be fetched.
            CorruptFileError: if a file is truncated or not what its name promises.
            ShapeError: if arrays are not images and labels, the two sets do not match, or there is only one class.
        """
        self.prepare()
        train, test = self.read()
        if train.image_shape != test.image_shape or train.class_names != test.class_names:
            raise ShapeError(
                f"{self.name}: training and test images must agree in shape and classes; got {train} and {test}"
            )
        if train.n_classes < 2:
            raise ShapeError(f"{self.name}: a classifier needs at least two classes; got {train.class_names}")
        return train, test

    def prepare(self) -> None:  # noqa: B027  (most sources have nothing to fetch)
        """Fetch what `read` needs and is not there yet."""

    @abstractmethod
    def read(self) -> tuple[ImageSet, ImageSet]:
        """Read training and test images from files that are there."""


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR100_CLASSES = tuple(_CIFAR100.split())

DIGITS = tuple(str(digit) for digit in range(10))
