// The pool: workers spin for a moment between jobs and barriers, then sleep on a futex, so that a step is
// started in a microsecond while streams run and an idle server costs nothing.
#include "pool.h"

#include <immintrin.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kSpins = 1500;  // about 30 microseconds: longer than a gap between ops, shorter than between steps

struct Pool {
    std::vector<std::thread> workers;
    int threads = 1;
    std::atomic<uint32_t> epoch{0};    // a new job
    std::atomic<uint32_t> arrived{0};  // of the barrier under way
    std::atomic<uint32_t> phase{0};    // of the barrier
    std::atomic<bool> stopping{false};
    TeamTask task = nullptr;
    void* argument = nullptr;
    std::mutex one_job;

    ~Pool() { stop(); }
    void stop();
    void start(int count);
    void work(int thread, uint32_t seen);
    void barrier();
};

// Returns once `value` differs from `seen`.
void wait_while(std::atomic<uint32_t>& value, uint32_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (value.load(std::memory_order_acquire) != seen) return;
        _mm_pause();
    }
    while (value.load(std::memory_order_acquire) == seen) value.wait(seen, std::memory_order_acquire);
}

void Pool::work(int thread, uint32_t seen) {
    while (true) {
        wait_while(epoch, seen);
        seen = epoch.load(std::memory_order_acquire);
        if (stopping.load(std::memory_order_acquire)) return;
        task(argument, thread, threads);
        barrier();
    }
}

void Pool::barrier() {
    if (threads == 1) return;
    uint32_t now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads)) {
        arrived.store(0, std::memory_order_relaxed);
        phase.store(now + 1, std::memory_order_release);
        phase.notify_all();
    } else {
        wait_while(phase, now);
    }
}

void Pool::stop() {
    stopping = true;
    epoch.fetch_add(1, std::memory_order_acq_rel);
    epoch.notify_all();
    for (auto& worker : workers) worker.join();
    workers.clear();
    stopping = false;
}

void Pool::start(int count) {
    std::lock_guard<std::mutex> lock(one_job);
    if (count < 1) count = 1;
    if (count == threads && static_cast<int>(workers.size()) == count - 1) return;
    stop();
    threads = count;
    uint32_t seen = epoch.load();
    for (int thread = 1; thread < count; ++thread) {
        workers.emplace_back([this, thread, seen] { work(thread, seen); });
    }
}

Pool& pool() {
    static Pool the_pool;
    return the_pool;
}

struct Range {
    std::atomic<int64_t> next{0};
    int64_t items, grain;
    RangeTask task;
    void* argument;
};

void run_range(void* argument, int thread, int) {
    auto& range = *static_cast<Range*>(argument);
    while (true) {
        int64_t begin = range.next.fetch_add(range.grain, std::memory_order_relaxed);
        if (begin >= range.items) return;
        int64_t end = begin + range.grain < range.items ? begin + range.grain : range.items;
        range.task(range.argument, begin, end, thread);
    }
}

}  // namespace

extern "C" {

void es_pool_start(int threads) { pool().start(threads); }

int es_pool_threads(void) { return pool().threads; }

void es_team_run(TeamTask task, void* argument) {
    Pool& team = pool();
    std::lock_guard<std::mutex> lock(team.one_job);
    team.task = task;
    team.argument = argument;
    team.epoch.fetch_add(1, std::memory_order_acq_rel);
    team.epoch.notify_all();
    task(argument, 0, team.threads);
    team.barrier();
}

void es_team_barrier(void) { pool().barrier(); }

void es_parallel_for(int64_t items, int64_t grain, RangeTask task, void* argument) {
    if (items <= 0) return;
    if (grain < 1) grain = 1;
    if (items <= grain) {
        task(argument, 0, items, 0);
        return;
    }
    Range range;
    range.items = items;
    range.grain = grain;
    range.task = task;
    range.argument = argument;
    es_team_run(run_range, &range);
}

}  // extern "C"
