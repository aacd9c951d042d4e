"""The report's sums, on lanes drawn by hand."""

import math

import pytest

from transformers_d3d import DraftReport
from transformers_d3d.report_d3d import TraceEvent

# Round 1 hits, round 2 misses, round 3 is the last.
EVENTS = [
    TraceEvent("target", "prefill", 0, 0.0, 2.0),
    TraceEvent("drafter", "prefill", 0, 0.0, 1.0),
    TraceEvent("target", "wait", 1, 2.0, 3.0),
    TraceEvent("drafter", "block", 1, 2.0, 3.0),
    TraceEvent("target", "verify", 1, 3.0, 7.0),
    TraceEvent("drafter", "packed", 1, 3.0, 5.0),
    TraceEvent("target", "wait", 2, 7.0, 7.5),
    TraceEvent("drafter", "head", 2, 7.0, 7.25),
    TraceEvent("drafter", "denoise", 2, 7.25, 7.5),
    TraceEvent("target", "verify", 2, 7.5, 9.0),
    TraceEvent("drafter", "packed", 2, 7.5, 9.5),
    TraceEvent("target", "wait", 3, 9.0, 11.0),
    TraceEvent("drafter", "block", 3, 9.5, 11.0),
    TraceEvent("target", "verify", 3, 11.0, 12.0),
    TraceEvent("drafter", "packed", 3, 11.0, 11.5),
]
REPORT = DraftReport(
    accepted=[3, 0, 1],
    proposed=[4, 4, 2],
    outcomes=[(3, True), (0, False)],
    events=EVENTS,
    mode="thread",
    reason="a test",
)


def test_counts():
    assert REPORT.rounds == 3 and REPORT.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert REPORT.histogram == [1, 1, 0, 1]
    assert REPORT.accepted_by_position == pytest.approx([2 / 3, 1 / 3, 1 / 2, 0.0])
    assert (REPORT.hits, REPORT.misses, REPORT.hit_rate) == (1, 1, 0.5)
    assert REPORT.hit_rate_by_accepted == {0: 0.0, 3: 1.0}


def test_times():
    assert REPORT.target_prefill_s == 2.0 and REPORT.drafter_prefill_s == 1.0
    assert REPORT.verifying_s == 6.5 and REPORT.waiting_s == 3.5
    assert REPORT.drafting_s == 1 + 2 + 0.5 + 2 + 1.5 + 0.5
    assert REPORT.overlapped_s == 1 + 2 + 1.5 + 0.5
    # Rounds 1 and 2 have a next proposal: max(4, 2) of 4.5, max(1.5, 2) of 3.5.
    assert REPORT.full_and_measured_overlap_s == (6.0, 8.0)
    assert REPORT.overlap_efficiency == 0.75


def test_the_timeline_shows_the_lanes():
    target, drafter, legend = REPORT.timeline(first_round=1, num_rounds=1, width=50).splitlines()
    assert target == f"target  |{'.' * 10}{'V' * 40}|"
    assert drafter == f"drafter |{'B' * 10}{'=' * 20}{' ' * 20}|"
    assert "5.00 s, rounds 1 to 1" in legend
    assert "no events" in REPORT.timeline(first_round=9)


def test_as_text():
    text = str(REPORT)
    assert "3 rounds" in text and "mode thread (a test)" in text and "successors ready 1 of 2 times" in text
    assert "overlapped 5.00 s" in text


def test_without_rounds():
    report = DraftReport()
    assert math.isnan(report.hit_rate) and math.isnan(report.overlap_efficiency)
    assert math.isnan(report.mean_acceptance_length)
    assert report.overlapped_s == 0.0 and "no rounds" in str(report)
