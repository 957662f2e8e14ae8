"""A conversation to the text that the model reads, and which characters of it are answers.

Three ways, the first that works: the marks of the template itself (`{% generation %}`); what a template writes beyond
the prompt that it gives for generation; and, for templates that write an answer differently once more turns follow, the
place where a placeholder comes out. Each result is checked against the text that is really trained on.
"""

import re
from dataclasses import dataclass
from typing import Any

from trimtab.data.tasks.messages import BadMessages, Message

Spans = list[tuple[int, int]]
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
            BadMessages: If the template refuses the conversation, or the answers cannot be found in what it writes.
        """
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
        """Answers are where placeholders come out in their stead; or nothing, if more than that is different then."""
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        if not all(isinstance(content, str) for content in contents):
            return []
        numbers = iter(range(len(contents)))
        replaced = [
            {**message, "content": f"answer<{next(numbers)}>here"} if message["role"] == "assistant" else message
            for message in messages
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
            return self._from_their_prompts(messages, text, found)
        return []

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


def _refused(error: Exception) -> BadMessages:
    return BadMessages(
        f"the chat template refuses the conversation ({error})",
        "change its roles to what the model's chat format allows (often user and assistant in turn)",
    )
