"""Reading JSON lines, plain or gzipped, with errors that name the line."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path


def read_json_lines(path: str | os.PathLike, expected: str = "one object") -> Iterator[tuple[str, object]]:
    """Yields `("<file>, line <number>", value)` of each line that is not blank.

    Args:
        path (`str` or `os.PathLike`): The file, gzipped if its name ends in `.gz`.
        expected (`str`): What a line must be, for the error.

    Raises:
        `ValueError`: If a line is not JSON, or the archive is damaged.
    """
    path = Path(path)
    number, opened = 0, gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path.name}, line {number}"
                    try:
                        value = json.loads(line)
                    except ValueError as error:  # no JSON, or no UTF-8
                        raise ValueError(f"{where}: not JSON ({error}); each line must be {expected}.") from error
                    yield where, value
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path.name}, line {number + 1}: the archive is damaged ({error}); make or copy it again."
        ) from error
