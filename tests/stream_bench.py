"""A service over a pretend worker in the same process, and how the tests of streams ask it.

Imports no torch and starts no process.
"""

import asyncio
from contextlib import asynccontextmanager

from app.generation import Admission, Generation, Service
from app.metrics import Metrics
from app.worker_client import Lost
from model.protocol import Retention, SamplingParams
from tests.fake_worker import FakePool


class Bench:
    """A service over a FakePool, and its metrics."""

    def __init__(self, tokenizer, admission=None, **behaviour):
        self.pool = FakePool(**behaviour)
        self.metrics = Metrics()
        self.service = Service(self.pool, tokenizer, admission or Admission(), self.metrics, "fake")

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"everstream_{name}", labels)

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.pool.run())
        beat = asyncio.create_task(self.service.keep_alive())
        try:
            yield self
        finally:
            task.cancel()
            beat.cancel()

    def lose(self, request, in_step=True, final=False):
        """The worker dies as far as this request is concerned."""
        inbox = self.pool.inboxes.pop(request)
        self.pool.engine.running = [s for s in self.pool.engine.running if s.submit.request != request]
        self.pool.engine.waiting = [s for s in self.pool.engine.waiting if s.submit.request != request]
        inbox.client = None
        inbox.put(Lost(in_step, final))


def ask(name="r", prompt=(1, 2, 3), **more):
    params = {key: more.pop(key) for key in list(more) if key in SamplingParams.__struct_fields__}
    retention = more.pop("retention", Retention())
    return Generation(name, tuple(prompt), SamplingParams(**params), retention, **more)


async def finish(stream, meanwhile=lambda: None):
    """Read a stream to its end."""
    async for _ in stream:
        meanwhile()


async def collect(service, generation):
    async with service.open(generation) as stream:
        return [delta async for delta in stream], stream.usage


async def text_of(service, generation):
    deltas, usage = await collect(service, generation)
    return "".join(d.text for d in deltas), deltas[-1].finish_reason, usage
