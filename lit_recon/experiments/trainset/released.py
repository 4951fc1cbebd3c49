"""The owner's side of an attack on a training set: images, training, and what is released."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_recon.attacks.trainset.base import Candidates, ReleasedModel
from lit_recon.attacks.trainset.training import Task, Training, Weights, accuracy, losses
from lit_recon.data import ImageSet, content_hash
from lit_recon.data.dataset import of_classes, relabelled, seeded_generator, without
from lit_recon.data.sources import ImageSource
from lit_recon.data.splits import in_pool, sample_victims
from lit_recon.errors import ConfigError, MissingDataError, ShapeError, UnsupportedModelError
from lit_recon.experiments.trainset.settings import ReleasedKey, TrainsetSettings
from lit_recon.experiments.trainset.starts import Start, StartMaterial
from lit_recon.io.tensors import TensorFormat, read_tensors
from lit_recon.metrics import MeanImage
from lit_recon.training.progress import Progress

#: Released weights and the start of their training.
MODEL_FORMAT = TensorFormat("lit_recon.trainset", "released model", "run the study again, which trains it")
#: Name of a model's file in its folder.
MODEL_FILE = "model.safetensors"
#: Images that pass through a network at a time, to measure its accuracy.
_CHUNK = 1024


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """A training set and what it is compared with; images `(n, c, h, w)` of the study's dtype, in [0, 1].

    Attributes:
        images, labels: of training, which the attacker is to find, sorted by label.
        ids: positions of these images in the test split; -1 where they are not from there.
        others: as many other images, with the same labels.
        known_images, known_labels: of training, which the attacker has, `(j, c, h, w)` and `(j,)`.
        public: public images, `(N, c, h, w)` in bytes.
        public_labels: `(N,)`.
        mean: of the public images, `(c, h, w)`.
        n_classes: number of labels.
        left_out: number of images of the data on which a model from elsewhere was trained, so that they are not public.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    others: Tensor
    known_images: Tensor
    known_labels: Tensor
    public: Tensor
    public_labels: Tensor
    mean: Tensor
    n_classes: int
    left_out: int = 0

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(c, h, w)`."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def n_examples(self) -> int:
        """Number of all training images."""
        return len(self.labels) + len(self.known_labels)

    def trained_on(self, index: int | None = None) -> tuple[Tensor, Tensor]:
        """All images and labels of training, the known ones first; without one of the others where `index` names it."""
        kept = torch.arange(len(self.labels), device=self.labels.device) != (-1 if index is None else index)
        return torch.cat([self.known_images, self.images[kept]]), torch.cat([self.known_labels, self.labels[kept]])


#: The data that were read last: all cells of a study use the same.
_LOADED: dict[str, tuple[ImageSet, ImageSet]] = {}


def _loaded(source: ImageSource) -> tuple[ImageSet, ImageSet]:
    name = repr(source)
    if name not in _LOADED:
        _LOADED.clear()
        _LOADED[name] = source.load()
    return _LOADED[name]


def split_hash(settings: TrainsetSettings) -> str:
    """Identifies the images that are there now, public ones and those to train on."""
    return content_hash(*_loaded(settings.data))


def recorded_data(folder: Path) -> object:
    """The `split_hash` of the images of the model in this folder; None without a model, or where it does not tell."""
    path = folder / MODEL_FILE
    return MODEL_FORMAT.read_header(path).get("split_hash") if path.is_file() else None


def training_set(settings: TrainsetSettings, seed: int) -> TrainingSet:
    """The training set of a seed and what it is compared with; a ConfigError where there are too few images."""
    loaded, classes = _loaded(settings.data), settings.examples.classes
    public, test = (relabelled(images, classes) for images in loaded)
    n_classes, wanted = public.n_classes, settings.examples.per_class
    pool, given, left_out = test.subset(in_pool(test, settings.examples.pool)), None, 0
    if settings.released is not None:
        given = _given(settings, test.image_shape, n_classes)
        size = len(public) + len(test)  # images of the other pool are not public either
        public, pool = without(public, given[0]), without(pool, given[0])
        left_out = size - len(public) - len(without(test, given[0]))
    counts = torch.bincount(pool.labels, minlength=n_classes)
    if settings.released is None and int(counts.min()) < 2 * wanted:
        raise ConfigError(
            f"{wanted} training images and as many others of each label need {2 * wanted} images in the pool "
            f"{settings.examples.pool}, which has {int(counts.min())} of one label: lower examples.per_class, or "
            "choose the pool all"
        )
    n = wanted * n_classes
    if settings.examples.n_public is not None and settings.examples.n_public < len(public):
        public = public.subset(sample_victims(public.labels, settings.examples.n_public))
    like = torch.zeros(0, dtype=getattr(torch, settings.dtype), device=settings.device)
    mean = MeanImage.from_images(public.images).image.to(like)
    if given is not None:
        images, labels, ids = given
        others = pool.subset(_others_like(labels, pool.labels, seed)).pixels()
    else:
        drawn = sample_victims(pool.labels, 2 * n, seed)
        chosen, rest = (part[pool.labels[part].argsort(stable=True)] for part in drawn.split(n))
        images, labels, others = pool.pixels(chosen), pool.labels[chosen], pool.pixels(rest)
        ids = of_classes(loaded[1], classes)[in_pool(test, settings.examples.pool)[chosen]]
    images, labels = images.to(like), labels.to(like.device)
    known, sought = _split_known(len(labels), settings.known.images, seed)
    return TrainingSet(
        images[sought],
        labels[sought],
        ids[sought],
        others.to(like)[sought],
        images[known],
        labels[known],
        public.images,
        public.labels,
        mean,
        n_classes,
        left_out,
    )


def _split_known(n: int, n_known: int, seed: int) -> tuple[Tensor, Tensor]:
    """Positions of training images that the attacker has, and of all others, both sorted."""
    if n_known >= n:
        raise ConfigError(
            f"known.images={n_known} leaves none of the {n} training images to reconstruct: lower known.images, or "
            "raise examples.per_class"
        )
    order = torch.randperm(n, generator=seeded_generator(seed, "known")) if n_known else torch.arange(n)
    return order[:n_known].sort().values, order[n_known:].sort().values


def _given(
    settings: TrainsetSettings, image_shape: tuple[int, int, int], n_classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The training set of a model that was trained elsewhere."""
    assert settings.released is not None
    path = settings.released.examples
    found = read_tensors(path, "training images", "give a .safetensors file with images and labels")
    if not {"images", "labels"} <= found.keys():
        raise MissingDataError(f"{path} must hold images and labels; it holds {', '.join(found) or 'nothing'}")
    images, labels = found["images"], found["labels"].long()
    if images.shape[1:] != image_shape or labels.shape != images.shape[:1] or not len(labels):
        raise ShapeError(
            f"{path} must hold images (n, {', '.join(map(str, image_shape))}) and labels (n,); got "
            f"{tuple(images.shape)} and {tuple(labels.shape)}"
        )
    if not 0 <= images.min() <= images.max() <= 1 or not 0 <= labels.min() <= labels.max() < n_classes:
        raise ShapeError(f"{path} must hold images in [0, 1] and labels 0 to {n_classes - 1}")
    order = labels.argsort(stable=True)
    return images[order], labels[order], torch.full_like(labels, -1)


def _others_like(labels: Tensor, pool: Tensor, seed: int) -> Tensor:
    """Indices of images of a pool with the same labels; a ConfigError where a label has too few."""
    generator, found = seeded_generator(seed, "others"), []
    for label in labels.unique():
        members, wanted = torch.nonzero(pool == label).flatten(), int((labels == label).sum())
        if len(members) < wanted:
            raise ConfigError(f"the pool has {len(members)} images of label {int(label)}; {wanted} are needed")
        found.append(members[torch.randperm(len(members), generator=generator)[:wanted]])
    return torch.cat(found)


def network_of(settings: TrainsetSettings, examples: TrainingSet, seed: int) -> nn.Module:
    """The architecture with initial weights of this seed; subtracts the public mean image if it subtracts one."""
    n_outputs = examples.n_classes if settings.training.task == "multiclass" else 1
    generator = seeded_generator(seed, "weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        try:
            network = settings.network(examples.image_shape, n_outputs)
            mean = getattr(network, "mean", None)
            if isinstance(mean, Tensor) and tuple(mean.shape) == examples.image_shape:
                mean.copy_(examples.mean)
            if callable(initialize := getattr(network, "initialize", None)):
                initialize(generator)
            outputs = network.to(examples.images).eval()(examples.images[:1])
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"the network cannot be built from image_shape={examples.image_shape} and n_outputs={n_outputs}, or "
                f"does not take such images ({' '.join(str(error).split())}): give a class that does"
            ) from error
    if tuple(outputs.shape) != (1, n_outputs):
        raise ShapeError(f"the network must return {n_outputs} outputs per image; got {tuple(outputs.shape)}")
    return network


def initial_weights(network: nn.Module) -> Weights:
    """The weights of a network by parameter name."""
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}


@torch.no_grad()
def public_accuracy(task: Task, network: nn.Module, weights: Weights, examples: TrainingSet) -> float:
    """Share of the public images that are classified correctly."""
    parts = (
        functional_call(network, weights, (images.to(examples.images) / 255,)).cpu()
        for images in examples.public.split(_CHUNK)
    )
    return accuracy(task, torch.cat([*parts]), examples.public_labels)


@dataclass(frozen=True)
class ModelTraining:
    """Trains one released model of a study, without one image where it is to be left out."""

    settings: TrainsetSettings
    key: ReleasedKey
    training: Training

    def __call__(self, folder: Path) -> str:
        """Write the model's file; its training loss in words."""
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        examples = training_set(self.settings, self.key.seed)
        network = network_of(self.settings, examples, self.key.seed)
        if self.settings.released is not None:
            header = self._given(folder, network, examples)
        else:
            header = self._trained(folder / MODEL_FILE, network, examples, examples.trained_on())
        return f"training loss {header['loss']:.3g}"

    def without(self, folder: Path, examples: TrainingSet, index: int) -> Path:
        """The file of the model trained without one image from the same start; trained where it is not there yet."""
        path = folder / f"without_{index}.safetensors"
        if not path.is_file():
            network = network_of(self.settings, examples, self.key.seed)
            self._trained(path, network, examples, examples.trained_on(index))
        return path

    def _trained(
        self, path: Path, network: nn.Module, examples: TrainingSet, data: tuple[Tensor, Tensor]
    ) -> dict[str, Any]:
        start, began = initial_weights(network), time.perf_counter()
        progress = Progress(self.training.steps, "training", "steps")
        noise = seeded_generator(self.key.seed, "noise")
        found = self.training.run(network, *data, start, lambda loss: progress.advance(1, loss=loss), noise)
        progress.close()
        return self._write(path, network, examples, found.weights, start, found.loss, found.steps, began)

    def _given(self, folder: Path, network: nn.Module, examples: TrainingSet) -> dict[str, Any]:
        began = time.perf_counter()
        weights, start, loss = given_weights(self.settings, network, examples)
        return self._write(folder / MODEL_FILE, network, examples, weights, start, loss, 0, began)

    def _write(
        self,
        path: Path,
        network: nn.Module,
        examples: TrainingSet,
        weights: Weights,
        start: Weights,
        loss: float,
        steps: int,
        began: float,
    ) -> dict[str, Any]:
        right = public_accuracy(self.training.task, network, weights, examples)
        facts = {"split_hash": split_hash(self.settings), "seconds": time.perf_counter() - began}
        header: dict[str, Any] = {"loss": loss, "steps": steps, "accuracy": right, **facts}
        header["epsilon"] = self.training.epsilon if self.training.epsilon < torch.inf else None
        parts = {"weights": weights, "start": start}
        tensors = {f"{part}.{name}": value for part, own in parts.items() for name, value in own.items()}
        MODEL_FORMAT.write(path, tensors, header)
        return header


def given_weights(
    settings: TrainsetSettings, network: nn.Module, examples: TrainingSet
) -> tuple[Weights, Weights, float]:
    """Weights of a model that was trained elsewhere, those of its start (empty if unknown), and its training loss.

    Raises as `ReleasedModel` where they do not fit the network.
    """
    files, remedy = settings.released, "give weights by parameter name"
    assert files is not None
    weights = _on(read_tensors(files.weights, "released weights", remedy), examples.images)
    start = _on(read_tensors(files.start, "initial weights", remedy), examples.images) if files.start else {}
    known = ReleasedModel(
        network,
        weights,
        settings.training.task,
        examples.image_shape,
        examples.n_classes,
        examples.mean,
        examples.n_examples,
        start=start or None,
    )
    images, labels = examples.trained_on()
    with torch.no_grad():
        loss = losses(known.task, known.outputs(weights, images), labels).mean()
    return weights, start, float(loss)


def _on(tensors: Mapping[str, Tensor], like: Tensor) -> Weights:
    return {name: value.to(like) for name, value in tensors.items()}


def read_released(
    settings: TrainsetSettings, training: Training, examples: TrainingSet, network: nn.Module, path: Path, n: int
) -> ReleasedModel:
    """What the attacker sees of a model whose file is there, trained on `n` images."""
    header, tensors = MODEL_FORMAT.read(path)
    tensors = _on(tensors, examples.images)
    weights, start = (
        {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
        for part in ("weights.", "start.")
    )
    return seen_of(settings, training, examples, network, weights, start or None, float(header["loss"]), n)


def seen_of(
    settings: TrainsetSettings,
    training: Training,
    examples: TrainingSet,
    network: nn.Module,
    weights: Weights,
    start: Weights | None,
    loss: float,
    n: int,
) -> ReleasedModel:
    """What the attacker sees of released weights, as `settings.known` grants it."""
    known = settings.known
    return ReleasedModel(
        network,
        weights,
        training.task,
        examples.image_shape,
        examples.n_classes,
        examples.mean,
        n,
        weight_decay=training.weight_decay if known.weight_decay else None,
        loss=loss if known.loss else None,
        training=training if known.training else None,
        start=start if known.start else None,
        known_images=examples.known_images if known.images else None,
        known_labels=examples.known_labels if known.images else None,
    )


def candidates_of(
    settings: TrainsetSettings,
    seen: ReleasedModel,
    examples: TrainingSet,
    start: Start,
    share: float,
    seed: int,
    restart: int,
) -> Candidates:
    """The start of one restart: labels of the images to be found, and images of this kind of start."""
    repeats, drawn = settings.candidates, seeded_generator(seed, "start", restart)
    orders = [_shuffled_within_labels(examples.labels, drawn) for _ in range(repeats)]
    material = StartMaterial(
        examples.images.repeat(repeats, 1, 1, 1),
        torch.cat([examples.others[order] for order in orders]),
        examples.mean,
        drawn,
    )
    attack_seed = int(torch.randint(2**31, (), generator=seeded_generator(seed, "attack", restart)))
    return Candidates(seen, start.images(material, share), examples.labels.repeat(repeats), attack_seed)


def _shuffled_within_labels(labels: Tensor, generator: torch.Generator) -> Tensor:
    """A permutation of positions that keeps every label; `labels` are sorted."""
    drawn = torch.rand(len(labels), generator=generator, dtype=torch.float64).to(labels.device)
    return (labels + drawn / 2).argsort()
