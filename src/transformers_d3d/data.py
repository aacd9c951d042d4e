"""Target responses as training data: reading them, and turning them into batches of sequences and blocks."""

import os
from pathlib import Path

import torch
from torch.utils.data import Dataset

from .answer_files import check_header, is_header
from .json_lines import read_json_lines
from .objective import IGNORE


class ResponseDataset(Dataset):
    """A target's responses from a JSON-lines file, plain or gzipped.

    Each line is an object with `prompt_ids` (the chat template applied, generation prompt included) and `response_ids`;
    with `top_ids` and `top_log_probs`, if any, for each token of the response; other fields are kept. The first line may
    be a header, as `d3d generate-data` writes it.

    Args:
        path (`str` or `os.PathLike`): The file.
        vocab_size (`int`): Vocabulary of the drafter: every id is checked against it.
        max_length (`int`, *optional*): Sequences are cut to this many tokens; those without response left are dropped.
        sources (`list[str]`, *optional*): Keep only lines whose `source` is one of these.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Refuse a file whose header names another vocabulary.
        target (`str`, *optional*): Refuse a file whose header names another target.

    Attributes:
        header (`dict`, *optional*): The file's header.

    Raises:
        `FileNotFoundError`: If there is no such file.
        `ValueError`: If a line is not such an object, if the header does not fit, or if nothing is left; names the line.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        vocab_size: int,
        max_length: int | None = None,
        sources: list[str] | None = None,
        tokenizer=None,
        target: str | None = None,
    ):
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"No data file at `{path}`; give a JSON-lines file, plain or ending in `.gz`.")
        self.header, self.examples = None, []
        for number, (where, example) in enumerate(read_json_lines(path)):
            if not is_header(example):
                self._add(example, where, vocab_size, max_length, sources)
            elif number == 0:
                self.header = check_header(example["header"], where, tokenizer, target)
            else:
                raise ValueError(
                    f"{where}: a header among the answers; a file holds the answers of one `d3d generate-data`, so keep "
                    "several of them in files of their own."
                )
        if not self.examples:
            raise ValueError(
                f"`{path.name}` leaves nothing to train on: no line has a response"
                + (f" within {max_length} tokens" if max_length else "")
                + (f" from the sources {sources}" if sources else "")
                + "."
            )

    def _add(
        self, example: object, where: str, vocab_size: int, max_length: int | None, sources: list[str] | None
    ) -> None:
        for field in ("prompt_ids", "response_ids"):
            ids = example.get(field) if isinstance(example, dict) else None
            if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
                raise ValueError(
                    f"{where}: `{field}` is {str(ids)[:40]}; it must be a list of one token id or more, as the "
                    "target's tokenizer gives them."
                )
            if min(ids) < 0 or max(ids) >= vocab_size:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(
                    f"{where}: `{field}` holds the id {wrong}, outside the drafter's vocabulary "
                    f"[0, {vocab_size}); the data must come from this drafter's own tokenizer."
                )
        if sources is not None and example.get("source") not in sources:
            return
        length = len(example["response_ids"])
        room = length if max_length is None else max(max_length - len(example["prompt_ids"]), 0)
        for field in ("response_ids", "top_ids", "top_log_probs"):
            if field in example:
                if not isinstance(example[field], list) or len(example[field]) != length:
                    raise ValueError(
                        f"{where}: `{field}` is {str(example[field])[:40]}; it must be a list with an entry for each of the "
                        f"{length} `response_ids`."
                    )
                example[field] = example[field][:room]
        if example["response_ids"]:
            self.examples.append(example)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict:
        return self.examples[index]


class BlockCollator:
    """Packs responses into one row of sequences, and draws the blocks to train on.

    Packing is not random and may run in a worker of a `DataLoader`. Anchors are drawn anew at every call, from the global
    PyTorch generator of the batch's device, without repetition, among the positions from the last of the prompt on whose
    blocks have a token to predict.

    Args:
        block_size (`int`): Rows of a block, its anchor included.
        num_anchors (`int`): Blocks for each sequence, at most.
        offset_keep_rate (`float`, *optional*, defaults to 1.0):
            A block keeps its mask rows up to offset j with probability `offset_keep_rate ** (j - 1)`. Below 1, later
            offsets are trained less often and a step costs less: exponential position weights by sampling (like the
            conditional drop of PARD, arXiv 2504.18583). Needs `block_attention="causal"`.
        offset_keep_floor (`float`, *optional*, defaults to 0.15): Lower bound of that probability.
        reveal_rate (`float`, *optional*, defaults to 0.0):
            Probability that a block is trained for a later denoising step: its first mask rows are revealed, a number
            drawn evenly from one to all but one of those with a token to predict.
    """

    def __init__(
        self,
        block_size: int,
        num_anchors: int,
        offset_keep_rate: float = 1.0,
        offset_keep_floor: float = 0.15,
        reveal_rate: float = 0.0,
    ):
        self.reveal_rate = reveal_rate
        self.num_anchors = num_anchors
        self.offset = torch.arange(block_size - 1)
        self.keep = (offset_keep_rate ** self.offset.double()).clamp(min=offset_keep_floor)

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        """Makes a batch with blocks: what [`~BlockCollator.pack`] and [`~BlockCollator.draw`] return, in one."""
        batch = self.pack(examples)
        return batch | self.draw(batch)

    def pack(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        """Makes a batch of sequences.

        Args:
            examples (`list[dict]`): Each with `prompt_ids` and `response_ids`.

        Returns:
            `dict` with `input_ids` `(1, num_clean)`, and for each clean row `positions`, `sequences` and `labels` (the
            next token where it is the response's, else -100), all `(num_clean,)`. If all examples store the target's
            likeliest tokens, also `top_ids` and `top_log_probs`, `(num_clean, num_top)`, of the rows with labels.
        """
        parts = {"input_ids": [], "positions": [], "sequences": [], "labels": []}
        for index, example in enumerate(examples):
            ids = torch.tensor([*example["prompt_ids"], *example["response_ids"]])
            prompt = len(example["prompt_ids"])
            labels = torch.full_like(ids, IGNORE)
            labels[prompt - 1 : -1] = ids[prompt:]
            parts["input_ids"].append(ids)
            parts["positions"].append(torch.arange(len(ids)))
            parts["sequences"].append(torch.full_like(ids, index))
            parts["labels"].append(labels)
        batch = {name: torch.cat(tensors) for name, tensors in parts.items()}
        if all("top_ids" in example and "top_log_probs" in example for example in examples):
            supervised = batch["labels"] != IGNORE
            for name in ("top_ids", "top_log_probs"):
                stored = torch.cat([torch.tensor(e[name][: len(e["response_ids"])]) for e in examples])
                batch[name] = stored.new_zeros(len(supervised), stored.shape[1])
                batch[name][supervised] = stored
        batch["input_ids"] = batch["input_ids"].unsqueeze(0)
        return batch

    def draw(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Draws the blocks of a batch.

        Args:
            batch (`dict`): As [`~BlockCollator.pack`] makes it, on any device.

        Returns:
            `dict` with for each block its anchor's position `anchors` and `anchor_sequences`, `(num_blocks,)`, and of
            shape `(num_blocks, block_size - 1)` `block_labels`, the token that each mask row predicts, -100 for rows that
            are left out, and `revealed`, the token that it holds in place of the mask token, -100 where it holds that.
            `clean_twins`, of that shape too, is the index of the clean row that predicts the same token. Revealed rows but
            the last have no label: a bidirectional block shows it to them.
        """
        labels, sequences = batch["labels"], batch["sequences"]
        # An anchor's own next token and the one behind it, which its first mask row predicts, are the response's.
        candidates = ((labels[:-1] != IGNORE) & (labels[1:] != IGNORE)).nonzero()[:, 0]
        chosen = []
        for part in candidates.split(sequences[candidates].unique_consecutive(return_counts=True)[1].tolist()):
            chosen.append(part[torch.randperm(len(part), device=part.device)[: self.num_anchors]].sort().values)
        anchors = torch.cat([candidates[:0], *chosen])
        # The mask row at offset i has the label of the clean row at its own position.
        rows = anchors[:, None] + 1 + self.offset.to(anchors.device)
        inside = rows.clamp(max=len(labels) - 1)
        # One draw for each block, so that what it keeps is always a beginning.
        kept = torch.rand(len(anchors), 1, dtype=torch.double, device=anchors.device) < self.keep.to(anchors.device)
        kept = kept & (rows == inside) & (sequences[inside] == sequences[anchors][:, None])
        block_labels = torch.where(kept, labels[inside], IGNORE)
        shown = self._draw_shown(block_labels != IGNORE)
        # All but the last of the revealed rows stand before another one, which holds the answer.
        hidden = torch.cat([shown[:, 1:], torch.zeros_like(shown[:, :1])], dim=1)
        return {
            "anchors": batch["positions"][anchors],
            "anchor_sequences": sequences[anchors],
            "block_labels": block_labels.masked_fill(hidden, IGNORE),
            "revealed": torch.where(shown, batch["input_ids"][0, inside], IGNORE),
            "clean_twins": inside,
        }

    def _draw_shown(self, kept: torch.Tensor) -> torch.Tensor:
        """Which mask rows to reveal, of the shape of `kept`: in each block drawn, the first 1 to all but one of those."""
        if self.reveal_rate == 0:
            return torch.zeros_like(kept)
        drawn, share = torch.rand(2, len(kept), dtype=torch.double, device=kept.device)
        num_shown = ((1 - share) * (kept.sum(dim=1) - 1)).ceil() * (drawn < self.reveal_rate)
        return self.offset.to(kept.device) < num_shown[:, None]
