"""What a client wrote to token ids, without holding the event loop up.

Knows texts, ids and the tokenizer; limits of the model are the door's. Long texts are encoded in a thread, through
the library's batch call, which alone lets go of the interpreter's lock.
"""

import asyncio
from dataclasses import dataclass

from app.api.errors import Invalid
from app.api.schemas_requests import MAX_PROMPTS
from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokenizer

LONG = 4096  # characters; below it encoding takes under a millisecond or two


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, and the text it came from (None where ids were sent)."""

    ids: tuple[int, ...]
    text: str | None = None


async def encode(tokenizer: Tokenizer, text: str, add_special: bool) -> list[int]:
    """The ids of a text."""
    if len(text) <= LONG:
        return tokenizer.encode(text, add_special)
    return await asyncio.to_thread(_encode_long, tokenizer, text, add_special)


def _encode_long(tokenizer: Tokenizer, text: str, add_special: bool) -> list[int]:
    ids: list[int] = tokenizer.backend.encode_batch([text], add_special_tokens=add_special)[0].ids
    return ids


async def read_prompts(
    tokenizer: Tokenizer, prompt: str | list[int] | list[str] | list[list[int]], add_special: bool
) -> list[Prompt]:
    """The prompts of a completion request. Raises Invalid; ids are not checked against the vocabulary here."""
    if isinstance(prompt, str):
        return [await _of_text(tokenizer, prompt, add_special)]
    if not prompt:
        raise Invalid("the prompt is an empty list; send a text, ids, or a list of them", "prompt")
    if isinstance(prompt[0], int):
        return [Prompt(tuple(token for token in prompt if isinstance(token, int)))]
    if len(prompt) > MAX_PROMPTS:
        raise Invalid(f"{len(prompt)} prompts are more than the limit of {MAX_PROMPTS}", "prompt")
    prompts = []
    for one in prompt:
        if isinstance(one, str):
            prompts.append(await _of_text(tokenizer, one, add_special))
        elif isinstance(one, list) and one:
            prompts.append(Prompt(tuple(one)))
        else:
            raise Invalid("a prompt of the list holds no token ids", "prompt")
    return prompts


async def _of_text(tokenizer: Tokenizer, text: str, add_special: bool) -> Prompt:
    ids = await encode(tokenizer, text, add_special)
    if not ids:
        if tokenizer.bos_id is None:
            raise Invalid("the prompt is empty, and this model has no begin token to start from", "prompt")
        ids = [tokenizer.bos_id]
    return Prompt(tuple(ids), text)


def token_texts(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    """What each token of a prompt adds to its text; joined they are the prompt's text.

    A begin token that was only added, and the space that some vocabularies put before a text, add nothing.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    texts = [detokenizer.push(token) for token in prompt.ids]
    if prompt.text is None:
        return texts
    written = prompt.text
    for place in (0, len(texts) - 1):
        special = tokenizer.is_special(prompt.ids[place])
        if special and not (written.startswith(texts[place]) if place == 0 else written.endswith(texts[place])):
            texts[place] = ""
    joined = "".join(texts)
    if joined == f" {written}":
        place = next(place for place, text in enumerate(texts) if text)
        texts[place] = texts[place][1:]
    return texts
