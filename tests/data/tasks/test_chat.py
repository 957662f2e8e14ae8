"""Chat: the tokens that carry loss are the answers and what ends them, and nothing else."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from task_tokenizers import make_rows

from trimtab.data.tasks.build import build_task
from trimtab.data.tasks.chat import kept_positions, token_spans
from trimtab.data.tasks.chat_template import Renderer
from trimtab.errors import DataError, ModelError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The end of the turn is not inside of the mark, as in many templates.
MARKED_WITHOUT_END = MARKED.replace(
    "message['content'] + '<|im_end|>' }}{% endgeneration %}", "message['content'] }}{% endgeneration %}<|im_end|>"
)
# Answers and questions in one line, a space on both sides, as in Llama 2.
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] }}"
    "{{ ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# The last answer is written with an empty thought before it, the earlier ones without, as in Qwen 3.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] | trim }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_END = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TWO_TURNS = [
    {"role": "user", "content": "what is the capital of france ?"},
    {"role": "assistant", "content": "paris"},
    {"role": "user", "content": "how are you today ?"},
    {"role": "assistant", "content": "fine\n\n thanks"},
]


def encoded(conversations, tokenizer, max_length=512, **settings):
    rows = make_rows(messages=conversations)
    task = build_task("chat", rows, **settings)
    return task, task.encode(rows, tokenizer, max_length)


def learnt(dataset, tokenizer, row=0):
    """The runs of tokens that carry loss, decoded."""
    ids, labels = (dataset[row][name].tolist() for name in ("input_ids", "labels"))
    runs, open_run = [], []
    for token, label in zip([*ids, -1], [*labels, -100], strict=True):
        if label != -100:
            assert label == token
            open_run.append(token)
        elif open_run:
            runs.append(tokenizer.decode(open_run))
            open_run = []
    return runs


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, ["paris<|im_end|>", "fine\n\n thanks<|im_end|>"]),
        (MARKED, ["paris<|im_end|>", "fine\n\n thanks<|im_end|>"]),
        (MARKED_WITHOUT_END, ["paris<|im_end|>", "fine\n\n thanks<|im_end|>"]),
        (LLAMA2, [" paris </s>", " fine\n\n thanks </s>"]),
        (THINKING, ["paris<|im_end|>", "<think>\n\n</think>\n\nfine\n\n thanks<|im_end|>"]),
        (None, ["paris</s>", "fine\n\n thanks</s>"]),
    ],
    ids=["chatml", "marked", "marked-without-end", "llama2", "thinking", "plain"],
)
def test_answers_and_their_ends_carry_loss(fresh_llama, template, answers):
    fresh_llama.chat_template = template
    _, dataset = encoded([TWO_TURNS], fresh_llama)
    assert learnt(dataset, fresh_llama) == answers
    whole = fresh_llama.apply_chat_template(TWO_TURNS, tokenize=True)["input_ids"]
    assert dataset[0]["input_ids"].tolist() == whole


@pytest.mark.parametrize("template", [CHATML, MARKED_WITHOUT_END, LLAMA2, None])
def test_what_is_learnt_follows_the_prompt_for_generation(fresh_llama, template):
    """The tokens before the last answer are those that the model will be given when it is asked."""
    fresh_llama.chat_template = template
    _, dataset = encoded([TWO_TURNS], fresh_llama)
    prompt = fresh_llama.apply_chat_template(TWO_TURNS[:3], add_generation_prompt=True)["input_ids"]
    labels = dataset[0]["labels"].tolist()
    assert dataset[0]["input_ids"].tolist()[: len(prompt)] == prompt
    assert labels[len(prompt) - 1] == -100
    assert labels[len(prompt)] != -100


def test_one_and_several_turns_are_learnt_alike(fresh_gpt):
    """A thought that the template writes is learnt with the answer, by whichever way the answer was found."""
    fresh_gpt.chat_template = THINKING
    _, dataset = encoded([TWO_TURNS[2:], TWO_TURNS], fresh_gpt)
    assert learnt(dataset, fresh_gpt, 0) == learnt(dataset, fresh_gpt, 1)[1:]


# Tool calls in the words of Qwen; the line before the first one is left out where the answer has no text.
_CALLS = (
    "{% for call in message.tool_calls or [] %}{% if not loop.first or message['content'] %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
)
CHATML_WITH_TOOLS = CHATML.replace(
    "message['content'] + '<|im_end|>\n' }}", f"message['content'] }}}}{_CALLS}<|im_end|>\n"
)
THINKING_WITH_TOOLS = THINKING.replace("| trim }}", f"| trim }}}}{_CALLS}")
MARKED_WITH_TOOLS = MARKED.replace(
    "message['content'] + '<|im_end|>' }}{% endgen", f"message['content'] }}}}{_CALLS}{{{{ '<|im_end|>' }}}}{{% endgen"
)
# What is written of a tool call is not marked as part of the answer.
CALLS_NOT_MARKED = MARKED.replace("{% generation %}", f"{_CALLS}{{% generation %}}")


def a_call(city):
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


WITH_TOOLS = [
    {"role": "user", "content": "is it fine today ?"},
    {"role": "assistant", "content": None, "tool_calls": [a_call("paris"), a_call("rome")]},
    {"role": "tool", "content": "paris: fine"},
    {"role": "tool", "content": "rome: dull"},
    {"role": "assistant", "content": "fine in paris"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "hello", "tool_calls": [a_call("here")]},
]
CALLS = {city: json.dumps(a_call(city)["function"]) for city in ("paris", "rome", "here")}


@pytest.mark.parametrize(
    ("template", "thought"),
    [(CHATML_WITH_TOOLS, ""), (MARKED_WITH_TOOLS, ""), (THINKING_WITH_TOOLS, "<think>\n\n</think>\n\n")],
    ids=["chatml", "marked", "thinking"],
)
def test_tool_calls_are_learnt(fresh_gpt, template, thought):
    fresh_gpt.chat_template = template
    _, dataset = encoded([WITH_TOOLS], fresh_gpt)
    calls = {city: f"<tool_call>{call}</tool_call>" for city, call in CALLS.items()}
    assert learnt(dataset, fresh_gpt) == [
        f"{calls['paris']}\n{calls['rome']}<|im_end|>",
        "fine in paris<|im_end|>",
        f"{thought}hello\n{calls['here']}<|im_end|>",
    ]


ONE_CALL = CHATML_WITH_TOOLS.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
WITHOUT_RESULTS = [
    template.replace("in messages %}", "in messages if message['role'] != 'tool' %}", 1)
    for template in (CHATML_WITH_TOOLS, THINKING_WITH_TOOLS, MARKED_WITH_TOOLS)
]


@pytest.mark.parametrize(
    ("template", "dropped"),
    [
        *((template, "a tool call of message 2") for template in (CHATML, MARKED, CALLS_NOT_MARKED, THINKING, None)),
        (ONE_CALL, "a tool call of message 2"),
        *((template, "message 3 (role 'tool')") for template in WITHOUT_RESULTS),
    ],
)
@pytest.mark.parametrize("content", [None, "let me see"])
def test_a_template_that_drops_tool_calls_or_results_is_rejected(fresh_gpt, said, template, dropped, content):
    """The model would learn empty answers, or answers to results that it does not see."""
    fresh_gpt.chat_template = template
    conversation = [WITH_TOOLS[0], {**WITH_TOOLS[1], "content": content}, *WITH_TOOLS[2:]]
    with pytest.raises(DataError) as caught:
        encoded([TWO_TURNS, conversation], fresh_gpt)
    assert str(caught.value).startswith(f"mine.csv, row 2: the chat template drops {dropped}")
    assert "chat_template.jinja" in caught.value.cure
    assert len(encoded([TWO_TURNS, conversation], fresh_gpt, on_bad_rows="skip")[1]) == 1
    assert any(f"drops {dropped}" in line for line in said)


@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize("as_json", [False, True])
def test_tools_reach_the_template(fresh_gpt, said, marks, as_json):
    """The column "tools" beside the messages; a row may have none."""
    schema = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}
    tools = [json.dumps([schema]) if as_json else [schema], None]
    template = (MARKED if marks else CHATML).replace("{% for", "{% if tools %}{{ tools | tojson }}{% endif %}{% for", 1)
    fresh_gpt.chat_template = template
    rows = make_rows(messages=[TWO_TURNS, TWO_TURNS], tools=tools)
    task = build_task(None, rows)
    assert task.columns == {"messages": "messages", "tools": "tools"}
    assert task.notes[-1].startswith("tools of the conversations: column 'tools'")
    dataset = task.encode(rows, fresh_gpt, 512)
    texts = [task.example_text(dataset[row], fresh_gpt) for row in range(2)]
    assert texts[0] == json.dumps([schema]) + texts[1]
    assert learnt(dataset, fresh_gpt, 0) == learnt(dataset, fresh_gpt, 1)
    bad = make_rows(messages=[TWO_TURNS, TWO_TURNS], tools=[[schema], "a hammer"])
    with pytest.raises(DataError, match="row 2: column 'tools' contains a str, expected a list of tools"):
        task.usable(bad)


def test_marks_give_what_transformers_gives(fresh_llama):
    fresh_llama.chat_template = MARKED
    reference = fresh_llama.apply_chat_template(TWO_TURNS, return_assistant_tokens_mask=True)
    _, dataset = encoded([TWO_TURNS], fresh_llama)
    assert (dataset[0]["labels"] != -100).int().tolist() == reference["assistant_masks"]


def test_white_space_that_no_token_covers(bert):
    """The mask of transformers leaves an answer out that begins with such a space; ours does not."""
    bert.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{% generation %} {{ message['content'] }}[SEP]{% endgeneration %} "
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    try:
        reference = bert.apply_chat_template(TWO_TURNS, return_assistant_tokens_mask=True)
        _, dataset = encoded([TWO_TURNS], bert)
    finally:
        bert.chat_template = None
    assert sum(reference["assistant_masks"]) == 0
    assert learnt(dataset, bert) == ["paris [SEP]", "fine thanks [SEP]"]


def test_real_llama(stories):
    rows = make_rows(
        prompt=["Tell me of a dog named “Spot” – please 🐶"], response=["Once upon a time, é 🐶\n\nThe end."]
    )
    task = build_task(None, rows)
    dataset = task.encode(rows, stories, 512)
    assert learnt(dataset, stories) == ["Once upon a time, é 🐶\n\nThe end.</s>"]
    assert dataset[0]["input_ids"][:2].tolist().count(stories.bos_token_id) == 1


def test_a_plain_template_is_said_and_kept(fresh_llama, said):
    encoded([TWO_TURNS], fresh_llama)
    assert len(said) == 1
    assert "no chat template" in said[0]
    text = fresh_llama.apply_chat_template(TWO_TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert text == "<s>User:\nwhat is the capital of france ?\n\nAssistant:\n"


def test_a_plain_template_begins_as_the_tokenizer_does(fresh_gpt):
    _, dataset = encoded([TWO_TURNS], fresh_gpt)
    assert fresh_gpt.decode(dataset[0]["input_ids"]).startswith("User:\n")
    assert learnt(dataset, fresh_gpt) == ["paris<|end|>", "fine\n\n thanks<|end|>"]


def test_no_special_token_ends_an_answer(fresh_gpt, said):
    fresh_gpt.chat_template = WITHOUT_END
    _, dataset = encoded([TWO_TURNS[:2]], fresh_gpt)
    assert learnt(dataset, fresh_gpt) == [" paris\n"]  # the token of the first word holds the space of the prompt
    assert len(said) == 1
    assert "1 conversation(s) have an answer that does not end with a special token" in said[0]


def test_a_greeting_carries_loss(fresh_gpt):
    fresh_gpt.chat_template = CHATML
    greeting = [{"role": "assistant", "content": "hello there"}, *TWO_TURNS[:2]]
    _, dataset = encoded([greeting], fresh_gpt)
    assert learnt(dataset, fresh_gpt) == ["hello there<|im_end|>", "paris<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 10 ** 400 * 1.5 }}", "OverflowError: int too large"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: maximum recursion"),
        ("{{ messages[0].content * 100000 }}", "makes 3,100,000 characters of a conversation of"),
    ],
)
def test_templates_that_fail(fresh_llama, template, problem):
    fresh_llama.chat_template = template
    with pytest.raises(DataError, match=f"row 1: the chat template .*{re.escape(problem)}"):
        encoded([TWO_TURNS], fresh_llama)


def test_a_template_that_needs_too_much_ends_the_call(fresh_llama):
    """It is not a bad row, which could be skipped: every row would take as long."""
    fresh_llama.chat_template = "{{ 'x' * 10**12 }}"
    with pytest.raises(ModelError, match="needs more than 1 GiB of memory for one conversation"):
        encoded([TWO_TURNS], fresh_llama, on_bad_rows="skip")


def test_roles_that_a_template_refuses(fresh_llama, said):
    fresh_llama.chat_template = LLAMA2
    conversations = [TWO_TURNS, [{"role": "system", "content": "be kind"}, *TWO_TURNS]]
    with pytest.raises(DataError, match=r"mine.csv, row 2: the chat template rejects .* \(only user and assistant\)"):
        encoded(conversations, fresh_llama)
    _, dataset = encoded(conversations, fresh_llama, on_bad_rows="skip")
    assert len(dataset) == 1
    assert said == [line for line in said if "skipped 1 bad row(s)" in line]


def test_answers_that_cannot_be_told_apart(fresh_gpt):
    fresh_gpt.chat_template = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    with pytest.raises(DataError, match="row 1: the answers cannot be located .*\n.*mark them in the template"):
        encoded([[TWO_TURNS[1], *TWO_TURNS[:2]]], fresh_gpt)


def test_a_tokenizer_without_offsets(fresh_gpt):
    class Slow:
        is_fast = False
        chat_template = CHATML

        def __getattr__(self, name):
            return getattr(fresh_gpt, name)

    with pytest.raises(ModelError, match="Slow returns no character offsets"):
        encoded([TWO_TURNS], Slow())


@pytest.mark.parametrize(
    "value",
    [
        [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "paris"}],
        [{"role": "User", "content": "hello", "tool_calls": None}, {"role": "model", "content": "paris"}],
        json.dumps([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "paris"}]),
        [
            {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
            {"role": "assistant", "content": "paris"},
        ],
    ],
)
def test_messages_in_other_words(fresh_gpt, value):
    fresh_gpt.chat_template = CHATML
    rows = make_rows(conversations=[value])
    task = build_task(None, rows)
    assert task.name == "chat"
    text = task.example_text(task.encode(rows, fresh_gpt, 64)[0], fresh_gpt)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nparis<|im_end|>\n"


@pytest.mark.parametrize(
    ("columns", "prompt", "found"),
    [
        (
            {"instruction": ["hello"], "input": ["a film"], "output": ["paris"]},
            "hello\n\na film",
            ["instruction", "input"],
        ),
        ({"instruction": ["hello"], "input": [""], "output": ["paris"]}, "hello", ["instruction", "input"]),
        ({"instruction": ["hello"], "response": ["paris"]}, "hello", "instruction"),
        ({"prompt": ["hello"], "completion": ["paris"]}, "hello", "prompt"),
        ({"Question": ["hello"], "Answer": ["paris"], "id": [3]}, "hello", "Question"),
        ({"prompt": [[{"role": "user", "content": "hello"}]], "completion": ["paris"]}, "hello", "prompt"),
    ],
)
def test_instruction_data(fresh_gpt, columns, prompt, found):
    fresh_gpt.chat_template = CHATML
    rows = make_rows(**columns)
    task = build_task(None, rows)
    assert task.columns["prompt"] == found
    assert any("guessed" in line for line in task.notes)
    dataset = task.encode(rows, fresh_gpt, 64)
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\nparis<|im_end|>\n"
    assert task.example_text(dataset[0], fresh_gpt) == text
    assert learnt(dataset, fresh_gpt) == ["paris<|im_end|>"]


def test_columns_that_the_user_names(fresh_gpt):
    fresh_gpt.chat_template = CHATML
    rows = make_rows(ask=["hello"], say=["paris"], system=["be kind"], output=["no"], instruction=["no"])
    task = build_task(None, rows, prompt="ask", answer="say")
    assert task.columns == {"prompt": "ask", "answer": "say", "system": "system"}
    text = task.example_text(task.encode(rows, fresh_gpt, 64)[0], fresh_gpt)
    assert text.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "is empty, expected a list of messages"),
        ([], "is empty, expected a list of messages"),
        ("hello", "contains a str, expected a list of messages"),
        ("[{", "contains invalid JSON"),
        (["hello"], "contains a str, expected a message"),
        ([{"content": "hello"}], "contains a message without a role"),
        ([{"role": "user", "content": "hello"}], "contains no answer: the roles are user"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}], "contains an empty answer"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
            "contains a message without content",
        ),
        ([{"role": "user"}, {"role": "assistant", "content": "a"}], "contains a message without content (role 'user')"),
        ([{"role": "user", "content": [{"type": "image"}]}], "contains a message with a part 'image'"),
    ],
)
def test_bad_conversations(fresh_gpt, said, value, problem):
    fresh_gpt.chat_template = CHATML
    with pytest.raises(DataError) as caught:
        encoded([TWO_TURNS, value], fresh_gpt)
    assert caught.value.problem.startswith(f"mine.csv, row 2: column 'messages' {problem}")
    _, dataset = encoded([TWO_TURNS, value], fresh_gpt, on_bad_rows="skip")
    assert len(dataset) == 1
    assert "skipped 1 bad row(s)" in said[0]


def test_no_conversation_left(fresh_gpt, said):
    with pytest.raises(DataError, match="no conversation with an answer is left"):
        encoded([TWO_TURNS[:1]], fresh_gpt, on_bad_rows="skip")


def test_labels_in_a_batch(fresh_gpt):
    fresh_gpt.chat_template = CHATML
    task, dataset = encoded([TWO_TURNS, TWO_TURNS[:2]], fresh_gpt)
    batch = task.collate([dataset[0], dataset[1]])
    assert {values.dtype for values in batch.values()} == {torch.int64}
    assert {values.shape for values in batch.values()} == {batch["input_ids"].shape}
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    for row in range(2):
        length = dataset.lengths[row]
        assert batch["labels"][row, :length].tolist() == dataset[row]["labels"].tolist()


def test_a_long_prompt_is_cut_and_not_the_answer(fresh_llama):
    conversation = [{"role": "user", "content": "one two three " * 40}, {"role": "assistant", "content": "paris"}]
    _, dataset = encoded([conversation, TWO_TURNS], fresh_llama, max_length=36)
    assert dataset.num_truncated == 2
    assert dataset.lengths == [36, 36]
    assert learnt(dataset, fresh_llama) == ["paris</s>"]
    text = fresh_llama.decode(dataset[0]["input_ids"])
    assert text.startswith("<s>")
    assert "Assistant:\nparis</s>" in text
    assert learnt(dataset, fresh_llama, 1)[0] == "paris</s>"


@given(
    start=st.integers(1, 60),
    size=st.integers(1, 60),
    rest=st.integers(0, 60),
    max_length=st.integers(2, 80),
    keeps_first=st.booleans(),
)
def test_cutting(start, size, rest, max_length, keeps_first):
    num_tokens = start + size + rest
    kept = kept_positions(num_tokens, (start, start + size), max_length, keeps_first=keeps_first)
    assert len(kept) == min(num_tokens, max_length)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(range(num_tokens))
    answer = set(range(start, start + size))
    assert len(answer & set(kept)) >= min(size, max_length // 2)
    if keeps_first or start + min(size, max_length // 2) <= max_length:
        assert kept[0] == 0


def test_characters_to_tokens():
    offsets = [(0, 3), (3, 4), (6, 6), (6, 8), (8, 8), (9, 12)]  # two tokens whose white space was trimmed away
    assert token_spans([(0, 3)], offsets) == [(0, 1)]
    assert token_spans([(2, 7)], offsets) == [(0, 4)]
    assert token_spans([(6, 12)], offsets) == [(3, 6)]
    assert token_spans([(4, 12)], offsets) == [(2, 6)]
    assert token_spans([(4, 5)], offsets) == []


def test_many_conversations_take_few_calls(fresh_gpt):
    fresh_gpt.chat_template = CHATML
    conversations = [
        [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": f"film {i}"}] for i in range(1100)
    ]
    _, dataset = encoded(conversations, fresh_gpt)
    assert len(dataset) == 1100
    for row in (0, 999, 1000, 1099):
        assert learnt(dataset, fresh_gpt, row) == [f"film {row}<|im_end|>"]


def test_content_that_looks_like_a_mark(fresh_gpt):
    """Prefixes, and not a search for the content, find the answer that stands in the question as well."""
    fresh_gpt.chat_template = CHATML
    conversation = [{"role": "user", "content": "user assistant"}, {"role": "assistant", "content": "user"}]
    rendered = Renderer(fresh_gpt).render(conversation)
    assert [rendered.text[start:end] for start, end in rendered.answers] == ["user<|im_end|>"]
    assert rendered.answers[0][0] == rendered.text.rindex("user")
