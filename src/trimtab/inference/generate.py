"""Generate text: a continuation, an answer in a chat, or the output of an encoder-decoder."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trimtab.data.tasks.base import GENERATING_TASKS
from trimtab.data.tasks.chat_template import LimitedRenderer
from trimtab.data.tasks.decoder_start import generation_start
from trimtab.data.tasks.messages import BadMessages, as_messages, as_tools
from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.inference.batches import Example, padded_batches
from trimtab.inference.load import LoadedModel
from trimtab.log import say
from trimtab.model.hub import quiet_transformers
from trimtab.model.limits import MAX_BEAMS
from trimtab.model.load import max_positions
from trimtab.model.virtual_tokens import num_virtual_tokens_of
from trimtab.randomness import random_state, restore_random_state, set_seed

Prompt = str | Sequence[dict[str, str]] | Mapping[str, Any]


def generate_texts(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    *,
    batch_size: int = 8,
    temperature: float = 0.0,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """Generate text, in batches of similar length.

    For a chat model each prompt is the user's turn of its chat template; other decoders continue the prompt.

    Args:
        loaded: A causal, chat or encoder-decoder model.
        prompts: Texts; for a chat model also lists of messages, each with `role` and `content`, or dicts with
            `messages` and `tools` (JSON schemas of the tools that the model may call).
        max_new_tokens: Maximum number of tokens to generate.
        batch_size: Prompts per batch.
        temperature: 0 is greedy decoding; higher values sample.
        top_p: Sample only from the most likely tokens whose probabilities add up to this value; by default the value of
            the model's generation config.
        stop: Texts at which generation stops; the output ends before them.
        seed: Seed of the sampling. The global random state is restored.

    Returns:
        The generated texts without the prompts, in the order of the prompts.
    """
    if prompts is None or isinstance(prompts, str):
        found = "None" if prompts is None else "a string"
        raise DataError(f"{found} was passed, expected a list of prompts", "pass [prompt]")
    stop = check_stops(stop)
    texts = [""] * len(prompts)
    before = random_state()
    try:
        with quiet_transformers(), torch.inference_mode(), loaded.errors_explained():
            examples = tokenize_prompts(loaded, prompts, max_new_tokens)
            settings = generation_settings(loaded, max_new_tokens, temperature, top_p)
            set_seed(seed)
            loaded.model.eval()
            side = "right" if loaded.task_name == "seq2seq" else "left"
            for indices, batch in padded_batches(examples, batch_size, loaded.tokenizer, loaded.device, side=side):
                width = 0 if loaded.task_name == "seq2seq" else batch["input_ids"].shape[1]
                ends = {"stopping_criteria": [StopTexts(loaded.tokenizer, stop, width)]} if stop else {}
                written = loaded.model.generate(**batch, generation_config=settings, **ends).tolist()
                for index, tokens in zip(indices, written, strict=True):
                    texts[index] = decode_written(loaded, list(examples[index]["input_ids"]), tokens[width:], stop)
    finally:
        restore_random_state(before)
    return texts


def is_one_prompt(prompts: Any) -> bool:
    """Whether an argument is one prompt (a text, a dict, or the messages of a conversation) or a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return True
    return bool(prompts) and all(isinstance(turn, Mapping) and "role" in turn for turn in prompts)


def check_stops(stop: Sequence[str]) -> tuple[str, ...]:
    """Return the texts that end the output; one text may be passed without a list."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise RecipeError(f"stop is {stop!r}", "pass texts that are not empty")
    return stops


class StopTexts:
    """A stopping criterion of `generate`: each row ends once it contains one of the texts.

    Args:
        tokenizer: Decodes the tokens.
        stop: The texts.
        width: Number of tokens of the prompts.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], width: int) -> None:
        self._tokenizer, self._stop, self._width = tokenizer, stop, width
        # A token is at least one byte of text, so a stop text that ends with the last token is within this many last
        # tokens.
        self._num_last = max(len(text.encode()) for text in stop) + 1

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return for each row whether it ends."""
        last = input_ids[:, self._width :][:, -self._num_last :]
        texts = [str(self._tokenizer.decode(row, skip_special_tokens=True)) for row in last.tolist()]
        return torch.tensor([any(stop in text for stop in self._stop) for text in texts], device=input_ids.device)


def tokenize_prompts(loaded: LoadedModel, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Example]:
    """Tokenize prompts; prompts that leave no space for new tokens are truncated."""
    if loaded.task_name not in GENERATING_TASKS:
        raise ModelError(
            f"this model does not generate text: its task is {loaded.task_name}",
            "load a causal-lm, chat or seq2seq model",
        )
    if max_new_tokens < 1:
        raise RecipeError(f"max_new_tokens is {max_new_tokens}", "use 1 or more")
    limit = max_positions(loaded.model)
    if limit is not None:
        limit -= num_virtual_tokens_of(loaded.model)
    continues_prompt = loaded.task_name != "seq2seq"
    if limit is not None and max_new_tokens >= limit:
        raise RecipeError(
            f"max_new_tokens {max_new_tokens} exceeds the model's {limit} positions", f"use less than {limit}"
        )
    room = limit - max_new_tokens if limit is not None and continues_prompt else limit
    examples: list[Example] = []
    num_truncated = 0
    with _renderer(loaded) as renderer:
        for index, prompt in enumerate(prompts):
            tokens = _prompt_tokens(loaded, prompt, index, renderer)
            if room is not None and len(tokens) > room:
                # A decoder continues the end of the prompt, so the start is dropped; for an encoder, the end.
                tokens = tokens[-room:] if continues_prompt else tokens[:room]
                num_truncated += 1
            examples.append({"input_ids": tokens})
    if num_truncated:
        say(f"{num_truncated:,} of {len(prompts):,} prompts are longer than {room} tokens and were truncated")
    return examples


def _renderer(loaded: LoadedModel) -> AbstractContextManager[LimitedRenderer | None]:
    """Return a context with the renderer of conversations; with None for models that need none."""
    if loaded.task_name != "chat":
        return nullcontext()
    if not loaded.tokenizer.chat_template:
        raise ModelError("this chat model has no chat template", "set tokenizer.chat_template")
    return LimitedRenderer(loaded.tokenizer)


def _prompt_tokens(loaded: LoadedModel, prompt: Prompt, index: int, renderer: LimitedRenderer | None) -> list[int]:
    tokenizer = loaded.tokenizer
    is_text = isinstance(prompt, str)
    tokens: list[int]
    if renderer is not None:
        turns: Any = [{"role": "user", "content": prompt}] if is_text else prompt
        whole = turns if isinstance(turns, Mapping) else {"messages": turns}
        try:
            tools = as_tools(whole.get("tools"), "tools")
            text = renderer.render_prompt(as_messages(whole.get("messages"), "messages"), tools)
        except BadMessages as error:
            problem = error.problem.replace("column 'messages'", "the conversation")
            raise DataError(f"prompt {index + 1}: {problem}", error.cure) from error
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes them
    elif is_text:
        tokens = tokenizer(prompt)["input_ids"]
    else:
        raise DataError(f"prompt {index + 1} is {prompt!r}", "pass texts; lists of messages are for chat models")
    if loaded.task_name == "causal-lm" and tokens[-1:] == [tokenizer.eos_token_id]:
        tokens = tokens[:-1]  # after EOS a model starts another text
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
    return tokens or [first]


def generation_settings(
    loaded: LoadedModel, max_new_tokens: int, temperature: float = 0.0, top_p: float | None = None
) -> Any:
    """Return the model's generation config with these settings."""
    if top_p is not None and not 0 < top_p <= 1:
        raise RecipeError(f"top_p is {top_p}", "use a number above 0, up to 1")
    settings = copy.deepcopy(loaded.model.generation_config)
    if (settings.num_beams or 1) > MAX_BEAMS:
        raise ModelError(
            f"generation_config.json of {loaded.source} sets num_beams: {settings.num_beams:,}, which needs as many "
            "times the memory and time",
            f"set it to {MAX_BEAMS} or less",
        )
    settings.return_dict_in_generate, settings.num_return_sequences = False, 1  # the text of each prompt is returned
    if loaded.facts and loaded.task_name == "seq2seq":  # trained by trimtab: an adapter's base has its own settings
        settings.update(**generation_start(loaded.tokenizer, loaded.model.config.model_type))
    settings.max_length = None
    settings.max_new_tokens = max_new_tokens
    settings.pad_token_id = loaded.tokenizer.pad_token_id
    ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    settings.eos_token_id = sorted({end for end in [*ends, loaded.tokenizer.eos_token_id] if end is not None}) or None
    settings.do_sample = temperature > 0
    settings.temperature = temperature if temperature > 0 else None
    if temperature <= 0:
        settings.top_k = settings.top_p = None
    elif top_p is not None:
        settings.top_p = top_p
    return settings


def decode_written(loaded: LoadedModel, prompt: list[int], written: list[int], stop: Sequence[str] = ()) -> str:
    """Return the text of generated tokens, up to the first of the texts that end it."""
    text = _decoded(loaded, prompt, written)
    text = text[: min((text.find(each) for each in stop if each in text), default=len(text))]
    return text if loaded.task_name == "causal-lm" else text.strip()


def _decoded(loaded: LoadedModel, prompt: list[int], written: list[int]) -> str:
    decode = loaded.tokenizer.decode
    if loaded.task_name != "causal-lm":
        return str(decode(written, skip_special_tokens=True))
    # Some tokenizers (SentencePiece) drop the first space of what they decode: decode prompt and continuation together.
    before, whole = (str(decode(tokens, skip_special_tokens=True)) for tokens in (prompt, prompt + written))
    return whole[len(before) :] if whole.startswith(before) else str(decode(written, skip_special_tokens=True))
