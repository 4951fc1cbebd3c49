"""The attacks of an audit, cheapest first, within a time budget; what each of them found can be kept on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_recon.attacks.base import Attack, AttackRun
from lit_recon.attacks.updates.gradient_matching.matching import update_distance
from lit_recon.errors import ConfigError, CorruptFileError, LitReconError, lack_of_memory
from lit_recon.experiments.configuration import find_configuration
from lit_recon.experiments.engine.pieces import Subcommand, merged
from lit_recon.io.tensors import TensorFormat
from lit_recon.records import Batch, Observation, Reconstruction
from lit_recon.reporting.provenance import read_settings

_RUN = Subcommand("attack.py run", "lit_recon.experiments.update_attack.run")
_KEPT = TensorFormat("lit_recon_audit", "result of an audit's attack", "delete it, and the attack runs again")
#: Iterations by which the speed of an attack is measured, and the fewest and most that it is given.
_TRIED, _FEWEST = 10, 50
_NOT_NEEDED = "not needed: all images are certified"
#: How the reasons begin of attacks without time, and of those that lacked memory, which the same command runs again.
NO_TIME, NO_MEMORY = "no time was left", "not enough memory"


class Candidate(NamedTuple):
    """An attack that an audit tries.

    Attributes:
        name, title: in files and on the page.
        needs: the layers or knowledge that it uses besides model and update.
        settings: of the attack; for a number of iterations where it can be cut short.
        most: iterations of the full attack where it can be cut short, else 0.
    """

    name: str
    title: str
    needs: str
    settings: Callable[[int], dict[str, Any]]
    most: int = 0

    def build(self, steps: int) -> Attack:
        """The attack, with at most so many iterations."""
        attack: Attack = _RUN.built({"attack": self.settings(steps)})["attack"]
        return attack


def _configured(file: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings of the attack of a shipped configuration."""
    settings: Any = read_settings(find_configuration(file, "attack"))
    return merged(dict(settings["attack"]), changes or {})


def _maps(_: int) -> dict[str, Any]:
    """Exact and completed maps, and patches.

    Left out are what begins at a wide feature layer, which hardly a user's network has, and gradient matching.
    """
    listed = _configured("feature_maps")["init_args"]["attacks"]
    matched = [one["init_args"].get("features", {}).get("class_path") for one in listed]
    kept = [one for one, features in zip(listed, matched, strict=True) if features in ("MapMatching", "PatchMatching")]
    return _configured("feature_maps", {"init_args": {"attacks": kept}})


#: In the order of their cost.
CANDIDATES = (
    Candidate(
        "analytic",
        "Analytic inversion",
        "one image, and a fully connected first layer or a patch embedding with learned positions",
        lambda _: _configured("analytic"),
    ),
    Candidate(
        "cocktail_party",
        "Cocktail Party on images",
        "a fully connected first layer with as many neurons as images",
        # the attack's own terms, which recover far more than the published ones
        lambda _: _configured(
            "kariyappa2023", {"init_args": {"terms": None, "steps": 1200, "lr": 0.02, "refinements": 40}}
        ),
    ),
    Candidate(
        "feature_maps",
        "Exact feature maps",
        "a convolution with fewer positions and images than output channels",
        _maps,
    ),
    Candidate(
        "features",
        "Cocktail Party on features",
        "a wide feature layer before the head",
        lambda steps: _configured("kariyappa2023_conv", {"init_args": {"steps": steps}}),
        2000,
    ),
    Candidate(
        "layer_inputs",
        "Inputs of a linear layer",
        "a linear layer behind a ReLU with more neurons than images",
        lambda steps: _configured("layer_inputs", {"init_args": {"steps": steps}}),
        3000,
    ),
    Candidate(
        "geiping2020",
        "Gradient inversion",
        "nothing more",
        lambda steps: _configured("geiping2020", {"init_args": {"steps": steps}}),
        4800,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What one attack found.

    Attributes:
        name, title, needs: of the candidate.
        found: images and labels; None if it does not apply, had no time, or broke off.
        reason: why there is nothing.
        seconds, steps: time and iterations that it took.
        distance: 1 - cosine between the update of the images found and the observed one.
        certified: images that the attack knows to be the true ones.
        cut: whether there was no time for it, or not for all of its iterations, or the machine broke it off.
        minutes: that all attacks together had.
    """

    name: str
    title: str
    needs: str
    found: Reconstruction | None = None
    reason: str = ""
    seconds: float = 0.0
    steps: int = 0
    distance: float = float("nan")
    certified: int = 0
    notes: tuple[str, ...] = field(default=())
    cut: bool = False
    minutes: float = 0.0

    @property
    def missing(self) -> bool:
        """Whether nothing is known for lack of time or memory, or as linear algebra failed."""
        return self.cut and self.found is None

    @property
    def untried(self) -> bool:
        """Whether nothing is known: it is missing, or another attack had certified all images."""
        return self.missing or self.reason == _NOT_NEEDED

    @property
    def batch(self) -> Batch:
        """The images found, with their labels."""
        if self.found is None:
            raise ConfigError(f"{self.title} returned no images: {self.reason}")
        return Batch(self.found.images, self.found.labels)

    @property
    def rank(self) -> tuple[int, float]:
        """The smaller, the more can be believed: certified images first, then the distance of the update."""
        return -self.certified, self.distance

    def write(self, folder: Path, identity: str = "") -> None:
        """Keep the outcome as a file; `identity` says what it depends on, see `check_kept`."""
        header = {"identity": identity} | {name: getattr(self, name) for name in _WRITTEN}
        tensors = {}
        if self.found is not None:
            tensors = {"images": self.found.images, "labels": self.found.labels}
            if self.found.certified is not None:
                tensors["certified"] = self.found.certified
            header["loss"] = self.found.loss
        _KEPT.write(folder / f"{self.name}.safetensors", tensors or {"none": torch.zeros(1)}, header)


_WRITTEN = tuple(one.name for one in fields(Outcome) if one.name != "found")


def read_outcome(path: Path) -> Outcome:
    """The outcome in a file of `Outcome.write`; a CorruptFileError for a damaged one."""
    header, tensors = _KEPT.read(path)
    try:
        texts = [header[name] for name in ("name", "title", "needs", "reason")] + list(header["notes"])
        counts = [header[name] for name in ("steps", "certified")]
        numbers = [header[name] for name in ("seconds", "distance", "minutes")]
        if not all(isinstance(one, str) for one in texts) or not all(type(one) is int for one in counts):
            raise ValueError("texts or counts are of another type")
        if not all(type(one) in (int, float) for one in numbers):
            raise ValueError("seconds, distance and minutes must be numbers")
        if type(header["cut"]) is not bool:
            raise ValueError("cut must be true or false")
        outcome = Outcome(**{name: header[name] for name in _WRITTEN} | {"notes": tuple(header["notes"])})
        if "images" not in tensors:
            return outcome
        images, labels, certified = tensors["images"], tensors["labels"], tensors.get("certified")
        if images.dim() != 4 or labels.shape != images.shape[:1] or not images.isfinite().all():
            raise ValueError("images must be (n, c, h, w) and finite, labels (n,)")
        if certified is not None and (certified.dtype != torch.bool or certified.shape != labels.shape):
            raise ValueError("certified must be true or false for every image")
        return replace(outcome, found=Reconstruction(images, labels, float(header["loss"]), certified=certified))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{path} is damaged ({error}): {_KEPT.remedy}") from error


def check_kept(folder: Path, identity: str) -> None:
    """A ConfigError if an outcome in the folder does not have this identity: nothing of another update is taken over.

    Settings do not tell: a file of the same name may hold an update that was recorded anew.
    """
    for path in (folder / f"{one.name}.safetensors" for one in CANDIDATES):
        if path.is_file() and _KEPT.read_header(path).get("identity") != identity:
            raise ConfigError(
                f"{path} must be the outcome of an attack on this update, with this model, defense and knowledge; it "
                f"is of others: choose another folder, or delete {folder}, and the attacks run again"
            )


def run_attacks(
    seen: Observation,
    minutes: float,
    folder: Path | None = None,
    names: Sequence[str] = (),
    progress: Callable[[str], None] = print,
    identity: str = "",
) -> list[Outcome]:
    """The outcomes of all candidates, or of some by name, in the order of their cost.

    Attacks after one that certifies all images are left out; so are those for which no time is left. With a `folder`,
    outcomes are written there under an `identity` of what they depend on, and those that are there already are read
    instead of computed; attacks that were cut short run again if there are more minutes.
    """
    if folder is not None:
        check_kept(folder, identity)
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + 60 * minutes
    chosen = [one for one in CANDIDATES if not names or one.name in names]
    for number, candidate in enumerate(chosen):
        path = None if folder is None else folder / f"{candidate.name}.safetensors"
        if any(done.certified == seen.n_examples for done in outcomes):
            outcomes.append(Outcome(*candidate[:3], reason=_NOT_NEEDED))
            continue
        kept = read_outcome(path) if path is not None and path.is_file() else None
        if kept is not None and (not kept.cut or minutes <= kept.minutes):
            outcomes.append(kept)
            continue
        left = (deadline - time.monotonic()) / max(1, len(chosen) - number)
        # a cheap attack rarely takes its share; the last has all that is left
        allowed = deadline - time.monotonic() if number == len(chosen) - 1 else 2 * left
        outcome = attempt(candidate, seen, allowed)
        progress(_line(outcome, seen.n_examples))
        if kept is not None:
            outcome = replace(best([outcome, kept]) or outcome, cut=outcome.cut)
        outcome = replace(outcome, minutes=minutes)
        if folder is not None and not outcome.missing:  # else it runs when it is asked for again
            outcome.write(folder, identity)
        outcomes.append(outcome)
    return outcomes


def attempt(candidate: Candidate, seen: Observation, seconds: float) -> Outcome:
    """One attack in at most about so many seconds."""
    blank, started = Outcome(*candidate[:3]), time.monotonic()
    if seconds <= 0:
        return replace(blank, reason=f"{NO_TIME}: raise minutes", cut=True)
    try:
        steps, deadline = candidate.most, started + seconds
        if steps:
            steps = _affordable(candidate, seen, seconds)
        found, done = _finish(candidate.build(steps).begin([seen]), deadline)
        cut = steps < candidate.most or time.monotonic() >= deadline
        distance = update_distance(seen, found.images, found.labels)
    except (LitReconError, NotImplementedError) as error:  # PyTorch's: an operation cannot be differentiated twice
        reason = " ".join(str(error).split())
        if isinstance(error, LitReconError):
            # what follows is advice to whoever chooses the attack and the network; here both are given
            reason = reason.rpartition(": ")[0] or reason
        return replace(blank, reason=reason, seconds=time.monotonic() - started)
    except (MemoryError, RuntimeError) as error:  # of the machine: other attacks, or this one elsewhere, may succeed
        reason = _broken_off(error)
        if not reason:
            raise
        return replace(blank, reason=reason, seconds=time.monotonic() - started, cut=True)
    return replace(
        blank,
        found=found,
        seconds=time.monotonic() - started,
        steps=done,
        distance=distance,
        certified=found.n_certified,
        notes=found.notes,
        cut=cut,
    )


def _broken_off(error: Exception) -> str:
    """Why an attack broke off for lack of memory, or as linear algebra failed; empty for a fault of the program."""
    if short := lack_of_memory(error):
        return f"{NO_MEMORY} ({short}): free some or take a machine with more, and run the audit again"
    failed = isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]  # a documented name
    return f"linear algebra failed ({' '.join(str(error).split())})" if failed else ""


def _affordable(candidate: Candidate, seen: Observation, seconds: float) -> int:
    """Iterations that fit into the time, by the speed of the first ones."""
    run, started = candidate.build(_FEWEST).begin([seen]), time.monotonic()
    prepared = started
    for number in range(_TRIED + 1):
        run.advance()
        if number == 0:  # the first one compiles and allocates
            prepared = time.monotonic()
    each = (time.monotonic() - prepared) / _TRIED
    # the attack begins anew, with what was prepared
    left = 0.95 * seconds - 2 * (prepared - started)
    return min(candidate.most, max(_FEWEST, int(left / each)))


def _finish(run: AttackRun, deadline: float) -> tuple[Reconstruction, int]:
    """The result of a run and those that follow it, as far as they come in time, and the iterations done."""
    done = 0
    while True:
        while run.state is not None and run.state.step < run.n_steps and (time.monotonic() < deadline or not done):
            run.advance()
            done += 1
        found = run.results()
        if time.monotonic() >= deadline:
            break
        following = run.then(found)
        if following is None:
            break
        run = following
    return found[0], done


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The outcome that the attacker would believe; None if no attack returned images."""
    return min((one for one in outcomes if one.found is not None), key=lambda one: one.rank, default=None)


def _line(outcome: Outcome, n: int) -> str:
    told = outcome.reason
    if outcome.found is not None:
        certified = f"{outcome.certified} of {n} certified, " if outcome.found.certified is not None else ""
        told = f"{certified}update explained to {outcome.distance:.2g} (1 - cosine)"
    return f"{outcome.title:<27} {told} ({outcome.seconds:.0f} s)"
