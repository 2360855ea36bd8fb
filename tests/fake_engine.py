"""A pretend engine that speaks the protocol without torch: the next id is a hash of the last ids.

Deterministic in (position, last eight ids, seed, choice), so a resume can be checked token for token, also
after old ids were dropped. Honours limits, stops, choices, logprobs, cancels, retention counts and faults.
"""

import hashlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from model.config import EngineConfig
from model.protocol import (
    VERSION,
    Accepted,
    Begin,
    BlockView,
    Cancel,
    Down,
    Drain,
    Ready,
    Rejected,
    Resume,
    Row,
    Stats,
    Step,
    Submit,
    TokenLogprob,
    Up,
)

Decode = Callable[[Sequence[int], int, int, int], int]


@dataclass(frozen=True)
class Behaviour:
    """How the pretend model answers. `low`/`high`: the range of sampled ids; `script`: these ids, then eos;
    `echo`: the prompt's ids, then eos; `delay`: seconds a step; `die_at`: the life's step that kills the process;
    `eos_every`: one sampled id in so many becomes eos (0: never); `long_step`: (step number, seconds)."""

    low: int = 97
    high: int = 122
    eos: int = 257
    vocabulary: int = 258
    context: int = 4096
    script: tuple[int, ...] = ()
    echo: bool = False
    delay: float = 0.0
    die_at: int = 0
    eos_every: int = 0
    long_step: tuple[int, float] = (0, 0.0)
    reject: str = ""
    layer_windows: tuple[int, ...] = (0, 0)


def hashed(low: int, high: int, eos: int, eos_every: int) -> Decode:
    """The default decoder: an id of [low, high] from a hash of (seed, choice, position, last eight ids)."""

    def decode(last: Sequence[int], position: int, seed: int, choice: int) -> int:
        text = repr((seed, choice, position, tuple(last[-8:]))).encode()
        value = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        if eos_every and value % eos_every == 0:
            return eos
        return low + (value // 64) % (high - low + 1)

    return decode


@dataclass
class FakeSequence:
    """One choice: the ids that are known, at true positions."""

    submit: Submit
    choice: int
    known: list[int]
    position: int
    outputs: int
    prefill_left: int
    sent_first: bool = False
    cancelled: bool = False
    prompt_sent: bool = False
    waited: int = 0


@dataclass
class FakeEngine:
    """What `model.engine.Engine` is to the worker loop: take messages, make steps."""

    config: EngineConfig
    behaviour: Behaviour = field(default_factory=Behaviour)
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        b = self.behaviour
        self.decode = hashed(b.low, b.high, b.eos, b.eos_every)
        self.waiting: list[FakeSequence] = []
        self.running: list[FakeSequence] = []
        self.draining = False
        self.steps = 0
        self.counts = {"prompt": 0, "sampled": 0, "evicted": 0}
        self._begun: tuple[str, ...] = ()

    def ready(self) -> Ready:
        """What the worker says when it is up."""
        return Ready(
            version=VERSION,
            pid=os.getpid(),
            model=self.config.name,
            family="fake",
            context=self.config.context or self.behaviour.context,
            vocabulary=self.behaviour.vocabulary,
            num_blocks=self.config.num_blocks or 4096,
            block_size=self.config.block_size,
            max_sequences=self.config.max_sequences,
            token_budget=self.config.token_budget,
            dtype="float32",
            device="cpu",
            kernels="fake",
            policies=("none", "sinks", "window", "restart"),
            min_window=16,
            max_window=1024,
            weight_bytes=1,
            cache_bytes=1 << 20,
            layer_windows=self.behaviour.layer_windows,
        )

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def take(self, message: Down) -> list[Up]:
        """Answers to one message from the front end."""
        if isinstance(message, Drain):
            self.draining = True
            return []
        if isinstance(message, Cancel):
            for sequence in self.waiting + self.running:
                if sequence.submit.request == message.request and message.choice in (-1, sequence.choice):
                    sequence.cancelled = True
            return []
        refusal = self._refusal(message)
        if refusal is not None:
            return [refusal]
        resumed: dict[int, Resume] = {resume.choice: resume for resume in message.resume}
        for choice in range(message.n):
            resume = resumed.get(choice)
            if resume is None or not resume.finished:
                self.waiting.append(self._sequence(message, choice, resume))
        return [Accepted(message.request, message.attempt)]

    def _refusal(self, submit: Submit) -> Rejected | None:
        ready, length = self.ready(), len(submit.prompt)
        if self.behaviour.reject:
            return Rejected(submit.request, submit.attempt, self.behaviour.reject, "refused by the test", "prompt")
        capacity = ready.num_blocks * ready.block_size
        if submit.retention.policy == "none" and length >= ready.context:
            text = f"the prompt has {length} tokens, the context is {ready.context}"
            return Rejected(submit.request, submit.attempt, "too_long", text, "prompt")
        if submit.retention.policy == "none" and length > capacity:
            text = f"the prompt has {length} tokens, the KV cache holds {capacity}"
            return Rejected(submit.request, submit.attempt, "cache_too_small", text, "prompt")
        return None

    def _sequence(self, submit: Submit, choice: int, resume: Resume | None) -> FakeSequence:
        prompt = list(submit.prompt)
        if resume is None or not resume.num_output_tokens:
            return FakeSequence(submit, choice, prompt, len(prompt), 0, len(prompt))
        start = resume.tail_start
        known = (prompt if start == len(prompt) else []) + list(resume.tail)
        position = start + len(resume.tail)
        assert position == len(prompt) + resume.num_output_tokens, (start, len(resume.tail), resume.num_output_tokens)
        return FakeSequence(submit, choice, known, position, resume.num_output_tokens, len(known), sent_first=True)

    def begin(self) -> Begin | None:
        """The announcement of the next step's requests, when they changed."""
        alone = next((s for s in self.running + self.waiting if s.submit.alone and not s.sent_first), None)
        if alone is None:
            alone = next((s for s in self.running if s.submit.alone and s.waited == 0), None)
        if alone is not None:
            chosen = [s for s in self.running + self.waiting if s.submit.request == alone.submit.request]
            self.waiting = [s for s in self.running + self.waiting if s not in chosen]
            self.running = chosen
        else:
            room = self.config.max_sequences - len(self.running)
            self.waiting.sort(key=lambda s: s.submit.priority)
            self.running += self.waiting[:room]
            self.waiting = self.waiting[room:]
        names = tuple(dict.fromkeys(s.submit.request for s in self.running))
        if names == self._begun:
            return None
        self._begun = names
        return Begin(self.steps + 1, names)

    def step(self) -> Step:
        """Each running sequence gets a chunk of prefill or one token."""
        self.steps += 1
        if self.steps == self.behaviour.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        budget, rows, prefill_rows = self.config.token_budget, [], 0
        for sequence in list(self.running):
            if self.config.fault_token >= 0 and self.config.fault_token in sequence.known:
                os.kill(os.getpid(), signal.SIGKILL)
            if sequence.cancelled:
                rows.append(self._row(sequence, finish="abort"))
            elif sequence.prefill_left > budget:
                sequence.prefill_left -= budget
                self.counts["prompt"] += budget
                budget, prefill_rows = 0, prefill_rows + 1
                continue
            else:
                self.counts["prompt"] += sequence.prefill_left
                budget -= sequence.prefill_left
                sequence.prefill_left = 0
                rows.append(self._decode(sequence))
            if rows[-1].finish:
                self.running.remove(sequence)
        for sequence in [s for s in self.waiting if s.cancelled]:
            self.waiting.remove(sequence)
            rows.append(self._row(sequence, finish="abort"))
        return Step(self.steps, tuple(rows), self._stats(prefill_rows, len(rows)))

    def _stats(self, prefill_rows: int, decode_rows: int) -> Stats:
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            waiting_tokens=sum(len(s.submit.prompt) for s in self.waiting),
            blocks_total=self.config.num_blocks or 4096,
            blocks_used=sum(s.position // 16 + 1 for s in self.running),
            steps=self.steps,
            prompt_tokens_computed=self.counts["prompt"],
            tokens_sampled=self.counts["sampled"],
            tokens_evicted=self.counts["evicted"],
            last_prefill_rows=prefill_rows,
            last_decode_rows=decode_rows,
            step_seconds=self.steps * 0.001,
            last_step_seconds=0.001,
            resident_bytes=self.resident_bytes,
        )

    def _decode(self, sequence: FakeSequence) -> Row:
        submit, params = sequence.submit, sequence.submit.params
        if params.max_tokens is not None and sequence.outputs >= params.max_tokens:
            return self._row(sequence, finish="length")
        token = self._next(sequence)
        if token == self.behaviour.eos and (sequence.outputs < params.min_tokens or params.ignore_eos):
            token = self.behaviour.low
        index = sequence.outputs
        sequence.known.append(token)
        sequence.known = sequence.known[-4096:]
        sequence.position += 1
        sequence.outputs += 1
        sequence.waited += 1
        self.counts["sampled"] += 1
        finish, stop = "", None
        if token in params.stop_token_ids or (token == self.behaviour.eos and not params.ignore_eos):
            finish, stop = "stop", token
        else:
            full = submit.retention.policy == "none" and sequence.position >= self.ready().context
            at_limit = params.max_tokens is not None and sequence.outputs >= params.max_tokens
            finish = "length" if full or at_limit else ""
        return self._row(sequence, index, (token,), finish, stop)

    def _next(self, sequence: FakeSequence) -> int:
        fixed = sequence.submit.prompt if self.behaviour.echo else self.behaviour.script
        if fixed:
            return fixed[sequence.outputs] if sequence.outputs < len(fixed) else self.behaviour.eos
        return self.decode(sequence.known, sequence.position, sequence.submit.params.seed, sequence.choice)

    def _row(
        self,
        sequence: FakeSequence,
        index: int | None = None,
        tokens: tuple[int, ...] = (),
        finish: str = "",
        stop: int | None = None,
    ) -> Row:
        submit, params = sequence.submit, sequence.submit.params
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if params.prompt_logprobs is not None and not sequence.prompt_sent and sequence.choice == 0:
            prompt_logprobs = tuple(self._logprob(token, params.prompt_logprobs) for token in submit.prompt[1:])
        sequence.prompt_sent = True
        sequence.sent_first = True
        retention = submit.retention
        evicted = max(0, sequence.position - retention.sink_tokens - retention.window)
        return Row(
            request=submit.request,
            attempt=submit.attempt,
            choice=sequence.choice,
            index=sequence.outputs if index is None else index,
            tokens=tokens,
            logprobs=() if params.logprobs is None else tuple(self._logprob(t, params.logprobs) for t in tokens),
            finish=finish,
            stop_token=stop,
            prompt_logprobs=prompt_logprobs,
            evicted=0 if retention.policy == "none" else evicted,
            blocks=(BlockView(0, 1, 1),) if submit.watch else (),
        )

    def _logprob(self, token: int, k: int) -> TokenLogprob:
        top = tuple(((token + place) % self.behaviour.vocabulary, -0.5 - place) for place in range(k))
        return TokenLogprob(token, -0.5, 0, top)
