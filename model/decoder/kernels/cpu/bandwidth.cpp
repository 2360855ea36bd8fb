// How fast the pool reads memory: the yardstick for a single stream, measured beside it. Knows nothing of models.
#include <immintrin.h>

#include <atomic>
#include <cstdint>

#include "pool.h"

namespace {

struct Reading {
    const uint8_t* from;
    std::atomic<int64_t> folded{0};  // so that the loads are not optimised away
};

void read_range(void* argument, int64_t begin, int64_t end, int) {
    auto& reading = *static_cast<Reading*>(argument);
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int64_t i = begin * 64; i < end * 64; i += 64) {
        a = _mm256_xor_si256(a, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(reading.from + i)));
        b = _mm256_xor_si256(b, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(reading.from + i + 32)));
    }
    reading.folded.fetch_xor(_mm256_extract_epi64(_mm256_xor_si256(a, b), 0), std::memory_order_relaxed);
}

}  // namespace

extern "C" int64_t es_read_memory(const uint8_t* from, int64_t bytes) {
    Reading reading{from, {}};
    es_parallel_for(bytes / 64, 4096, read_range, &reading);
    return reading.folded.load();
}
