"""`d3d trace`: a picture, a trace and a timeline of a real run."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError

from transformers_d3d.trace import TraceConfig, run_trace


@pytest.fixture
def pair(pair_folders):
    return pair_folders | {"prompt": "abc"}


@pytest.mark.parametrize("overlap", ["inline", "thread"])
def test_both_lanes_are_drawn(pair, tmp_path, overlap):
    pytest.importorskip("matplotlib")
    output = tmp_path / "new" / "v1.2"
    settings = {"overlap": overlap, "num_successors": 3, "max_new_tokens": 20}
    text = run_trace(TraceConfig(**pair, **settings, output=str(output)))
    assert (tmp_path / "new" / "v1.2.png").stat().st_size > 5000
    trace = json.loads((tmp_path / "new" / "v1.2.json").read_text())
    names = {row["name"] for row in trace["traceEvents"]}
    assert {"prefill", "verify", "wait", "packed", "head"} <= names
    assert trace["otherData"]["mode"] == overlap
    assert "target  |" in text and "drafter |" in text and f"mode {overlap}" in text


@pytest.mark.parametrize(
    ("change", "match"),
    [({"num_rounds": 0}, "num_rounds"), ({"dtype": "int8"}, "dtype"), ({"overlap": "x"}, "overlap")],
)
def test_bad_settings(pair, change, match):
    with pytest.raises((ValueError, StrictDataclassError), match=match):
        run_trace(TraceConfig(**pair | change))
