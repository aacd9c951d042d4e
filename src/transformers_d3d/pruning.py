"""Layer pruning by acceptance length: removes the layers that cost the least of it, and keeps account of each removal."""

import copy
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.cache_utils import DynamicCache
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from .acceptance import simulate_acceptance
from .answer_files import short_name, stable_hash
from .benchmark import check_dtype, load_drafter
from .data import ResponseDataset
from .json_lines import read_json_lines
from .layers import layer_similarities, original_layers, remove_layers, skipped_layers
from .lora import add_lora, has_adapters, is_adapter_weight, save_adapters
from .masking_d3d import mask_rows
from .modeling_d3d import D3DDrafterModel
from .plotting import plot_pruning
from .records import command, hardware, versions, write_json
from .trainer import D3DTrainer
from .training_args import D3DTrainingArguments

REPORT, JOURNAL, COST = "pruning.json", "pruning.journal.jsonl", "pruning.cost.json"
METHODS = ("progressive", "one_shot", "similarity", "last")
NUM_RESAMPLES = 1000

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Responses:
    """Responses to measure on, in batches that hold as many of each source.

    Args:
        examples (`list[dict]`): Each with `prompt_ids`, `response_ids` and maybe a `source`.
        batch_size (`int`): Responses of each source in a batch.
    """

    examples: list[dict]
    batch_size: int = 4

    def __post_init__(self):
        by_source = {}
        for example in self.examples:
            by_source.setdefault(example.get("source", "all"), []).append(example)
        rounds = max((-(-len(own) // self.batch_size) for own in by_source.values()), default=0)
        size = self.batch_size
        batches = [
            [example for own in by_source.values() for example in own[i * size : (i + 1) * size]]
            for i in range(rounds)
        ]
        object.__setattr__(self, "batches", batches)
        object.__setattr__(self, "examples", [example for batch in batches for example in batch])
        object.__setattr__(self, "sources", [example.get("source", "all") for example in self.examples])


def measure_responses(drafter: D3DDrafterModel, skipped: tuple[int, ...], examples: list[dict]) -> list[list[float]]:
    """What a drafter without some layers accepts in each response.

    Returns:
        `list`: For each response its number of rounds, of tokens in them (bonus counted), and the acceptance length over
        all anchors. A response without a round counts as nothing.
    """
    rows = []
    with skipped_layers(drafter, list(skipped)):
        for example in examples:
            acceptance = simulate_acceptance(drafter, [example])
            rounds = len(acceptance.rounds)
            rows.append([rounds, rounds + sum(acceptance.rounds), acceptance.every_anchor if rounds else 0.0])
    return rows


def lengths_by_source(rows: list[list[float]], sources: list[str]) -> dict[str, float]:
    """Acceptance length on each source, and under `"mean"` their mean."""
    lengths = {}
    for source in dict.fromkeys(sources[: len(rows)]):
        own = [row for row, of in zip(rows, sources, strict=False) if of == source]
        lengths[source] = sum(row[1] for row in own) / max(sum(row[0] for row in own), 1)
    return lengths | {"mean": sum(lengths.values()) / len(lengths)}


def resampled_lengths(rows: list[list[list[float]]], sources: list[str], seed: int = 0) -> torch.Tensor:
    """Mean acceptance lengths of several candidates on the same bootstrap resamples of their responses.

    Each source is resampled for itself, and its acceptance length counts as much as another's.

    Args:
        rows (`list`): For each candidate, rows of [`measure_responses`] on the same responses.
        sources (`list[str]`): The source of each response.
        seed (`int`, *optional*, defaults to 0): Seed of the resampling.

    Returns:
        `torch.Tensor` of shape `(num_candidates, NUM_RESAMPLES)`.
    """
    counts = torch.tensor([[row[:2] for row in candidate] for candidate in rows], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    for source in dict.fromkeys(sources):
        own = torch.tensor([i for i, of in enumerate(sources) if of == source])
        drawn = own[torch.randint(len(own), (NUM_RESAMPLES, len(own)), generator=generator)]
        rounds, tokens = counts[:, drawn].sum(dim=2).unbind(-1)
        lengths.append(tokens / rounds.clamp(min=1))
    return torch.stack(lengths).mean(0)


def interval(values: torch.Tensor, confidence: float) -> tuple[float, float]:
    """The central interval that holds the share `confidence` of resampled values."""
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high


@dataclass(frozen=True)
class DraftingCost:
    """Seconds of a round's passes, to weigh acceptance against time.

    Args:
        layers (`tuple[float, ...]`): Of each layer of the drafter in a block pass.
        rest (`float`): Of that pass outside the layers, head included.
        verify (`float`): Of the target's pass over a draft.
    """

    layers: tuple[float, ...]
    rest: float
    verify: float

    def draft(self, skipped: tuple[int, ...]) -> float:
        """Seconds of a block pass without some layers."""
        return self.rest + sum(seconds for i, seconds in enumerate(self.layers) if i not in skipped)

    def round(self, skipped: tuple[int, ...]) -> float:
        """Seconds of a round in which drafter and target take turns."""
        return self.draft(skipped) + self.verify


@torch.no_grad()
def measure_cost(drafter: D3DDrafterModel, target, context: int = 256, repeats: int = 15) -> DraftingCost:
    """Measures the passes of a round behind a context, as medians.

    Args:
        drafter (`D3DDrafterModel`): The drafter.
        target (`PreTrainedModel`): The target.
        context (`int`, *optional*, defaults to 256): Tokens in the cache of both.
        repeats (`int`, *optional*, defaults to 15): Passes of each kind.
    """
    block_size = drafter.config.block_size
    ids = torch.arange(context + block_size, device=drafter.device).unsqueeze(0) % 1000 % drafter.config.vocab_size
    cache = drafter.new_cache(context + block_size)
    drafter(ids[:, :context], cache=cache)
    spans, starts = [[] for _ in drafter.model.layers], [0.0] * len(drafter.model.layers)
    hooks = []
    for index, layer in enumerate(drafter.model.layers):
        hooks.append(layer.register_forward_pre_hook(lambda *_, i=index: starts.__setitem__(i, _now(drafter.device))))
        hooks.append(
            layer.register_forward_hook(lambda *_, i=index: spans[i].append(_now(drafter.device) - starts[i]))
        )
    passes, verified = [], []
    rows = mask_rows(torch.tensor([context - 1], device=drafter.device), block_size)
    masks = torch.full((1, len(rows)), drafter.config.mask_token_id, device=drafter.device)
    try:
        for _ in range(repeats):
            start = _now(drafter.device)
            hidden = drafter(masks, rows, cache=cache, mask_offsets=rows.position - rows.start).last_hidden_state
            drafter.logits(hidden)
            passes.append(_now(drafter.device) - start)
            cache.rollback(context)
    finally:
        for hook in hooks:
            hook.remove()
    ids = ids.to(target.device)
    known = DynamicCache()
    target(input_ids=ids[:, :context], cache=known)
    for _ in range(repeats):
        start = _now(target.device)
        target(input_ids=ids[:, context:], cache=known)
        verified.append(_now(target.device) - start)
        known.crop(-block_size)
    layers = tuple(_median(span) for span in spans)
    return DraftingCost(layers, max(_median(passes) - sum(layers), 0.0), _median(verified))


def _median(values: list[float]) -> float:
    return torch.tensor(values, dtype=torch.float64).median().item()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Journal:
    """What trials measured, on disk as soon as it is measured, so that a killed pruning goes on.

    Args:
        path (`str` or `os.PathLike`, *optional*): A file of JSON lines. Without it nothing is kept.
        header (`dict`): What the measurements depend on.
        writes (`bool`): Whether this process is the one that writes.

    Raises:
        `ValueError`: If the file's measurements depend on something else; names it.
    """

    def __init__(self, path: str | os.PathLike | None, header: dict, writes: bool = True):
        self.path, self.writes, self.rows = path and Path(path), writes, {}
        if self.path is None:
            return
        if self.path.exists():
            text = self.path.read_bytes()
            if not text.endswith(b"\n"):  # the process was killed here
                text = text[: text.rfind(b"\n") + 1]
                if writes:
                    self.path.write_bytes(text)
        if self.path.exists() and self.path.stat().st_size:
            (_, first), *lines = read_json_lines(self.path)
            found = [
                f"`{key}` is {first.get(key)} there and {header[key]} now"
                for key in header
                if first.get(key) != header[key]
            ]
            if found:
                raise ValueError(
                    f"`{self.path}` belongs to another pruning: {'; '.join(found)}. Go on with those settings, choose "
                    f"another `--output_dir`, or delete the file to begin anew."
                )
            for _, line in lines:
                self.rows[tuple(line["skipped"]), line["healed"], line["batch"]] = line["rows"]
        elif writes:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(header)

    def add(self, skipped: tuple[int, ...], healed: int, batch: str, rows: list) -> None:
        """Keeps what a drafter without the layers `skipped`, healed so many times, accepted in a batch."""
        self.rows[skipped, healed, batch] = rows
        if self.path is not None and self.writes:
            self._append({"skipped": skipped, "healed": healed, "batch": batch, "rows": rows})

    def _append(self, line: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def prune_drafter(
    drafter: D3DDrafterModel,
    calibration: list[dict],
    *,
    num_layers: int | None = None,
    min_retained: float | None = None,
    cost: DraftingCost | None = None,
    method: str = "progressive",
    evaluation: list[dict] | None = None,
    heal: Callable[[D3DDrafterModel, int], None] | None = None,
    heal_every: int = 1,
    batch_size: int = 4,
    confidence: float = 0.95,
    seed: int = 0,
    journal: str | os.PathLike | None = None,
) -> dict:
    """Removes layers from a drafter, in place, one after another, by what their removal costs in acceptance length.

    `"progressive"` tries the removal of each layer that is left, by skipping it, on one batch of responses after the other,
    and drops candidates that are worse than the best beyond chance (bootstrap, paired by response). If several are left when
    the responses end, the one with the highest acceptance length over all anchors goes: a measure with less noise. The other
    methods fix the order beforehand and are there to compare: `"one_shot"` by each layer's removal alone, `"similarity"`
    by ShortGPT's measure (arXiv 2403.03853), `"last"` from the end.

    Processes of `torchrun` or `accelerate launch` share the candidates.

    Args:
        drafter (`D3DDrafterModel`): The drafter, in evaluation mode.
        calibration (`list[dict]`): The target's responses to rank by, with `prompt_ids`, `response_ids` and maybe `source`.
        num_layers (`int`, *optional*): Remove so many layers at most. Default: until another limit, or one is left.
        min_retained (`float`, *optional*): Stop before the share of the acceptance length on `calibration` falls below this.
        cost ([`DraftingCost`], *optional*):
            Rank by the predicted speed instead of the acceptance length alone, and stop where it is highest.
        method (`str`, *optional*, defaults to `"progressive"`): See above.
        evaluation (`list[dict]`, *optional*): Responses measured after each removal and not ranked by.
        heal (`Callable`, *optional*): Trains the drafter in place after removals; called with it and the healing's number.
        heal_every (`int`, *optional*, defaults to 1): Removals between two healings.
        batch_size (`int`, *optional*, defaults to 4): Responses of each source between two decisions.
        confidence (`float`, *optional*, defaults to 0.95): Of the intervals.
        seed (`int`, *optional*, defaults to 0): Seed of the resampling.
        journal (`str` or `os.PathLike`, *optional*): File of measurements, to go on after a kill.

    Returns:
        `dict`: The report, ready for JSON: every removal with its candidates, and what is left on each source.

    Raises:
        `ValueError`: If the settings or the responses cannot serve; before any work.
    """
    whole = original_layers(drafter)
    if method not in METHODS:
        raise ValueError(f"`method` is {method!r}; allowed are {', '.join(map(repr, METHODS))}.")
    if len(whole) < 2:
        raise ValueError("The drafter has one layer, and one must stay: there is nothing left to remove.")
    if num_layers is not None and not 0 < num_layers < len(whole):
        raise ValueError(
            f"`num_layers` is {num_layers}; the drafter has {len(whole)} layers, of which 1 to {len(whole) - 1} can be removed."
        )
    if min_retained is not None and not 0 < min_retained <= 1:
        raise ValueError(
            f"`min_retained` is {min_retained}; it is a share of the acceptance length, above 0 and at most 1."
        )
    if num_layers is None and min_retained is None and cost is None:
        raise ValueError(
            "Nothing tells when to stop: give `num_layers`, `min_retained` or a cost to find the best speed by."
        )
    for name, value in (("heal_every", heal_every), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` is {confidence}; it must be above 0 and below 1.")
    for name, responses in (("calibration", calibration), ("evaluation", evaluation or [])):
        check_responses(responses, name, drafter.config.vocab_size)
    limit = num_layers or len(whole) - 1
    trials = _Trials(
        drafter, Responses(calibration, batch_size), Responses(evaluation or [], batch_size), journal, seed
    )
    order = _fixed_order(method, trials)
    start = {"calibration": trials.lengths((), 0), "evaluation": trials.lengths((), 0, of_evaluation=True)}
    full = start["calibration"]["mean"]
    fastest = full / cost.round(()) if cost else 0.0
    steps, removed, healed, reason = [], (), 0, f"{limit} layers are removed"
    while len(removed) < limit:
        if order is None:
            choice, candidates, tied = _race(trials, removed, healed, cost, confidence)
        else:
            choice, candidates, tied = order[len(removed)], [], []
        skipped = (*removed, choice)
        unhealed, weights = trials.lengths(skipped, healed), None
        lengths = unhealed
        if heal is not None and len(skipped) % heal_every == 0:
            weights = {n: p.detach().clone() for n, p in drafter.named_parameters() if p.requires_grad}
            with skipped_layers(drafter, list(skipped)):
                heal(drafter, healed + 1)
            drafter.eval()
            lengths = trials.lengths(skipped, healed + 1)
        retained = lengths["mean"] / full
        speed = lengths["mean"] / cost.round(skipped) if cost else None
        if min_retained is not None and retained < min_retained:
            reason = (
                f"without layer {whole[choice]} only {100 * retained:.1f} % of the acceptance length would be left"
            )
        elif cost is not None and speed <= fastest:
            reason = f"without layer {whole[choice]} decoding would not get faster"
        else:
            removed, healed, fastest = skipped, healed + (weights is not None), speed or 0.0
            step = {
                "layer": whole[choice],
                "calibration": lengths,
                "retained": retained,
                "retained_interval": trials.retained(removed, healed, confidence),
                "evaluation": trials.lengths(removed, healed, of_evaluation=True),
                "tied_with": [whole[i] for i in tied],
                "candidates": [candidate | {"layer": whole[candidate["layer"]]} for candidate in candidates],
            }
            if cost is not None:
                step |= {"draft_s": cost.draft(removed), "predicted_speedup": speed / (full / cost.round(()))}
            if weights is not None:
                step["unhealed"] = unhealed
            steps.append(step)
            continue
        if weights is not None:
            with torch.no_grad():
                for name, parameter in drafter.named_parameters():
                    if name in weights:
                        parameter.copy_(weights[name])
        break
    remove_layers(drafter, list(removed))
    removals = [{"layer": step["layer"], "retained": round(step["retained"], 4)} for step in steps]
    drafter.config.pruning = [*(drafter.config.pruning or []), *removals]
    return {
        "method": method,
        "confidence": confidence,
        "seed": seed,
        "cost": asdict(cost) if cost else None,
        "layers_before": whole,
        "kept_layers": drafter.config.kept_layers,
        "stopped_because": reason,
        "responses": {
            "calibration": Counter(trials.calibration.sources),
            "evaluation": Counter(trials.evaluation.sources),
        },
        "before": start,
        "steps": steps,
    }


def check_responses(responses: list[dict], name: str, vocab_size: int) -> None:
    """Raises `ValueError` unless responses are there (for calibration) and of a vocabulary of this size."""
    if not responses and name == "calibration":
        raise ValueError(
            "There are no calibration responses; give the target's responses to prompts of the intended use."
        )
    for number, example in enumerate(responses):
        largest = max([*example["prompt_ids"], *example["response_ids"]], default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"Response {number} of the {name} holds the id {largest}, outside the drafter's vocabulary [0, {vocab_size}); "
                "it must come from this drafter's own tokenizer."
            )


class _Trials:
    """Acceptance of the drafter without some layers, measured once, by all processes together, and kept in a journal."""

    def __init__(self, drafter, calibration: Responses, evaluation: Responses, journal, seed: int):
        self.state = PartialState()
        self.drafter, self.calibration, self.evaluation, self.seed = drafter, calibration, evaluation, seed
        header = {
            "drafter": drafter_fingerprint(drafter),
            "calibration": stable_hash([[e["prompt_ids"], e["response_ids"]] for e in calibration.examples]),
            "evaluation": stable_hash([[e["prompt_ids"], e["response_ids"]] for e in evaluation.examples]),
            "batch_size": calibration.batch_size,
        }
        with self.state.main_process_first():  # which may have to mend the file that the others read
            self.journal = Journal(journal, header, self.state.is_main_process)

    def measure(
        self, skips: list[tuple[int, ...]], healed: int, batch: int, of_evaluation: bool = False
    ) -> list[list]:
        """Rows of [`measure_responses`] of one batch, for each of some sets of skipped layers."""
        responses = self.evaluation if of_evaluation else self.calibration
        name = f"{'evaluation' if of_evaluation else 'calibration'} {batch}"
        todo = [skipped for skipped in skips if (skipped, healed, name) not in self.journal.rows]
        each = self.state.num_processes
        shown = self.state.is_main_process and len(todo) > 1
        with tqdm(total=len(todo), desc=f"{len(skips[0])} removed, {name}", leave=False, disable=not shown) as bar:
            for first in range(0, len(todo), each):  # one for each process, then all of them are kept
                with self.state.split_between_processes(todo[first : first + each]) as own:
                    found = [(s, measure_responses(self.drafter, s, responses.batches[batch])) for s in own]
                for skipped, rows in gather_object(found):
                    self.journal.add(tuple(skipped), healed, name, rows)
                    bar.update()
        return [self.journal.rows[skipped, healed, name] for skipped in skips]

    def rows(self, skipped: tuple[int, ...], healed: int, of_evaluation: bool = False) -> list:
        """Rows of all batches."""
        responses = self.evaluation if of_evaluation else self.calibration
        return [
            row
            for batch in range(len(responses.batches))
            for row in self.measure([skipped], healed, batch, of_evaluation)[0]
        ]

    def lengths(self, skipped: tuple[int, ...], healed: int, of_evaluation: bool = False) -> dict[str, float]:
        """Acceptance length by source, and their mean; empty without responses."""
        responses = self.evaluation if of_evaluation else self.calibration
        rows = self.rows(skipped, healed, of_evaluation)
        return lengths_by_source(rows, responses.sources) if rows else {}

    def retained(self, skipped: tuple[int, ...], healed: int, confidence: float) -> tuple[float, float]:
        """Interval of the retained share of the acceptance length on the calibration responses."""
        both = [self.rows(skipped, healed), self.rows((), 0)]
        left, whole = resampled_lengths(both, self.calibration.sources, self.seed)
        return interval(left / whole, confidence)


def _race(
    trials: _Trials, removed: tuple[int, ...], healed: int, cost: DraftingCost | None, confidence: float
) -> tuple[int, list[dict], list[int]]:
    """The layer to remove next, what was measured of each candidate, and the candidates that chance can't tell from it."""
    left = [i for i in range(len(trials.drafter.model.layers)) if i not in removed]
    worth = {i: 1 / cost.round((*removed, i)) if cost else 1.0 for i in left}
    rows = {i: [] for i in left}
    sources, candidates = trials.calibration.sources, {}
    for batch in range(len(trials.calibration.batches)):
        for i, more in zip(left, trials.measure([(*removed, i) for i in left], healed, batch), strict=True):
            rows[i] = rows[i] + more
        seen = sources[: len(rows[left[0]])]
        drawn = resampled_lengths([rows[i] for i in left], seen, trials.seed)
        means = {i: lengths_by_source(rows[i], seen)["mean"] for i in left}
        for i, values in zip(left, drawn, strict=True):
            low, high = interval(values, confidence)
            candidates[i] = {
                "layer": i,
                "acceptance_length": means[i],
                "low": low,
                "high": high,
                "responses": len(seen),
            }
        best = max(left, key=lambda i: means[i] * worth[i])
        ahead = drawn[left.index(best)] * worth[best]
        left = [i for i, v in zip(left, drawn, strict=True) if interval(v * worth[i] - ahead, confidence)[1] >= 0]
        if len(left) == 1:
            break

    def steadier(i):  # the mean over sources of the acceptance length over all anchors
        by_source = {}
        for row, source in zip(rows[i], sources, strict=False):
            by_source.setdefault(source, []).append(row[2])
        return worth[i] * sum(sum(own) / len(own) for own in by_source.values()) / len(by_source)

    choice = max(left, key=steadier)
    return choice, [candidates[i] for i in sorted(candidates)], [i for i in left if i != choice]


def _fixed_order(method: str, trials: _Trials) -> list[int] | None:
    """The order of removal, where it is fixed beforehand."""
    layers = range(len(trials.drafter.model.layers))
    if method == "last":
        return list(reversed(layers))
    if method == "similarity":
        similarities = layer_similarities(trials.drafter, trials.calibration.examples)
        return sorted(layers, key=lambda i: -similarities[i])
    if method == "one_shot":
        for batch in range(len(trials.calibration.batches)):
            trials.measure([(i,) for i in layers], 0, batch)
        return sorted(layers, key=lambda i: -trials.lengths((i,), 0)["mean"])
    return None


@torch.no_grad()
def drafter_fingerprint(drafter: D3DDrafterModel) -> str:
    """A hash that tells drafters apart: their settings, and a sum of each weight."""
    sums = [[name, tensor.double().sum().item()] for name, tensor in sorted(drafter.state_dict().items())]
    return stable_hash(
        [drafter.config.kept_layers, drafter.config.block_size, drafter.config.num_denoising_steps, sums]
    )


# The command


class Healing:
    """Trains a pruned drafter in place, each time with a schedule of its own, and keeps what was trained.

    A healing that was done before a kill is read back instead of repeated.

    Args:
        args (`D3DTrainingArguments`): The training's settings.
        data (`Dataset`): What it trains on.
    """

    def __init__(self, args: D3DTrainingArguments, data: ResponseDataset):
        self.args, self.data = args, data
        names = ("max_steps", "learning_rate", "seed", "num_anchors", "per_device_train_batch_size", "loss_weighting")
        self.settings = stable_hash([len(data), *(str(getattr(args, name)) for name in names)])

    def __call__(self, drafter: D3DDrafterModel, number: int) -> None:
        """Trains for `args.max_steps` steps."""
        path = Path(self.args.output_dir) / f"healed-{number}.safetensors"
        if not path.exists():
            args = copy.copy(self.args)
            args.save_strategy, args.seed = SaveStrategy.NO, args.seed + number  # other responses each time
            D3DTrainer(drafter, args, train_dataset=self.data).train()
        PartialState().wait_for_everyone()
        every = not has_adapters(drafter)
        own = {name: p for name, p in drafter.named_parameters() if every or is_adapter_weight(name)}
        if not path.exists() and PartialState().is_main_process:
            partial = path.with_suffix(".part")
            tensors = {name: p.detach().cpu().contiguous() for name, p in own.items()}
            save_file(tensors, partial, metadata={"settings": self.settings})
            partial.replace(path)
        PartialState().wait_for_everyone()
        with safe_open(path, framework="pt") as file, torch.no_grad():
            if file.metadata() != {"settings": self.settings} or set(file.keys()) != set(own):
                raise ValueError(
                    f"`{path}` was healed with other settings; go on with those, choose another `--output_dir`, or delete "
                    "what is there to begin anew."
                )
            for name in file.keys():
                own[name].copy_(file.get_tensor(name))


def describe(report: dict) -> str:
    """The report in words: a line for each removal."""
    lines = []
    full = report["before"]["calibration"]["mean"]
    for number, step in enumerate(report["steps"], start=1):
        low, high = step["retained_interval"]
        line = (
            f"  {number:3}  layer {step['layer']:3}  acceptance length {step['calibration']['mean']:.3f}, "
            f"{100 * step['retained']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        )
        if step["evaluation"]:
            share = step["evaluation"]["mean"] / report["before"]["evaluation"]["mean"]
            line += f"; on other prompts {step['evaluation']['mean']:.3f}, {100 * share:.1f} %"
        if "unhealed" in step:
            line += f"; {step['unhealed']['mean']:.3f} before healing"
        lines.append(line)
    return "\n".join(
        [
            f"Acceptance length {full:.3f} with all {len(report['layers_before'])} layers; removed, one after another:",
            *(lines or ["  nothing"]),
            f"Stopped because {report['stopped_because']}.",
        ]
    )


@dataclass
class PruneConfig:
    """What `d3d prune` prunes, by what, and when it stops. The options of `d3d train` are those of healing."""

    target: str = field(metadata={"help": "The target: an id on the Hub or a folder."})
    drafter: str = field(metadata={"help": "The drafter: an id on the Hub or a folder. Adapters go over --target."})
    calibration_data: str = field(
        metadata={"help": "JSON-lines file (.gz too) of the target's responses to rank layers by, as for `d3d train`."}
    )
    evaluation_data: str | None = field(
        default=None, metadata={"help": "Such a file, of other prompts, to measure what is left."}
    )
    num_layers: int | None = field(default=None, metadata={"help": "Remove so many layers at most."})
    min_retained: float | None = field(
        default=None, metadata={"help": "Stop before less than this share of the acceptance length is left."}
    )
    by_speed: bool = field(
        default=False,
        metadata={
            "help": "Rank by predicted speed (acceptance length and measured time), and stop where it is highest."
        },
    )
    method: str = field(
        default="progressive",
        metadata={"help": "progressive, or to compare: one_shot, similarity (ShortGPT), last (from the end)."},
    )
    num_calibration: int | None = field(default=None, metadata={"help": "Responses of each source to rank by."})
    num_evaluation: int | None = field(
        default=None, metadata={"help": "Responses of each source of --evaluation_data."}
    )
    sources: list[str] | None = field(default=None, metadata={"help": "Use only lines with these `source`s."})
    batch_size: int = field(default=4, metadata={"help": "Responses of each source between two decisions."})
    confidence: float = field(default=0.95, metadata={"help": "Confidence of the intervals."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16."})
    train_data: str | None = field(
        default=None, metadata={"help": "Heal between removals, by training on these responses for --max_steps steps."}
    )
    heal_every: int = field(default=1, metadata={"help": "Removals between two healings."})
    heal_lora_rank: int = field(
        default=0,
        metadata={
            "help": "Heal with a LoRA of this rank on all rows. Default: adapters or weights, as the drafter has."
        },
    )

    def __post_init__(self):
        check_dtype(self.dtype)
        for name in ("num_calibration", "num_evaluation"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")


def run_prune(config: PruneConfig, args: D3DTrainingArguments) -> str | None:
    """Prunes a drafter and saves it with a report and a picture.

    Started again after a kill, it goes on from what is in `args.output_dir`.

    Args:
        config (`PruneConfig`): What to prune.
        args (`D3DTrainingArguments`): The settings of healing; its `output_dir` and `device` are those of everything.

    Returns:
        `str`: A summary for people, in the main process only.
    """
    output, device = Path(args.output_dir), args.device  # the latter decides on the processes, so it comes first
    if config.train_data is not None and args.max_steps < 1:
        raise ValueError("`train_data` is given, to heal between removals, but not for how long; give `max_steps`.")
    if config.train_data is None and config.heal_lora_rank:
        raise ValueError("`heal_lora_rank` is given without `train_data` to heal on.")
    if (output / REPORT).exists():
        raise ValueError(
            f"`{output / REPORT}` is the report of a finished pruning; choose another `--output_dir`, or delete it."
        )
    state = PartialState()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=config.dtype).to(device)
    drafter = load_drafter(config.drafter, target).eval()
    made_by = {"tokenizer": tokenizer, "target": drafter.config.target_name_or_path}
    vocab_size = drafter.config.vocab_size

    def read(path, number):
        responses = ResponseDataset(path, vocab_size, sources=config.sources, **made_by).examples
        counts = Counter()
        return [
            r
            for r in responses
            if number is None or counts.update([r.get("source")]) or counts[r.get("source")] <= number
        ]

    calibration = read(config.calibration_data, config.num_calibration)
    evaluation = config.evaluation_data and read(config.evaluation_data, config.num_evaluation)
    cost = None
    if config.by_speed:  # one measurement for all processes, and for a run that goes on
        with state.main_process_first():
            if not (output / COST).exists():
                write_json(output / COST, asdict(measure_cost(drafter, target)))
            cost = DraftingCost(**json.loads((output / COST).read_text()))
    heal = None
    if config.train_data is not None:
        if config.heal_lora_rank:
            add_lora(drafter, config.heal_lora_rank)
        heal = Healing(args, ResponseDataset(config.train_data, vocab_size, max_length=512, **made_by))
    report = prune_drafter(
        drafter,
        calibration,
        num_layers=config.num_layers,
        min_retained=config.min_retained,
        cost=cost,
        method=config.method,
        evaluation=evaluation,
        heal=heal,
        heal_every=config.heal_every,
        batch_size=config.batch_size,
        confidence=config.confidence,
        seed=args.seed,
        journal=output / JOURNAL,
    )
    if not state.is_main_process:
        return None
    if has_adapters(drafter):
        save_adapters(drafter, output)
    else:
        drafter.save_pretrained(output)
    made = {"schema": 1, "command": command(), "versions": versions(), "hardware": hardware()}
    made |= {"drafter": short_name(config.drafter), "target": drafter.config.target_name_or_path}
    write_json(output / REPORT, made | report)
    try:
        plot_pruning(report, output / "pruning.png", short_name(config.drafter))
    except ImportError as error:
        logger.info(str(error))
    return f"{describe(report)}\nSaved in {output}."
