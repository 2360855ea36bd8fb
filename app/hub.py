"""Models of a hub, through huggingface_hub: which files a repository's model needs, at which pinned revision.

Knows hub ids, revisions and file names; does not know what is in a file. A revision such as "main" is resolved to
a commit once, at the first pull, and stays pinned there until somebody pulls again; a pinned model needs no network.
Importing this file takes 0.3 s, so app.catalog does it only when a hub id is asked for.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, errors
from huggingface_hub.utils.tqdm import disable_progress_bars

# "owner/name", then optionally "/file.gguf", then optionally "@revision".
_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?")
_BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)


class HubError(Exception):
    """A hub model that cannot be had; the text is one sentence with the remedy."""


@dataclass(frozen=True)
class HubId:
    """A parsed hub id; `file` is empty unless one .gguf of the repository is meant."""

    repository: str
    file: str
    revision: str


def parse(model: str) -> HubId:
    """The parts of a hub id. Raises HubError when it has not the form of one."""
    match = _ID.fullmatch(model)
    if match is None:
        raise HubError(f"{model!r} is no hub id; write owner/name, owner/name@revision or owner/name/file.gguf.")
    return HubId(match["repository"], match["file"] or "", match["revision"] or "main")


def fetch(model: str, cache: Path, *, endpoint: str = "", refresh: bool) -> tuple[Path, str, str]:
    """The local path of a hub model, its name, and the commit it is pinned at; downloads what is not here.

    `refresh` asks the hub which commit the revision means today. Raises HubError.
    """
    wanted = parse(model)
    folder = cache / "hub"
    pin = folder / "pins" / f"{model.replace('/', '--')}.txt"
    name = wanted.repository.rsplit("/", 1)[-1]
    if not refresh and pin.is_file():
        commit, _, file = pin.read_text(encoding="utf-8").strip().partition(" ")
        kept = _snapshot(folder, wanted.repository, commit) / file
        if kept.exists():
            return kept, name, commit
    try:
        commit, file, snapshot = _download(wanted, folder, endpoint)
    except HubError:
        raise
    except Exception as error:  # its HTTP client raises errors of its own, whichever client that is
        raise HubError(_reason(wanted, error)) from error
    pin.parent.mkdir(parents=True, exist_ok=True)
    scratch = pin.with_name(f"{pin.name}.{os.getpid()}")
    scratch.write_text(f"{commit} {file}\n", encoding="utf-8")
    scratch.replace(pin)
    return snapshot / file, name, commit


def _download(wanted: HubId, folder: Path, endpoint: str) -> tuple[str, str, Path]:
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(endpoint=endpoint or None)
    info = api.model_info(wanted.repository, revision=wanted.revision)
    commit = info.sha
    if commit is None:
        raise HubError(f"The hub names no commit for {wanted.repository}@{wanted.revision}, so it cannot be pinned.")
    files = choose(wanted, [sibling.rfilename for sibling in info.siblings or ()])
    snapshot = api.snapshot_download(
        wanted.repository, revision=commit, cache_dir=folder, allow_patterns=[_literal(file) for file in files]
    )
    return commit, files[0] if files[0].endswith(".gguf") else "", Path(snapshot)


def _literal(file: str) -> str:
    """A file name as a pattern that matches nothing else."""
    return re.sub(r"([*?\[])", r"[\1]", file)


def _snapshot(folder: Path, repository: str, commit: str) -> Path:
    return folder / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def choose(wanted: HubId, files: list[str]) -> list[str]:
    """The files that the model needs out of a repository's list: weights of one kind and what stands beside them.

    Safetensors come before PyTorch's .bin; a repository of .gguf files must hold one, or the id must name one.
    """
    if wanted.file:
        if wanted.file not in files:
            raise HubError(f"{wanted.repository} holds no {wanted.file}; it has: {_listed(files)}.")
        return [wanted.file]
    top = [file for file in files if "/" not in file]
    for suffix in (".safetensors", ".bin"):
        weights = [file for file in top if file.endswith(suffix) and not file.startswith("consolidated")]
        if weights and "config.json" in top:
            index = [file for file in top if file.endswith(f"{suffix}.index.json")]
            return [*weights, *index, *(file for file in _BESIDE_WEIGHTS if file in top)]
    single = [file for file in files if file.endswith(".gguf")]
    if len(single) == 1:
        return single
    if single:
        raise HubError(
            f"{wanted.repository} holds {len(single)} .gguf files; name one, as {wanted.repository}/{single[0]}: "
            f"{_listed(single)}."
        )
    raise HubError(
        f"{wanted.repository} holds no weights that can be served (.safetensors with config.json, or .gguf)."
    )


def _listed(files: list[str]) -> str:
    shown = [str(PurePosixPath(file)) for file in files[:8]]
    return ", ".join(shown) + (f" and {len(files) - 8} more" if len(files) > 8 else "") if shown else "nothing"


def _reason(wanted: HubId, error: Exception) -> str:
    what = f"{wanted.repository}@{wanted.revision}"
    if isinstance(error, errors.GatedRepoError):
        return f"{what} is gated; accept its terms on the hub and set HF_TOKEN to a token that may read it."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{wanted.repository} has no revision {wanted.revision!r}; leave @{wanted.revision} out for the newest."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"The hub has no model {wanted.repository} (or it is private: then set HF_TOKEN)."
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{what} could not be pulled from the hub ({first}); check the network, or give a local folder."
