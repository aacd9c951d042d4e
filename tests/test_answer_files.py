"""Files of answers: going on after a kill at any byte, one setting for each file, and nothing half-written."""

import copy
import errno
import gzip
import json

import pytest

from transformers_d3d import answer_files
from transformers_d3d.answer_files import AnswerWriter, check_header, tokenizer_hash

HEADER = {
    "schema": 1,
    "target": "org/model",
    "settings": {"temperature": 0.0, "seed": None},
    "versions": {"torch": "1"},
}
ANSWERS = [{"id": i, "response_ids": [i, i + 1]} for i in range(5)]


def read(path):
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def write(path, indices, rank=0, num_processes=1, header=HEADER):
    writer = AnswerWriter(path, header, len(ANSWERS), rank, num_processes)
    with writer:
        for index in indices:
            writer.write(index, ANSWERS[index])
    return writer


@pytest.fixture(params=["answers.jsonl", "answers.jsonl.gz"])
def path(request, tmp_path):
    return tmp_path / "new" / request.param


def test_answers_come_in_the_order_of_the_prompts(path):
    writer = write(path, [3, 1, 4, 0, 2])
    assert not path.exists()
    writer.finish()
    assert read(path) == [{"header": HEADER}, *ANSWERS]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_going_on_with_another_number_of_processes(path):
    write(path, [0], 0, 2)
    write(path, [4, 2], 1, 2)
    writer = AnswerWriter(path, HEADER, 5)
    assert writer.done == {0, 2, 4} and not writer.finished
    write(path, [1, 3], 0, 1).finish()
    assert read(path) == [{"header": HEADER}, *ANSWERS]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_going_on_after_a_kill_at_any_byte(tmp_path):
    path = tmp_path / "answers.jsonl"
    writer = write(path, range(5))
    whole = writer.part.read_bytes()
    writer.finish()
    expected = path.read_bytes()
    for length in range(len(whole) + 1):
        path.unlink(missing_ok=True)
        writer.part.write_bytes(whole[:length])
        left = sorted(set(range(5)) - AnswerWriter(path, HEADER, 5).done)
        assert len(left) == min(5, 6 - whole[:length].count(b"\n"))
        write(path, left).finish()
        assert path.read_bytes() == expected


def test_two_runs_do_not_write_one_file(path):
    first, second = AnswerWriter(path, HEADER, 5), AnswerWriter(path, HEADER, 5, 0, 2)
    with first:
        first.write(0, ANSWERS[0])
        with pytest.raises(ValueError, match="Another run is writing .*another `--output`"), second:
            pass
        with AnswerWriter(path, HEADER, 5, 1, 2):  # another process of the same run
            pass
    with AnswerWriter(path, HEADER, 5) as third:
        assert third.done == {0}
    assert not list(path.parent.glob("*lock*"))


def test_a_finished_file_is_left_alone(path):
    write(path, range(5)).finish()
    before = path.read_bytes()
    writer = AnswerWriter(path, HEADER | {"versions": {"torch": "2"}}, 5)
    assert writer.finished and path.read_bytes() == before


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "begun"])
def test_settings_are_not_mixed(path, finished):
    writer = write(path, range(5))
    if finished:
        writer.finish()
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    other = copy.deepcopy(HEADER)
    other["settings"]["temperature"], other["target"] = 0.7, "org/other"
    message = "`target` is org/model there and org/other now; `temperature` is 0.0 there and 0.7 now.*`--output`"
    with pytest.raises(ValueError, match=message):
        AnswerWriter(path, other, 5)
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


@pytest.mark.parametrize("content", ["", '{"prompt_ids": [1], "response_ids": [2]}\n'], ids=["empty", "no-header"])
def test_other_files_are_not_overwritten(tmp_path, content):
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="mine.jsonl` exists and has no header.*`--output`"):
        AnswerWriter(path, HEADER, 5)
    assert path.read_text() == content


def test_missing_answers_make_no_file(path):
    writer = write(path, [0, 1, 3])
    with pytest.raises(ValueError, match="2 of 5 answers are missing"):
        writer.finish()
    assert not path.exists() and writer.part.exists()


class FullDisk:
    """A file that takes a few bytes and then no more."""

    def __init__(self, room):
        self.room, self.written = room, b""

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data)[: min(self.room, 3)]
        self.room -= len(taken)
        self.written += taken
        return len(taken)

    def close(self):
        pass


def test_a_full_disk_while_answering(path):
    writer = AnswerWriter(path, HEADER, 5)
    with pytest.raises(OSError, match="No space left.*make room and start the same command again") as raised:
        with writer:
            writer.write(0, ANSWERS[0])
            disk = FullDisk(len(json.dumps(ANSWERS[1])) + 5)
            writer._file.close()
            writer._file = disk
            for index in range(1, 5):
                writer.write(index, ANSWERS[index])
    assert raised.value.errno == errno.ENOSPC
    with writer.part.open("ab") as part:
        part.write(disk.written)
    left = AnswerWriter(path, HEADER, 5)
    assert left.done == {0, 1}
    write(path, [2, 3, 4]).finish()
    assert read(path) == [{"header": HEADER}, *ANSWERS]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_at_the_end(path, monkeypatch, step):
    writer = write(path, range(5))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((answer_files.os, "fsync") if step == "fsync" else (answer_files.Path, "replace")), full)
        with pytest.raises(OSError, match="No space left.*start the same command again"):
            writer.finish()
    assert [file.name for file in path.parent.iterdir()] == [writer.part.name]
    write(path, []).finish()
    assert read(path) == [{"header": HEADER}, *ANSWERS]


def test_numbers_that_are_none_are_not_written(path):
    writer = AnswerWriter(path, HEADER, 5)
    with writer, pytest.raises(ValueError, match="JSON"):
        writer.write(0, {"top_log_probs": [[float("nan")]]})
    assert AnswerWriter(path, HEADER, 5).done == set()


def test_a_header_is_checked_against_tokenizer_and_target(tokenizer):
    header = HEADER | {"tokenizer_hash": tokenizer_hash(copy.deepcopy(tokenizer))}
    for target in ("org/model", "model", "other-org/Model", None):
        assert check_header(header, "here", tokenizer, target) is header
    with pytest.raises(ValueError, match="here: these are answers of `org/model`, not of `org/small`.*--target_name"):
        check_header(header, "here", tokenizer, "org/small")
    tokenizer.add_tokens(["more"])
    with pytest.raises(
        ValueError, match="here: these are answers of `org/model`, whose tokenizer has another vocabulary"
    ):
        check_header(header, "here", tokenizer)
    for bad in ({"schema": 2}, [], None):
        with pytest.raises(ValueError, match="here: the header is .*`schema` must be 1"):
            check_header(bad, "here")
