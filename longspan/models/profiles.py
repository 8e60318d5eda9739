"""Offline statistics: what a method must learn about a model before it can run, made once and found again.

A method whose card declares ``profile`` is a `Profiled`: shared code shows it `Evidence` (how a score ranks the tokens
of calibration texts, and what answers about them needed later), and it makes a few tensors of that. They lie in one
safetensors file in the user's cache folder, since a model's own folder may be shared or read-only. The file's name is
a key of all that the tensors depend on: the model's fingerprint, the method and its settings, the score, and a version.

A method that also declares ``trains`` is a `Trained`: its tensors are weights that a module of its own trains on the
calibration texts. Methods of one family share a file. Files that come with the package (``trained/``) serve where the
user has made none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jaxtyping import Bool, Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from longspan.models.bundled import bundled_gguf, cache_folder
from longspan.models.load import edits_digest, fingerprint, resolve
from longspan.registry import Card, Refused

VERSION = 1
"""A change of what profiles hold, or of how they are made, gets a new number; old files are left alone."""
AUTO = "auto"
SHIPPED = Path(__file__).parent / "trained"
"""Weights that come with the package."""


@dataclass(frozen=True)
class Evidence:
    """What one question about one calibration text of N tokens showed, in the K layers that compress (of n_layers)."""

    layers: tuple[int, ...]
    n_layers: int
    scores: Float[Tensor, "K H N"]
    """What the score said before the question was known."""
    utility: Float[Tensor, "K H N"]
    """What the answer needed of every token."""
    protected: Bool[Tensor, "K H N"]
    """Entries that the score always keeps."""


class Profiled(Protocol):
    """A method that learns from evidence."""

    card: ClassVar[Card]

    def profile_settings(self) -> dict[str, Any]:
        """Those of its knobs that what it learns depends on."""

    def fit(self, evidence: Iterable[Evidence]) -> dict[str, Tensor]:
        """What it keeps of the evidence: tensors by name.

        Raises:
            Refused: the evidence is empty, or not finite.
        """


class Trained(Protocol):
    """A method whose weights are trained, whatever the score beside it."""

    card: ClassVar[Card]
    family: ClassVar[str]
    """Methods of one family share a file."""
    trainer: ClassVar[str]
    """The module that trains it, imported when it is asked to: it defines ``train(model, texts, methods, found, …)``, and
    ``texts(loaded, contexts, length, text, seed)`` if it wants other texts than questions with their answers."""

    def profile_settings(self) -> dict[str, Any]:
        """Those of its knobs that all tensors of the file depend on."""

    def profile_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that it needs of the file."""

    def profile_recipe(self) -> str:
        """A recipe that `longspan profile` trains it for."""


@dataclass(frozen=True)
class Key:
    """All that a profile depends on."""

    model: str
    """Fingerprint."""
    method: str
    settings: str
    score: str

    @property
    def path(self) -> Path:
        """Where such a profile lies; it may not exist yet."""
        digest = hashlib.sha256(json.dumps([VERSION, *vars(self).values()]).encode()).hexdigest()
        return cache_folder() / "profiles" / self.model[:16] / f"{self.method}-{digest[:16]}-v{VERSION}.safetensors"

    @property
    def shipped(self) -> Path:
        """Where it would lie if it came with the package."""
        return SHIPPED / f"{self.model[:16]}-{self.path.name}"


def key_of(model: nn.Module, method: Profiled, score: str) -> Key:
    """The key of the profile that `method` needs on `model` beside the score written as `score`."""
    if method.card.can("trains"):
        return trained_key(model, method)  # type: ignore[arg-type]
    return Key(model_key(model), method.card.name, json.dumps(method.profile_settings(), sort_keys=True), score)


@dataclass(frozen=True, eq=False)
class Profile:
    """What a method learned about a model."""

    key: Key
    tensors: dict[str, Tensor]
    notes: dict[str, Any] = field(default_factory=dict)
    """How it was made: texts, questions, seed."""


def save(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile atomically, by default where `find` looks for it.

    Raises:
        Refused: the folder can't be written.
    """
    file = path or profile.key.path
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.part")
    meta = {"format": _format(), "key": json.dumps(vars(profile.key)), "notes": json.dumps(profile.notes)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({n: t.detach().cpu().contiguous() for n, t in profile.tensors.items()}, part, metadata=meta)
            with open(part, "rb+") as written:
                os.fsync(written.fileno())
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)
    except Exception as error:  # safetensors has an exception of its own for a full disk or a closed folder
        raise Refused(f"can't write the profile to {str(file)!r} ({error}); name another file, or set LONGSPAN_CACHE to a "
                      "folder that you may write to.") from error
    return file


def load(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        Refused: no such file, or it holds no whole profile of this version.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise Refused(f"profile {str(path)!r}: no such file; expected one written by `longspan profile`.")
    stat = file.stat()
    return _read(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=16)
def _read(file: Path, changed: int, size: int) -> Profile:
    """Every layer of every prompt asks for the same file; it is read again only when it has changed."""
    try:
        with safe_open(file, "pt") as stored:
            meta = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
        if meta.get("format") == _format():
            return Profile(Key(**json.loads(meta["key"])), tensors, json.loads(meta["notes"]))
    except Exception as error:
        raise Refused(f"profile {str(file)!r} can't be read ({error}); make it again with `longspan profile`.") from error
    raise Refused(f"profile {str(file)!r} is of the format {meta.get('format')!r}, expected {_format()!r}; make it again "
                  "with `longspan profile`.")


def _format() -> str:
    return f"longspan-profile-{VERSION}"


def find(model: nn.Module, method: Profiled, score: str, where: str = AUTO) -> Profile:
    """The profile that `method` needs on `model` beside the score written as `score`.

    Args:
        where: a file, or "auto": the place its key names.

    Raises:
        Refused: there is none, with the command that makes it; or the file was made for something else.
    """
    wanted = key_of(model, method, score)
    path = wanted.path if where == AUTO else Path(where).expanduser()
    out = "" if where == AUTO else f" --out {shlex.quote(where)}"
    make = f"make it once with: {command(model, method, score)}{out}"
    if not path.is_file():
        place = "" if where == AUTO else f" in {where!r}"
        raise Refused(f"{method.card.name} needs a profile of {score} on this model and there is none{place}; {make}")
    found = load(path)
    for name, value in vars(wanted).items():
        made = getattr(found.key, name)
        if made != value:
            raise Refused(f"profile {str(path)!r} was made for {name} {made}, and {value} is wanted; {make}")
    return found


def command(model: nn.Module, method: Profiled, score: str) -> str:
    """The command line that makes this profile."""
    return _command(model, f"{score} @ {method}")


def _command(model: nn.Module, recipe: str) -> str:
    source = str(getattr(model.config, "_name_or_path", "") or "")
    model_option = "" if _is_bundled(source) else f" --model {shlex.quote(source or 'MODEL')}"
    return f"longspan profile {shlex.quote(recipe)}{model_option}"


def _is_bundled(source: str) -> bool:
    """Whether a model was read from the folder of the bundled one, which is what no `--model` means."""
    try:
        # The name first: asking for the folder would convert the bundled model where nobody has used it yet.
        return Path(source).name.startswith(f"{bundled_gguf().stem}-") and resolve()[0] == Path(source)
    except Refused:
        return False


# -------------------------------------------------------------------------------------------------- trained weights


def trained_key(model: nn.Module, method: Trained) -> Key:
    """The key of the weights of `method` on `model`: they serve any score."""
    return Key(model_key(model), method.family, json.dumps(method.profile_settings(), sort_keys=True), "every score")


def find_trained(model: nn.Module, method: Trained, where: str = AUTO) -> Profile:
    """The weights that `method` needs on `model`: those the user has trained, else those that come with the package.

    Args:
        where: a file, or "auto": one of the two places its key names.

    Raises:
        Refused: there are none, or the file was made for another model or without this method; with the command.
    """
    key = trained_key(model, method)
    out = "" if where == AUTO else f" --out {shlex.quote(where)}"
    make = f"train them once with: {_command(model, method.profile_recipe())}{out}"
    if where == AUTO:
        for path in (key.path, key.shipped):
            found = _whole(path)
            if found is not None and found.key == key and not missing(found, [method]):
                return found
        raise Refused(f"{method.card.name} needs weights trained for this model and there are none; {make}")
    path = Path(where).expanduser()
    if not path.is_file():
        raise Refused(f"{method.card.name} needs weights trained for this model and there are none in {where!r}; {make}")
    found = load(path)
    for name, value in vars(key).items():
        if getattr(found.key, name) != value:
            raise Refused(f"the weights in {where!r} were trained for {name} {getattr(found.key, name)}, and {value} is wanted; "
                          f"{make}")
    if lacking := missing(found, [method]):
        raise Refused(f"the file {where!r} has no {lacking[0]}, which {method.card.name} needs; {make}")
    return found


def _whole(path: Path) -> Profile | None:
    """The profile at `path`, if there is one that can be read."""
    try:
        return load(path)
    except Refused:
        return None


def missing(found: Profile, methods: Iterable[Trained]) -> list[str]:
    """Tensors that `methods` need and the profile doesn't hold."""
    return [name for method in methods for name in method.profile_tensors() if name not in found.tensors]


# ------------------------------------------------------------------------------------------------- which model it is

_known: weakref.WeakKeyDictionary[nn.Module, tuple[int, str]] = weakref.WeakKeyDictionary()


def model_key(model: nn.Module) -> str:
    """The model's fingerprint, remembered as long as none of its weights is replaced or written to."""
    stamp = hash(tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()))
    known = _known.get(model)
    if known is None or known[0] != stamp:
        key, edits = fingerprint(model), edits_digest(model)
        known = _known[model] = stamp, hashlib.sha256((key + edits).encode()).hexdigest() if edits else key
    return known[1]


def profiled(methods: Iterable[Any]) -> list[Any]:
    """Those of `methods` that need a profile, by their cards."""
    return [m for m in methods if isinstance(getattr(m, "card", None), Card) and m.card.can("profile")]
