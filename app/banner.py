"""What a person sees when the server is up: address, model, precision, cache, and a line to try.

Knows how the lines look; takes every fact from Settings and the workers' Ready messages.
"""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from model.protocol import Ready


def bytes_in_words(count: int) -> str:
    """A byte count as people write it: 92 MiB, 1.4 GiB."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}" if size < 10 and units[0] != "B" else f"{size:.0f} {units[0]}"


def curl_line(address: str, model: str, asks_key: bool = False) -> str:
    """A command that streams an answer, to be pasted into a terminal; `asks_key`: with a place for the API key."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64, "stream": True}
    key = "-H 'Authorization: Bearer YOUR-KEY' " if asks_key else ""
    return f"curl -N {address}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def facts(workers: Sequence[Ready], revision: str = "") -> list[tuple[str, str]]:
    """The lines of the banner below the address, as (label, text)."""
    first = workers[0]
    cache_tokens = first.num_blocks * first.block_size
    kept = [policy for policy in first.policies if policy != "none"]
    lines = [
        ("model", f"{first.model}  ({first.family}, {bytes_in_words(first.weight_bytes)} of weights)"),
        ("runs on", f"{first.device}, {first.dtype}, kernels: {first.kernels}"),
        ("context", f"{first.context:,} tokens" + (f", endless with retention: {', '.join(kept)}" if kept else "")),
        (
            "KV cache",
            f"{bytes_in_words(first.cache_bytes)}, {first.num_blocks:,} blocks of {first.block_size} tokens "
            f"({cache_tokens:,} tokens)",
        ),
        ("ready in", f"{first.load_seconds:.1f} s" + (f", {len(workers)} workers" if len(workers) > 1 else "")),
    ]
    if revision and revision != "local":
        lines.insert(1, ("revision", revision))
    return lines


def print_banner(
    address: str,
    workers: Sequence[Ready],
    revision: str = "",
    console: Console | None = None,
    *,
    asks_key: bool = False,
) -> None:
    """Print the banner to standard output; plain lines where that is no terminal."""
    console = console or Console(soft_wrap=True)
    lines = [("address", address), *facts(workers, revision)]
    reachable = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    curl = curl_line(reachable, workers[0].model, asks_key)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for label, text in lines:
            table.add_row(Text(label, style="dim"), Text(text, style="bold cyan" if label == "address" else ""))
        console.print(Panel(table, title="everstream", title_align="left", border_style="cyan", expand=False))
    else:
        for label, text in lines:
            console.out(f"{label + ':':<10} {text}", highlight=False)
    console.out(f"\nTry it:\n{curl}\n", highlight=False)
