// One pool of threads for the whole worker: the decoder's tape and the sampler share it.
// Knows threads, barriers and counters; knows nothing of models. The calling thread is one of the pool.
#pragma once
#include <cstdint>

// Work on items [begin, end) on pool thread `thread`; ranges are handed out dynamically, in order.
using RangeTask = void (*)(void* argument, int64_t begin, int64_t end, int thread);
// Run once on every thread of the pool, `thread` 0 being the caller.
using TeamTask = void (*)(void* argument, int thread, int threads);

extern "C" {
// Start (or restart with another size) the pool; `threads` counts the caller. Not to be called from a task.
void es_pool_start(int threads);
int es_pool_threads(void);
// Calls from several threads are served one after another; a call from inside a task is not allowed.
void es_parallel_for(int64_t items, int64_t grain, RangeTask task, void* argument);
void es_team_run(TeamTask task, void* argument);
// Inside a team task: wait until every thread of the pool has come here.
void es_team_barrier(void);
}
