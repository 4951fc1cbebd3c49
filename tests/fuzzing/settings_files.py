"""Configurations and command lines: a command builds its settings, or ends with one line and code 2."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hypothesis import strategies as st
from jsonargparse import ArgumentParser, Namespace

from lit_recon import cli
from lit_recon.errors import LitReconError
from lit_recon.experiments.call import Call
from lit_recon.reporting.provenance import find_setting, flatten, read_settings
from tests.fuzzing.harness import Files, Link, Reader
from tests.fuzzing.mutations import ODD, altered, damaged, pick
from tests.fuzzing.payloads import CANARY, HARMFUL_TEXT, HARMFUL_YAML, SCRIPTS

CONFIGS = Path(__file__).parents[2] / "configs"
#: Commands by script, whose settings are built; each with a shipped configuration.
COMMANDS = {
    ("attack", "run"): ("lit_recon.experiments.update_attack.run", "attack/demo_digits.yaml"),
    ("train", "backbone"): ("lit_recon.experiments.train.backbone", "train/resnet18_cifar10.yaml"),
    ("attack", "audit"): ("lit_recon.experiments.audit.run", None),
}


class RefusedError(LitReconError):
    """A command ended with code 2."""


def build(script: str, command: str, arguments: list[str]) -> dict[str, Any]:
    """The settings that a command builds; its run is left out. `RefusedError` holds the line that it printed."""
    module = importlib.import_module(COMMANDS[script, command][0])
    found: dict[str, Any] = {}

    def execute(parser: ArgumentParser, values: Namespace) -> None:
        call = Call(parser, values, "name")
        found.update(call.own)

    errors = io.StringIO()
    parser = functools.partial(_parser, module.__name__)
    # the parser's warnings of its own later changes are not shown to users
    with (
        warnings.catch_warnings(),
        mock.patch.multiple(module, execute=execute, parser=parser),
        contextlib.redirect_stderr(errors),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        code = getattr(cli, script)([command, *arguments])
    told = errors.getvalue()
    if code == 2:
        assert told.startswith("error: "), told
        assert told.count("\n") == 1, told
        raise RefusedError(told[:-1])
    assert code == 0, code
    return found


_real: dict[str, Any] = {name: importlib.import_module(name).parser for name, _ in COMMANDS.values()}


@functools.cache
def _parser(module: str, program: str) -> ArgumentParser:
    """The parser of a command, made once: that takes longer than to use it."""
    made: ArgumentParser = _real[module](program)
    return made


def _build_file(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("*.yaml")
    script, command = path.stem.split("-")
    return build(script, command, ["--config", str(path)])


@functools.cache
def _base(script: str, command: str) -> dict[str, Any]:
    name = COMMANDS[script, command][1]
    return {"minutes": 1.0, "steps": 2} if name is None else dict(yaml.safe_load((CONFIGS / name).read_text()))


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
#: YAML that other parsers read in a surprising way, or not at all.
_TEXTS = (
    *HARMFUL_YAML,
    *(f"seed: {text}\n" for text in HARMFUL_YAML),
    _BOMB,
    "a: &a [*a]\n",
    "seed: 1\nseed: 2\n",
    "attack:\n  init_args: {lr: 1, lr: 2}\n",
    "seed: 2001-99-99\n",
    "seed: !!int abc\n",
    "seed: !!bool x\n",
    "seed: !!timestamp x\n",
    "seed: !!float .nan\n",
    "seed: !!binary x\n",
    "seed: !!set {a, a}\n",
    "seed: " + "9" * 5000 + "\n",
    "? [1, 2]\n: 3\n",
    "? {a: 1}\n: 3\n",
    "<<: {seed: 1}\n",
    "<<: [1]\n",
    "seed: 0o17\n",
    "seed: 1_000\n",
    "seed: 1:30\n",
    "seed: yes\n",
    "seed: 1\n---\nseed: 2\n",
    "[" * 3000,
    "{a: " * 3000,
    "%YAML 9.9\n---\nseed: 1\n",
    "\ufeffseed: 1\n",
    "seed:\t1\n",
    "'seed': 1\n\"se\\u0065d\": 2\n",
    "",
    "- 1\n",
    "null\n",
    "text\n",
    "config: /dev/zero\n",
    f"config: {CANARY}\n",
    "name: ../../x\nout: /dev/null\n",
    "attack: os.system\n",
    "data: {class_path: Npz, init_args: {root: /dev/zero}}\n",
)


@st.composite
def _yaml_of(draw: st.DrawFn, tree: Any) -> bytes:
    changed = draw(altered(tree, values=(*SCRIPTS, HARMFUL_TEXT, math.nan, "GradientMatching", {"class_path": "Npz"})))
    try:
        text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=draw(st.booleans()))
    except (yaml.YAMLError, ValueError):
        text = str(changed)
    content = text.encode("utf-8", "surrogateescape" if "\udcff" in text else "replace")
    return draw(pick([(6, st.just(content)), (1, damaged(content))]))


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration of one of the commands."""
    script, command = draw(st.sampled_from((*COMMANDS, ("attack", "audit"), ("train", "backbone"))))
    tree = _base(script, command)
    intact = yaml.safe_dump(tree).encode()
    content = draw(
        pick(
            [
                (1, st.just(intact)),
                (1, st.binary(max_size=80) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace"))),
                (4, st.sampled_from(_TEXTS).map(lambda text: text.encode())),
                (2, damaged(intact)),
                (8, _yaml_of(tree)),
            ]
        )
    )
    odd: Any = draw(pick([(60, st.just(content)), (1, st.just(Link("nowhere"))), (1, st.none())]))
    return {f"{script}-{command}.yaml": odd}


def _check_settings(found: Any, files: Files) -> None:
    """What was given is what is used, and no key was given twice."""
    [content] = files.values()
    assert isinstance(content, bytes)
    given = yaml.safe_load(content.decode("utf-8")) or {}
    top = re.findall(r"^(\w+):", content.decode("utf-8"), re.MULTILINE)
    assert len(top) == len(set(top)) or "---" in content.decode("utf-8"), f"a key was given twice: {top}"
    seed = given.get("seed")
    if type(seed) is int:
        assert find_setting(found, "seed") == seed, f"seed {seed} was given, {find_setting(found, 'seed')} is used"
    flatten(found)


CONFIGURATION = Reader(
    "configurations",
    "YAML",
    configurations(),
    _build_file,
    _check_settings,
    short=24,
    names=("error: ",),
    advice=r"\b(must|needs?|expected|at least)\b",
)


_OPTIONS = (
    *("--seed", "--name", "--out", "--overwrite", "--data", "--data.seed", "--data.size", "--data.root", "--victims.n"),
    *("--attack", "--attack.steps", "--attack.solver", "--attack.solver.lr", "--attack.priors", "--attack.labels"),
    *("--model.class_path", "--model.init_args", "--client.batch_norm", "--client.loss", "--defense", "--defense.std"),
    *(
        "--backbone.trunk",
        "--backbone.epochs",
        "--knowledge.labels",
        "--trainer.threads",
        "--trainer.devices",
        "--config",
    ),
    *(
        "--metrics",
        "--metrics+",
        "--lpips.network",
        "--wandb.mode",
        "--paper.values",
        "--clients_per_batch",
        "--help.x",
    ),
    *("--victims.batch_size", "--server", "--", "-x", "--=", "--attack.init_args.steps", "--attack.class_path", ""),
)
_VALUES = st.sampled_from(
    (
        *(str(value)[:200] for value in ODD),
        *("GradientMatching", "Npz", "Digits", "torch.nn.Linear", "os.system", "builtins.exec", "subprocess.run"),
        *(
            "{'class_path':'Npz','init_args':{'root':'x'}}",
            "[{'class_path':'TotalVariation','init_args':{'weight':1}}]",
        ),
        *("1e3", "0x10", "1_000", ".5", "1e999", "-1e-400", "NaN", "[1, 2", "{a: 1", "!!python/name:os.system", "@/x"),
        *HARMFUL_YAML,
    )
) | st.text(max_size=6)


#: Options of both commands with values that they take.
_SOUND = (
    *(("--seed", "3"), ("--name", "a"), ("--out", "runs/x"), ("--data", "Digits"), ("--data.seed", "1")),
    *(("--overwrite", "true"), ("--wandb.mode", "disabled"), ("--trainer.threads", "1"), ("--data.size", "16")),
)


def _near(value: str) -> st.SearchStrategy[str]:
    """A value, or one with a character more or less."""
    changed = st.sampled_from((value[:-1], f"{value}0", f"-{value}", f"{value}.5", f"[{value}]", value.upper()))
    return st.just(value) | changed


def _legal(text: str) -> bool:
    return "\0" not in text


OVERRIDES = Reader(
    "overrides",
    "command lines",
    st.tuples(
        st.sampled_from((("attack", "run"), ("attack", "run"), ("train", "backbone"))),
        st.lists(
            st.tuples(st.sampled_from(_OPTIONS), _VALUES.filter(_legal), st.booleans())
            | st.sampled_from(_SOUND).flatmap(lambda one: st.tuples(st.just(one[0]), _near(one[1]), st.booleans())),
            min_size=1,
            max_size=3,
        ),
    ).map(
        lambda one: {
            "arguments": "\0".join(
                [
                    *one[0],
                    *(
                        part
                        for key, value, joined in one[1]
                        for part in ([f"{key}={value}"] if joined else [key, value])
                    ),
                ]
            ).encode("utf-8", "surrogatepass")
        }
    ),
    lambda folder: _build_line((folder / "arguments").read_bytes()),
    short=24,
    names=("error: ",),
    advice=r"\b(must|needs?|expected|at least)\b",
)


def _build_line(content: bytes) -> Mapping[str, Any]:
    script, command, *arguments = content.decode("utf-8", "surrogatepass").split("\0")
    return build(script, command, arguments)


SETTINGS = Reader(
    "read_settings",
    "config.yaml of runs",
    configurations(),
    lambda folder: [read_settings(path) for path in folder.iterdir()],
    lambda found, files: flatten(found[0]) and None,
    short=80,
)
