"""Pictures of runs, with Matplotlib (the extra `plot`), which is imported only here and only when it draws."""

import os

from .report_d3d import DraftReport

COLOURS = {
    "prefill": "#8da0cb",
    "verify": "#4878a8",
    "wait": "#e8e8e8",
    "packed": "#6aaa64",
    "block": "#d9822b",
    "denoise": "#c9587a",
    "head": "#8c6bb1",
}
MEANINGS = {
    "prefill": "prefill",
    "verify": "verifies a draft",
    "wait": "waits for a draft",
    "packed": "packed pass: successors",
    "block": "block pass: nothing was ready",
    "denoise": "later denoising step",
    "head": "head",
}


def new_figure(width: float, height: float, columns: int = 1):
    """A figure of `width` by `height` inches and its axes, an array of them if there are several columns; no window.

    Raises:
        `ImportError`: If Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need Matplotlib; install it with `pip install 'transformers-d3d[plot]'`."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def plot_trace(
    report: DraftReport, path: str | os.PathLike, first_round: int = 0, num_rounds: int = 12, title: str = ""
) -> None:
    """Draws target and drafter as two lanes over time.

    Args:
        report (`DraftReport`): Of a `generate` call.
        path (`str` or `os.PathLike`): The picture; its ending tells the format (PNG, SVG, PDF).
        first_round, num_rounds (`int`, *optional*): Which rounds; 0 is the prefill.
        title (`str`, *optional*): Above the picture.

    Raises:
        `ValueError`: If there are no such rounds.
    """
    events = [event for event in report.events if first_round <= event.round < first_round + num_rounds]
    if not events:
        raise ValueError(
            f"There are no rounds {first_round} to {first_round + num_rounds - 1}: the run has rounds 0 to {report.rounds}."
        )
    figure, axes = new_figure(12, 2.6)
    origin = min(event.start for event in events)
    lanes = {"target": 1, "drafter": 0}
    for event in events:
        bar = {"color": COLOURS[event.name], "edgecolor": "white", "linewidth": 0.5}
        axes.barh(lanes[event.lane], event.seconds, left=event.start - origin, height=0.8, **bar)
        if event.name in ("verify", "packed", "block"):
            middle = event.start - origin + event.seconds / 2
            axes.text(middle, lanes[event.lane], str(event.round), ha="center", va="center", fontsize=7, color="white")
    names = [name for name in COLOURS if any(event.name == name for event in events)]
    handles = [axes.barh(0, 0, color=COLOURS[name], label=MEANINGS[name]) for name in names]
    figure.legend(handles=handles, ncols=len(names), loc="outside lower center", frameon=False, fontsize=8)
    axes.set_yticks(list(lanes.values()), list(lanes))
    axes.set_xlim(0, max(event.end for event in events) - origin)
    axes.set_xlabel("seconds (numbers: rounds)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=150)


def plot_training(history: list[dict], path: str | os.PathLike, title: str = "") -> None:
    """Draws how a training went: the loss, and at each evaluation the acceptance length and the share of right drafts.

    Args:
        history (`list[dict]`): The trainer's log, as in the `history` of `training.json`.
        path (`str` or `os.PathLike`): The picture; its ending tells the format (PNG, SVG, PDF).
        title (`str`, *optional*): Above the picture.

    Raises:
        `ImportError`: If Matplotlib is not installed.
    """
    losses = [entry for entry in history if "loss" in entry]
    evaluations = [entry for entry in history if "eval_acceptance_length" in entry]
    figure, (left, middle, right) = new_figure(12, 3.4, 3)
    for axes, name in (
        (left, "loss of a step"),
        (middle, "acceptance length"),
        (right, "share of right drafts by offset"),
    ):
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    left.plot([entry["step"] for entry in losses], [entry["loss"] for entry in losses], color=COLOURS["verify"])
    left.set_yscale("log")
    steps = [entry["step"] for entry in evaluations]
    lengths = [entry["eval_acceptance_length"] for entry in evaluations]
    middle.plot(steps, lengths, "o-", color=COLOURS["packed"])
    for step, length in zip(steps, lengths, strict=True):
        middle.annotate(f"{length:.2f}", (step, length), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    for name in sorted({name for entry in evaluations for name in entry if name.startswith("eval_correct_")}):
        shares = [entry[name] for entry in evaluations]
        right.plot(steps, shares, ".-", color=COLOURS["block"], alpha=0.7)
        right.annotate(
            name.removeprefix("eval_correct_"), (steps[-1], shares[-1]), (5, -3), textcoords="offset points"
        )
    right.set_ylim(0, 1)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def plot_pruning(report: dict, path: str | os.PathLike, title: str = "") -> None:
    """Draws the share of the acceptance length that is left after each removal, by source, and the drafting time if known.

    Args:
        report (`dict`): Of `prune_drafter`. The evaluation responses are drawn if there are any, else the calibration.
        path (`str` or `os.PathLike`): The picture; its ending tells the format (PNG, SVG, PDF).
        title (`str`, *optional*): Above the picture.

    Raises:
        `ImportError`: If Matplotlib is not installed.
    """
    responses = "evaluation" if report["before"]["evaluation"] else "calibration"
    figure, axes = new_figure(7, 3.6)
    removed = range(len(report["steps"]) + 1)
    before = report["before"][responses]
    for source, full in before.items():
        shares = [100.0] + [100 * step[responses][source] / full for step in report["steps"]]
        style = {"linewidth": 2.5, "color": "black"} if source == "mean" else {"linewidth": 1, "marker": "."}
        axes.plot(removed, shares, label=f"{source} (was {full:.2f})", **style)
    if report["cost"]:
        full = report["cost"]["rest"] + sum(report["cost"]["layers"])
        times = [100.0] + [100 * step["draft_s"] / full for step in report["steps"]]
        axes.plot(removed, times, "--", color=COLOURS["block"], label="time of a draft")
    axes.set_xlabel("layers removed: " + ", ".join(str(step["layer"]) for step in report["steps"]))
    axes.set_ylabel(f"% of the acceptance length\n({responses} responses)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=150)


def chrome_trace(report: DraftReport) -> dict:
    """The report's events in the format of `chrome://tracing` and https://ui.perfetto.dev."""
    lanes = {"target": 0, "drafter": 1}
    rows = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in lanes.items()
    ]
    for event in report.events:
        times = {"ts": event.start * 1e6, "dur": event.seconds * 1e6}
        where = {"pid": 0, "tid": lanes[event.lane], "args": {"round": event.round}}
        rows.append({"name": event.name, "cat": event.lane, "ph": "X"} | times | where)
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"mode": report.mode, "reason": report.reason}}
