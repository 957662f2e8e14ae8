"""Render conversations with a chat template, and find the characters of the answers in the text.

Three methods are tried in this order: the marks of the template itself (`{% generation %}`); the text that the template
appends to its generation prompt; and, for templates that write an answer differently if more turns follow, the position
of a placeholder. Each result is checked against the training text.
"""

import os.path
import re
from dataclasses import dataclass
from typing import Any

from trimtab.data.limited_process import LimitedProcess, LimitExceeded
from trimtab.data.tasks.messages import BadMessages, Message
from trimtab.data.tasks.tokenization import backend_unchanged
from trimtab.errors import ModelError, summarize_error

Spans = list[tuple[int, int]]
_USUAL_ROLES = ("system", "developer", "user", "assistant")
_TOOLS_FIX = (
    "use a chat template that writes tool calls and their results (chat_template.jinja in the model's folder), or "
    "remove the row"
)
_OTHER_TEMPLATE = "use another chat template (chat_template.jinja in the model's folder), or another model"
_MAX_GROWTH = 20  # characters of the text for each of the conversation, in texts of more than a million
_GENERATION_MARK = re.compile(r"\{%-?\+?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Args:
        text: The text that the model is trained on.
        answers: Start and end of each answer, including the token that ends the turn.
        ends_marked: Whether a special token ends every answer.
    """

    text: str
    answers: Spans
    ends_marked: bool


def plain_template(tokenizer: Any) -> str:
    """Return a template for tokenizers without one: role on a line, text below, EOS after an answer."""
    with backend_unchanged(tokenizer):
        begins_with_bos = tokenizer("", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]
    return (
        ("{{ bos_token }}" if begins_with_bos else "")
        + "{% for message in messages %}"
        + "{{ message['role'] | capitalize }}{{ ':\\n' }}{{ message['content'] }}"
        + "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}"
        + "{% endfor %}"
        + "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
    )


class LimitedRenderer:
    """A `Renderer` in a process with limited memory and time, which ends with the context.

    Its methods also raise a ModelError, if the template needs more than that.

    Args:
        tokenizer: A tokenizer with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        renderer = Renderer(tokenizer)

        def call(name: str, messages: list[Message], tools: list[Any] | None) -> Any:
            try:
                return getattr(renderer, name)(messages, tools)
            except BadMessages as error:
                return error.problem, error.cure

        self._process = LimitedProcess(call)

    def __enter__(self) -> "LimitedRenderer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> Rendered:
        """Render a conversation and find its answers."""
        rendered: Rendered = self._call("render", messages, tools)
        return rendered

    def render_prompt(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """Render a conversation up to the point where the model generates the next answer."""
        return str(self._call("render_prompt", messages, tools))

    def _call(self, name: str, messages: list[Message], tools: list[Any] | None) -> Any:
        try:
            answer = self._process(name, messages, tools)
        except LimitExceeded as error:  # not a bad row: each of them would take as long
            raise ModelError(
                f"the chat template needs more than {error} for one conversation", _OTHER_TEMPLATE
            ) from error
        if isinstance(answer, tuple):
            raise BadMessages(*answer)
        return answer


class Renderer:
    """Renders conversations with the chat template of a tokenizer.

    Args:
        tokenizer: A tokenizer with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.get_chat_template()
        self._has_marks = _GENERATION_MARK.search(self._template) is not None
        self._tools: list[Any] | None = None  # tools of the current conversation
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
        any_special = "|".join(map(re.escape, special)) or "(?!)"
        self._special_next = re.compile(rf"\s*(?:{any_special})")
        self._special_last = re.compile(rf"(?:{any_special})(?=\s*\Z)")

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> Rendered:
        """Render a conversation and find its answers.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools that the model may call.

        Raises:
            BadMessages: If the template rejects the conversation or drops tool calls or their results, or if the
                answers cannot be found in the text.
        """
        self._tools = tools
        self._require_tools_written(messages)
        if self._has_marks:
            text, answers = self._by_marks(messages)
        else:
            text = self._text(messages)
            answers = self._by_prefixes(messages, text) or self._by_placeholders(messages, text)
        if not answers:
            raise BadMessages(
                "the answers cannot be located in the output of the chat template",
                "mark them in the template with {% generation %} and {% endgeneration %}",
            )
        ended = [self._with_end_of_turn(text, start, end) for start, end in answers]
        return Rendered(text, ended, all(self._special_last.search(text[start:end]) for start, end in ended))

    def render_prompt(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """Render a conversation up to the point where the model generates the next answer.

        Raises:
            BadMessages: If the template rejects the conversation, or drops a message, tool calls or tools.
        """
        self._tools = tools
        self._require_tools_written(messages)
        return self._text(messages, for_generation=True)

    def _require_tools_written(self, messages: list[Message]) -> None:
        """Reject conversations of which the template silently drops tools, tool calls or messages."""
        if self._tools is not None:
            text = self._text(messages)
            tools, self._tools = self._tools, None
            without = self._text(messages)
            self._tools = tools
            if text == without:
                raise BadMessages("the chat template drops the tools: the model would not see them", _TOOLS_FIX)
        for index, message in enumerate(messages):
            role = message["role"]
            others = [_without_call(message, number) for number in range(_num_calls(message))]
            if any(self._renders_the_same(messages, index, other) for other in others):
                raise BadMessages(
                    f"the chat template drops a tool call of message {index + 1}: the model would learn an answer "
                    "without it",
                    _TOOLS_FIX,
                )
            if role in _USUAL_ROLES or not message["content"]:
                continue
            if self._renders_the_same(messages, index, {**message, "content": f"no {message['content']}"}):
                raise BadMessages(
                    f"the chat template drops message {index + 1} (role {role!r}): the model would learn answers to "
                    "text that it does not see",
                    _TOOLS_FIX,
                )

    def _renders_the_same(self, messages: list[Message], index: int, other: Message) -> bool:
        """Whether the text is the same with another message at this index."""
        try:
            changed = self._rendered_parts(_replace(messages, index, other), answers_only=other["role"] == "assistant")
        except BadMessages:  # the template reads the changed value
            return False
        return changed == self._rendered_parts(messages, answers_only=other["role"] == "assistant")

    def _rendered_parts(self, messages: list[Message], *, answers_only: bool) -> list[str]:
        """Return the text of a conversation; or only of the answers, for a template with marks."""
        if not self._has_marks:
            return [self._text(messages)]
        text, answers = self._by_marks(messages)
        return [text[start:end] for start, end in answers] if answers_only else [text]

    def _text(self, messages: list[Message], *, for_generation: bool = False) -> str:
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    messages, tools=self._tools, tokenize=False, add_generation_prompt=for_generation
                )
            )
        except MemoryError:
            raise
        except Exception as error:  # a template can raise any type
            raise _rejected(error) from error
        return self._checked(text, messages)

    def _checked(self, text: str, messages: list[Message]) -> str:
        """Return a text; reject one that is far longer than its conversation, which would fill the memory as tokens."""
        if len(text) > 1_000_000:
            given = len(str(messages)) + len(str(self._tools))
            if len(text) > _MAX_GROWTH * given:
                raise BadMessages(
                    f"the chat template makes {len(text):,} characters of a conversation of {given:,}", _OTHER_TEMPLATE
                )
        return text

    def _by_marks(self, messages: list[Message]) -> tuple[str, Spans]:
        """Return the text and the characters that the template marks.

        `return_assistant_tokens_mask` of apply_chat_template is not used: it looks up the tokens of the first and last
        character of a span. If no token covers one of these (white space), it omits the answer or extends it to the end
        of the conversation.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(  # annotated as str
                conversations=[messages],
                tools=self._tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise _rejected(error) from error
        texts, spans = rendered
        return self._checked(texts[0], messages), [(start, end) for start, end in spans[0] if end > start]

    def _by_prefixes(self, messages: list[Message], text: str) -> Spans:
        """Return what the template appends to the generation prompt of each answer.

        Empty if a generation prompt is not a prefix of the training text: inference would then prompt the model with
        something that it was not trained on.
        """
        answers: Spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:  # a greeting has no prompt
                return []
            prompt = self._text(messages[:index], for_generation=True)
            until = self._text(messages[: index + 1]) if index + 1 < len(messages) else text
            if not (until.startswith(prompt) and text.startswith(until) and len(until) > len(prompt)):
                return []
            answers.append((len(prompt), len(until)))
        return answers

    def _by_placeholders(self, messages: list[Message], text: str) -> Spans:
        """Return the positions of placeholders that replace the answers; empty if they change other text too.

        For answers with tool calls, the span is the text that the template omits without them.
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
            return self._from_prompt_ends(messages, text, sorted([*found, *(s for s in with_calls if s)]))
        return []

    def _answer_with_calls(self, messages: list[Message], index: int, text: str) -> tuple[int, int] | None:
        """Return the span that `text` loses with an empty answer; None if other text changes too."""
        empty = {key: value for key, value in messages[index].items() if key != "tool_calls"} | {"content": ""}
        try:
            without = self._text(_replace(messages, index, empty))
        except BadMessages:
            return None
        num_same_at_end = len(os.path.commonprefix([text[::-1], without[::-1]]))
        start, end = len(without) - num_same_at_end, len(text) - num_same_at_end
        return (start, end) if start < end and text[:start] == without[:start] else None

    def _from_prompt_ends(self, messages: list[Message], text: str, answers: Spans) -> Spans:
        """Extend answers back to the end of the generation prompt.

        Some templates write more before an answer, for example an empty thought; the model has to generate that too.
        """
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        if last == 0:
            return answers
        before, prompted = (self._text(messages[:last], for_generation=asks) for asks in (False, True))
        prompt = prompted.removeprefix(before)
        if not prompt or len(prompt) == len(prompted):
            return answers
        extended: Spans = []
        for start, end in answers:
            at = text.rfind(prompt, extended[-1][1] if extended else 0, start)
            extended.append((start if at < 0 else at + len(prompt), end))
        return extended

    def _with_end_of_turn(self, text: str, start: int, end: int) -> tuple[int, int]:
        """Extend an answer to the special token that ends it, without white space after that.

        The model has to learn to generate that token, or it does not stop.
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
    """Return an answer without one of its tool calls."""
    calls = message["tool_calls"]
    others = [call for i, call in enumerate(calls) if i != number] if isinstance(calls, list | tuple) else []
    return {key: value for key, value in message.items() if key != "tool_calls"} | (
        {"tool_calls": others} if others else {}
    )


def _replace(messages: list[Message], index: int, other: Message) -> list[Message]:
    return [*messages[:index], other, *messages[index + 1 :]]


def _rejected(error: Exception) -> BadMessages:
    from jinja2 import TemplateError

    by_template = type(error) is TemplateError  # it called raise_exception
    return BadMessages(
        f"the chat template rejects the conversation ({error if by_template else summarize_error(error)})",
        "change its roles to those that the template accepts (often user and assistant in turn)"
        if by_template
        else _OTHER_TEMPLATE,
    )
