"""Which worker gets a request: the one that has computed the same beginning before, unless it is too busy.

Knows prompts as ids, salts and loads; no connection, no process. Remembers hashes of prompt beginnings only.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

CHUNK = 64
MAX_CHUNKS = 32
SLACK = 4


class PrefixRouter:
    """Remembers which worker saw which beginning, the `capacity` latest of them."""

    def __init__(self, capacity: int = 16384) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[int, int] = OrderedDict()

    def choose(self, prompt: Sequence[int], salt: str, loads: Mapping[int, int]) -> int:
        """A key of `loads` (worker number to open requests), which must not be empty.

        The worker of the longest known beginning wins while its load is at most twice the least one plus SLACK.
        """
        least = min(loads, key=lambda slot: (loads[slot], slot))
        if len(loads) == 1:
            return least
        chain = self._chain(prompt, salt)
        chosen = least
        for key in reversed(chain):
            slot = self._seen.get(key)
            if slot in loads and slot is not None:
                if loads[slot] <= 2 * loads[least] + SLACK:
                    chosen = slot
                break
        for key in chain:
            self._seen[key] = chosen
            self._seen.move_to_end(key)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return chosen

    def _chain(self, prompt: Sequence[int], salt: str) -> list[int]:
        keys: list[int] = []
        key = hash(salt)
        for start in range(0, min(len(prompt), CHUNK * MAX_CHUNKS) - CHUNK + 1, CHUNK):
            key = hash((key, tuple(prompt[start : start + CHUNK])))
            keys.append(key)
        return keys
