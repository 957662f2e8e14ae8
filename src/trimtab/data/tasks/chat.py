"""Chat and instructions: conversations in the model's chat format, with loss on the answers only."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from trimtab.data.bad_rows import BadRows
from trimtab.data.metrics import Metrics
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Columns, Problem, without_bad_rows
from trimtab.data.tasks.chat_template import Rendered, Renderer, Spans, plain_template
from trimtab.data.tasks.inputs import EncoderInputs
from trimtab.data.tasks.messages import BadMessages, Conversations
from trimtab.data.tasks.padding import IGNORED, pad
from trimtab.data.tasks.tokenizing import CHARACTERS_PER_CALL, ROWS_PER_CALL
from trimtab.data.tokens import TokenDataset
from trimtab.errors import DataError, ModelError
from trimtab.log import say, say_once


class Chat:
    """Learn to answer.

    Args:
        conversations: Where the conversations stand.
        said: Lines for the user about what was guessed.
        on_bad_rows: "stop" or "skip".
    """

    name = "chat"
    model_kind = "causal-lm"
    loss_kind = "token-cross-entropy"
    shifts_labels = True
    default_metric = "loss"

    def __init__(self, conversations: Conversations, said: list[str], on_bad_rows: str = "stop") -> None:
        self.columns: Columns = conversations.columns
        self.said = said
        self._conversations = conversations
        self._on_bad_rows = on_bad_rows
        self._inputs = EncoderInputs()

    @property
    def settings(self) -> dict[str, Any]:
        """The columns; the chat template belongs to the tokenizer."""
        return {"task": self.name, "columns": self.columns}

    def head(self) -> dict[str, Any]:
        """Nothing: a language model brings its head along."""
        return {}

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Take the pad token; a tokenizer without a chat template is given a plain one.

        It stays with the tokenizer, so that it is saved beside the model and used when the model is asked.
        """
        self._inputs.bind(tokenizer, config)
        if not tokenizer.chat_template:
            tokenizer.chat_template = plain_template(tokenizer)
            say_once("the tokenizer has no chat template: a plain one (User: … Assistant: …) is used and saved with it")
            if tokenizer.eos_token is None:
                say_once("the tokenizer has no EOS token either: the model will not learn where an answer ends")

    def usable(self, rows: Rows) -> Rows:
        """The rows that hold a conversation with an answer."""

        def problem_of(index: int) -> Problem:
            try:
                self._conversations.of(rows, index)
            except BadMessages as error:
                return error.problem, error.cure
            return None

        return without_bad_rows(rows, problem_of, self._on_bad_rows)

    def encode(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Conversations to tokens, and labels that are ignored outside of answers.

        Raises:
            ModelError: If the tokenizer cannot say which characters a token stands for.
        """
        self.bind(tokenizer)
        if not tokenizer.is_fast:
            raise ModelError(
                f"{type(tokenizer).__name__} does not know which characters a token stands for, so that answers cannot "
                "be told from prompts",
                "use a model with a fast tokenizer (tokenizer.json)",
            )
        counts = _Counts()
        rendered = self._rendered(self.usable(rows), Renderer(tokenizer))
        dataset = TokenDataset.from_examples(_examples(rendered, tokenizer, max_length, counts))
        dataset.num_truncated = counts.truncated
        counts.report(rows.origin)
        if len(dataset) == 0:
            raise DataError(f"{rows.origin}: no conversation is left to learn from", "look at the skipped rows")
        return dataset

    def _rendered(self, rows: Rows, renderer: Renderer) -> Iterator[Rendered]:
        bad = BadRows(self._on_bad_rows)
        for index in range(len(rows)):
            try:
                yield renderer.render(self._conversations.of(rows, index))
            except BadMessages as error:
                bad.add(rows.place(index), error.problem, error.cure)
        bad.report(rows.origin)

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """A padded batch; labels are the tokens of answers."""
        batch = self._inputs.collate(examples)
        batch["labels"] = pad(examples, "labels", IGNORED, batch["attention_mask"].bool())
        return batch

    def metrics(self, names: Sequence[str] | None = None) -> Metrics:
        """Loss and perplexity unless others are named."""
        return Metrics(self.loss_kind, names, shifts_labels=True)

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """The conversation as the model sees it."""
        return self._inputs.text(example, tokenizer)


class _Counts:
    """What happened to conversations on their way to tokens."""

    def __init__(self) -> None:
        self.truncated = 0
        self.answerless = 0
        self.unended = 0

    def report(self, origin: str) -> None:
        if self.unended:
            say(
                f"{origin}: in {self.unended} conversation(s) no special token ends an answer, so that the model may "
                "not learn to stop; look at the chat template"
            )
        if self.answerless:
            say(f"{origin}: {self.answerless} conversation(s) left out, because no token of them is an answer")


def _examples(rendered: Iterator[Rendered], tokenizer: Any, max_length: int, counts: _Counts) -> Iterator[Any]:
    for part in _parts(rendered):
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
                counts.answerless += 1
                continue
            labels = [IGNORED] * len(ids)
            for start, end in answers:
                labels[start:end] = ids[start:end]
            kept = cut_to_answers(len(ids), answers[0], max_length, keeps_first=ids[0] == tokenizer.bos_token_id)
            counts.truncated += len(kept) < len(ids)
            counts.unended += not conversation.ends_marked
            yield {"input_ids": [ids[i] for i in kept], "labels": [labels[i] for i in kept]}


def _parts(rendered: Iterator[Rendered]) -> Iterator[list[Rendered]]:
    part: list[Rendered] = []
    num_characters = 0
    for conversation in rendered:
        part.append(conversation)
        num_characters += len(conversation.text)
        if len(part) == ROWS_PER_CALL or num_characters >= CHARACTERS_PER_CALL:
            yield part
            part, num_characters = [], 0
    if part:
        yield part


def token_spans(spans: Spans, offsets: Sequence[tuple[int, int]]) -> Spans:
    """Spans of characters to spans of tokens: every token that stands, in part at least, for a character of a span.

    White space may belong to no token, or to one whose own characters were trimmed away (start equals end); such a
    token is taken where it stands between others of its span.
    """
    starts = [start for start, _ in offsets]
    ends = [end for _, end in offsets]
    found = [(bisect_right(ends, start), bisect_left(starts, end)) for start, end in spans]
    return [(first, last) for first, last in found if first < last]


def cut_to_answers(num_tokens: int, first_answer: tuple[int, int], max_length: int, *, keeps_first: bool) -> list[int]:
    """The positions that stay when a conversation is cut to `max_length` tokens.

    The end is cut, as everywhere. Where that would leave less than the first answer (or than half of `max_length`, if
    the answer is longer), the beginning of the prompt is cut instead, so that there is something to learn.

    Args:
        num_tokens: The length of the conversation.
        first_answer: Where its first answer begins and ends.
        max_length: How many tokens may stay.
        keeps_first: Whether the first token (BOS) stays in any case.
    """
    start, end = first_answer
    needed = min(end, start + max_length // 2)
    dropped = max(needed - max_length, 0)
    kept = list(range(min(num_tokens, dropped + max_length)))[dropped:]
    if dropped and keeps_first:
        kept[0] = 0
    return kept
