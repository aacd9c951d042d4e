"""Cards: every number comes from a record, both ways to load are there, and what people wrote stays."""

import json
from pathlib import Path

import pytest
import yaml

from transformers_d3d.cards import BEGIN, END, render_card, write_card

CARDS = Path(__file__).parents[1] / "hub_cards"
HARDWARE = {"device": "A CPU", "cores": 2}
BENCH = {
    "command": "d3d bench --prompts gsm8k.jsonl",
    "hardware": HARDWARE,
    "setting": {
        "dataset": "gsm8k", "num_prompts": 20, "max_new_tokens": 64, "temperature": 0.0, "dtype": "float32", "overlap": "inline"
    },
    "summary": {
        "mean_acceptance_length": 3.456, "target_tok_per_s": 11.11, "drafted_tok_per_s": 22.22, "speedup": 2.0,
        "identical_outputs": "20/20",
    },
}  # fmt: skip
TRAINING = {
    "command": "d3d train --target org/target",
    "hardware": HARDWARE,
    "versions": {"torch": "2.13.0"},
    "steps": 77,
    "seconds": 600,
    "data": {"train": "answers.jsonl", "train_examples": 1234},
    "final": {"eval_acceptance_length": 3.21},
}
PRUNING = {
    "method": "progressive",
    "layers_before": [0, 1, 2],
    "responses": {"calibration": {"gsm8k": 8, "mbpp": 4}},
    "before": {"evaluation": {"mean": 4.0}},
    "steps": [{"layer": 1, "retained": 0.991, "evaluation": {"mean": 3.9}}],
}


@pytest.fixture
def folder(targets, make_perturbed, tmp_path):
    """A checkpoint of adapters, with records if asked."""

    def make(**records):
        make_perturbed(targets["llama"], 2, target_name_or_path="org/target").save_adapter(tmp_path)
        for name, record in {"card": {"license": "mit"}, **records}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        return tmp_path

    return make


def metadata(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_a_card_says_what_the_records_say(folder):
    path = folder(bench_gsm8k=BENCH, training=TRAINING, pruning=PRUNING)
    (path / "training.png").touch()
    text = render_card(path, "org/d3d-x")
    for words in (
        "| mean acceptance length (bonus token counted) | 3.46 |", "| plain decoding | 11.1 tokens/s |", "| ratio | 2.00 |",
        "| identical outputs | 20/20 |", "on A CPU, 2 cores: `d3d bench --prompts gsm8k.jsonl`", "77 steps on `answers.jsonl`",
        "(1234 answers of the target)", "10 minutes on A CPU, 2 cores", "held-out answers\n3.21", "d3d train --target org/target",
        "of 3, without 1", "| 1 | 99.1 % | 97.5 % |", "8 of gsm8k, 4 of mbpp", "(training.png)", "torch 2.13.0",
        'AutoModel.from_pretrained("org/d3d-x", base_model=target)', "trust_remote_code=True", "| licence | mit |",
        "adapters on mask rows of rank 2", "| block | 4 rows, causal attention |",
    ):  # fmt: skip
        assert words in text, words
    assert "(pruning.png)" not in text and "{{" not in text and "not measured" not in text
    data = metadata(text)
    assert data["license"] == "mit" and data["base_model"] == "org/target" and data["library_name"] == "transformers"
    assert data["tags"] == ["speculative-decoding", "d3d", "drafter"]


def test_a_card_without_records_claims_nothing(folder):
    text = render_card(folder(), "org/d3d-x")
    assert (
        "## Measured" not in text and "## Training" not in text and "## Pruning" not in text and "tokens/s" not in text
    )


def test_the_card_of_a_checkpoint_with_all_weights(targets, make_perturbed, tmp_path):
    make_perturbed(targets["llama"], target_name_or_path="org/target").save_pretrained(tmp_path)
    text = render_card(tmp_path, "org/d3d-x")
    assert (
        "| kind | all weights |" in text and 'from_pretrained("org/d3d-x")' in text and "base_model=target" not in text
    )
    assert "license" not in metadata(text)


def test_a_card_of_what_is_not_trained_yet_says_so(tmp_path):
    card = {"target": "org/target", "license": "mit", "reported": [["speedup, seven benchmarks", "5.00x"]]}
    (tmp_path / "card.json").write_text(json.dumps(card))
    text = render_card(tmp_path, "org/d3d-x")
    assert "**There are no weights here yet.**" in text
    assert "## Reported by the paper's authors, not measured here" in text and "| 5.00x |" in text
    assert "No speed of this checkpoint has been measured yet." in text


def test_what_people_wrote_stays(folder):
    path = folder()
    write_card(path, "org/d3d-x")
    readme = path / "README.md"
    first = readme.read_text()
    edited = first.replace("license: mit", "license: mit\nlanguage: en\nextra: 5").replace(
        "- d3d\n", "- d3d\n- ours\n"
    )
    edited = edited.replace(BEGIN, f"Our words.\n\n{BEGIN}").replace(END, f"{END}\n\n## Ours\n") + "At the end.\n"
    readme.write_text(edited.replace("It reads only tokens", "An edit inside"))
    (path / "bench.json").write_text(json.dumps(BENCH))
    write_card(path, "org/d3d-x")
    text = readme.read_text()
    assert "Our words.\n" in text and "## Ours\n" in text and text.endswith("At the end.\n")
    assert "An edit inside" not in text and "| ratio | 2.00 |" in text and text.count(BEGIN) == text.count(END) == 1
    assert metadata(text)["language"] == "en" and metadata(text)["extra"] == 5
    assert set(metadata(text)["tags"]) == {"speculative-decoding", "d3d", "drafter", "ours"}
    again = render_card(path, "org/d3d-x", text)
    assert again == text


def test_a_card_of_peoples_own_is_kept_whole(folder):
    text = render_card(folder(), "org/d3d-x", "---\nlicense: mit\n---\n# My drafter\n\nWords.\n")
    assert text.index("# My drafter\n\nWords.") < text.index(BEGIN)
    assert "# My drafter" in render_card(folder(), "org/d3d-x", "# My drafter\n")


@pytest.mark.parametrize("bad", ["---\na: [1\n---\nwords", "---\na: b: c\n---\nwords", "---\n- list\n---\nwords"])
def test_invalid_metadata_are_refused(folder, bad):
    path = folder()
    (path / "README.md").write_text(bad)
    with pytest.raises(ValueError, match="`org/d3d-x` are not valid YAML.*Nothing was changed"):
        write_card(path, "org/d3d-x")
    assert (path / "README.md").read_text() == bad


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in CARDS.glob("*/README.md")), ids=lambda path: path.name
)
def test_the_cards_in_this_repository_are_rendered_from_their_records(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert render_card(folder, f"org/{folder.name}", text) == text


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "no `config.json` and no `card.json`"),
        ({"card.json": "{}"}, "there is nothing to make a card of"),
        ({"card.json": '{"license": "mit"}'}, "names no target"),
        ({"card.json": "{"}, "card.json` is no JSON"),
    ],
)
def test_folders_without_what_a_card_needs(tmp_path, files, match):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=match):
        render_card(tmp_path, "org/d3d-x")
