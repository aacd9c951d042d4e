"""The Hub: what is pushed is whole and in one commit, what is pulled is whole, and it works without the package."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from transformers_d3d import hub
from transformers_d3d.cards import END
from transformers_d3d.hub import CardConfig, PullConfig, PushConfig, check_checkpoint, run_card, run_pull, run_push
from transformers_d3d.layers import remove_layers
from transformers_d3d.lora import add_lora, save_lora
from transformers_d3d.modeling_d3d import ADAPTER_FILE, LORA_CONFIG

ROOT = Path(__file__).parents[1]
IDS = torch.tensor([[5, 6, 7, 8]])


def refusal(kind, status):
    return kind("refused", response=SimpleNamespace(headers={}, request=None, status_code=status))


class FakeHub:
    """`HfApi` over folders: `root/org/name/<branch>`."""

    def __init__(self, root):
        self.root, self.calls, self.failure = root, Counter(), None

    def __call__(self):
        return self

    def _called(self, name):
        self.calls[name] += 1
        if self.failure is not None and name == self.failure[0]:
            raise self.failure[1]

    def _branch(self, repo_id, revision):
        repo = self.root / repo_id
        if not repo.exists():
            raise refusal(RepositoryNotFoundError, 404)
        if not (repo / (revision or "main")).exists():
            raise refusal(RevisionNotFoundError, 404)
        return repo / (revision or "main")

    def model_info(self, repo_id, revision=None):
        self._called("model_info")
        folder = self._branch(repo_id, revision)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names], sha=folder.name)

    def hf_hub_download(self, repo_id, name, revision=None):
        return str(self._branch(repo_id, revision) / name)

    def create_repo(self, repo_id, private=False, exist_ok=False):
        self._called("create_repo")
        (self.root / repo_id / "main").mkdir(parents=True, exist_ok=exist_ok)

    def create_branch(self, repo_id, branch, exist_ok=False):
        (self.root / repo_id / branch).mkdir(exist_ok=exist_ok)

    def create_commit(self, repo_id, operations, commit_message, revision=None, parent_commit=None):
        self._called("create_commit")
        for operation in operations:
            path = self._branch(repo_id, revision) / operation.path_in_repo
            path.parent.mkdir(parents=True, exist_ok=True)
            with operation.as_file() as file:
                path.write_bytes(file.read())
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")

    def snapshot_download(self, repo_id, revision=None, local_dir=None):
        shutil.copytree(self._branch(repo_id, revision), local_dir, dirs_exist_ok=True)
        (Path(local_dir) / ".cache").mkdir()


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(hub, "HfApi", fake)
    return fake


@pytest.fixture
def save(targets, make_perturbed, tmp_path):
    """Saves a checkpoint of a kind, with what a training leaves beside it; returns its folder and the drafter."""

    def save(kind, name="llama"):
        rank = 0 if kind in ("full", "lora", "pruned") else 2
        drafter = make_perturbed(targets[name], rank, target_name_or_path="org/target")
        folder = tmp_path / "run"
        if "pruned" in kind:
            remove_layers(drafter, [1])
        if "lora" in kind:
            add_lora(drafter, 2)
            save_lora(drafter, folder)
        elif rank:
            drafter.save_adapter(folder)
        else:
            drafter.save_pretrained(folder)
        (folder / "checkpoint-3").mkdir()
        for name in (
            "checkpoint-3/model.safetensors",
            "training_args.bin",
            "pruning.journal.jsonl",
            "healed-1.safetensors",
        ):
            (folder / name).write_text("stays at home")
        (folder / "card.json").write_text('{"license": "mit"}')
        return folder, drafter

    return save


KINDS = ["full", "adapters", "lora", "lora-adapters", "pruned", "pruned-adapters"]


@torch.no_grad()
def logits(drafter):
    return drafter.logits(drafter(IDS).last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(fake_hub, save, targets, tmp_path, kind):
    folder, drafter = save(kind)
    text = run_push(PushConfig(str(folder), "org/d3d-x.y"))
    assert "https://huggingface.co/org/d3d-x.y" in text
    assert fake_hub.calls["create_commit"] == 1
    pushed = {
        path.relative_to(fake_hub.root / "org/d3d-x.y/main").as_posix()
        for path in fake_hub.root.rglob("*")
        if path.is_file()
    }
    assert {"config.json", "README.md", "modeling_d3d.py", "card.json"} <= pushed
    assert not [
        name
        for name in pushed
        if "checkpoint" in name or "training_args" in name or "journal" in name or "healed" in name
    ]
    text = run_pull(PullConfig("org/d3d-x.y", str(tmp_path / "pulled")))
    over = kind not in ("full", "pruned")
    assert ("adapters over org/target" in text) == over
    assert not (tmp_path / "pulled" / ".cache").exists()
    loaded = AutoModel.from_pretrained(tmp_path / "pulled", **{"base_model": targets["llama"]} if over else {})
    torch.testing.assert_close(logits(loaded), logits(drafter), atol=1e-4, rtol=1e-4)
    assert loaded.config.kept_layers == ([0, 2] if "pruned" in kind else None)


def test_a_second_push_keeps_what_people_edited(fake_hub, save):
    folder, _ = save("adapters")
    run_push(PushConfig(str(folder), "org/d3d-x"))
    card = fake_hub.root / "org/d3d-x/main/README.md"
    card.write_text(card.read_text().replace("license: mit", "license: mit\nlanguage: en") + "\nOur words.\n")
    (folder / "card.json").write_text('{"license": "apache-2.0"}')
    run_push(PushConfig(str(folder), "org/d3d-x"))
    text = card.read_text()
    assert text.endswith("Our words.\n") and "language: en" in text and "license: apache-2.0" in text
    assert text.count(END) == 1 and (folder / "README.md").read_text() == text


def test_another_branch(fake_hub, save, tmp_path):
    folder, _ = save("adapters")
    run_push(PushConfig(str(folder), "org/d3d-x", revision="next"))
    assert not list((fake_hub.root / "org/d3d-x/main").iterdir())
    run_pull(PullConfig("org/d3d-x", str(tmp_path / "pulled"), revision="next"))
    assert (tmp_path / "pulled" / ADAPTER_FILE).exists()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ("create_repo", LocalTokenNotFoundError("no token"), "no token for the Hub; log in with `hf auth login`"),
        ("create_repo", refusal(HfHubHTTPError, 403), r"refuses access to `org/d3d-x` \(403\).*may write"),
        ("create_commit", refusal(HfHubHTTPError, 412), "was changed meanwhile; start the same command again"),
    ],
    ids=["no-token", "forbidden", "race"],
)
def test_refusals_are_explained_and_nothing_is_pushed(fake_hub, save, call, error, match):
    folder, _ = save("adapters")
    fake_hub.failure = (call, error)
    with pytest.raises(ValueError, match=match):
        run_push(PushConfig(str(folder), "org/d3d-x"))
    assert not [path for path in fake_hub.root.rglob("*") if path.is_file()]
    assert not (folder / "README.md").exists()


def test_another_kind_of_model_is_left_alone(fake_hub, save):
    folder, _ = save("adapters")
    other = fake_hub.root / "org/d3d-x/main"
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="another kind of model .`llama`.*Nothing was pushed"):
        run_push(PushConfig(str(folder), "org/d3d-x"))
    assert [path.name for path in other.iterdir()] == ["config.json"]


def test_a_card_with_invalid_metadata_stops_a_push(fake_hub, save):
    folder, _ = save("adapters")
    run_push(PushConfig(str(folder), "org/d3d-x"))
    card = fake_hub.root / "org/d3d-x/main/README.md"
    card.write_text("---\na: [1\n---\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        run_push(PushConfig(str(folder), "org/d3d-x"))
    assert card.read_text() == "---\na: [1\n---\n" and fake_hub.calls["create_commit"] == 1


@pytest.mark.parametrize("kind", ["full", "adapters"])
@pytest.mark.parametrize("fault", ["missing", "left over", "of another shape"])
def test_weights_that_do_not_fit_are_not_pushed(fake_hub, save, kind, fault):
    folder, _ = save(kind)
    file = folder / ("model.safetensors" if kind == "full" else ADAPTER_FILE)
    weights = load_file(file)
    name = next(iter(weights))
    changed = {
        "missing": {},
        "left over": weights | {"odd": weights[name]},
        "of another shape": weights | {name: torch.zeros(1)},
    }
    save_file({k: t.clone() for k, t in changed[fault].items()}, file)
    with pytest.raises(ValueError, match=f"not those of the drafter.*{fault}"):
        run_push(PushConfig(str(folder), "org/d3d-x"))
    assert not fake_hub.calls


def test_folders_that_hold_no_drafter(targets, save, tmp_path):
    with pytest.raises(ValueError, match="no `config.json`"):
        check_checkpoint(tmp_path)
    targets["llama"].save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="holds a `llama`, not a D3D drafter; convert it with `d3d convert`"):
        check_checkpoint(tmp_path / "llama")
    folder, _ = save("lora")
    (folder / LORA_CONFIG).unlink()
    with pytest.raises(ValueError, match="without its `lora/adapter_config.json`"):
        check_checkpoint(folder)


def test_pulls_that_cannot_be(fake_hub, save, tmp_path):
    folder, _ = save("adapters")
    run_push(PushConfig(str(folder), "org/d3d-x"))
    with pytest.raises(ValueError, match="no repository `org/none`"):
        run_pull(PullConfig("org/none", str(tmp_path / "pulled")))
    with pytest.raises(ValueError, match="`org/d3d-x` has no revision 'v9'"):
        run_pull(PullConfig("org/d3d-x", str(tmp_path / "pulled"), revision="v9"))
    with pytest.raises(ValueError, match="exists; choose another `--output_dir`"):
        run_pull(PullConfig("org/d3d-x", str(folder)))
    (fake_hub.root / "org/d3d-x/main" / ADAPTER_FILE).unlink()
    with pytest.raises(ValueError, match="missing"):
        run_pull(PullConfig("org/d3d-x", str(tmp_path / "pulled")))
    assert not [path for path in tmp_path.iterdir() if "pulled" in path.name]


def test_a_bad_id_is_named(save):
    with pytest.raises(ValueError, match="`repo_id` is 'a/b/c'; it must be organisation/name"):
        run_push(PushConfig(str(save("adapters")[0]), "a/b/c"))


def test_cards_can_be_made_elsewhere(save, tmp_path):
    folder, _ = save("adapters")
    (folder / "training.png").write_bytes(b"picture")
    text = run_card(CardConfig(str(folder), "org/d3d-x", str(tmp_path / "cards")))
    assert str(tmp_path / "cards" / "README.md") in text
    assert {path.name for path in (tmp_path / "cards").iterdir()} == {"README.md", "training.png"}
    run_card(CardConfig(str(folder), "org/d3d-x"))
    assert (folder / "README.md").read_text() == (tmp_path / "cards" / "README.md").read_text()


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["transformers_d3d"] = None  # as if it were not installed
import torch
from transformers import AutoModel, AutoModelForCausalLM
folder, target_folder, again = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(target_folder)
base = {"base_model": target} if sys.argv[1].endswith("adapters") else {}
drafter = AutoModel.from_pretrained(folder, trust_remote_code=True, **base)
assert type(drafter).__module__.startswith("transformers_modules."), type(drafter)
inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
plain = target.generate(**inputs, max_new_tokens=16, do_sample=False)
assert torch.equal(target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=drafter), plain)
assert drafter.report.rounds > 0
drafter.save_adapter(again) if base else drafter.save_pretrained(again)
print("drafted", drafter.report.rounds)
"""


@pytest.mark.parametrize("kind", ["full", "adapters", "pruned"])
def test_remote_code_drafts_without_the_package(fake_hub, save, targets, tmp_path, kind):
    folder, _ = save(kind)
    run_push(PushConfig(str(folder), "org/d3d-0.5b"))
    pulled = tmp_path / f"d3d-0.5b-{kind}"
    run_pull(PullConfig("org/d3d-0.5b", str(pulled)))
    targets["llama"].save_pretrained(tmp_path / "target")
    environment = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin",
        "OMP_NUM_THREADS": "1",
    }
    folders = [str(pulled), str(tmp_path / "target"), str(tmp_path / f"again-{kind}")]
    for words in (
        folders,
        [folders[2], folders[1], str(tmp_path / f"third-{kind}")],
    ):  # and once more, what was saved again
        run = subprocess.run(
            [sys.executable, "-c", WITHOUT_THE_PACKAGE, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        assert "drafted" in run.stdout
    config = json.loads((tmp_path / f"third-{kind}" / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_d3d.D3DDrafterModel"
