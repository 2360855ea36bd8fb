"""An engine over a decoder that is no model: its cache keeps numbers whose meaning can be checked.

Each slot of the cache holds its position and, layer upon layer, a hash of everything a query there could see. So the
tokens that come out prove which keys each query saw, at which distances, through which block table: a stale block, a
lost key, a key too many or a replay that is too short all give other tokens than `Truth`, which has no cache at all.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch

from model.decoder.inputs import NO_WINDOW, DecoderInput
from model.engine.admission import Limits
from model.engine.block_pool import BlockPool
from model.engine.engine import Engine
from model.engine.residence import Residence
from model.engine.retention import max_blocks, segment_start, sinks_of, sliding
from model.engine.runner import Runner
from model.engine.sampler import Sampler, SampleRow, SamplerState
from model.engine.scheduler import Scheduler
from model.engine.stats import Counters
from model.protocol import Begin, Failed, Rejected, Retention, Row, SamplingParams, Step, Submit

VOCABULARY = 61
LAYER_WINDOWS = (0, 9, 0)
NONE = Retention()


def mix(x):
    """A 64-bit hash (splitmix64's last steps), for whole arrays."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def attend(position, keys, hashes, sinks, window, own):
    """One layer's hash at `position` from the keys' positions and their hashes one layer below."""
    narrowed = own == 0 or window < own
    sinks, window = (sinks, window) if narrowed else (0, own)
    seen = (keys <= position) & ((keys < sinks) | (keys > position - window))
    keys, hashes = keys[seen], hashes[seen]
    seen_from = np.where((keys < sinks), min(position, sinks + window - 1), position)
    with np.errstate(over="ignore"):
        return mix(mix(hashes + mix((seen_from - keys).astype(np.uint64))).sum(dtype=np.uint64)[None])[0]


def logits_of(value):
    """Logits [vocabulary] as a function of the last layer's hash."""
    return (mix(np.arange(VOCABULARY, dtype=np.uint64) + value) >> np.uint64(40)).astype(np.float32) / 2**21


class FakeStore:
    """Positions and hashes of each layer, slot by slot."""

    def __init__(self, num_blocks, block_size, layers):
        self.block_size = block_size
        self.positions = np.full(num_blocks * block_size, -1)
        self.hashes = np.zeros((layers + 1, num_blocks * block_size), np.uint64)
        self.num_bytes = self.hashes.nbytes

    def copy_block(self, source, target):
        part = slice(target * self.block_size, (target + 1) * self.block_size)
        taken = slice(source * self.block_size, (source + 1) * self.block_size)
        self.positions[part] = self.positions[taken]
        self.hashes[:, part] = self.hashes[:, taken]


class FakeDecoder:
    """Honours DecoderInput to the letter. `poison` is an id whose row's logits are not numbers."""

    def __init__(self, layer_windows=LAYER_WINDOWS, poison=-1):
        self.layer_windows = layer_windows
        self.poison = poison
        self.spec = None

    def run(self, inputs: DecoderInput, store: FakeStore):
        starts = inputs.query_start.tolist()
        last = np.zeros(len(inputs.ids), np.uint64)
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            sinks, window = int(inputs.sinks[row]), int(inputs.windows[row])
            slots, places = self.table(inputs, row, store.block_size)
            for token in range(begin, end):
                position, slot = int(inputs.positions[token]), int(inputs.slots[token])
                assert slots[places == position].tolist() == [slot], "a slot that the block table does not name"
                store.positions[slot] = position
                store.hashes[0, slot] = mix(np.uint64(int(inputs.ids[token])))
                for layer, own in enumerate(self.layer_windows):
                    wide = min(window, own or NO_WINDOW)
                    near = (places <= position) & ((places < sinks) | (places > position - wide))
                    assert (store.positions[slots[near]] == places[near]).all(), "a block holds another's keys"
                    store.hashes[layer + 1, slot] = attend(
                        position, places, store.hashes[layer, slots], sinks, window, own
                    )
                last[token] = store.hashes[-1, slot]
        rows = [logits_of(last[token]) for token in inputs.logit_rows.tolist()]
        for place, token in enumerate(inputs.logit_rows.tolist()):
            if int(inputs.ids[token]) == self.poison:
                rows[place][:] = np.nan
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCABULARY)

    @staticmethod
    def table(inputs, row, size):
        """Slots of a sequence's blocks, and the positions they stand for."""
        sink_blocks, base = int(inputs.sink_blocks[row]), int(inputs.recent_base[row])
        blocks = inputs.block_tables[row].numpy()
        entries = np.arange(len(blocks))
        logical = np.where(entries < sink_blocks, entries, base + entries - sink_blocks)
        within = np.arange(size)
        return (blocks[:, None] * size + within).ravel(), (logical[:, None] * size + within).ravel()


class FakeBackend:
    """Makes caches."""

    name = "fake"

    def __init__(self, layers):
        self.layers = layers

    def new_kv_store(self, spec, num_blocks, block_size):
        return FakeStore(num_blocks, block_size, self.layers)


class Truth:
    """A stream computed without any cache: all hashes of all positions, from the definition alone."""

    def __init__(self, retention=NONE, layer_windows=LAYER_WINDOWS):
        self.retention = retention
        self.layer_windows = layer_windows
        self.ids = []
        self._start_segment()

    def _start_segment(self):
        self.hashes = [[] for _ in range(len(self.layer_windows) + 1)]

    def _compute(self, token):
        slides = sliding(self.retention)
        sinks = sinks_of(self.retention) if slides else 0
        window = self.retention.window if slides else NO_WINDOW
        position = len(self.hashes[0])
        self.hashes[0].append(mix(np.uint64(token)))
        keys = np.arange(position + 1)
        for layer, own in enumerate(self.layer_windows):
            below = np.array(self.hashes[layer], np.uint64)
            self.hashes[layer + 1].append(attend(position, keys, below, sinks, window, own))

    def push(self, token):
        """One more token; returns the logits after it."""
        retention = self.retention
        if retention.policy == "restart" and len(self.hashes[0]) == retention.sink_tokens + retention.window:
            self._start_segment()
            first = segment_start(len(self.ids), retention.sink_tokens, retention.window)
            for earlier in self.ids[: retention.sink_tokens] + self.ids[first:]:
                self._compute(earlier)
        self.ids.append(token)
        self._compute(token)
        return logits_of(self.hashes[-1][-1])

    def stream(self, prompt, params: SamplingParams, choice=0, eos=()):
        """The output ids that a request must have."""
        sampler = Sampler(VOCABULARY)
        state = SamplerState.start(params, prompt, ())
        for token in prompt:
            logits = self.push(token)
        output = []
        while params.max_tokens is None or len(output) < params.max_tokens:
            banned = (*eos, *params.stop_token_ids) if len(output) < params.min_tokens else ()
            row = SampleRow(params, state, choice, len(output), banned)
            token = sampler.sample(torch.from_numpy(logits)[None], [row])[0].token
            output.append(token)
            state.append(token)
            if len(output) > params.min_tokens and (
                token in params.stop_token_ids or (token in eos and not params.ignore_eos)
            ):
                break
            logits = self.push(token)
        return output


@dataclass
class Told:
    """What a request's choice was told."""

    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    finish: str = ""
    stop_token: int | None = None


class Bench:
    """An engine over the fake decoder, its steps and everything it said. Checks what must hold after every step."""

    def __init__(
        self, num_blocks=64, block_size=4, token_budget=32, max_sequences=8, layer_windows=LAYER_WINDOWS, **more
    ):
        decoder = more.pop("decoder", None) or FakeDecoder(layer_windows)
        self.counters = Counters()
        self.pool = BlockPool(num_blocks)
        self.residence = Residence(self.pool, block_size, layer_windows, self.counters, more.pop("prefix_cache", True))
        self.scheduler = Scheduler(self.residence, self.counters, token_budget, max_sequences)
        self.budget = token_budget
        settings = {
            "vocabulary": VOCABULARY,
            "context": 512,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_waiting": 100,
            "max_waiting_tokens": 100_000,
            "max_stream_tokens": 100_000,
            "policies": ("none", "sinks", "window", "restart"),
            "refusals": {},
        }
        self.eos = more.pop("eos", ())
        self.limits = Limits(**(settings | more))
        runner = Runner(
            decoder,
            FakeBackend(len(layer_windows)),
            Sampler(VOCABULARY),
            num_blocks,
            block_size,
            token_budget + max_sequences,
            max_sequences,
        )
        self.engine = Engine(runner, self.residence, self.scheduler, self.counters, self.limits, self.eos)
        self.told: dict[tuple[str, int], Told] = defaultdict(Told)
        self.words: list = []
        self.begins: list[Begin] = []
        self.open: set[tuple[str, int]] = set()

    def submit(self, request, prompt, attempt=1, **fields):
        fields.setdefault("params", SamplingParams(temperature=0, max_tokens=8))
        submit = Submit(request, attempt, tuple(prompt), **fields)
        answer = self.engine.submit(submit)
        if isinstance(answer, Rejected):
            self.words.append(answer)
        else:
            finished = {resume.choice for resume in submit.resume if resume.finished}
            self.open |= {(request, choice) for choice in range(submit.n) if choice not in finished}
        return answer

    def step(self):
        for message in self.engine.step(self.begins.append):
            if isinstance(message, Step):
                for row in message.rows:
                    self._hear(row)
            else:
                assert isinstance(message, Failed | Rejected)
                ended = {key for key in self.open if key[0] == message.request}
                assert ended, f"a last word for {message.request}, which is not open"
                self.open -= ended
                self.words.append(message)
        self.scheduler.check()
        for sequence in self.scheduler.running:
            self._bounded(sequence)

    def _hear(self, row):
        key = (row.request, row.choice)
        assert key in self.open, f"{key} was told something after its last word"
        told = self.told[key]
        assert row.index == len(told.tokens), f"{key}: a token is missing or repeated"
        told.tokens += row.tokens
        told.logprobs += row.logprobs
        told.prompt_logprobs += row.prompt_logprobs
        told.rows.append(row)
        if row.finish:
            told.finish, told.stop_token = row.finish, row.stop_token
            self.open.remove(key)

    def _bounded(self, sequence):
        retention = sequence.group.submit.retention
        if retention.policy == "none":
            return
        chunk = 1 if sequence.num_output and sequence.remaining == 1 else self.budget
        assert len(sequence.blocks) <= max_blocks(retention, self.residence.block_size, chunk)

    def run(self, most=5000):
        """Step until nothing is left to do; afterwards nothing is held and every request had its last words."""
        while self.engine.has_work:
            self.step()
            most -= 1
            assert most, "the engine does not come to an end"
        assert not self.open, f"no last word for {self.open}"
        assert self.pool.num_used == 0
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
        return self

    def tokens(self, request, choice=0):
        return self.told[request, choice].tokens


def prompt_of(length, seed=0):
    """A reproducible prompt."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
