"""Data split of an informed adversary, who knows all training images of a released model but one, the target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lit_recon.data.dataset import ImageSet, seeded_generator
from lit_recon.data.sources.base import ImageSource
from lit_recon.data.splits import Pool, content_hash, in_pool
from lit_recon.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class InformedSplitSettings:
    """Sizes of the three parts, drawn from the training and test images of a source together.

    More shadow targets leave all other images as they are.

    Args:
        fixed: size of the fixed set.
        shadow: number of shadow target images, one shadow model each.
        targets: number of images to reconstruct, one released model each.
        seed: of the draw.
        pool: images that targets are drawn from: `development` to choose settings, `evaluation` to measure, disjoint;
            or `all`.
    """

    fixed: int = 500
    shadow: int = 8_000
    targets: int = 200
    seed: int = 0
    pool: Pool = "evaluation"

    def __post_init__(self) -> None:
        if self.fixed < 1 or self.shadow < 2 or self.targets < 1:
            raise ConfigError(
                "split.fixed and split.targets must be at least 1, split.shadow at least 2; "
                f"got {self.fixed}, {self.targets} and {self.shadow}"
            )


@dataclass(frozen=True, eq=False)
class InformedSplit:
    """Images of the parts; no two of them share an image, compared pixel by pixel.

    Attributes:
        fixed: training images of the released models, without the target image.
        shadow: images in the place of the target in the adversary's own models; `s` models use the first `s`.
        targets: images to reconstruct, one per released model.
        rest: images of the same source in no part; None if there are none.
        pretraining: training images of the released models' initial weights; None for random ones.
        foreign: the shadow targets are of another source.

    Raises:
        ConfigError: an image is in two parts, `rest` aside, or a shadow label is none of the fixed set's classes.
        ShapeError: the parts differ in the shape of their images.
    """

    fixed: ImageSet
    shadow: ImageSet
    targets: ImageSet
    rest: ImageSet | None = None
    pretraining: ImageSet | None = None
    foreign: bool = False

    def __post_init__(self) -> None:
        parts = {"the fixed set": self.fixed, "the shadow targets": self.shadow, "the test targets": self.targets}
        if self.pretraining is not None:
            parts["the images of the pre-training"] = self.pretraining
        shapes = {name: part.image_shape for name, part in parts.items()}
        if len(set(shapes.values())) != 1:
            raise ShapeError(f"all parts must hold images of one shape; got {shapes}: choose data of equal size")
        if int(self.shadow.labels.max()) >= self.fixed.n_classes:
            raise ConfigError(
                f"shadow labels must be 0 to {self.fixed.n_classes - 1}, the classes of the released models; got "
                f"{int(self.shadow.labels.max())}"
            )
        seen: dict[bytes, str] = {}
        for name, part in parts.items():
            own = _pixels(part)
            for index, pixels in enumerate(own):
                if seen.get(pixels, name) != name:
                    raise ConfigError(
                        f"{name} must share no image with {seen[pixels]}; image {index} of {part.name} is in both: "
                        "an adversary must not know a target image; remove it from one of them"
                    )
            seen.update(dict.fromkeys(own, name))

    @property
    def hash(self) -> str:
        """`content_hash` of all parts but `rest`."""
        earlier = () if self.pretraining is None else (self.pretraining,)
        return content_hash(self.fixed, self.shadow, self.targets, *earlier)

    @property
    def others(self) -> list[ImageSet]:
        """The images in none of the three parts, for the nearest-neighbor oracle only."""
        return [part for part in (self.rest, self.pretraining) if part is not None]

    @property
    def unseen(self) -> ImageSet:
        """Images of the source that no released model is trained on: the rest, or else the shadow targets.

        A ConfigError where both are missing, as the shadow targets are of another source.
        """
        if self.rest is None and self.foreign:
            raise ConfigError(
                "accuracy is measured on images of the data in no part of the split, of which none is left, and the "
                "shadow targets are of other data: lower split.fixed or split.targets"
            )
        return self.shadow if self.rest is None else self.rest

    def with_pretraining(self, n: int) -> InformedSplit:
        """The same with the last `n` images of the rest for pre-training; a ConfigError if the rest holds fewer."""
        left = 0 if self.rest is None else len(self.rest)
        if self.rest is None or left < n:
            raise ConfigError(
                f"pre-training needs {n} images that are in no part of the split; got {left}: lower "
                "initialization.images, split.shadow or split.fixed"
            )
        numbers = torch.arange(left)
        rest = self.rest.subset(numbers[: left - n]) if left > n else None
        return replace(self, rest=rest, pretraining=self.rest.subset(numbers[left - n :], f"{self.rest.name}, last"))


def draw_informed_split(
    source: ImageSource,
    settings: InformedSplitSettings,
    shadow_source: ImageSource | None = None,
    fixed: str = "fixed",
    shadow: str = "shadow",
) -> InformedSplit:
    """Draw the three parts; duplicate images count once, and too few of them are a `ConfigError`.

    Shadow targets may come from another source; if its classes differ, each image gets a random class of `source`.
    `fixed` and `shadow` are what the command calls these settings, for messages.
    """
    fewer = f"lower split.{fixed} or split.targets"
    images = _distinct(source)
    shadows = settings.shadow if shadow_source is None else 0
    wanted = {fixed: settings.fixed, "targets": settings.targets, **({shadow: shadows} if shadows else {})}
    if sum(wanted.values()) > len(images):
        most = len(images) - settings.fixed - settings.targets
        remedy = f"lower split.{shadow} to at most {most}" if shadows and most >= 2 else fewer
        raise ConfigError(
            f"split asks for {' + '.join(f'{size} {name}' for name, size in wanted.items())} images; {source.name} has "
            f"{len(images)} different ones: {remedy}"
        )
    order = torch.randperm(len(images), generator=seeded_generator(settings.seed, "informed split"))
    known, others = order[: settings.fixed], order[settings.fixed :]
    eligible = others[torch.isin(others, in_pool(images, settings.pool))]
    targets = eligible[: settings.targets]
    if len(targets) < settings.targets:
        raise ConfigError(
            f"split.targets must be at most {len(targets)}, the images of pool {settings.pool} of {source.name} "
            f"that are left beside {settings.fixed} {fixed}; got {settings.targets}: {fewer}, or set split.pool to all"
        )
    own, rest = others[~torch.isin(others, targets)].split([shadows, len(others) - len(targets) - shadows])
    return InformedSplit(
        images.subset(known, f"{source.name} fixed"),
        images.subset(own, f"{source.name} shadow")
        if shadow_source is None
        else _foreign_shadows(images, shadow_source, settings),
        images.subset(targets, f"{source.name} targets"),
        images.subset(rest, f"{source.name} rest") if len(rest) else None,
        foreign=shadow_source is not None,
    )


def _foreign_shadows(pool: ImageSet, source: ImageSource, settings: InformedSplitSettings) -> ImageSet:
    others = _distinct(source)
    if settings.shadow > len(others):
        raise ConfigError(
            f"split.shadow must be at most {len(others)}, the different images of {source.name}; got {settings.shadow}"
        )
    generator = seeded_generator(settings.seed, "shadow source")
    ids = torch.randperm(len(others), generator=generator)[: settings.shadow]
    chosen = others.subset(ids)
    labels = chosen.labels
    if others.class_names != pool.class_names:
        labels = torch.randint(pool.n_classes, (len(labels),), generator=generator)
    return ImageSet(chosen.images, labels, pool.class_names, f"{source.name} shadow")


def _distinct(source: ImageSource) -> ImageSet:
    """Training and test images of a source together, each once."""
    both = source.load()
    images = torch.cat([part.images for part in both])
    labels = torch.cat([part.labels for part in both])
    pool = ImageSet(images, labels, both[0].class_names, source.name)
    first: dict[bytes, int] = {}
    for index, pixels in enumerate(_pixels(pool)):
        first.setdefault(pixels, index)
    return pool if len(first) == len(pool) else pool.subset(torch.tensor(list(first.values())))


def _pixels(images: ImageSet) -> list[bytes]:
    return [image.tobytes() for image in images.images.contiguous().numpy()]
