"""A conversation with a model directory: replies come as they are made."""

from __future__ import annotations

import threading
from collections.abc import Generator

import torch
from transformers import StoppingCriteria, TextIteratorStreamer

from aliquot.core.errors import UsageError
from aliquot.models.generate import Loaded, chat_ids, check_text, ends_of_turn, sampling


class Chat:
    """What was said so far, and what the model makes of it."""

    def __init__(self, loaded: Loaded, max_new_tokens: int, temperature: float, seed: int) -> None:
        """Raises UserError where the tokenizer has no chat template."""
        self._loaded = loaded
        self._messages: list[dict[str, str]] = []
        self._options = {**sampling(max_new_tokens, temperature), **ends_of_turn(loaded.tokenizer)}
        self._max_new_tokens = max_new_tokens
        torch.manual_seed(seed)

    def reset(self) -> None:
        self._messages.clear()

    def reply(self, text: str) -> Generator[str, None, None]:
        """Pieces of the reply to `text`. Closed before its end, it stops, and what was said until then is kept.

        Raises UserError where the conversation has grown longer than the model can read, or `text` is none; it is not
        kept then.
        """
        check_text(text)
        asked = [*self._messages, {"role": "user", "content": text}]
        ids = chat_ids(self._loaded.tokenizer, asked, self._loaded.chat_prefix)
        room = self._loaded.room
        if room is not None and len(ids) + self._max_new_tokens > room:
            raise UsageError(
                f"the conversation has {len(ids)} tokens, and with {self._max_new_tokens} new ones it is longer than"
                f" the {room} that this model can read: /reset, or a smaller --max-new-tokens"
            )
        streamer = TextIteratorStreamer(self._loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop, failed = _Stop(), []

        def generate() -> None:
            try:
                with torch.no_grad():
                    self._loaded.model.generate(
                        torch.tensor([ids]), streamer=streamer, stopping_criteria=[stop], **self._options
                    )
            except Exception as error:  # told by the thread that reads, which would wait for ever
                failed.append(error)
                streamer.end()

        thread = threading.Thread(target=generate, name="aliquot-chat", daemon=True)
        said: list[str] = []
        thread.start()
        try:
            for piece in streamer:
                said.append(piece)
                yield piece
        finally:
            stop.wanted = True
            thread.join()
            self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        if failed:
            raise failed[0]


class _Stop(StoppingCriteria):  # type: ignore[misc]
    wanted = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.wanted, dtype=torch.bool)
