"""Reading responses, and the indices of every label that a batch holds."""

import gzip
import json
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from transformers_d3d.data import BlockCollator, ResponseDataset
from transformers_d3d.objective import IGNORE

GOOD = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}


def write(path, lines):
    opened = gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")
    with opened as file:
        file.write("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


@pytest.fixture(params=["data.jsonl", "data.jsonl.gz"])
def path(request, tmp_path):
    return tmp_path / request.param


def test_reading(path):
    write(path, [GOOD, "", {**GOOD, "source": "math", "other": "kept"}])
    data = ResponseDataset(path, vocab_size=6)
    assert len(data) == 2
    assert data[0] == GOOD
    assert data[1]["other"] == "kept"
    assert [example["prompt_ids"] for example in data] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{", "not JSON", id="not-json"),
        pytest.param("[1, 2]", "`prompt_ids` is None", id="not-an-object"),
        pytest.param({"prompt_ids": [1]}, "`response_ids` is None", id="no-response"),
        pytest.param({**GOOD, "prompt_ids": []}, r"`prompt_ids` is \[\]", id="empty-prompt"),
        pytest.param({**GOOD, "response_ids": []}, r"`response_ids` is \[\]", id="empty-response"),
        pytest.param({**GOOD, "response_ids": "text"}, "`response_ids` is text", id="text"),
        pytest.param({**GOOD, "response_ids": [1.5]}, r"`response_ids` is \[1.5\]", id="fractions"),
        pytest.param({**GOOD, "response_ids": [True]}, r"`response_ids` is \[True\]", id="booleans"),
        pytest.param({**GOOD, "response_ids": [3, 6]}, r"the id 6, outside .* \[0, 6\)", id="beyond-vocabulary"),
        pytest.param({**GOOD, "top_ids": [[1], [2]]}, "`top_ids` is .* each of the 3 `response_ids`", id="short-top"),
        pytest.param({**GOOD, "top_log_probs": None}, "`top_log_probs` is None", id="no-top"),
        pytest.param({"header": {"schema": 1}}, "a header among the answers", id="second-header"),
        pytest.param({**GOOD, "prompt_ids": [-100, 1]}, r"`prompt_ids` holds the id -100, outside", id="negative"),
    ],
)
def test_errors_name_the_file_and_the_line(path, line, message):
    write(path, [GOOD, "", line, GOOD])
    with pytest.raises(ValueError, match=f"{path.name}, line 3: .*{message}"):
        ResponseDataset(path, vocab_size=6)


def test_a_header_is_no_answer(path):
    header = {"schema": 1, "target": "org/model"}
    write(path, [{"header": header}, GOOD])
    data = ResponseDataset(path, vocab_size=6)
    assert data.header == header and list(data) == [GOOD]
    write(path, [GOOD])
    assert ResponseDataset(path, vocab_size=6, target="org/any").header is None


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\x00\n")
    with pytest.raises(ValueError, match=r"data.jsonl, line 2: not JSON"):
        ResponseDataset(path, vocab_size=6)


@pytest.mark.parametrize("keep", [10, -12, -4], ids=["head", "body", "checksum"])
def test_a_damaged_archive_is_named(tmp_path, keep):
    path = write(tmp_path / "data.jsonl.gz", [GOOD] * 500)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"data.jsonl.gz, line \d+: the archive is damaged"):
        ResponseDataset(path, vocab_size=6)


def test_what_is_no_archive_is_named(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    path.write_text(json.dumps(GOOD))
    with pytest.raises(ValueError, match=r"data.jsonl.gz, line 1: the archive is damaged"):
        ResponseDataset(path, vocab_size=6)


def test_text_in_other_fields_is_utf8_whatever_the_locale(path, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda *args: "ascii")
    line = json.dumps({**GOOD, "text": "größer 🙂"}, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(line) if path.suffix == ".gz" else line)
    assert ResponseDataset(path, vocab_size=6)[0]["text"] == "größer 🙂"


def test_a_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError, match=path.name):
        ResponseDataset(path, vocab_size=6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_length": 2}, "within 2 tokens"), ({"sources": ["code"]}, r"from the sources \['code'\]"), ({}, "nothing")],
    ids=["too-short", "no-source", "empty"],
)
def test_nothing_left_is_refused(path, settings, message):
    write(path, [GOOD] if settings else [""])
    with pytest.raises(ValueError, match=f"{path.name}.*{message}"):
        ResponseDataset(path, vocab_size=6, **settings)


@pytest.mark.parametrize(("max_length", "responses"), [(None, [3, 1]), (5, [3, 1]), (4, [2]), (3, [1])])
def test_max_length_cuts_the_response(path, max_length, responses):
    write(path, [GOOD, {"prompt_ids": [1, 2, 3, 4], "response_ids": [5]}])
    data = ResponseDataset(path, 6, max_length)
    assert [len(example["response_ids"]) for example in data] == responses
    assert data[0]["response_ids"] == GOOD["response_ids"][: responses[0]]


def test_sources_choose_lines(path):
    write(path, [{**GOOD, "source": source} for source in ("math", "code", "math", "chat")] + [GOOD])
    data = ResponseDataset(path, 6, sources=["math", "chat"])
    assert [example["source"] for example in data] == ["math", "math", "chat"]


def examples(*lengths):
    """Sequences whose tokens tell their place: 100 times the sequence plus the position."""
    made = []
    for index, (prompt, response) in enumerate(lengths):
        ids = [100 * index + position for position in range(prompt + response)]
        made.append({"prompt_ids": ids[:prompt], "response_ids": ids[prompt:]})
    return made


LENGTHS = [(3, 9), (1, 2), (5, 1), (2, 30)]


def naive_labels(prompt, length):
    """Row i predicts token i + 1, which must be the response's."""
    return [i + 1 if prompt <= i + 1 < length else IGNORE for i in range(length)]


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("num_anchors", [1, 5, 1000])
def test_labels_by_index(block_size, num_anchors):
    batch = BlockCollator(block_size, num_anchors)(examples(*LENGTHS))
    assert batch["input_ids"].tolist() == [[100 * s + p for s, (a, b) in enumerate(LENGTHS) for p in range(a + b)]]
    assert batch["positions"].tolist() == [p for a, b in LENGTHS for p in range(a + b)]
    assert batch["sequences"].tolist() == [s for s, (a, b) in enumerate(LENGTHS) for _ in range(a + b)]
    expected = []
    for sequence, (prompt, response) in enumerate(LENGTHS):
        expected += [i if i == IGNORE else 100 * sequence + i for i in naive_labels(prompt, prompt + response)]
    assert batch["labels"].tolist() == expected
    assert batch["block_labels"].shape == (len(batch["anchors"]), block_size - 1)
    for anchor, sequence, labels in zip(
        batch["anchors"].tolist(), batch["anchor_sequences"].tolist(), batch["block_labels"].tolist(), strict=True
    ):
        length = sum(LENGTHS[sequence])
        for offset, label in enumerate(labels):
            predicted = anchor + 2 + offset
            assert label == (100 * sequence + predicted if predicted < length else IGNORE)


def test_first_and_last_response_tokens_are_supervised():
    prompt, response = 3, 9
    batch = BlockCollator(4, 1000)(examples((prompt, response)))
    assert batch["labels"][:2].tolist() == [IGNORE, IGNORE]
    assert batch["labels"][2:].tolist() == [*range(3, 12), IGNORE]
    assert batch["anchors"].tolist() == list(range(2, 10))
    assert batch["block_labels"][0].tolist() == [4, 5, 6]
    assert batch["block_labels"][-1].tolist() == [11, IGNORE, IGNORE]


@pytest.mark.parametrize("num_anchors", [1, 4, 7, 1000])
def test_anchors_are_unique_sorted_and_in_range(num_anchors):
    for _ in range(20):
        batch = BlockCollator(4, num_anchors)(examples(*LENGTHS))
        for sequence, (prompt, response) in enumerate(LENGTHS):
            anchors = batch["anchors"][batch["anchor_sequences"] == sequence].tolist()
            assert anchors == sorted(set(anchors))
            assert len(anchors) == min(num_anchors, max(response - 1, 0))
            assert all(prompt - 1 <= anchor <= prompt + response - 3 for anchor in anchors)


def test_anchors_are_drawn_anew_and_by_seed():
    collator, batch = BlockCollator(4, 5, offset_keep_rate=0.7), examples((2, 60))
    torch.manual_seed(0)
    first, second = collator(batch), collator(batch)
    torch.manual_seed(0)
    again = collator(batch)
    assert not torch.equal(first["anchors"], second["anchors"])
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_the_keep_rate_drops_tails_only_and_as_often_as_it_says():
    torch.manual_seed(0)
    rate, block_size = 0.6, 6
    batch = BlockCollator(block_size, 10_000, rate, offset_keep_floor=0.2)(examples((1, 4000)))
    kept = (batch["block_labels"] != IGNORE)[:-block_size]
    assert torch.equal(kept, kept.long().cumprod(dim=1).bool())
    assert kept[:, 0].all()
    expected = [max(rate**j, 0.2) for j in range(block_size - 1)]
    assert kept.double().mean(0).tolist() == pytest.approx(expected, abs=0.03)
    whole = BlockCollator(block_size, 10_000)(examples((1, 4000)))
    assert (whole["block_labels"] != IGNORE)[:-block_size].all()


@pytest.mark.parametrize("block_size", [2, 3, 6])
@pytest.mark.parametrize("keep_rate", [1.0, 0.6])
@pytest.mark.parametrize("reveal_rate", [0.0, 0.3, 0.999])
def test_revealed_rows_by_index(block_size, keep_rate, reveal_rate):
    """Each block holds true tokens up to one of its rows but the last; from the last of them on, rows have labels."""
    torch.manual_seed(0)
    batch = BlockCollator(block_size, 1000, keep_rate, reveal_rate=reveal_rate)(examples(*LENGTHS, (1, 3000)))
    counts, num_long = [0] * block_size, 0
    names = ("anchors", "anchor_sequences", "revealed", "block_labels")
    for anchor, sequence, revealed, labels in zip(*(batch[name].tolist() for name in names), strict=True):
        true = [100 * sequence + anchor + 1 + offset for offset in range(block_size)]
        num_revealed = sum(token != IGNORE for token in revealed)
        assert revealed == true[:num_revealed] + [IGNORE] * (block_size - 1 - num_revealed)
        first = max(num_revealed - 1, 0)
        num_labels = sum(label != IGNORE for label in labels)
        assert labels == [IGNORE] * first + true[first + 1 :][:num_labels] + [IGNORE] * (
            block_size - 1 - first - num_labels
        )
        assert num_labels >= (2 if num_revealed else 1)
        if sequence == len(LENGTHS) and anchor < 3000 - block_size and keep_rate == 1:
            counts[num_revealed] += 1
            num_long += 1
    if num_long:
        rate = reveal_rate if block_size > 2 else 0
        each = [rate / max(block_size - 2, 1)] * (block_size - 2) + [0]
        assert [count / num_long for count in counts] == pytest.approx([1 - rate, *each], abs=0.05)


@pytest.mark.parametrize("lengths", [[(3, 1)], [(3, 1), (1, 1)]], ids=["one", "two"])
@pytest.mark.parametrize("reveal_rate", [0.0, 0.9])
def test_responses_too_short_for_a_block(lengths, reveal_rate):
    batch = BlockCollator(4, 8, reveal_rate=reveal_rate)(examples(*lengths))
    assert batch["anchors"].shape == batch["anchor_sequences"].shape == (0,)
    assert batch["block_labels"].shape == batch["revealed"].shape == (0, 3)
    assert (batch["labels"] != IGNORE).sum() == len(lengths)


def test_worker_processes(tmp_path):
    write(tmp_path / "data.jsonl", [{"prompt_ids": [1], "response_ids": list(range(2, 30))}] * 8)
    data = ResponseDataset(tmp_path / "data.jsonl", 64)
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size=2, collate_fn=BlockCollator(4, 5), num_workers=2)
    batches = list(loader)
    assert len(batches) == 4
    assert len({tuple(batch["anchors"].tolist()) for batch in batches}) > 1
    assert all(batch["anchors"].shape == (10,) for batch in batches)


def test_the_collator_travels_between_processes():
    collator = pickle.loads(pickle.dumps(BlockCollator(4, 5, 0.7)))
    torch.manual_seed(0)
    batch = collator(examples(*LENGTHS))
    torch.manual_seed(0)
    twin = BlockCollator(4, 5, 0.7)(examples(*LENGTHS))
    assert all(torch.equal(batch[key], twin[key]) for key in twin)
