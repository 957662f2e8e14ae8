"""Chat and instructions: conversations in the model's chat template, with loss on the answers only."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from trimtab.data.bad_rows import BadRows
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Problem, Task
from trimtab.data.tasks.chat_template import LimitedRenderer, Rendered, Spans, plain_template
from trimtab.data.tasks.messages import BadMessages, Conversations
from trimtab.data.tasks.padding import IGNORED, pad
from trimtab.data.tasks.tokenization import call_batches
from trimtab.data.tokens import TokenDataset
from trimtab.errors import DataError, ModelError
from trimtab.log import log_info_once, say


class Chat(Task):
    """Generate the assistant's answers.

    Args:
        conversations: The reader of the conversations.
        notes, on_bad_rows: As in `Task`.
    """

    name = "chat"
    model_kind = "causal-lm"
    shifts_labels = True

    def __init__(self, conversations: Conversations, notes: list[str], on_bad_rows: str = "stop") -> None:
        super().__init__(conversations.columns, notes, on_bad_rows)
        self._conversations = conversations

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Read the pad token, and set a plain chat template on a tokenizer that has none.

        The template is then saved with the tokenizer, so inference uses the same one.
        """
        super().bind(tokenizer, config)
        if not tokenizer.chat_template:
            tokenizer.chat_template = plain_template(tokenizer)
            log_info_once(
                "the tokenizer has no chat template: using a plain one (User: … Assistant: …), saved with the model"
            )
            if tokenizer.eos_token is None:
                log_info_once("the tokenizer has no EOS token either: the model cannot learn where an answer ends")

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a row without a conversation or without an answer."""
        try:
            self._conversations.read(rows, index)
            self._conversations.read_tools(rows, index)
        except BadMessages as error:
            return error.problem, error.cure
        return None

    def encode_rows(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Tokenize conversations; labels outside answers are ignored.

        Raises:
            ModelError: If the tokenizer does not return character offsets.
        """
        if not tokenizer.is_fast:
            raise ModelError(
                f"{type(tokenizer).__name__} returns no character offsets, which are needed to find the answers among "
                "the tokens",
                "use a model with a fast tokenizer (tokenizer.json)",
            )
        counts: Counter[str] = Counter()
        with LimitedRenderer(tokenizer) as renderer:
            rendered = self._render(rows, renderer)
            dataset = TokenDataset.from_examples(_examples(rendered, tokenizer, max_length, counts))
        dataset.num_truncated = counts["truncated"]
        if counts["unended"]:
            say(
                f"{rows.origin}: {counts['unended']} conversation(s) have an answer that does not end with a "
                "special token: the model may not learn to stop; check the chat template"
            )
        if counts["answerless"]:
            say(f"{rows.origin}: {counts['answerless']} conversation(s) dropped: no token is part of an answer")
        if len(dataset) == 0:
            raise DataError(f"{rows.origin}: no conversation with an answer is left", "fix the skipped rows")
        return dataset

    def _render(self, rows: Rows, renderer: LimitedRenderer) -> Iterator[Rendered]:
        bad = BadRows(self.on_bad_rows)
        for index in range(len(rows)):
            try:
                messages, tools = self._conversations.read(rows, index), self._conversations.read_tools(rows, index)
                yield renderer.render(messages, tools)
            except BadMessages as error:
                bad.add(rows.location(index), error.problem, error.cure)
        bad.report(rows.origin)

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Pad a batch; labels are the tokens of answers."""
        batch = self.collate_inputs(examples)
        batch["labels"] = pad(examples, "labels", IGNORED, batch["attention_mask"].bool())
        return batch


def _examples(rendered: Iterator[Rendered], tokenizer: Any, max_length: int, counts: Counter[str]) -> Iterator[Any]:
    for part in call_batches(rendered, lambda conversation: len(conversation.text)):
        encoding = tokenizer(
            [conversation.text for conversation in part],
            add_special_tokens=False,  # the template writes them
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        rows = zip(part, encoding["input_ids"], encoding["offset_mapping"], strict=True)
        for conversation, ids, offsets in rows:
            answers = token_spans(conversation.answers, offsets)
            if not answers:
                counts["answerless"] += 1
                continue
            labels = [IGNORED] * len(ids)
            for start, end in answers:
                labels[start:end] = ids[start:end]
            kept = kept_positions(len(ids), answers[0], max_length, keeps_first=ids[0] == tokenizer.bos_token_id)
            counts["truncated"] += len(kept) < len(ids)
            counts["unended"] += not conversation.ends_marked
            yield {"input_ids": [ids[i] for i in kept], "labels": [labels[i] for i in kept]}


def token_spans(spans: Spans, offsets: Sequence[tuple[int, int]]) -> Spans:
    """Convert spans of characters to spans of tokens: every token that covers a character of a span.

    White space may belong to no token, or to a token whose offsets were trimmed to nothing (start equals end); such a
    token belongs to a span if tokens of the span surround it.
    """
    starts = [start for start, _ in offsets]
    ends = [end for _, end in offsets]
    found = [(bisect_right(ends, start), bisect_left(starts, end)) for start, end in spans]
    return [(first, last) for first, last in found if first < last]


def kept_positions(num_tokens: int, first_answer: tuple[int, int], max_length: int, *, keeps_first: bool) -> list[int]:
    """Return the positions that remain when a conversation is truncated to `max_length` tokens.

    The end is truncated. If that would leave less than the first answer (or than half of `max_length`, for a longer
    answer), the start of the prompt is truncated instead, so the example still carries loss.

    Args:
        num_tokens: Length of the conversation.
        first_answer: Start and end of its first answer.
        max_length: Maximum number of tokens.
        keeps_first: Whether the first token (BOS) always remains.
    """
    start, end = first_answer
    needed = min(end, start + max_length // 2)
    dropped = max(needed - max_length, 0)
    kept = list(range(min(num_tokens, dropped + max_length)))[dropped:]
    if dropped and keeps_first:
        kept[0] = 0
    return kept
