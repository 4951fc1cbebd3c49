"""What the attack on feature maps finds with networks and image sizes other than CIFAR-10's.

    python -m benchmarks.architectures --data.root DIR --photos DIR [--cells "ResNet-18, 64x64/1" ...]

The networks are torchvision's, but for the plain ConvNet, for 10 classes, after 8 steps of training on enlarged images
of CIFAR-10. The private images are photographs, those of the folder and the two of scikit-learn, cut to squares and
reduced; the nearest of the other photographs stands beside the results.
The attacks are analytic inversion, for vision transformers, and those of `configs/attack/feature_maps.yaml` but for the
last, without a defense.

With `--record OUT` nothing is attacked: the update of each cell's first batch, new weights after one step of SGD, is
written as a user would record his own, `OUT/NETWORK_BATCH.safetensors`, for `attack.py audit`; `--frozen`: BatchNorm
uses its running statistics, as in much fine-tuning.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lit_recon._torchvision

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from benchmarks.certificates import Attacked, attacks_of, summary
from benchmarks.record import Record, Row
from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import AnalyticInversion, FirstApplicable
from lit_recon.attacks.updates.feature_maps.convolutions import find_convolutions
from lit_recon.attacks.updates.feature_maps.input_map import InputMap
from lit_recon.clients import Client
from lit_recon.clients.record import Recorder
from lit_recon.data.sources import CIFAR10
from lit_recon.metrics.fidelity import pairwise_mse
from lit_recon.models import ConvNet
from lit_recon.records import Knowledge, Normalization, Observation

CLASSES, STEPS, RATE = 10, 8, 0.02
#: Private photographs, at most.
MOST = 8


def _torchvision_network(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES, **arguments)
        return model

    return build


def _small_vit(patch_size: int, width: int) -> Callable[[], nn.Module]:
    blocks = {"image_size": 64, "num_layers": 4, "num_heads": 3, "mlp_dim": 768}
    return _torchvision_network("VisionTransformer", patch_size=patch_size, hidden_dim=width, **blocks)


def _plain() -> nn.Module:
    trunk = ConvNet((3, 32, 32), (64, 128, 256, 512), norm="none")
    return nn.Sequential(trunk, nn.Linear(trunk.out_features, CLASSES))


#: Networks by name, the side of their images, and the sizes of batches.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "ResNet-18, 64x64": (_torchvision_network("resnet18"), 64, (1, 4, 8)),
    "ResNet-18, 224x224": (_torchvision_network("resnet18"), 224, (1, 4)),
    "ConvNet without BatchNorm, 32x32": (_plain, 32, (1, 4)),
    "VGG-11, 64x64": (_torchvision_network("vgg11"), 64, (1, 4)),
    "VGG-11 with BatchNorm, 64x64": (_torchvision_network("vgg11_bn"), 64, (1, 4)),
    "AlexNet, 224x224": (_torchvision_network("alexnet"), 224, (1,)),
    "ViT, patches of 8, width 192, 64x64": (_small_vit(8, 192), 64, (1, 2)),
    "ViT, patches of 16, width 384, 64x64": (_small_vit(16, 384), 64, (1, 4)),
    "ViT-B/16, 224x224": (_torchvision_network("vit_b_16"), 224, (1,)),
}


@dataclass(frozen=True)
class OtherNetwork:
    """One row: `draws` batches of a network's updates."""

    network: str
    batch: int
    draws: int

    @property
    def name(self) -> str:
        return f"{self.network}/{self.batch}"


def cells() -> Iterator[OtherNetwork]:
    for network, (_, _, batches) in NETWORKS.items():
        for batch in batches:
            yield OtherNetwork(network, batch, draws=2 if batch == 1 else 1)


def photographs(folder: Path, side: int) -> Tensor:
    """Pictures of a folder by name, then scikit-learn's: the square in their middle, `(n, 3, side, side)` in [0, 1]."""
    from sklearn.datasets import load_sample_images

    paths = sorted(path for path in folder.iterdir() if path.suffix in (".png", ".jpg"))
    pictures = [
        *(np.array(Image.open(path).convert("RGB")) for path in paths),
        *map(np.array, load_sample_images().images),
    ]
    squares = []
    for picture in pictures[:MOST]:
        whole = torch.from_numpy(picture).permute(2, 0, 1) / 255
        edge = min(whole.shape[1:])
        top, left = ((size - edge) // 2 for size in whole.shape[1:])
        square = whole[None, :, top : top + edge, left : left + edge]
        squares.append(interpolate(square, (side, side), mode="area")[0])
    return torch.stack(squares)


def network(name: str, public: Tensor, labels: Tensor) -> nn.Module:
    """A network after a few steps on public images `(STEPS n, 3, h, w)`, enlarged to its size."""
    torch.manual_seed(0)
    build, side, _ = NETWORKS[name]
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for images, own in zip(public.chunk(STEPS), labels.chunk(STEPS), strict=True):
        optimizer.zero_grad()
        larger = interpolate(images, (side, side), mode="bilinear")
        cross_entropy(model(larger), own).backward()
        optimizer.step()
    return model.eval()


def measure(model: nn.Module, attack: Attack, images: Tensor, cell: OtherNetwork) -> Row:
    """The summary of a cell's batches, the distance of every image to the nearest other photograph, and `entries`."""
    batches = []
    nearest: list[float] = []
    entries: list[float] = []
    client = Client(model, image_shape=images.shape[1:], normalization=Normalization((0.5,) * 3, (0.25,) * 3))
    for number in range(cell.draws):
        chosen = (torch.arange(cell.batch) + number * cell.batch) % len(images)
        own = images[chosen]
        apart = pairwise_mse(own, images).sqrt()
        apart[torch.arange(len(own)), chosen] = torch.inf
        nearest += [float(f"{value:.3g}") for value in apart.min(1)[0].tolist()]
        seen = client.observe(own, torch.arange(cell.batch) + number, Knowledge())
        entries += entries_per_pixel(seen, own)
        batches.append(Attacked.by(attack, seen, own))
    least = round(min(entries), 2) if entries else None
    return {"images": cell.batch * cell.draws, "nearest_other": nearest, "entries": least, **summary(batches)}


def entries_per_pixel(seen: Observation, images: Tensor) -> list[float]:
    """Entries other than zero that the second convolution sees of every image, by its pixels; none without a second.

    With fewer than one, what all later layers see does not determine the image.
    """
    convolutions = find_convolutions(seen)
    if len(convolutions) < 2:
        return []
    with torch.no_grad():
        [maps] = InputMap(seen, convolutions[1].name, "eval").each(images)
    counts = (maps != 0).flatten(1).sum(1) / images[0].numel()
    return [float(count) for count in counts]


def record(model: nn.Module, images: Tensor, cell: OtherNetwork, out: Path, frozen: bool = False) -> None:
    """Write the weights before and after one step on the first images, pixels normalized, by a plain loop."""
    own, labels = images[: cell.batch], torch.arange(cell.batch)
    model.train(not frozen)
    recorder = Recorder(model, batch_size=cell.batch, lr=RATE)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer.zero_grad()
    cross_entropy(model((own - 0.5) / 0.25), labels).backward()
    optimizer.step()
    name = re.sub(r"\W+", "_", f"{cell.name}_frozen" if frozen else cell.name).lower()
    print(recorder.save(out / f"{name}.safetensors", model, images=own, labels=labels))


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--photos", type=Path, required=True, help="folder of photographs, the private images")
    parser.add_argument("--cells", nargs="+", help="names as in the example above; default: all")
    parser.add_argument("--record", type=Path, help="folder for updates to be audited, instead of measuring")
    parser.add_argument("--frozen", action="store_true", help="see above")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train, _ = CIFAR10(root=Path(arguments.root)).load()
    chosen = torch.arange(STEPS * 16)
    public, labels = train.pixels(chosen), train.labels[chosen]
    attack = FirstApplicable([AnalyticInversion(), *attacks_of("feature_maps")[:-1]])
    chosen_cells = [cell for cell in cells() if not arguments.cells or cell.name in arguments.cells]
    if arguments.record:
        for cell in chosen_cells:
            images = photographs(arguments.photos, NETWORKS[cell.network][1])
            record(network(cell.network, public, labels), images, cell, arguments.record, arguments.frozen)
        return
    with Record("architectures", vars(arguments)) as measured:
        for cell in chosen_cells:
            model = network(cell.network, public, labels)
            images = photographs(arguments.photos, NETWORKS[cell.network][1])
            measured.measure(vars(cell), partial(measure, model, attack, images, cell))


if __name__ == "__main__":
    main()
