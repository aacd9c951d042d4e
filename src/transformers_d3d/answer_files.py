"""Files of a target's answers: a header that says how they were made, then a JSON line for each answer.

They are written by way of part files, one for each process, beside the file: a run can be killed at any moment and go on,
and the file itself appears only when it is whole. Knows nothing about models.
"""

import glob
import gzip
import hashlib
import json
import os
from contextlib import ExitStack, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from .json_lines import read_json_lines

SCHEMA = 1


def stable_hash(value: object) -> str:
    """SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tokenizer_hash(tokenizer) -> str:
    """Hash of a tokenizer's vocabulary: equal for tokenizers whose ids mean the same."""
    return stable_hash(tokenizer.get_vocab())


def short_name(target: str | os.PathLike) -> str:
    """The target's name: an id on the Hub as it is; of a folder, whose path means nothing elsewhere, the last part."""
    return Path(target).resolve().name if Path(target).is_dir() else str(target)


def is_header(value: object) -> bool:
    """Whether a line's value is a header."""
    return isinstance(value, dict) and value.keys() == {"header"}


def check_header(header: object, where: str, tokenizer=None, target: str | None = None) -> dict:
    """Checks that a file's answers can be used.

    Args:
        header (`dict`): The header.
        where (`str`): The file, for errors.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The one that the ids must come from.
        target (`str`, *optional*): The model that must have answered; an organisation before it does not matter.

    Returns:
        `dict`: The header.

    Raises:
        `ValueError`: If the header is of another version, or the answers of another tokenizer or target.
    """
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise ValueError(f"{where}: the header is {str(header)[:60]}; its `schema` must be {SCHEMA}.")
    made_by = header.get("target")
    if tokenizer is not None and header.get("tokenizer_hash") != tokenizer_hash(tokenizer):
        raise ValueError(
            f"{where}: these are answers of `{made_by}`, whose tokenizer has another vocabulary than "
            f"`{tokenizer.name_or_path}`; use answers of this target, made by `d3d generate-data`."
        )
    if target is not None and _last_part(target) != _last_part(made_by):
        raise ValueError(
            f"{where}: these are answers of `{made_by}`, not of `{target}`; use answers of this target, made by "
            f"`d3d generate-data`. If both are one model, give its name with `--target_name {made_by}`."
        )
    return header


def _last_part(name: object) -> str:
    return str(name).rpartition("/")[2].lower()


def differences(there: dict, here: dict) -> list[str]:
    """What two headers differ in, in words; versions do not matter."""
    there, here = (
        {
            name: value
            for name, value in (header | header.get("settings", {})).items()
            if name not in ("settings", "versions")
        }
        for header in (there, here)
    )
    return [
        f"`{name}` is {there.get(name)} there and {here.get(name)} now"
        for name in here | there
        if there.get(name) != here.get(name)
    ]


class AnswerWriter:
    """Writes a file of answers that can be stopped and gone on with.

    Making one reads what earlier runs left, however many processes they had. Inside `with`, [`~AnswerWriter.write`]
    appends to this process's own part; when all processes are through, one calls [`~AnswerWriter.finish`].

    Args:
        path (`str` or `os.PathLike`): The file, gzipped if its name ends in `.gz`.
        header (`dict`): How the answers are made.
        num_answers (`int`): How many there will be.
        rank (`int`): This process.
        num_processes (`int`): All processes.

    Attributes:
        finished (`bool`): Whether the file is there and whole.

    Raises:
        `ValueError`: If the file or a part was made with other settings, or another run is writing.
    """

    def __init__(self, path: str | os.PathLike, header: dict, num_answers: int, rank: int = 0, num_processes: int = 1):
        self.path, self.header, self.num_answers = Path(path), header, num_answers
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.part = self.path.with_name(f".{self.path.name}.part-{rank}-of-{num_processes}")
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock-{rank}"))
        self.finished = self.path.exists()
        if self.finished:
            _, first = next(read_json_lines(self.path), (None, None))
            if not is_header(first):
                raise ValueError(
                    f"`{self.path}` exists and has no header, so it was not made by `d3d generate-data`; "
                    "choose another `--output`."
                )
            self._check(first["header"], self.path)
        self._places = {}
        self._whole = 0  # bytes of the own part up to its last whole line
        self._read_parts()

    @property
    def done(self) -> set[int]:
        """Prompts whose answers are in part files."""
        return set(self._places)

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f".{glob.escape(self.path.name)}.part-*"))

    def _check(self, header: dict, path: Path) -> None:
        found = differences(header, self.header)
        if found:
            raise ValueError(
                f"`{path}` was made with other settings: {'; '.join(found)}. One file holds answers of one setting: go on "
                f"with those, choose another `--output`, or delete `{path.name}` to begin anew."
            )

    def _read_parts(self) -> None:
        for part in self._parts():
            whole = 0
            with part.open("rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n"):  # the process was killed here
                        break
                    if whole == 0:
                        self._check(json.loads(line)["header"], part)
                    else:
                        index, _, text = line.partition(b"\t")
                        self._places[int(index)] = (part, whole + len(line) - len(text), len(text))
                    whole += len(line)
            if part == self.part:
                self._whole = whole

    def __enter__(self):
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"Another run is writing `{self.path}`; wait until it ends, or choose another `--output`."
            ) from None
        self._file = self.part.open("ab", buffering=0)
        self._file.truncate(self._whole)
        if self._whole == 0:
            self._append(_line({"header": self.header}))
        return self

    def __exit__(self, *error):
        self._file.close()
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def write(self, index: int, answer: dict) -> None:
        """Appends the answer to prompt `index`; a line that is on disk is whole or dropped when going on."""
        self._append(b"%d\t" % index + _line(answer))

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._failed(self.part, error) from error

    def _failed(self, path: Path, error: OSError) -> OSError:
        return OSError(
            error.errno,
            f"Writing `{path}` failed ({error.strerror}). The answers so far are kept: make room and start the same "
            "command again to go on.",
        )

    def finish(self) -> None:
        """Makes the file out of all parts, in the order of the prompts, and removes them.

        Raises:
            `ValueError`: If an answer is missing.
            `OSError`: If there is no room; the parts stay.
        """
        self._read_parts()
        missing = self.num_answers - len(self._places)
        if missing:
            raise ValueError(f"{missing} of {self.num_answers} answers are missing; start the same command again.")
        partial = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with ExitStack() as stack:
                parts = {part: stack.enter_context(part.open("rb")) for part in self._parts()}
                raw = stack.enter_context(partial.open("wb"))
                gzipped = self.path.suffix == ".gz"
                with gzip.GzipFile("", "wb", 6, raw, mtime=0) if gzipped else nullcontext(raw) as out:
                    out.write(_line({"header": self.header}))
                    for index in range(self.num_answers):
                        part, offset, length = self._places[index]
                        parts[part].seek(offset)
                        out.write(parts[part].read(length))
                raw.flush()
                os.fsync(raw.fileno())
            partial.replace(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._failed(self.path, error) from error
        self.remove_parts()

    def remove_parts(self) -> None:
        """Removes all part files."""
        for part in self._parts():
            part.unlink(missing_ok=True)


def _line(value: dict) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"
