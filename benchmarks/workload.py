"""What the benchmarks measure on: CIFAR-10, or an untrained ResNet-18 and made-up images; and a usual attack."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import lit_recon._torchvision

import torch
from torch import Tensor, nn

from lit_recon.attacks.base import Execution
from lit_recon.attacks.updates import GradientMatching, KnownLabels, MatchingState, Parametrization, TotalVariation
from lit_recon.attacks.updates.gradient_matching.matching import Compilation
from lit_recon.clients import BatchNormMode, Client
from lit_recon.data import ImageSet
from lit_recon.data.sources import CIFAR10
from lit_recon.data.splits import Pool, in_pool
from lit_recon.models import Backbone, ResNet18
from lit_recon.records import Knowledge, Normalization, Observation

#: Far more iterations than a benchmark takes, so that schedules and logs stay where they are in a long run.
STEPS = 10_000

_NORMALIZATION = Normalization((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


def read_cifar10(parser: ArgumentParser) -> tuple[Namespace, ImageSet, ImageSet]:
    """Arguments, CIFAR-10's training images, and the test images of the pool to attack.

    Args:
        parser: with the folder of CIFAR-10 as `root`; gets `--pool` and `--threads`.
    """
    parser.add_argument("--pool", choices=get_args(Pool), default="evaluation", help="of the attacked images")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train, test = CIFAR10(Path(arguments.root)).load()
    return arguments, train, test.subset(in_pool(test, arguments.pool))


@dataclass(frozen=True)
class Workload:
    """A model, clients that hold equally many images, and what an attacker sees of each.

    Attributes:
        model: in the mode of the clients' BatchNorm layers.
        observations: one per client, all from the same client object.
        images: of the first client, `(n, 3, 32, 32)`.
        labels: of every client, `(n,)`.
    """

    model: Backbone
    observations: list[Observation]
    images: Tensor
    labels: Tensor

    @classmethod
    def build(
        cls, batch: int, batch_norm: BatchNormMode = "eval", victims: int = 1, width: int = 64, device: str = "cpu"
    ) -> Workload:
        """The same draws on every device.

        Args:
            batch: images per client.
            batch_norm: of the clients.
            victims: clients.
            width: of the ResNet-18; 64 is the published network.
            device: where everything lies.
        """
        torch.manual_seed(0)
        model = Backbone(ResNet18(width=width), 10, _NORMALIZATION).to(device)
        images, labels = torch.rand(victims, batch, 3, 32, 32).to(device), (torch.arange(batch) % 10).to(device)
        client = Client(model, batch_norm)
        seen = [client.observe(private, labels, Knowledge(labels=True)) for private in images]
        model.train(batch_norm == "train")
        return cls(model, seen, images[0], labels)

    def forward_backward(self) -> None:
        """One step of training without its update: the unit of all ratios."""
        self.model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.model(self.images), self.labels).backward()

    def attack(
        self,
        execution: Execution = "loop",
        compilation: Compilation = "none",
        parametrization: Parametrization | None = None,
    ) -> tuple[GradientMatching, MatchingState]:
        """A started attack on all clients: cosine, total variation, sign-Adam, labels known; by default in pixels."""
        attack = GradientMatching(
            priors=[TotalVariation(0.1)],
            parametrization=parametrization,
            labels=KnownLabels(),
            steps=STEPS,
            execution=execution,
            compilation=compilation,
        )
        return attack, attack.init(self.observations)
