"""Plans as integers, without a decoder: order, budget, room, preemption."""

from model.engine.block_pool import BlockPool
from model.engine.residence import Residence
from model.engine.scheduler import PATIENCE, SCORING_CHUNK, Scheduler
from model.engine.sequence import Group, Sequence, TokenLog
from model.engine.stats import Counters
from model.protocol import Retention, SamplingParams, Submit

NONE = Retention()


class House:
    """A scheduler and the parts around it; `step` computes what was planned."""

    def __init__(self, num_blocks=64, token_budget=32, max_sequences=8):
        self.counters = Counters()
        self.pool = BlockPool(num_blocks)
        self.residence = Residence(self.pool, 4, (0, 0), self.counters)
        self.scheduler = Scheduler(self.residence, self.counters, token_budget, max_sequences)
        self.now = 0.0

    def add(self, name, length, *, retention=NONE, arrived=None, **params):
        ids = range(1000 * ord(name[0]), 1000 * ord(name[0]) + length)  # nobody shares a prefix
        submit = Submit(name, 1, tuple(ids), SamplingParams(**params), retention)
        group = Group(submit, self.now if arrived is None else arrived, num_open=1)
        sinks = retention.sink_tokens if retention.policy == "sinks" else 0
        one = Sequence(group, 0, TokenLog(ids), None, sinks=sinks, prompt_length=length)
        one.segment_start = sinks
        group.sequences.append(one)
        self.scheduler.open(group)
        return one

    def step(self):
        plan = self.scheduler.plan(self.now)
        for row in plan.rows:
            self.residence.advance(row.sequence, row.count)
            if row.sample:
                row.sequence.log.append(99)
                row.sequence.num_output += 1
        self.scheduler.check()
        return [(row.sequence.group.submit.request, row.start, row.count, row.sample) for row in plan.rows]


def test_one_ragged_plan_decode_rows_first():
    house = House()
    house.add("a", 10)
    assert house.step() == [("a", 0, 10, True)]
    house.add("b", 50)
    assert house.step() == [("a", 10, 1, True), ("b", 0, 31, False)]
    assert house.step() == [("a", 11, 1, True), ("b", 31, 19, True)]
    assert house.step() == [("a", 12, 1, True), ("b", 50, 1, True)]


def test_nothing_waits_nothing_is_planned():
    assert House().step() == []


def test_the_budget_is_shared_between_prompts():
    house = House(token_budget=32, num_blocks=128)
    for name in "abc":
        house.add(name, 100)
    assert house.step() == [("a", 0, 16, False), ("b", 0, 8, False), ("c", 0, 8, False)]
    assert sum(count for _, _, count, _ in house.step()) <= 32


def test_never_more_run_than_the_budget_has_tokens():
    house = House(token_budget=4, max_sequences=9)
    for number in range(9):
        house.add(str(number), 3)
    for _ in range(20):
        house.step()
    assert len(house.scheduler.running) == 4
    assert len(house.step()) == 4


def test_without_room_for_the_whole_prompt_it_waits():
    house = House(num_blocks=20, token_budget=64)
    house.add("a", 40)
    house.step()
    house.add("b", 50)
    house.add("c", 4)  # does not pass by
    assert [name for name, *_ in house.step()] == ["a"]
    house.scheduler.remove(house.scheduler.running[0])
    assert [name for name, *_ in house.step()] == ["b", "c"]


def test_the_last_come_is_preempted_and_takes_its_old_place():
    house = House(num_blocks=8, token_budget=64)
    for arrived, name in enumerate("ab"):
        house.add(name, 13, arrived=float(arrived))
    house.step()
    for _ in range(3):
        house.step()
    assert {name for name, *_ in house.step()} == {"a"}
    assert house.counters.preemptions == 1
    assert house.scheduler.num_waiting == 1
    assert house.scheduler.num_waiting_tokens == 17
    house.scheduler.remove(house.scheduler.running[0])
    assert house.step()[0][0] == "b"
    assert house.counters.replayed_tokens > 0


def test_streams_without_evictions_are_preempted_first():
    house = House(num_blocks=10, token_budget=64)
    house.add("plain", 9, arrived=0.0)
    house.add("endless", 40, arrived=1.0, retention=Retention("sinks", 2, 8))
    for _ in range(20):
        house.step()
        if house.counters.preemptions:
            break
    assert [one.group.submit.request for one in house.scheduler.waiting()] == ["plain"]


def test_a_short_pool_cuts_a_chunk_before_it_preempts():
    house = House(num_blocks=5, token_budget=64)
    house.add("a", 60, retention=Retention("sinks", 2, 8))
    rows = house.step()
    assert rows == [("a", 0, 4, False)]  # the sink block, then the replay's own place
    assert house.step()[0][2] == 16  # four blocks are left
    assert house.counters.preemptions == 0


def test_prompts_to_be_scored_come_in_small_chunks():
    house = House(token_budget=512, num_blocks=200)
    house.add("a", 300, prompt_logprobs=1)
    house.scheduler.plan(0.0)
    assert house.scheduler.running[0].blocks.itemsize == 4
    assert len(house.scheduler.running[0].blocks) == SCORING_CHUNK // 4


def test_endless_streams_give_way_only_to_what_waited_long():
    house = House(num_blocks=10, token_budget=64)
    house.add("endless", 60, retention=Retention("sinks", 2, 8))
    for _ in range(9):
        house.step()
    house.add("big", 30, arrived=house.now)
    assert [name for name, *_ in house.step()] == ["endless"]
    house.now = PATIENCE + 1.0
    assert "big" in [name for name, *_ in house.step()]
    assert house.counters.preemptions == 1


def test_removing_what_waits_keeps_the_count_of_tokens():
    house = House(max_sequences=1)
    house.add("a", 4)
    house.step()
    waiting = [house.add(str(number), 5 + number) for number in range(6)]
    house.scheduler.remove(waiting[2])
    house.scheduler.remove(waiting[5])
    assert house.scheduler.num_waiting_tokens == 5 + 6 + 8 + 9
    house.scheduler.check()


def test_deadlines_come_in_order_and_only_for_what_has_not_begun():
    house = House(max_sequences=1)
    groups = []
    for number, limit in enumerate((5.0, 1.0, 3.0)):
        submit = Submit(str(number), 1, (1, 2), SamplingParams(), queue_timeout=limit)
        group = Group(submit, 0.0, num_open=1)
        group.sequences.append(Sequence(group, 0, TokenLog((1, 2)), None, prompt_length=2))
        house.scheduler.open(group)
        groups.append(group)
    assert house.scheduler.expired(0.5) == []
    groups[2].started = 0.1
    assert house.scheduler.expired(4.0) == [groups[1]]
    assert house.scheduler.expired(6.0) == [groups[0]]
