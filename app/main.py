"""The only place where the front end is put together, and the life of the server process.

`create_app` wires routes, gate and service around some pool of workers; `serve` runs it with real workers until
a signal, drains, and returns the exit code. Every expected failure is one line on standard error.
"""

import asyncio
import atexit
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app import banner, logs
from app.api import chat, completions, documentation, errors, health, live, models, playground, tokens
from app.api.door import Limits as ApiLimits
from app.api.door import check_defaults
from app.connections import ConnectionLimits, LimitedProtocol, limited
from app.gate import Gate, Limits
from app.generation import Admission, Broken, Pool, Refused, Service, ServiceObserver
from app.metrics import Metrics
from app.process import WORKER, Launched
from app.security import Keys, UnsafeBind, check_bind
from app.settings import Settings
from app.supervisor import StartFailed, Supervisor
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer, load_tokenizer
from model.config import EngineConfig

log = logging.getLogger("everstream.main")

KEEP_ALIVE_SECONDS = 75
LAST_WORDS_SECONDS = 3
SEND_BUFFER_BYTES = 128 << 10
_PORT_FAULTS = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)
GARBAGE = (1_000, 5, 2)  # a full round after some 18,000 new objects: cycles of ended requests stay below a few MB


def create_app(
    settings: Settings,
    pool: Pool,
    tokenizer: Tokenizer,
    metrics: Metrics,
    observer: ServiceObserver | None = None,
    keys: Keys | None = None,
    model: str = "",
) -> FastAPI:
    """The front end around a pool of workers. `observer` hears what `metrics` would hear, where it is given."""
    admission = Admission(
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        queue_timeout=settings.queue_timeout,
        request_timeout=settings.request_timeout,
        silence=settings.silence,
        stream_buffer=settings.stream_buffer,
        resume=settings.resume,
        log_prompts=settings.log_prompts,
    )
    service = Service(pool, tokenizer, admission, observer or metrics, settings.served_name or model)
    metrics.watch(lambda: service.num_open, lambda: service.num_waiting, lambda: pool.num_ready)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        pulse = asyncio.create_task(service.keep_alive(), name="keep-alive")
        yield
        pulse.cancel()
        await app.state.chat_template.close()

    app = FastAPI(title="Everstream", lifespan=lifespan, redirect_slashes=False)
    app.state.settings = settings
    app.state.service = service
    app.state.metrics = metrics
    app.state.live = metrics.live
    app.state.ticker = live.Ticker(app.state)
    app.state.limits = ApiLimits(settings.default_retention, settings.max_stream_tokens)
    errors.install(app, (Refused, Broken))
    app.state.chat_template = ChatTemplate(tokenizer)
    for route in (completions, chat, models, tokens, health, live, playground):
        app.include_router(route.router)
    keys = keys or Keys(settings.api_keys, settings.api_keys_file)
    app.state.asks_key = keys.required
    limits = _gate_limits(settings)
    documentation.install(app, limits.guards if keys.required else None)
    app.add_middleware(Gate, keys=keys, limits=limits, counter=metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's clients send x-stainless-…, tracing sends traceparent
            allow_private_network="*" not in settings.cors_origins,  # pages of the Internet, where they are named
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _gate_limits(settings: Settings) -> Limits:
    return Limits(
        max_body_bytes=int(settings.max_body_bytes),
        total_body_bytes=16 * int(settings.max_body_bytes),
        body_timeout=settings.body_timeout,
        protect_health=settings.protect_health,
        protect_metrics=settings.protect_metrics,
    )


def serve(
    settings: Settings,
    configs: Sequence[EngineConfig],
    launched: Sequence[Launched],
    revision: str = "",
    command: Sequence[str] = WORKER,
) -> int:
    """Run the server until a signal ends it; returns the exit code. The workers load meanwhile.

    `command` starts a worker in the place of one that died.
    """
    logs.configure(settings.log_level)
    try:
        keys = Keys(settings.api_keys, settings.api_keys_file)
        check_bind(settings.host, keys, settings.insecure)
        listener = listen(settings.host, settings.port)
        _raise_descriptor_limit()
        metrics = Metrics()
        tokenizer = load_tokenizer(configs[0].model)
        supervisor = Supervisor(configs, metrics, launched, command)
        observer = _observer(settings, metrics, configs[0].name)
        app = create_app(settings, supervisor, tokenizer, metrics, observer, keys, configs[0].name)
        return uvloop.run(run_until_signal(settings, supervisor, app, listener, revision))
    except (UnsafeBind, StartFailed, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for process in launched:
            process.kill()
            process.close()


def _observer(settings: Settings, metrics: Metrics, model: str) -> ServiceObserver:
    """Who hears of requests: the metrics, and the traces where they are asked for."""
    if not settings.otlp_endpoint:
        return metrics
    try:
        from app.tracing import Tracing
    except ImportError as error:
        text = f"--otlp-endpoint needs a package that is not installed ({error.name}): pip install 'everstream[otel]'"
        raise ValueError(text) from error
    tracing = Tracing(metrics, model, settings.otlp_endpoint)
    atexit.register(tracing.close)
    return tracing


async def run_until_signal(
    settings: Settings, supervisor: Supervisor, app: FastAPI, listener: socket.socket, revision: str = ""
) -> int:
    """Serve on the listening socket until a signal comes, then drain. Raises StartFailed when no worker comes up.

    Raises ValueError where the settings ask for what the model cannot do.
    """
    limits = ConnectionLimits(
        settings.max_connections, int(settings.max_header_bytes), settings.header_timeout, settings.write_timeout
    )
    config = uvicorn.Config(
        app,
        http=limited(limits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS + 2,
    )
    server = _Server(config)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop, supervisor)
    serving = asyncio.create_task(server.serve([listener]), name="http")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    starting = asyncio.create_task(supervisor.start(), name="start")
    try:
        await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _check_defaults(settings, supervisor)
            _show(settings, supervisor, revision, listener, app.state.asks_key)
            gc.collect()
            gc.freeze()  # what is there now stays: collections during streams need not walk through it
            gc.set_threshold(*GARBAGE)
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            log.info("draining", extra={"streams": app.state.service.num_open, "grace": settings.grace})
            await app.state.service.drain(settings.grace)
    finally:
        starting.cancel()
        stopping.cancel()
        # Both at once: who stops a container waits for a limited time, and most of it is the grace.
        await asyncio.gather(_end(server, serving), supervisor.stop())
    return 0


def _check_defaults(settings: Settings, supervisor: Supervisor) -> None:
    for _, ready, _ in supervisor.workers:
        if ready is not None:
            check_defaults(ready, settings.default_retention, settings.model_fields_set)


async def _end(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    """Let uvicorn end. Clients that do not take their last words, or are not done sending, are cut off before it would
    cancel their requests.
    """
    server.should_exit = True
    await asyncio.wait((serving,), timeout=LAST_WORDS_SECONDS)
    for connection in list(server.server_state.connections):
        if isinstance(connection, LimitedProtocol):
            connection.cut_off()
    await asyncio.wait((serving,), timeout=LAST_WORDS_SECONDS)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the drain is ours."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def] # uvicorn's own differs by version
        yield


def _on_signal(stop: asyncio.Event, supervisor: Supervisor) -> None:
    """The first signal drains; the second ends everything at once."""
    if stop.is_set():
        for pid in supervisor.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)
    stop.set()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with a sentence when the address cannot be had."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: what a slow reader may pile up in the kernel is bounded too.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, UnicodeError) as error:  # the latter where the name is none that an address could have
        if listener is not None:
            listener.close()
        of_the_port, why = False, str(error)
        if isinstance(error, OSError):
            of_the_port, why = error.errno in _PORT_FAULTS, error.strerror or why
        remedy = "choose another --port" if of_the_port else "choose a --host of this machine, 127.0.0.1 for instance"
        raise OSError(f"cannot listen on {host} port {port}: {why}; {remedy}") from error
    listener.setblocking(False)
    return listener


def _show(settings: Settings, supervisor: Supervisor, revision: str, listener: socket.socket, asks_key: bool) -> None:
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    ready = [ready for _, ready, _ in supervisor.workers if ready is not None]
    if not ready:  # the one that was up has died this very moment
        return
    with contextlib.suppress(OSError):  # nobody reads standard output, or its disk is full
        banner.print_banner(f"http://{host}:{port}", ready, revision, asks_key=asks_key)
        sys.stdout.flush()


def _raise_descriptor_limit() -> None:
    """Each connection takes a descriptor, and the usual soft limit of 1,024 is low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
