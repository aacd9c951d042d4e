"""Pushing checkpoints to the Hub and pulling them: checked first, in one commit, with a card."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import safe_open
from transformers import AutoConfig

from .cards import render_card, write_card
from .configuration_d3d import D3DDrafterConfig
from .modeling_d3d import ADAPTER_FILE, LORA_CONFIG, LORA_FILE, D3DDrafterModel
from .records import write_text

# What is pushed: checkpoints of the trainer, journals and logs stay at home.
PUSHED = (
    "config.json",
    "generation_config.json",
    "*.py",
    "model*.safetensors",
    "model.safetensors.index.json",
    ADAPTER_FILE,
    LORA_CONFIG,
    LORA_FILE,
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template.jinja",
    "card.json",
    "training.json",
    "pruning.json",
    "bench*.json",
    "*.png",
)


def check_checkpoint(folder: str | Path) -> D3DDrafterConfig:
    """Checks that a folder holds a whole drafter: its weights are those that its configuration asks for.

    Reads names and shapes only; nothing is loaded.

    Returns:
        [`D3DDrafterConfig`]: The configuration.

    Raises:
        `ValueError`: If it is no drafter, or weights are missing, left over or of another shape.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"`{folder}` holds no `config.json`; give the folder of a saved drafter.")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, D3DDrafterConfig):
        raise ValueError(
            f"`{folder}` holds a `{config.model_type}`, not a D3D drafter; convert it with `d3d convert`."
        )
    with torch.device("meta"):
        drafter = D3DDrafterModel(config)
    adapter = {name: tuple(tensor.shape) for name, tensor in drafter.adapter_state_dict().items()}
    lora = (folder / LORA_FILE).is_file()
    if lora and not (folder / LORA_CONFIG).is_file():
        raise ValueError(f"`{folder}` holds a `{LORA_FILE}` without its `{LORA_CONFIG}`; save it again.")
    if (folder / ADAPTER_FILE).is_file():
        expected, files = adapter, [folder / ADAPTER_FILE]
    elif lora and not adapter:
        return config  # what a LoRA changes is checked over its base
    else:
        expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        if config.tie_word_embeddings:
            expected.pop("lm_head.weight")
        files = sorted(folder.glob("model*.safetensors"))
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            found |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    faults = {
        "missing": sorted(set(expected) - set(found)),
        "left over": sorted(set(found) - set(expected)),
        "of another shape": sorted(name for name in found if name in expected and found[name] != expected[name]),
    }
    if any(faults.values()):
        words = "; ".join(f"{len(names)} {kind} ({', '.join(names[:5])})" for kind, names in faults.items() if names)
        raise ValueError(f"The weights in `{folder}` are not those of the drafter in its `config.json`: {words}.")
    return config


@dataclass
class PushConfig:
    """What `d3d push` pushes, and where to."""

    folder: str = field(metadata={"help": "The checkpoint: a folder that `d3d train` or `d3d prune` left."})
    repo_id: str = field(metadata={"help": "Repository on the Hub, as organisation/name. Made if it does not exist."})
    private: bool = field(default=False, metadata={"help": "Make a new repository private."})
    revision: str | None = field(default=None, metadata={"help": "Branch. Default: main."})
    message: str = field(default="Upload a D3D drafter", metadata={"help": "Message of the commit."})


@dataclass
class PullConfig:
    """What `d3d pull` pulls, and where to."""

    repo_id: str = field(metadata={"help": "Repository on the Hub, as organisation/name."})
    output_dir: str = field(metadata={"help": "Folder for the checkpoint. It must not exist."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit. Default: main."})


@dataclass
class CardConfig:
    """What `d3d card` makes a card of."""

    folder: str = field(metadata={"help": "The checkpoint with its records, or a folder with a card.json."})
    repo_id: str = field(metadata={"help": "The id that it has or will have on the Hub."})
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Write the card and its pictures there. Default: into the checkpoint's folder."},
    )


def run_push(config: PushConfig) -> str:
    """Pushes a checkpoint with its records and a card, in one commit.

    What people wrote in the card on the Hub is kept, see [`render_card`].

    Returns:
        `str`: What was pushed, and where to.

    Raises:
        `ValueError`: If the checkpoint is not whole, the repository holds something else, or the Hub refuses; nothing is
            pushed then.
    """
    check_checkpoint(config.folder)
    folder, api = Path(config.folder), HfApi()
    card = folder / "README.md"
    with _explained(config.repo_id, config.revision):
        existing, parent = _repository(api, config, card)
        text = render_card(folder, config.repo_id, existing)
        files = sorted({path for pattern in PUSHED for path in folder.glob(pattern) if path.is_file()})
        operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
        operations.append(CommitOperationAdd("README.md", text.encode()))
        api.create_repo(config.repo_id, private=config.private, exist_ok=True)
        if config.revision is not None:
            api.create_branch(config.repo_id, branch=config.revision, exist_ok=True)
        commit = api.create_commit(
            config.repo_id,
            operations,
            commit_message=config.message,
            revision=config.revision,
            parent_commit=parent,
        )
    write_text(card, text)
    return f"{len(operations)} files of `{folder}` are at {commit.commit_url}."


def _repository(api: HfApi, config: PushConfig, card: Path) -> tuple[str | None, str | None]:
    """The card and the commit that a push goes on from: those on the Hub, else the local card."""
    local = card.read_text(encoding="utf-8") if card.exists() else None
    try:
        info = api.model_info(config.repo_id, revision=config.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return local, None
    names = {sibling.rfilename for sibling in info.siblings}

    def read(name):
        return Path(api.hf_hub_download(config.repo_id, name, revision=info.sha)).read_text(encoding="utf-8")

    if "config.json" in names:
        kind = D3DDrafterConfig.get_config_dict(api.hf_hub_download(config.repo_id, "config.json", revision=info.sha))[
            0
        ]
        if kind.get("model_type") != D3DDrafterConfig.model_type:
            raise ValueError(
                f"`{config.repo_id}` holds another kind of model (`{kind.get('model_type')}`); push to a repository of its "
                "own. Nothing was pushed."
            )
    return (read("README.md") if "README.md" in names else local), info.sha


def run_pull(config: PullConfig) -> str:
    """Pulls a checkpoint into a folder, whole or not at all.

    Returns:
        `str`: What was pulled, and how to load it.
    """
    output = Path(config.output_dir)
    if output.exists():
        raise ValueError(f"`{output}` exists; choose another `--output_dir`.")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{'--'.join(config.repo_id.split('/'))}.part")
    with _explained(config.repo_id, config.revision):
        HfApi().snapshot_download(config.repo_id, revision=config.revision, local_dir=partial)
    try:
        drafter = check_checkpoint(partial)
    except ValueError:
        shutil.rmtree(partial)
        raise
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the download's own notes
    partial.replace(output)
    over = any((output / name).exists() for name in (ADAPTER_FILE, LORA_FILE))
    base = drafter.base_model_name_or_path or drafter.target_name_or_path
    return f"`{config.repo_id}` is in `{output}`: " + (
        f"adapters over {base}, to load with `base_model=`." if over else "all weights."
    )


def run_card(config: CardConfig) -> str:
    """Renders a card from the records in a folder.

    Returns:
        `str`: Where it is.
    """
    folder = Path(config.folder)
    if config.output_dir is None or Path(config.output_dir) == folder:
        return f"The card is in `{write_card(folder, config.repo_id)}`."
    output = Path(config.output_dir)
    card = output / "README.md"
    text = render_card(folder, config.repo_id, card.read_text(encoding="utf-8") if card.exists() else None)
    write_text(card, text)
    for picture in folder.glob("*.png"):
        shutil.copyfile(picture, output / picture.name)
    return f"The card is in `{card}`."


@contextmanager
def _explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Says what the Hub's errors mean here, and what to do."""
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"`repo_id` is {repo_id!r}; it must be organisation/name ({error}).") from error
    except LocalTokenNotFoundError as error:
        raise ValueError("There is no token for the Hub; log in with `hf auth login`, or set `HF_TOKEN`.") from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"`{repo_id}` has no revision {revision!r}; give a branch, a tag or a commit of it."
        ) from error
    except EntryNotFoundError as error:
        raise ValueError(f"`{repo_id}` lacks a file ({error}).") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"There is no repository `{repo_id}`, or it is not yours to see; check the name and `hf auth whoami`."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise ValueError(
                f"The Hub refuses access to `{repo_id}` ({status}); log in with `hf auth login`, with a token that may write "
                "there."
            ) from error
        if status == 412:
            raise ValueError(f"`{repo_id}` was changed meanwhile; start the same command again.") from error
        raise
