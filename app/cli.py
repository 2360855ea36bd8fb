"""The command line: serve, pull, chat, bench, inspect. Parses flags, builds Settings, hands over.

Knows commands and exit codes; does no work itself. What needs torch runs as a process of its own. Every
expected failure is one sentence on standard error and an exit code that is not 0.
"""

import contextlib
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import ByteSize
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from app import catalog, process, settings
from app.catalog import CatalogError, Source
from app.settings import DEFAULT_MODEL, Settings, SettingsError

EPILOG = (
    "Every flag of serve can also be set as an environment variable: --cache-bytes is EVERSTREAM_CACHE_BYTES. "
    "API keys come from EVERSTREAM_API_KEYS or --api-keys-file."
)
cli = typer.Typer(
    help="Everstream serves language models over an OpenAI-style API, as streams that may run for ever.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def run(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        outcome = cli(arguments, standalone_mode=True)
    except (CatalogError, SettingsError) as error:
        return _fail(str(error))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return outcome if isinstance(outcome, int) else 0


def _fail(sentence: str) -> int:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(sentence)}", highlight=False)
    return 2


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _typer_type(annotation: Any) -> Any:
    """The type Typer parses for a setting: choices stay choices, paths paths, all else is text or a number."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is Literal or annotation in (int, float, bool, str):
        return annotation
    return Path if annotation is Path else str


def _default(field: Any) -> str:
    """How --help shows the default of a setting; empty where it has none worth showing."""
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, ByteSize):
        value = value.human_readable()
    elif isinstance(value, Path) and value.is_relative_to(Path.home()):
        value = f"~/{value.relative_to(Path.home())}"
    elif isinstance(value, bool):
        value = "on" if value else "off"
    return rf" [dim]\[default: {value}][/]"


def takes_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that takes **flags one option for each setting that may be a flag, grouped and explained."""
    parameters = []
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        if not isinstance(extra, dict) or not extra["flag"]:
            continue
        kind = _typer_type(field.annotation)
        flag = f"--{name.replace('_', '-')}"
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if kind is bool and field.default is True else flag,
            help=f"{field.description}{_default(field)}",
            rich_help_panel=str(extra["group"]),
        )
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _stop(number: int, _frame: FrameType | None) -> None:
    """A signal during a pull ends it with everything tidied up, and without a traceback."""
    raise SystemExit(128 + number)


def obtain(model: str, cache: Path, endpoint: str = "", *, refresh: bool = False) -> Source:
    """The model's files, with a progress bar on standard error while they are pulled."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            tasks: dict[str, TaskID] = {}
            said: set[str] = set()

            def progress(what: str, done: int, total: int) -> None:
                if what not in said and not console.is_terminal:
                    console.print(f"{model}: {what} …", highlight=False)
                said.add(what)
                if what not in tasks:
                    tasks[what] = bars.add_task(f"{model}: {what}", total=total or None)
                bars.update(tasks[what], completed=done)

            return catalog.resolve(model, cache, endpoint=endpoint, refresh=refresh, progress=progress)
    finally:
        signal.signal(signal.SIGTERM, before)


@cli.command()
@takes_settings
def serve(**flags: Any) -> None:
    """Serve a model: an OpenAI-style API, metrics, and a page to look at, on one port.

    Without flags: the default model (pulled once, 93 MB) on http://127.0.0.1:8000. Ctrl-C ends it.
    """
    chosen = settings.load(**flags)
    source = obtain(chosen.model, chosen.model_cache, chosen.hub_endpoint)
    configs = chosen.engine_configs(source.path, source.name)
    with _signals_end_workers() as launched:
        launched.extend(process.launch_all(configs))
        from app import main

        raise typer.Exit(main.serve(chosen, configs, launched, source.revision))


@contextlib.contextmanager
def _signals_end_workers() -> Iterator[list[process.Launched]]:
    """Until the server takes signals in hand, one ends the workers of the list that is given, and this process.

    Not by an exception: the imports meanwhile have callbacks in which it would be printed and lost. A signal before
    the list is filled leaves workers alone; they end by themselves when they find nobody at their socket.
    """
    launched: list[process.Launched] = []

    def end_workers() -> None:
        for one in launched:
            one.kill()
            one.close()

    def leave(number: int, _frame: FrameType | None) -> None:
        end_workers()
        os._exit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield launched
    finally:
        end_workers()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@cli.command()
def pull(
    model: Annotated[str, typer.Argument(help="catalog name or hub id")] = DEFAULT_MODEL,
    model_cache: Annotated[Path | None, typer.Option(help="folder that pulled models are kept in")] = None,
    hub_endpoint: Annotated[str | None, typer.Option(help="address of another model hub")] = None,
) -> None:
    """Bring a model into the cache, or check the one that is there against its sha256."""
    chosen = settings.load(model=model, model_cache=model_cache, hub_endpoint=hub_endpoint)
    source = obtain(chosen.model, chosen.model_cache, chosen.hub_endpoint, refresh=True)
    console = Console(soft_wrap=True)
    console.print(f"[bold]{_plain(source.name)}[/] at revision {_plain(source.revision)}", highlight=False)
    console.print(_plain(str(source.path)), highlight=False)


@cli.command()
def models() -> None:
    """List the models that the catalog knows."""
    console = Console(soft_wrap=True)
    for entry in catalog.ENTRIES:
        console.print(
            f"[bold]{entry.name}[/]  {entry.about}; {entry.size / 1e6:.0f} MB, {entry.licence}", highlight=False
        )


@cli.command(name="inspect")
def inspect_model(
    model: Annotated[str, typer.Argument(help="anything that serve takes as --model")] = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Print what a model is made of, without loading its weights: layers, bytes, cache per token, policies."""
    chosen = settings.load(model=model)
    source = obtain(chosen.model, chosen.model_cache, chosen.hub_endpoint)
    raise typer.Exit(_process("model.checkpoint.inspect", str(source.path), *(["--json"] if as_json else [])))


@cli.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Put closed-loop load on a running server and print what it gave; `bench --help` lists its flags."""
    raise typer.Exit(_process("bench.serve", *context.args))


def _process(module: str, *arguments: str) -> int:
    """Run a module of ours as a process of its own; returns its exit code, 130 after Ctrl-C.

    Ctrl-C reaches both processes, and Python would print a traceback in the other one, whatever it is importing: so
    that one is started deaf to it and ended from here. A signal in between is lost; it takes a few milliseconds.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])
    terminate = signal.signal(signal.SIGTERM, _stop)
    try:
        signal.signal(signal.SIGINT, interrupt)
        return process.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, terminate)
        process.terminate()
        process.wait()


@cli.command()
def chat(
    url: Annotated[str, typer.Option(help="address of the server")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="model to ask for; empty takes the server's first")] = "",
    system: Annotated[str, typer.Option(help="system message")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0.0, max=2.0)] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(help="longest answer; none by default", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="makes answers repeatable")] = None,
    api_key: Annotated[str, typer.Option(help="key of the server", envvar="EVERSTREAM_API_KEY")] = "",
    once: Annotated[str, typer.Option(help="ask this one thing and leave")] = "",
) -> None:
    """Talk to a running server in the terminal, the answer streaming as it comes."""
    from app import chat as terminal

    wishes = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    session = terminal.Session(terminal.Server(url, api_key), model, system, wishes)
    raise typer.Exit(terminal.talk(session, once))
