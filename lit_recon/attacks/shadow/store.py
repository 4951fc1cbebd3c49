"""Shadow models on disk, in shards that are written atomically and belong to one training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError, ShapeError
from lit_recon.io.files import LOCK, parse_json, write_text
from lit_recon.io.tensors import TensorFormat

_VERSION = 1
_SHARD = TensorFormat("lit_recon.shadows", "shard of shadow models", "delete it, and its models are trained again")


@dataclass(frozen=True)
class ShadowStore:
    """A folder of shadow models, each stored as its difference from the reference.

    Model `i` belongs to image `i` of the shadow targets. Shard `j` holds the models from `j * shard_size` on. A hash
    identifies every model's image, so that a store can be extended by further shadow targets.
    """

    folder: Path  # of the files
    description: Mapping[str, object]  # see `Plan.description`
    execution: str  # how all models of the store are trained
    shard_size: int  # models per file

    @classmethod
    def create(cls, folder: Path, description: Mapping[str, object], execution: str, shard_size: int) -> ShadowStore:
        """Create an empty store; ConfigError for a `shard_size` below 1."""
        if shard_size < 1:
            raise ConfigError(f"shard_size must be at least 1 model; got {shard_size}")
        header = {"version": _VERSION, "training": dict(description), "execution": execution, "shard_size": shard_size}
        write_text(folder / "store.json", json.dumps(header, indent=2) + "\n")
        return cls(folder, description, execution, shard_size)

    @classmethod
    def open(cls, folder: Path, description: Mapping[str, object]) -> ShadowStore | None:
        """The store in `folder`, if any; ConfigError for another training's, CorruptFileError for a damaged one."""
        path = folder / "store.json"
        if not path.is_file():
            return None
        try:
            header = parse_json(path.read_text(encoding="utf-8"))
            there, version = header["training"], header["version"]
            store = cls(folder, description, str(header["execution"]), int(header["shard_size"]))
            if not isinstance(there, dict) or store.shard_size < 1:
                raise ValueError("training must be a mapping and shard_size at least 1")
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(f"{path} is not the description of a store ({error}): delete the folder") from error
        wanted = json.loads(json.dumps(dict(description)))
        different = [key for key in sorted(there.keys() | wanted.keys()) if there.get(key) != wanted.get(key)]
        if version != _VERSION or different:
            shown = "; ".join(f"{key} is {there.get(key)!r} there, {wanted.get(key)!r} now" for key in different[:4])
            raise ConfigError(
                f"{folder} holds shadow models of another training ({shown or 'another format'}): "
                "choose another folder with --store"
            )
        return store

    def shards(self, n: int) -> list[int]:
        """Numbers of the shards that `n` models need."""
        return list(range(-(-n // self.shard_size)))

    def members(self, shard: int, n: int) -> range:
        """The models of a shard in a store of `n`."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, n))

    def missing(self, n: int) -> list[int]:
        """Shards that hold fewer models than a store of `n` needs; CorruptFileError if one is damaged."""
        return [shard for shard in self.shards(n) if not self.is_complete(shard, n)]

    def is_complete(self, shard: int, n: int) -> bool:
        """Whether a shard holds all models that a store of `n` needs of it; CorruptFileError if it is damaged."""
        return self._count(shard) >= len(self.members(shard, n))

    def check(self, images: ImageSet) -> None:
        """Raise ConfigError for a stored model of another image, and CorruptFileError for a damaged shard."""
        keys = image_keys(images)
        for shard in self.shards(len(images)):
            members = self.members(shard, len(images))
            there = min(self._count(shard), len(members))
            if there:
                self._compare(shard, keys[members.start :][:there], images.name)

    def write(self, shard: int, differences: Tensor, images: ImageSet) -> None:
        """Write finite differences `(s, p)` float32 of one shard's models and hashes of their images, atomically.

        A file that already holds as many or more is kept: another process may need fewer models, or more, of one shard.
        """
        if len(differences) != len(images) or not torch.isfinite(differences).all():
            raise ShapeError(
                f"shard {shard} needs one finite difference per image; got {tuple(differences.shape)} "
                f"for {len(images)} images"
            )
        content = {"deltas": differences, "images": image_keys(images)}
        with FileLock(self.folder / LOCK):
            if self._count(shard) < len(images):
                _SHARD.write(self._path(shard), content, {"store": self._key, "n": len(images)})

    def read(self, images: ImageSet, feature_map: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Differences `(s, p)` float32 of the models of these images, the first `s` shadow targets.

        A `feature_map` is applied to the differences of each shard as it is read. Raises MissingDataError for a shard
        that has not been trained yet, otherwise as `check`.
        """
        keys, differences = image_keys(images), torch.empty(0)
        for shard in self.shards(len(images)):
            members, path = self.members(shard, len(images)), self._path(shard)
            if not self.is_complete(shard, len(images)):
                raise MissingDataError(
                    f"{path} does not exist or is incomplete: train it with `python train.py shadows`"
                )
            found = _SHARD.read_rows(path, "deltas", len(members))
            if not torch.isfinite(found).all():
                raise CorruptFileError(f"{path} is damaged (it holds NaN or infinite weights): {_SHARD.remedy}")
            self._compare(shard, keys[members.start : members.stop], images.name)
            part = found if feature_map is None else feature_map(found)
            if members.start == 0:  # one array for all, since joining parts would hold them twice
                differences = part.new_empty(len(images), *part.shape[1:])
            differences[members.start : members.stop] = part
        return differences

    def _compare(self, shard: int, wanted: Tensor, name: str) -> None:
        path = self._path(shard)
        if not torch.equal(_SHARD.read_rows(path, "images", len(wanted)), wanted):
            raise ConfigError(
                f"{path} holds models of other images than {name}: the store belongs to another split; choose another "
                "folder with --store"
            )

    @property
    def _key(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.description), sort_keys=True).encode()).hexdigest()[:16]

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard_{shard:05d}.safetensors"

    def _count(self, shard: int) -> int:
        """Models in a shard's file; 0 if there is none."""
        path = self._path(shard)
        if not path.is_file():
            return 0
        header = _SHARD.read_header(path)
        if header.get("store") != self._key:
            raise ConfigError(f"{path} belongs to another store: choose another folder with --store")
        return int(header["n"])


def image_keys(images: ImageSet) -> Tensor:
    """A hash of every image's pixels and label, int64 `(N,)`."""
    pixels = images.images.contiguous().numpy()
    digests = [
        hashlib.sha256(image.tobytes() + label.to_bytes(8, "little")).digest()
        for image, label in zip(pixels, images.labels.tolist(), strict=True)
    ]
    return torch.tensor([int.from_bytes(digest[:8], "little", signed=True) for digest in digests])
