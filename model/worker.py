"""The worker process: checkpoint → decoder → engine, then a loop of inbox, step, send; put together only here.

Knows the socket and the protocol; nothing of text or HTTP. Started as `python -m model.worker CONFIG` with an
EngineConfig as JSON. Ends with code 3 and one sentence on stderr when the model cannot be served, and by itself
when the front end is gone.
"""

import collections
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback

import msgspec
from msgspec import structs

from model import checkpoint
from model.config import EngineConfig
from model.decoder import policies
from model.decoder.kernels import select
from model.decoder.kernels.cpu.structs import QUANTISED_KINDS
from model.engine.admission import Limits
from model.engine.block_pool import BlockPool
from model.engine.engine import Engine
from model.engine.residence import Residence
from model.engine.runner import Runner, check_device, fit_blocks
from model.engine.sampler import Sampler
from model.engine.scheduler import Scheduler
from model.engine.stats import Counters
from model.protocol import VERSION, Beat, Begin, Cancel, Down, Ready, Submit
from model.wire import BlockingConnection, ConnectionClosed

BEAT_SECONDS = 0.5
REFUSED = 3  # exit code: the model cannot be served; stderr says why
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def build(config: EngineConfig, context_limit: int = 0) -> tuple[Engine, Ready]:
    """Load the model and put the engine together. Raises CheckpointError, ValueError or OSError with a sentence.

    `context_limit` lets a benchmark run past the trained context, to see what happens there.
    """
    started = time.monotonic()
    opened = checkpoint.open_checkpoint(config.model, config.context)
    spec = opened.spec
    if config.context > spec.context:
        raise ValueError(
            f"the context of {config.context} tokens is beyond the {spec.context} this model was trained for: "
            "leave --context out, and stream longer texts with a retention policy"
        )
    check_device(config.device)
    backend = select.choose(config.device, config.dtype, config.kernels, config.threads, spec=spec)
    loaded = checkpoint.load(opened, backend=backend)
    sizes = (config.block_size, config.cache_bytes, config.num_blocks)
    num_blocks = fit_blocks(backend, loaded.decoder, *sizes, config.device)
    limits = Limits(
        vocabulary=spec.vocabulary,
        context=max(config.context or spec.context, context_limit),
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        max_stream_tokens=config.max_stream_tokens,
        policies=policies.policies(spec),
        refusals=policies.policy_refusals(spec),
    )
    layer_windows = tuple(layer.attention.window or 0 for layer in spec.layers)
    counters = Counters()
    residence = Residence(BlockPool(num_blocks), config.block_size, layer_windows, counters, config.prefix_cache)
    scheduler = Scheduler(residence, counters, config.token_budget, config.max_sequences)
    sampler = Sampler(spec.vocabulary, config.threads)
    most_tokens, most_rows = config.token_budget + config.max_sequences, config.max_sequences
    runner = Runner(loaded.decoder, backend, sampler, num_blocks, config.block_size, most_tokens, most_rows)
    engine = Engine(runner, residence, scheduler, counters, limits, loaded.eos_token_ids, config.fault_token)
    ready = describe(config, loaded, limits, layer_windows, backend.name, runner.store.num_bytes, started)
    kinds = collections.Counter[str]()
    for info in opened.table.values():
        kinds[info.kind] += info.num_bytes
    return engine, structs.replace(ready, dtype=arithmetic(backend.name, max(kinds, key=kinds.__getitem__)))


def arithmetic(kernels: str, kind: str) -> str:
    """What is computed in, for a person: by the backend's name, and the kind of tensor most of the file's bytes are."""
    if not kernels.startswith("cpu "):
        return kernels.removeprefix("torch ")
    if kernels.endswith("float32"):
        return "float32"
    if kind in QUANTISED_KINDS:
        return f"{kind} weights x int8 rows, float16 cache"
    return f"{'float16' if kind == 'F16' else 'bfloat16'} weights, float16 cache"


def describe(
    config: EngineConfig,
    loaded: checkpoint.Loaded,
    limits: Limits,
    layer_windows: tuple[int, ...],
    kernels: str,
    cache_bytes: int,
    started: float,
) -> Ready:
    """What the door needs to know of this worker."""
    context = config.context or loaded.spec.context
    return Ready(
        version=VERSION,
        pid=os.getpid(),
        model=config.name,
        family=loaded.spec.family,
        context=context,
        vocabulary=limits.vocabulary,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_sequences=config.max_sequences,
        token_budget=config.token_budget,
        dtype=config.dtype,
        device=config.device,
        kernels=kernels,
        policies=limits.policies,
        policy_refusals=limits.refusals,
        min_window=limits.block_size,
        max_window=context,
        weight_bytes=loaded.decoder.num_bytes,
        cache_bytes=cache_bytes,
        load_seconds=time.monotonic() - started,
        layer_windows=layer_windows,
    )


class Heart:
    """A thread that says every half second that the process lives, so that a hung worker is noticed.

    From the first moment on, also while the model loads; `engine` is set once there is one, and the beats say how old
    its step in flight is.
    """

    def __init__(self, connection: BlockingConnection) -> None:
        self.engine: Engine | None = None
        self._connection = connection
        self._recent: collections.deque[float] = collections.deque(maxlen=256)
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def note(self, seconds: float) -> None:
        """A step took so long."""
        self._recent.append(seconds)

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self._connection.send(self._beat())
            except ConnectionClosed:
                os._exit(0)  # nobody is left to work for, and the main thread may be deep in a step

    def _beat(self) -> Beat:
        if self.engine is None:
            return Beat(0, 0.0, 0.0)
        since = self.engine.in_flight_since
        age = time.monotonic() - since if since else 0.0
        recent = list(self._recent)
        median = statistics.median(recent) if recent else 0.0
        return Beat(self.engine.counters.steps, age, median)


def serve(engine: Engine, connection: BlockingConnection, heart: Heart) -> None:
    """Work until the front end closes the connection, or asks to drain and everything is said."""
    heart.engine = engine

    def begin(message: Begin) -> None:
        connection.send(message)

    while True:
        for message in connection.receive(0.0 if engine.has_work else None):
            take(engine, connection, message)
        if engine.has_work:
            started = time.monotonic()
            try:
                words = engine.step(begin)
            except Exception as error:  # a fault of ours ends these requests, not the service
                traceback.print_exc()
                words = engine.fail_all(f"the worker failed in a step ({type(error).__name__}); send the request again")
            for word in words:
                connection.send(word)
            heart.note(time.monotonic() - started)
            if not engine.has_work:
                engine.check()
        if engine.draining and not engine.has_work:
            return


def take(engine: Engine, connection: BlockingConnection, message: Down) -> None:
    """Act on one message of the front end."""
    if isinstance(message, Submit):
        connection.send(engine.submit(message))
    elif isinstance(message, Cancel):
        engine.cancel(message)
    else:
        engine.draining = True


def end_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it; where it cannot, the closed socket does."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


def fix_malloc() -> None:
    """Give each buffer above 4 MiB pages of its own, which go back to the system with it.

    glibc would raise that limit to 32 MiB by itself; then every step's logits (rows x vocabulary) come out of the heap,
    small things settle between them, and the worker grows by hundreds of megabytes. Elsewhere than on glibc: nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 4 << 20)
    mallopt(_M_TRIM_THRESHOLD, 16 << 20)


def main(arguments: list[str]) -> int:
    """Run a worker; returns its exit code."""
    end_with_parent()
    fix_malloc()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    config = msgspec.json.decode(arguments[0], type=EngineConfig)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(config.socket)
    connection = BlockingConnection(sock)
    heart = Heart(connection)
    heart.start()
    try:
        engine, ready = build(config)
    except (checkpoint.CheckpointError, ValueError, OSError, MemoryError) as error:
        print(error or "there is not enough memory for this model: choose a smaller cache", file=sys.stderr)
        return REFUSED
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not walk it again in the middle of a step
    gc.collect()  # its full rounds come by what is there beside the frozen: nothing now, so they come soon
    try:
        connection.send(ready)
        serve(engine, connection, heart)
    except ConnectionClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
