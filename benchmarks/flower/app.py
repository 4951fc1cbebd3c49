"""A Flower federation of two clients with CIFAR-10 images, and the network of Flower's quickstart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_recon.clients.adapters.flower import recording_mod
from lit_recon.clients.local_steps import Optimizer
from lit_recon.clients.record import Circumstances


class Net(nn.Module):
    """The quickstart's network, untrained; `norm`: with BatchNorm behind its convolutions."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv1 = nn.Conv2d(3, 6, 5)
            self.conv2 = nn.Conv2d(6, 16, 5)
            self.norm1, self.norm2 = (nn.BatchNorm2d(n) if norm else nn.Identity() for n in (6, 16))
            self.pool = nn.MaxPool2d(2, 2)
            self.fc1 = nn.Linear(400, 120)
            self.fc2 = nn.Linear(120, 84)
            self.fc3 = nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.pool(torch.relu(self.norm1(self.conv1(images))))
        maps = self.pool(torch.relu(self.norm2(self.conv2(maps))))
        features = torch.relu(self.fc2(torch.relu(self.fc1(maps.flatten(1)))))
        logits: Tensor = self.fc3(features)
        return logits


@dataclass(frozen=True)
class Case:
    """How a client trains: on all its `batch_size` images in each of `epochs` steps."""

    batch_size: int = 32
    epochs: int = 1
    lr: float = 0.1
    momentum: float = 0.0
    norm: bool = False
    optimizer: Optimizer = "sgd"

    @property
    def known(self) -> Circumstances:
        return Circumstances(self.batch_size, self.epochs, 1, self.lr, self.momentum, optimizer=self.optimizer)


CASES = {
    "one_epoch": Case(),
    "eight_images": Case(batch_size=8),
    "five_epochs": Case(epochs=5, lr=0.01),
    "momentum": Case(epochs=5, lr=0.01, momentum=0.9),
    "buffers": Case(norm=True),
    "adam": Case(batch_size=8, lr=0.001, optimizer="adam"),
    "adam_five_epochs": Case(batch_size=8, epochs=5, lr=0.001, optimizer="adam"),
}


def train(model: nn.Module, case: Case, images: Tensor, labels: Tensor) -> None:
    """A client's local training on pixels in [0, 1], normalized as in the quickstart."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.momentum)
    if case.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=case.lr)
    model.train()
    for _ in range(case.epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model((images - 0.5) / 0.5), labels).backward()
        optimizer.step()


def simulate(case: Case, folder: Path, data: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """One round of the federation in Flower's simulation; a mod records what each client sends."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client = ClientApp(mods=[recording_mod(folder, **asdict(case.known))])

    @client.train()
    def fit(message: Message, context: Context) -> Message:
        model = Net(case.norm)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        images, labels = data[int(context.node_config["partition-id"])]
        train(model, case, images, labels)
        metrics = MetricRecord({"num-examples": len(images)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        start = ArrayRecord(Net(case.norm).state_dict())
        FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=1)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    run_simulation(server, client, num_supernodes=len(data), backend_config=resources)
