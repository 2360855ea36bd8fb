"""What the two generating endpoints have in common: a checked request becomes generations, and chunks their frame.

Knows requests, the door and what the service takes; the shape of an answer is the endpoint's.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from app.api.answers import UsageBody, Watched, usage_body, watched
from app.api.door import Door, check_model, stops
from app.api.errors import Invalid
from app.api.prompts import MANY
from app.api.schemas import MAX_SCORED, Sampling
from app.generation import Delta, Generation, Service, Stream

_LEAST_SEED, _SEEDS = -(2**63), 2**64


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Candidates asked for, None for off: `answer` for output tokens, `prompt` for prompt tokens."""

    answer: int | None
    prompt: int | None


def door_of(request: Request, model: str | None) -> Door:
    """The door as it is now. Raises Refused while no worker is up, Invalid for another model's name."""
    state = request.app.state
    service: Service = state.service
    check_model(model, service.model)
    return Door(service.ready, service.tokenizer, state.limits)


async def generations(
    request: Request,
    door: Door,
    body: Sampling,
    prompts: Sequence[tuple[int, ...]],
    logprobs: Logprobs,
    *,
    field: str,
    rest_of_context: bool,
) -> list[Generation]:
    """One generation a prompt, each checked whole. Raises Invalid; `field` is where the prompts came from.

    The seed of the first is given or drawn, and each following prompt takes the next one, so that equal prompts
    of one request get answers of their own.
    """
    _check_options(body)
    retention = door.retention(body.retention)
    name = uuid.uuid4().hex
    asked: list[Generation] = []
    _check_scored(prompts, logprobs.prompt)
    for number, ids in enumerate(prompts):
        max_tokens = door.max_tokens(body, len(ids), retention, rest_of_context)
        door.check_length(len(ids), max_tokens, retention, field)
        if len(ids) <= MANY:
            door.check_ids(ids, field)
        else:
            await asyncio.to_thread(door.check_ids, ids, field)
        seed = asked[0].params.seed + number if asked else None
        params = door.params(body, max_tokens, logprobs.answer, logprobs.prompt, _wrapped(seed))
        asked.append(
            Generation(
                request_id=name if number == 0 else f"{name}-{number}",
                prompt_ids=tuple(ids),
                params=params,
                retention=retention,
                n=body.n or 1,
                stop=stops(body),
                include_stop=bool(body.include_stop_str_in_output),
                salt=request.state.salt,
                priority=body.priority or 0,
                timeout=body.timeout,
                watch=bool(body.watch),
                skip_special_tokens=body.skip_special_tokens is not False,
                traceparent=request.state.traceparent,
            )
        )
    return asked


def _check_scored(prompts: Sequence[tuple[int, ...]], k: int | None) -> None:
    """Raises Invalid where more candidates of prompts are asked for than an answer may hold."""
    scored = 0 if k is None else sum(map(len, prompts)) * (k + 1)
    if scored > MAX_SCORED:
        text = f"the prompt's tokens with {k} candidates each are {scored} values, over the limit of {MAX_SCORED}"
        raise Invalid(f"{text}; ask for fewer", "prompt_logprobs")


def _wrapped(seed: int | None) -> int | None:
    return None if seed is None else (seed - _LEAST_SEED) % _SEEDS + _LEAST_SEED


def _check_options(body: Sampling) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise Invalid("stream_options belong to a stream; send `stream: true` or leave them out", "stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        text = "continuous_usage_stats needs include_usage: true"
        raise Invalid(text, "stream_options.continuous_usage_stats")
    if options.include_obfuscation:
        raise Invalid("padding against eavesdroppers is not served", "stream_options.include_obfuscation")


class Frame:
    """What stands around the choices of every chunk and of the whole answer."""

    def __init__(self, kind: str, door: Door, body: Sampling, asked: Sequence[Generation], model: str) -> None:
        """`kind` is the prefix of the answer's id."""
        options = body.stream_options
        self.identity = f"{kind}-{asked[0].request_id}"
        self.created = int(time.time())
        self.model = model
        self.seed = asked[0].params.seed
        self.include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._watch = bool(body.watch)
        self._asked = asked
        self._door = door
        self._first = True

    @property
    def talkative(self) -> bool:
        """Chunks without text are sent too: they tell something else."""
        return self._continuous or self._watch

    def usage(self, streams: Sequence[Stream]) -> UsageBody:
        """The usage so far."""
        return usage_body([stream.usage for stream in streams])

    def around(self, streams: Sequence[Stream], deltas: Sequence[Delta]) -> dict[str, Any]:
        """The fields of a chunk beside its choices. The first chunk tells the seed."""
        usage: UsageBody | UnsetType | None = None if self.include_usage else UNSET
        if self._continuous:
            usage = self.usage(streams)
        seed, self._first = self.seed if self._first else UNSET, False
        return {"usage": usage, "seed": seed, "everstream": self.everstream(streams, deltas)}

    def everstream(self, streams: Sequence[Stream], deltas: Sequence[Delta]) -> Watched | UnsetType:
        """What the cache holds for these deltas, where it was asked for."""
        if not self._watch:
            return UNSET
        evicted = sum(stream.usage.tokens_evicted for stream in streams)
        return watched(deltas, evicted, self._asked[0].retention, self._door.ready)
