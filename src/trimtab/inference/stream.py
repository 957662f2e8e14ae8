"""Generate text piece by piece.

transformers passes tokens to a callback of `generate`. A thread turns that into an iterator: it runs only while the
caller waits for the next token, so neither affects the other's random numbers.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from trimtab.inference.batches import padded_batches
from trimtab.inference.generate import (
    Prompt,
    StopTexts,
    check_stops,
    decode_written,
    generation_settings,
    tokenize_prompts,
)
from trimtab.inference.load import LoadedModel
from trimtab.model.hub import quiet_transformers
from trimtab.randomness import random_state, restore_random_state, set_seed

_UNFINISHED = "\ufffd"  # the decoded form of the first bytes of a character, of which there are at most three


def stream_text(
    loaded: LoadedModel,
    prompt: Prompt,
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> Iterator[str]:
    """Yield the text that `generate_texts` returns for a prompt, in pieces; the arguments are the same.

    Models that use beam search generate with a single beam here.
    """
    stop = check_stops(stop)
    with loaded.errors_explained():
        examples = tokenize_prompts(loaded, [prompt], max_new_tokens)
        settings = generation_settings(loaded, max_new_tokens, temperature, top_p)
    settings.num_beams = 1
    side = "right" if loaded.task_name == "seq2seq" else "left"
    _, batch = next(padded_batches(examples, 1, loaded.tokenizer, loaded.device, side=side))
    width = 0 if loaded.task_name == "seq2seq" else batch["input_ids"].shape[1]
    ends = {"stopping_criteria": [StopTexts(loaded.tokenizer, stop, width)]} if stop else {}

    def write(streamer: Any) -> None:
        loaded.model.eval()
        with torch.inference_mode(), loaded.errors_explained():
            loaded.model.generate(**batch, generation_config=settings, streamer=streamer, **ends)

    tokens = _TokenThread(write, seed if temperature > 0 else None)
    return _pieces(loaded, list(examples[0]["input_ids"]), tokens, stop)


def _pieces(loaded: LoadedModel, prompt: list[int], tokens: "_TokenThread", stop: Sequence[str]) -> Iterator[str]:
    """Yield text as soon as later tokens cannot change it."""
    shown, written = "", []
    try:
        for token in tokens:
            written.append(token)
            text = decode_written(loaded, prompt, written, stop)
            kept = _settled(text, stop)
            if len(kept) > len(shown) and kept.startswith(shown):
                yield kept[len(shown) :]
                shown = kept
        text = decode_written(loaded, prompt, written, stop)
        if len(text) > len(shown):
            yield text[len(shown) :]
    finally:
        tokens.close()


def _settled(text: str, stop: Sequence[str]) -> str:
    """Return a text without its end, if that may still be part of a character or of a stop text."""
    text = text[:-3] + text[-3:].rstrip(_UNFINISHED)
    held = [size for each in stop for size in range(1, len(each)) if text.endswith(each[:size])]
    return text[: len(text) - max(held, default=0)]


class _Closed(BaseException):
    """Ends the thread of a generation whose output is no longer read."""


class _TokenThread:
    """Iterate over the tokens that a function passes to its streamer, in a thread that runs only during `next`.

    Args:
        write: The function that generates; its argument is the streamer.
        seed: Seed of the random numbers that it draws; None if it draws none.
    """

    def __init__(self, write: Callable[[Any], None], seed: int | None) -> None:
        self._write = write
        self._go, self._events = threading.Semaphore(0), SimpleQueue[Any]()
        self._pending: list[int] = []
        self._saw_prompt = self._is_closed = False
        self._random = None
        if seed is not None:
            before = random_state()
            set_seed(seed)
            self._random = random_state()
            restore_random_state(before)
        self._thread = threading.Thread(target=self._run, daemon=True)  # started by the first `next`

    def put(self, value: torch.Tensor) -> None:
        """Receive tokens; called by transformers, first with the prompt."""
        if self._saw_prompt:
            self._events.put(value.flatten().tolist())
            self._wait()
        self._saw_prompt = True

    def end(self) -> None:
        """Receive the end; called by transformers."""

    def __iter__(self) -> "_TokenThread":
        return self

    def __next__(self) -> int:
        while not self._pending:
            event = self._step()
            if not isinstance(event, list):
                self._thread.join()
                raise event or StopIteration
            self._pending = event
        return self._pending.pop(0)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._go.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _step(self) -> Any:
        """Let the thread run until its next token, end or error."""
        if self._thread.ident is None:
            self._thread.start()
        elif not self._thread.is_alive():
            return None
        before = random_state() if self._random is not None else None
        try:
            with quiet_transformers():
                if self._random is not None:
                    restore_random_state(self._random)
                self._go.release()
                event = self._events.get()
                if self._random is not None:
                    self._random = random_state()
        finally:
            if before is not None:
                restore_random_state(before)
        return event

    def _run(self) -> None:
        try:
            self._wait()
            self._write(self)
            self._events.put(None)
        except _Closed:
            pass
        except BaseException as error:
            self._events.put(error)

    def _wait(self) -> None:
        self._go.acquire()
        if self._is_closed:
            raise _Closed
