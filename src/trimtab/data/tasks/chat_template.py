"""A conversation to the text that the model reads, and which characters of it are answers.

Three ways, the first that works: the marks of the template itself (`{% generation %}`); what a template writes beyond
the prompt that it gives for generation; and, for templates that write an answer differently once more turns follow, the
place where a placeholder comes out. Each result is checked against the text that is really trained on.
"""

import os.path
import re
from dataclasses import dataclass
from typing import Any

from trimtab.data.tasks.messages import BadMessages, Message

Spans = list[tuple[int, int]]
_USUAL_ROLES = ("system", "developer", "user", "assistant")
_WITH_TOOLS = (
    "give the model's folder a chat template that writes tool calls and their results (chat_template.jinja), or remove "
    "the row"
)
_GENERATION_MARK = re.compile(r"\{%-?\+?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Args:
        text: What the model reads.
        answers: Start and end of each answer in it, with the token that ends the turn.
        ends_marked: Whether a special token ends every answer.
    """

    text: str
    answers: Spans
    ends_marked: bool


def plain_template(tokenizer: Any) -> str:
    """A simple template for tokenizers that have none: the role on a line, the text below, EOS after an answer."""
    begins = tokenizer("", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]
    return (
        ("{{ bos_token }}" if begins else "")
        + "{% for message in messages %}"
        + "{{ message['role'] | capitalize }}{{ ':\\n' }}{{ message['content'] }}"
        + "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}"
        + "{% endfor %}"
        + "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
    )


class Renderer:
    """Renders conversations with the chat template of a tokenizer.

    Args:
        tokenizer: A tokenizer that has a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.get_chat_template()
        self._has_marks = _GENERATION_MARK.search(self._template) is not None
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
        any_special = "|".join(map(re.escape, special)) or "(?!)"
        self._special_next = re.compile(rf"\s*(?:{any_special})")
        self._special_last = re.compile(rf"(?:{any_special})(?=\s*\Z)")

    def render(self, messages: list[Message]) -> Rendered:
        """The text of a conversation and the answers in it.

        Raises:
            BadMessages: If the template refuses the conversation or leaves out tool calls or their results, or if the
                answers cannot be found in what it writes.
        """
        self._require_tools_written(messages)
        if self._has_marks:
            text, answers = self._by_marks(messages)
        else:
            text = self._text(messages)
            answers = self._by_prefixes(messages, text) or self._by_placeholders(messages, text)
        if not answers:
            raise BadMessages(
                "the answers cannot be told apart in what the chat template writes",
                "mark them in the template with {% generation %} and {% endgeneration %}",
            )
        ended = [self._with_end_of_turn(text, start, end) for start, end in answers]
        return Rendered(text, ended, all(self._special_last.search(text[start:end]) for start, end in ended))

    def _require_tools_written(self, messages: list[Message]) -> None:
        """Refuse what a template drops in silence: an answer that is a tool call would be learnt as an empty one."""
        for index, message in enumerate(messages):
            role = message["role"]
            others = [_without_call(message, number) for number in range(_num_calls(message))]
            if any(self._is_written_alike(messages, index, other) for other in others):
                raise BadMessages(
                    f"the chat template leaves out a tool call of message {index + 1}, so that the model would learn "
                    "an answer without it",
                    _WITH_TOOLS,
                )
            if role in _USUAL_ROLES or not message["content"]:
                continue
            if self._is_written_alike(messages, index, {**message, "content": f"no {message['content']}"}):
                raise BadMessages(
                    f"the chat template leaves out message {index + 1}, of the role {role!r}, so that the model would "
                    "learn answers to what it has not read",
                    _WITH_TOOLS,
                )

    def _is_written_alike(self, messages: list[Message], index: int, other: Message) -> bool:
        """Whether a conversation in which one message is another one comes out the same."""
        try:
            changed = self._written(_exchanged(messages, index, other), answers_alone=other["role"] == "assistant")
        except BadMessages:  # the template looks at what was changed
            return False
        return changed == self._written(messages, answers_alone=other["role"] == "assistant")

    def _written(self, messages: list[Message], *, answers_alone: bool) -> list[str]:
        """The text of a conversation, or where the template marks answers, the text of those."""
        if not self._has_marks:
            return [self._text(messages)]
        text, answers = self._by_marks(messages)
        return [text[start:end] for start, end in answers] if answers_alone else [text]

    def _text(self, messages: list[Message], *, for_generation: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=for_generation)
            )
        except (TemplateError, TypeError) as error:
            raise _refused(error) from error

    def _by_marks(self, messages: list[Message]) -> tuple[str, Spans]:
        """The characters that the template marks. Not `return_assistant_tokens_mask`.

        That looks up the tokens of a span's first and last character, and where one of them is white space that no
        token covers, it leaves the answer out or runs on to the end of the conversation.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(  # its annotation says str
                conversations=[messages],
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError) as error:
            raise _refused(error) from error
        texts, spans = rendered
        return texts[0], [(start, end) for start, end in spans[0] if end > start]

    def _by_prefixes(self, messages: list[Message], text: str) -> Spans:
        """An answer is what the template adds to the prompt that it gives for generation; or nothing is found.

        Nothing, where a prompt is no beginning of the text trained on: the model would be asked for something else
        than it learnt.
        """
        answers: Spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:  # a greeting: there is no prompt for it
                return []
            prompt = self._text(messages[:index], for_generation=True)
            until = self._text(messages[: index + 1]) if index + 1 < len(messages) else text
            if not (until.startswith(prompt) and text.startswith(until) and len(until) > len(prompt)):
                return []
            answers.append((len(prompt), len(until)))
        return answers

    def _by_placeholders(self, messages: list[Message], text: str) -> Spans:
        """Answers are where placeholders come out in their stead; or nothing, if more than that is different then.

        Answers with tool calls are what the template does not write without them.
        """
        with_calls = [self._answer_with_calls(messages, i, text) for i, m in enumerate(messages) if _num_calls(m)]
        is_plain = [message["role"] == "assistant" and not _num_calls(message) for message in messages]
        contents = [message["content"] for message, plain in zip(messages, is_plain, strict=True) if plain]
        if None in with_calls or not all(isinstance(content, str) for content in contents):
            return []
        numbers = iter(range(len(contents)))
        replaced = [
            {**message, "content": f"answer<{next(numbers)}>here"} if plain else message
            for message, plain in zip(messages, is_plain, strict=True)
        ]
        around = re.split(r"answer<\d+>here", self._text(replaced))
        for answers in (contents, [content.strip() for content in contents]):
            if len(around) != len(answers) + 1:
                return []
            pieces = [piece for pair in zip(around, [*answers, ""], strict=True) for piece in pair]
            if "".join(pieces) != text:
                continue
            ends = [len("".join(pieces[: 2 * number + 2])) for number in range(len(answers))]
            found = [(end - len(answer), end) for end, answer in zip(ends, answers, strict=True)]
            return self._from_their_prompts(messages, text, sorted([*found, *(s for s in with_calls if s)]))
        return []

    def _answer_with_calls(self, messages: list[Message], index: int, text: str) -> tuple[int, int] | None:
        """What `text` has more than the same conversation with an empty answer; None where other text differs too."""
        empty = {key: value for key, value in messages[index].items() if key != "tool_calls"} | {"content": ""}
        try:
            without = self._text(_exchanged(messages, index, empty))
        except BadMessages:
            return None
        num_same_at_end = len(os.path.commonprefix([text[::-1], without[::-1]]))
        start, end = len(without) - num_same_at_end, len(text) - num_same_at_end
        return (start, end) if start < end and text[:start] == without[:start] else None

    def _from_their_prompts(self, messages: list[Message], text: str, answers: Spans) -> Spans:
        """Answers begin where the prompt for generation ends, so that the model learns all that it has to write.

        Some templates write more before an answer, for example a thought that is empty.
        """
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        if last == 0:
            return answers
        before, prompted = (self._text(messages[:last], for_generation=asks) for asks in (False, True))
        prompt = prompted.removeprefix(before)
        if not prompt or len(prompt) == len(prompted):
            return answers
        begun: Spans = []
        for start, end in answers:
            at = text.rfind(prompt, begun[-1][1] if begun else 0, start)
            begun.append((start if at < 0 else at + len(prompt), end))
        return begun

    def _with_end_of_turn(self, text: str, start: int, end: int) -> tuple[int, int]:
        """An answer up to and with the special token that ends it, without white space after that.

        The model has to learn to write that token, or it will not stop.
        """
        inside = self._special_last.search(text, start, end)
        if inside is not None:
            return start, inside.end()
        after = self._special_next.match(text, end)
        return start, after.end() if after is not None else end


def _num_calls(message: Message) -> int:
    calls = message.get("tool_calls") if message["role"] == "assistant" else None
    return len(calls) if isinstance(calls, list | tuple) else int(bool(calls))


def _without_call(message: Message, number: int) -> Message:
    """An answer with all but one of its tool calls."""
    calls = message["tool_calls"]
    others = [call for i, call in enumerate(calls) if i != number] if isinstance(calls, list | tuple) else []
    return {key: value for key, value in message.items() if key != "tool_calls"} | (
        {"tool_calls": others} if others else {}
    )


def _exchanged(messages: list[Message], index: int, other: Message) -> list[Message]:
    return [*messages[:index], other, *messages[index + 1 :]]


def _refused(error: Exception) -> BadMessages:
    return BadMessages(
        f"the chat template refuses the conversation ({error})",
        "change its roles to what the model's chat format allows (often user and assistant in turn)",
    )
