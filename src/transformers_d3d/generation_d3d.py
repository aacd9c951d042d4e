"""Drafting inside `target.generate(..., assistant_model=drafter)`: the candidate generator, its report, and the seam.

Transformers owns the decoding loop: verification, sampling, stopping and streaming. This file proposes tokens, and is
the only one of the package that changes a Transformers object ([`install_seam`]).
"""

import functools
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import transformers
from transformers import GenerationMixin
from transformers.generation import (
    CandidateGenerator,
    EosTokenCriteria,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from .configuration_d3d import denoising_parts
from .masking_d3d import mask_rows, successor_rows, trunk_rows
from .outcomes_d3d import Calibration, fan_out_outcomes, find_outcome, likeliest_outcomes
from .overlap_d3d import choose_overlap
from .report_d3d import DraftReport, TraceEvent

logger = logging.get_logger(__name__)

PREFILL_ROWS = 512  # rows of one drafter pass over a prompt: bounds the mask and the activations
DEFAULT_SUCCESSORS = 16  # when overlapping
SUPPORTED_TRANSFORMERS = ">=5.24,<6"


@dataclass
class Successors:
    """What a packed pass leaves: blocks for the outcomes of a verification.

    Args:
        outcomes (`torch.LongTensor` of shape `(num_successors, 2)`): Rows (n, b): n draft tokens kept, b behind them.
        hidden_states (`torch.Tensor` of shape `(num_successors, block_size, hidden_size)`): The blocks'.
        anchors_at (`int`): Row of the first block's anchor in the cache; the others' follow.
    """

    outcomes: torch.Tensor
    hidden_states: torch.Tensor
    anchors_at: int


class D3DCandidateGenerator(CandidateGenerator):
    """Proposes blocks of a [`D3DDrafterModel`] to Transformers' assisted decoding.

    While the target verifies a block, the drafter drafts successors of it, in one packed pass: one for each of the
    likeliest outcomes (with the settings `overlap` and `num_successors` of the drafter's configuration). Which draft is
    proposed never depends on timing: a pass that was started is waited for, and an outcome is matched on its tokens.

    All state of a generation lives here, so that one drafter serves many threads at once. `generate` makes one such
    object for each call and closes it.

    Args:
        drafter (`D3DDrafterModel`): The drafter.
        generation_config (`GenerationConfig`): The target's, for this call.
        logits_processor (`LogitsProcessorList`): The target's. Must be pure functions of the tokens and the scores.
        stopping_criteria (`StoppingCriteriaList`, *optional*):
            The target's. Must be pure functions of the tokens: they are asked about drafts, too, so that a draft never
            runs past a stop.
        prompt_mask (`torch.Tensor` of shape `(1, prompt_length)`, *optional*): 0 for padding in the prompt.
        target_device (`torch.device`, *optional*): Where the target runs. The drafter's device by default.
    """

    requires_model_outputs = False

    def __init__(
        self,
        drafter,
        generation_config,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prompt_mask: torch.Tensor | None = None,
        target_device: torch.device | None = None,
    ):
        self.drafter = drafter
        self.device = drafter.device
        self.max_length = generation_config.max_length
        self.logits_processor = logits_processor or LogitsProcessorList()
        eos_token_ids = generation_config.eos_token_id
        self.eos_token_ids = set(eos_token_ids if isinstance(eos_token_ids, list) else [eos_token_ids]) - {None}
        # Transformers itself ends at these three inside a block; any other criterion it asks at the block's end only.
        upstream = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)
        self.stopping_criteria = [c for c in stopping_criteria or () if not isinstance(c, upstream)]
        # A draft cut by looking at a sampled token would bias the output. Then draft the likeliest token instead, which
        # is not random: the loop samples from the target and compares.
        self.samples = bool(generation_config.do_sample) and not self.stopping_criteria
        if self.samples:
            seed = int(torch.randint(2**62, (1,)))
            self.random = torch.Generator(self.device).manual_seed(seed)
        self.length = DraftLength(drafter, generation_config)
        self.confidence_threshold = _setting("assistant_confidence_threshold", generation_config, drafter) or 0.0
        self.prompt_mask = prompt_mask
        config = drafter.config
        self.overlap, reason = choose_overlap(
            config.overlap, self.device, target_device or self.device, config.overlap_threads
        )
        self.num_successors = config.num_successors
        if self.num_successors is None:
            self.num_successors = 0 if self.overlap.mode == "inline" else DEFAULT_SUCCESSORS
        self.calibration = Calibration()
        self.report = DraftReport(mode=self.overlap.mode, reason=reason)

        self.cache = drafter.new_cache()
        self.context: torch.Tensor | None = None  # tokens read or to be read, on the drafter's device
        self.num_seen = 0  # length of the sequence that `generate` has shown
        self.round = -1  # 0 for the prefill
        self.pending: tuple[str, int, Callable] | None = None  # a pass in the background: name, round, the wait for it
        self.verdict: tuple[torch.Tensor, torch.Tensor] | None = None  # logits of a draft, and what the target settled
        self.draft_logits: torch.Tensor | None = None
        self.clock = self.proposed_at = time.perf_counter()

    # What Transformers calls

    @torch.no_grad()
    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Drafts the tokens that may follow.

        The first call proposes nothing, so that the first token comes as soon as in plain decoding; the drafter reads
        the prompt meanwhile.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): All tokens so far.

        Returns:
            `tuple`: `input_ids` with the draft appended, `(1, sequence_length + num_draft_tokens)`, and when sampling
            the processed logits that the draft was drawn from, float32, `(1, num_draft_tokens, vocab_size)`.
        """
        started = time.perf_counter()
        self.round += 1
        num_new = self._observe(input_ids)
        draft, logits = input_ids[:, :0], None
        if self.round == 0:
            self._launch_prefill(input_ids.shape[1])
        else:
            draft, logits = self._draft(input_ids, num_new)
        self.num_proposed = draft.shape[1]
        self.proposed_at = time.perf_counter()
        if self.round > 0:
            self._record("target", "wait", self.round, started, self.proposed_at)
        candidates = torch.cat([input_ids, draft.to(input_ids.device)], dim=1)
        return candidates, logits if self.num_proposed > 0 else None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int):
        """Takes note of the target's verdict: `num_matches` draft tokens were kept."""
        name = "prefill" if self.round == 0 else "verify"
        self._record("target", name, self.round, self.proposed_at, time.perf_counter())
        if self.round > 0:
            self.report.proposed.append(self.num_proposed)
            self.report.accepted.append(int(num_matches))
            self.length.update(self.num_proposed, int(num_matches))

    @property
    def num_drafting_tokens(self) -> int:
        """How many states a recurrent target keeps to go back to (Transformers 5.25): one for each row that it verifies.

        One more than the draft's tokens, as the row before the draft runs in the same forward: rows whose state isn't
        kept go through a fast scan that starts from an empty state (a known limit of Transformers' Mamba).
        """
        return self.length.most + 1

    def close(self) -> None:
        """Ends the generation: no work or thread is left, the drafter gets the report, the cache is let go."""
        self.drafter.report = self.report
        try:
            self._await_pending()
        except Exception as error:
            # The output is complete, and this pass was for a draft that nobody needs any more.
            logger.warning(f"A drafter pass failed that was not needed any more: {error!r}")
        finally:
            self.overlap.close()
            self.cache = self.drafter.new_cache()
            self.context = self.verdict = self.draft_logits = None

    # The stages of a round

    def _record(self, lane: str, name: str, number: int, start: float, end: float) -> None:
        self.report.events.append(TraceEvent(lane, name, number, start - self.clock, end - self.clock))

    def _start(self, name: str, work: Callable, *args) -> None:
        """Starts a pass of the drafter, which may run in the background until [`_await_pending`]."""
        self.pending = name, self.round, self.overlap.submit(functools.partial(work, *args))

    def _observe(self, input_ids: torch.LongTensor) -> int:
        """Takes in the tokens that the target has settled since the last call; returns their number."""
        new = input_ids[0, self.num_seen :].to(self.device)
        if self.context is None and self.prompt_mask is not None:
            new = new[self.prompt_mask[0, -len(new) :].to(self.device).bool()] if len(new) else new
        self.num_seen = input_ids.shape[1]
        self.context = new if self.context is None else torch.cat([self.context, new])
        return len(new)

    def _launch_prefill(self, sequence_length: int) -> None:
        """Lets the drafter read the prompt beside the target, if a draft can follow the first token."""
        if self.overlap.mode != "inline" and self._room(sequence_length + 1) > 0:
            self._slide()
            self._start("prefill", self._read, self.context)

    def _room(self, sequence_length: int) -> int:
        """Tokens worth drafting behind a sequence of this length."""
        # The target always adds a token of its own, so a draft that fills the remaining length would be wasted.
        return min(self.length.value, self.max_length - sequence_length - 1)

    def _draft(self, input_ids: torch.LongTensor, num_new: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts one block behind the newest token, cuts it where it could not be used, and starts on its successors."""
        num_tokens = self._room(input_ids.shape[1])
        if num_tokens <= 0:
            return input_ids[:, :0], None
        hidden = self._settle(num_new)
        draft, logits = self._denoise(input_ids, hidden, num_tokens)
        if self.num_successors > 0:
            self._launch_successors(input_ids.shape[1], draft[0], logits[: draft.shape[1] + 1])
        return draft, logits[None, : draft.shape[1]] if self.samples else None

    def _settle(self, num_new: int) -> torch.Tensor:
        """Hidden states `(block_size, hidden_size)` of the block anchored at the newest token: ready, or drafted now."""
        successors = self._await_pending()
        index = None
        if isinstance(successors, Successors):
            index = find_outcome(successors.outcomes, num_new - 1, int(self.context[-1]))
            self.report.outcomes.append((num_new - 1, index is not None))
        if self.draft_logits is not None:
            self.verdict = (self.draft_logits[:num_new], self.context[-num_new:])
        if index is not None:
            # The spine's rows are those of the tokens kept, and the block's own anchor follows them.
            anchor = len(self.context) - 1
            self.cache.copy_row(successors.anchors_at + index, anchor)
            self.cache.rollback(anchor + 1)
            return successors.hidden_states[index]
        # What the spine wrote of the tokens kept stays.
        self.cache.rollback(min(self.cache.length, len(self.context) - 1))
        # In turn with the target, the first block's pass reads the prompt, too.
        name = "block" if self.cache.length > 0 else "prefill"
        self._slide()
        self._start(name, self._block)
        return self._await_pending()

    def _await_pending(self):
        """Waits for the pass in the background, if there is one, and returns its result."""
        if self.pending is None:
            return None
        (name, number, wait), self.pending = self.pending, None
        done = wait()
        self._record("drafter", name, number, done.start, done.end)
        return done.result

    def _launch_successors(self, sequence_length: int, draft: torch.Tensor, logits: torch.Tensor) -> None:
        """Starts the packed pass for the outcomes of this draft's verification, if one of them can be drafted for."""
        self.draft_logits = logits
        # A successor behind n kept tokens must have room in the output, and its block in the drafter's context.
        in_output = self.max_length - sequence_length - 3
        in_context = self.drafter.max_context - len(self.context) - 1
        most = min(len(draft), in_output, in_context)
        if most >= 0 and self.length.value > 0:
            self._start("packed", self._draft_successors, draft.to(self.device), logits, most, self.verdict)
        self.verdict = None

    def _slide(self) -> None:
        """Moves a full window on."""
        limit = max(self.drafter.max_context, 1)
        if len(self.context) > limit:
            # Half a window at once: re-reading then costs one row for each token of the output.
            self.context = self.context[-max(limit // 2, 1) :]
            self.cache.rollback(0)

    # What may run in the background. The cache is theirs until the wait.

    def _read(self, context: torch.LongTensor) -> None:
        """Reads the first tokens of a sequence, in bounded passes."""
        while self.cache.length < len(context):
            ids = context[self.cache.length :][:PREFILL_ROWS]
            self.drafter(ids.unsqueeze(0), cache=self.cache)

    def _block(self) -> torch.Tensor:
        """Hidden states `(block_size, hidden_size)` of the block anchored at the newest token, in a pass of its own."""
        self._read(self.context[:-PREFILL_ROWS])
        config = self.drafter.config
        num_cached, anchor = self.cache.length, len(self.context) - 1
        clean = trunk_rows(torch.arange(num_cached, anchor + 1, device=self.device))
        masked = mask_rows(torch.tensor([anchor], device=self.device), config.block_size)
        masks = torch.full((len(masked),), config.mask_token_id, device=self.device)
        hidden = self.drafter(
            torch.cat([self.context[num_cached:], masks]).unsqueeze(0),
            clean + masked,
            cache=self.cache,
            mask_offsets=masked.position - masked.start,
        ).last_hidden_state[0]
        self.cache.rollback(anchor + 1)
        return hidden[-config.block_size :]

    def _revise(self, draft: torch.LongTensor) -> torch.Tensor:
        """Another pass over the newest block, with the draft so far in place of its first mask tokens.

        Args:
            draft (`torch.LongTensor` of shape `(num_settled,)`): The first draft tokens.

        Returns:
            `torch.Tensor` of shape `(block_size - 1, hidden_size)`: Hidden states of the mask rows. The last revealed one
            predicts the next draft token.
        """
        config, anchor = self.drafter.config, len(self.context) - 1
        masked = mask_rows(torch.tensor([anchor], device=self.device), config.block_size)
        block_ids = torch.full((1, len(masked)), config.mask_token_id, device=self.device)
        block_ids[0, : len(draft)] = draft
        offsets = masked.position - masked.start
        hidden = self.drafter(block_ids, masked, cache=self.cache, mask_offsets=offsets).last_hidden_state[0]
        self.cache.rollback(anchor + 1)
        return hidden

    def _draft_successors(self, draft, logits, most: int, verdict) -> Successors:
        """The packed pass: reads the draft as if it were kept, and drafts behind its likeliest outcomes.

        Args:
            draft (`torch.LongTensor` of shape `(num_draft_tokens,)`): The draft.
            logits (`torch.Tensor` of shape `(num_draft_tokens + 1, vocab_size)`): Its logits, and those behind it.
            most (`int`): Prepare for outcomes that keep at most this many tokens.
            verdict (`tuple`, *optional*): Logits and settled tokens of the round before, to calibrate by.
        """
        config = self.drafter.config
        if verdict is not None:
            self.calibration.update(*verdict)
        beliefs = self.calibration.log_probs(logits)
        # Behind an end of sequence, and beyond the room that is left, nobody needs a draft.
        beliefs[:, sorted(self.eos_token_ids)] = float("-inf")
        beliefs[most + 1 :] = float("-inf")
        if config.outcome_selection == "likeliest":
            outcomes, _ = likeliest_outcomes(beliefs, draft, self.num_successors)
        else:
            outcomes = fan_out_outcomes(beliefs, draft, self.num_successors)
        if len(outcomes) == 0:
            return Successors(outcomes, logits[:0], self.cache.length)

        spine, num_cached = draft[:most], self.cache.length
        clean = trunk_rows(torch.arange(num_cached, num_cached + len(spine), device=self.device))
        anchors, masked = successor_rows(num_cached + outcomes[:, 0], config.block_size)
        masks = torch.full((len(masked),), config.mask_token_id, device=self.device)
        hidden = self.drafter(
            torch.cat([spine, outcomes[:, 1], masks]).unsqueeze(0),
            clean + anchors + masked,
            cache=self.cache,
            mask_offsets=masked.position - masked.start - 1,
        ).last_hidden_state[0, len(spine) :]
        blocks = torch.cat(
            [
                hidden[: len(outcomes)].unsqueeze(1),
                hidden[len(outcomes) :].unflatten(0, (len(outcomes), config.block_size - 1)),
            ],
            dim=1,
        )
        return Successors(outcomes, blocks, num_cached + len(spine))

    # From hidden states to a draft

    def _denoise(
        self, input_ids: torch.LongTensor, hidden_states: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft `(1, num_draft_tokens)`, cut where it could not be used, and the logits that it was chosen from.

        Each denoising step settles the next part of the draft; a pass of the drafter that reads it comes before the next.
        Tokens are settled from left to right, so that each is drawn given those before it, as sampling requires.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): All tokens so far.
            hidden_states (`torch.Tensor` of shape `(block_size, hidden_size)`): Of the first pass.
            num_tokens (`int`): Tokens to draft, at least one.
        """
        config = self.drafter.config
        prefix, parts, first = input_ids, [], 0
        for num_settled in denoising_parts(config.block_size, config.num_denoising_steps):
            if first > 0:
                self._start("denoise", self._revise, prefix[0, -first:].to(self.device))
                hidden_states = torch.cat([hidden_states[:1], self._await_pending()])
            started = time.perf_counter()
            end = min(num_settled, num_tokens)
            # With successors, the row behind the draft is read, too: it guesses the bonus token.
            logits = self._block_logits(hidden_states, first, end + (self.num_successors > 0))
            part, logits = self._choose(prefix, logits, end - first)
            part = self._cut(prefix, part, logits)
            prefix = torch.cat([prefix, part.to(prefix.device)], dim=1)
            self._record("drafter", "head", self.round, started, time.perf_counter())
            if end == num_tokens or part.shape[1] < end - first or int(part[0, -1]) in self.eos_token_ids:
                break
            parts.append(logits[: end - first])
            first = end
        return prefix[:, input_ids.shape[1] :], torch.cat([*parts, logits]) if parts else logits

    def _block_logits(self, hidden_states: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Logits `(end - first, vocab_size)`, float32, of a block's rows from `first` to before `end`."""
        return self.drafter.logits(hidden_states[first:end]).float()

    def _choose(
        self, input_ids: torch.LongTensor, logits: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft tokens `(1, num_tokens)`, and the logits `(num_rows, vocab_size)` after the processors."""
        if not self.logits_processor and not self.samples:
            return logits[:num_tokens].argmax(dim=-1).unsqueeze(0), logits
        prefix = input_ids.to(self.device)
        processed = []
        for i, row in enumerate(logits):
            # Each processor sees the tokens that the target will see at this position if the draft is kept.
            row = self.logits_processor(prefix, row.unsqueeze(0))
            processed.append(row)
            if i == num_tokens:
                break  # the row behind the draft: nothing is drawn from it
            if self.samples:
                token = torch.multinomial(row.softmax(dim=-1), 1, generator=self.random)
            else:
                token = row.argmax(dim=-1, keepdim=True)
            prefix = torch.cat([prefix, token], dim=1)
        return prefix[:, input_ids.shape[1] :], torch.cat(processed)

    def _cut(self, input_ids: torch.LongTensor, draft: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Shortens a draft. When sampling, no cut looks at a token that it removes."""
        if self.confidence_threshold > 0:
            unsure = (logits.softmax(dim=-1).amax(dim=-1) < self.confidence_threshold).nonzero()
            if len(unsure):
                draft = draft[:, : int(unsure[0])]
        if self.eos_token_ids:
            # Behind an end of sequence nothing can be kept.
            ends = [i for i, token in enumerate(draft[0].tolist()) if token in self.eos_token_ids]
            if ends:
                draft = draft[:, : ends[0] + 1]
        for i in range(draft.shape[1]) if self.stopping_criteria else ():
            candidate = torch.cat([input_ids, draft[:, : i + 1].to(input_ids.device)], dim=1)
            if any(bool(torch.as_tensor(criterion(candidate, None)).all()) for criterion in self.stopping_criteria):
                # The token that stops must be the round's last: let the target add it.
                return draft[:, :i]
        return draft


class DraftLength:
    """How many tokens to draft: `num_assistant_tokens` and its schedule, as in Transformers.

    Args:
        drafter (`D3DDrafterModel`): Its block bounds the length, its `generation_config` may set it.
        generation_config (`GenerationConfig`): The target's, for this call; what it sets comes first.
    """

    def __init__(self, drafter, generation_config):
        self.most = drafter.config.block_size - 1
        wanted = _setting("num_assistant_tokens", generation_config, drafter)
        if wanted is not None and wanted < 0:
            raise ValueError(f"`num_assistant_tokens` is {wanted}; it must be between 0 and {self.most}.")
        if wanted is not None and wanted > self.most:
            logger.warning_once(
                f"`num_assistant_tokens` is {wanted}, but the drafter's block of {drafter.config.block_size} drafts at "
                f"most {self.most} tokens; drafting {self.most}."
            )
        self.value = self.most if wanted is None else min(wanted, self.most)
        self.schedule = _setting("num_assistant_tokens_schedule", generation_config, drafter) or "constant"
        if self.schedule not in ("constant", "heuristic", "heuristic_transient"):
            raise ValueError(
                f"`num_assistant_tokens_schedule` is {self.schedule!r}; allowed are 'constant', 'heuristic' and "
                "'heuristic_transient'."
            )

    def update(self, num_proposed: int, num_accepted: int) -> None:
        """Two tokens more after a round that kept the whole draft, else one less (schedule `heuristic`)."""
        if self.schedule == "constant" or num_proposed == 0:
            return
        step = 2 if num_accepted == num_proposed else -1
        self.value = min(max(self.value + step, 1), self.most)


def _setting(name: str, generation_config, drafter):
    """A conventional knob: the call's value if the call set one, else the drafter's, else `None`.

    Transformers fills unset fields of the call's configuration with defaults meant for other drafters, so a value equal
    to that default counts as unset.
    """
    value = getattr(generation_config, name, None)
    default = generation_config._get_default_generation_params().get(name)
    if value is not None and value != default:
        return value
    return getattr(drafter.generation_config, name, None)


# The seam


def check_pair(target, drafter) -> None:
    """Raises `ValueError` unless the drafter can draft for the target."""
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"The target `{type(target).__name__}` is an encoder-decoder model; a D3D drafter reads one sequence of "
            "tokens and drafts for decoder-only targets. Leave `assistant_model` out."
        )
    target_size = target.config.get_text_config().vocab_size
    drafter_size = drafter.config.vocab_size
    if target_size != drafter_size:
        raise ValueError(
            f"The target's vocabulary has {target_size} tokens and the drafter's {drafter_size}; they must be equal, "
            "since a draft is token ids that the target verifies. Use a drafter trained for this target "
            f"(this one was for {drafter.config.target_name_or_path or 'an unnamed target'}), or build one with "
            "`D3DDrafterModel.from_causal_lm`."
        )


def _check_settings(generation_config) -> None:
    if generation_config.guidance_scale is not None and generation_config.guidance_scale != 1:
        raise ValueError(
            f"`guidance_scale` is {generation_config.guidance_scale}, whose processor keeps a cache of its own that "
            "rejected drafts would corrupt; it is not supported with a drafter. Leave `assistant_model` out, or set "
            "`guidance_scale=None`."
        )
    if generation_config.cache_implementation in ("quantized", "offloaded_static", "offloaded_hybrid"):
        raise ValueError(
            f"`cache_implementation` is {generation_config.cache_implementation!r}, which cannot take back rejected "
            'drafts; use `cache_implementation="dynamic"`, or leave `assistant_model` out.'
        )


@dataclass
class _Run:
    """What one `generate` call with a drafter shares between the wrapped methods."""

    stopping_criteria: StoppingCriteriaList | None
    generator: CandidateGenerator | None = None


_run: ContextVar[_Run | None] = ContextVar("d3d_run", default=None)


def _offers_candidates(assistant) -> bool:
    return assistant is not None and hasattr(assistant, "get_candidate_generator")


def _validate_generation_mode(original):
    @functools.wraps(original)
    def wrapper(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        if _offers_candidates(assistant):
            if generation_mode == GenerationMode.ASSISTED_GENERATION:
                check_pair(self, assistant)
                _check_settings(generation_config)
            else:
                logger.warning_once(
                    f"`assistant_model` is ignored in the generation mode `{generation_mode.value}`; a drafter serves "
                    "greedy decoding and sampling (`num_beams=1`)."
                )
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return wrapper


def _get_candidate_generator(original):
    @functools.wraps(original)
    def wrapper(self, generation_config, input_ids, *args, **kwargs):
        assistant = kwargs.get("assistant_model")
        if not _offers_candidates(assistant):
            return original(self, generation_config, input_ids, *args, **kwargs)
        run = _run.get() or _Run(None)
        run.generator = assistant.get_candidate_generator(
            target=self,
            generation_config=generation_config,
            input_ids=input_ids,
            logits_processor=kwargs.get("logits_processor"),
            stopping_criteria=run.stopping_criteria,
            model_kwargs=kwargs.get("model_kwargs") or {},
        )
        return run.generator

    return wrapper


def _assisted_decoding(original):
    @functools.wraps(original)
    def wrapper(self, input_ids, *args, **kwargs):
        if not _offers_candidates(kwargs.get("assistant_model")):
            return original(self, input_ids, *args, **kwargs)
        if input_ids.shape[0] > 1:
            raise ValueError(
                f"The batch holds {input_ids.shape[0]} sequences; with a drafter `generate` takes one, since each would "
                "keep another number of draft tokens. Loop over the prompts."
            )
        _drop_covered_cache(input_ids, kwargs)
        run = _Run(kwargs.get("stopping_criteria"))
        token = _run.set(run)
        try:
            return original(self, input_ids, *args, **kwargs)
        except BaseException:
            # Else the reader of a `TextIteratorStreamer` would wait for ever.
            if kwargs.get("streamer") is not None:
                with suppress(Exception):
                    kwargs["streamer"].end()
            raise
        finally:
            _run.reset(token)
            if run.generator is not None:
                run.generator.close()

    return wrapper


def _drop_covered_cache(input_ids: torch.LongTensor, kwargs: dict) -> None:
    """Empties a cache from an earlier turn whose tokens come again in `input_ids`.

    Transformers' assisted decoding would run all of `input_ids` on top of it, without an error and with a wrong result.
    """
    cache, mask = kwargs.get("cache"), kwargs.get("attention_mask")
    num_cached = cache.get_seq_length() if cache is not None else 0
    length = mask.shape[-1] if mask is not None else getattr(kwargs["generation_config"], "_mask_length", None)
    if num_cached > 0 and (length is None or length <= input_ids.shape[1]):
        logger.warning_once(
            f"The cache passed to `generate` holds {int(num_cached)} tokens that are in `input_ids` too; with a drafter "
            "they are computed again. To use the cache, pass the new tokens only, with the attention mask of all."
        )
        cache.reset()


_WRAPPERS = {
    "_validate_generation_mode": (_validate_generation_mode, ("generation_mode", "generation_config")),
    "_get_candidate_generator": (
        _get_candidate_generator,
        ("generation_config", "input_ids", "logits_processor", "model_kwargs", "assistant_model"),
    ),
    "_assisted_decoding": (
        _assisted_decoding,
        ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "streamer", "assistant_model"),
    ),
}


def install_seam() -> None:
    """Lets `generate` ask an `assistant_model` that offers `get_candidate_generator(...)`; other calls are untouched.

    Done once, however often it is called, and undone by [`remove_seam`].

    Raises:
        `ImportError`: If this version of Transformers has other internals than those known.
    """
    for name, (_, parameters) in _WRAPPERS.items():
        method = getattr(GenerationMixin, name, None)
        found = inspect.signature(method).parameters if method is not None else {}
        missing = [parameter for parameter in parameters if parameter not in found]
        if method is None or missing:
            raise ImportError(
                f"Transformers {transformers.__version__} is not supported: `GenerationMixin.{name}` "
                f"{'lacks ' + ', '.join(missing) if method is not None else 'does not exist'}. Install "
                f"'transformers{SUPPORTED_TRANSFORMERS}'."
            )
    for name, (wrap, _) in _WRAPPERS.items():
        method = getattr(GenerationMixin, name)
        if not hasattr(method, "_d3d_original"):
            wrapper = wrap(method)
            wrapper._d3d_original = method
            setattr(GenerationMixin, name, wrapper)


def remove_seam() -> None:
    """Undoes [`install_seam`]."""
    for name in _WRAPPERS:
        method = getattr(GenerationMixin, name)
        if hasattr(method, "_d3d_original"):
            setattr(GenerationMixin, name, method._d3d_original)


# At import, since as remote code from the Hub these files come without the package.
install_seam()
