"""Pictures of a run: two lanes that show what the report says, and a trace that other tools read."""

import json

import pytest

from transformers_d3d.plotting import COLOURS, MEANINGS, chrome_trace, plot_pruning, plot_trace, plot_training
from transformers_d3d.report_d3d import DraftReport, TraceEvent

EVENTS = [
    TraceEvent("target", "prefill", 0, 0.0, 1.0),
    TraceEvent("drafter", "prefill", 0, 0.0, 1.5),
    TraceEvent("target", "wait", 1, 1.0, 2.0),
    TraceEvent("drafter", "denoise", 1, 1.5, 2.0),
    TraceEvent("drafter", "packed", 1, 2.0, 4.0),
    TraceEvent("target", "verify", 1, 2.0, 3.0),
]


def test_a_picture_of_two_lanes(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    report = DraftReport(accepted=[2], events=EVENTS)
    plot_trace(report, tmp_path / "trace.png", title="a run")
    image = matplotlib.image.imread(tmp_path / "trace.png")
    assert image.shape[1] > 1000 and len({tuple(pixel) for pixel in image[::7, ::7].reshape(-1, 4)}) > 5
    with pytest.raises(ValueError, match="rounds 5 to 6.*rounds 0 to 1"):
        plot_trace(report, tmp_path / "none.png", first_round=5, num_rounds=2)
    assert not (tmp_path / "none.png").exists()


def test_a_training(tmp_path):
    pytest.importorskip("matplotlib")
    history = [{"step": step, "loss": 5.0 / step} for step in range(1, 9)]
    plot_training(history, tmp_path / "early.png")  # nothing evaluated yet
    history += [
        {"step": s, "eval_acceptance_length": 2.0 + s, "eval_correct_1": 0.9, "eval_correct_2": 0.5} for s in (4, 8)
    ]
    plot_training(history, tmp_path / "curve.svg", title="a drafter")
    text = (tmp_path / "curve.svg").read_text()
    assert text.count("<!-- 6.00 -->") == text.count("<!-- 10.00 -->") == 1 and "<!-- a drafter -->" in text
    assert (tmp_path / "early.png").stat().st_size > 1000


@pytest.mark.parametrize("responses", ["evaluation", "calibration"])
def test_a_pruning(tmp_path, responses):
    pytest.importorskip("matplotlib")
    empty = {"calibration": {"gsm8k": 3.0, "mean": 3.0}, "evaluation": {}}
    before = empty | {responses: {"gsm8k": 4.0, "mbpp": 2.0, "mean": 3.0}}
    step = empty | {responses: {"gsm8k": 3.9, "mbpp": 1.9, "mean": 2.9}} | {"layer": 17, "draft_s": 0.9}
    cost = {"layers": [0.1] * 5, "rest": 0.5, "verify": 1.0} if responses == "evaluation" else None
    report = {"before": before, "steps": [step], "cost": cost}
    plot_pruning(report, tmp_path / "pruning.svg", "a drafter")
    text = (tmp_path / "pruning.svg").read_text()
    for label in (
        "gsm8k (was 4.00)",
        "mean (was 3.00)",
        "layers removed: 17",
        f"({responses} responses)",
        "a drafter",
    ):
        assert label in text
    assert ("time of a draft" in text) == (cost is not None)


def test_every_colour_has_a_meaning():
    assert COLOURS.keys() == MEANINGS.keys() >= {event.name for event in EVENTS}


def test_a_chrome_trace_has_every_event():
    trace = json.loads(json.dumps(chrome_trace(DraftReport(events=EVENTS, mode="thread"))))
    bars = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    names = {row["tid"]: row["args"]["name"] for row in trace["traceEvents"] if row["ph"] == "M"}
    assert [(names[row["tid"]], row["name"], row["ts"], row["dur"]) for row in bars] == [
        (event.lane, event.name, event.start * 1e6, (event.end - event.start) * 1e6) for event in EVENTS
    ]
    assert trace["otherData"]["mode"] == "thread"


def test_without_matplotlib_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers-d3d\[plot\]'"):
        plot_trace(DraftReport(events=EVENTS), tmp_path / "trace.png")
