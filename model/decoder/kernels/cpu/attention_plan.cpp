// Cuts a step's attention into units of work, and moves heads: rotation, and keys and values into their slots.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "simd.h"

namespace es {
namespace {

constexpr int64_t kRows = 48;

// Splits a tile's keys over several units where there are too few tiles for the threads; the bits are the same.
void add_units(const Batch& batch, const Attention& a, bool apart, const Unit& whole, Plan& plan) {
    const View view = view_of(batch, a, whole.sequence);
    const int64_t first = batch.positions[whole.first], last = batch.positions[whole.first + whole.count - 1];
    const int64_t begin = sees_all(view, first) ? 0 : std::max(first - view.window + 1, view.sinks), end = last + 1;
    Unit unit = whole;
    unit.cost = static_cast<double>(whole.count) * static_cast<double>(end - begin + view.sinks + 64);
    // While a stream is replayed its first keys are not there: then some of the splits find nothing to do.
    const int64_t splits = end > begin ? (end - 1) / kSplit - begin / kSplit + 1 : 0;
    if (!apart || splits < 3) {
        unit.split = -1;
        plan.units.push_back(unit);
        return;
    }
    Unit merge = whole;
    merge.partial = plan.partials;
    merge.num_splits = splits + 1;
    plan.merges.push_back(merge);
    for (int64_t split = 0; split <= splits; ++split) {  // 0 is the sinks
        unit.split = split;
        unit.partial = plan.partials++;
        unit.cost = split == 0 ? static_cast<double>(view.sinks) : 256.0;
        plan.units.push_back(unit);
    }
}

}  // namespace

void plan_attention(const Batch& batch, const Attention& a, int threads, Plan& plan) {
    plan.units.clear();
    plan.merges.clear();
    plan.partials = 0;
    const int64_t step = std::max<int64_t>(1, kRows / (a.heads / a.kv_heads));
    int64_t tiles = 0;
    for (int64_t s = 0; s < batch.sequences; ++s) tiles += (batch.query_start[s + 1] - batch.query_start[s] + step - 1) / step;
    const bool apart = tiles * a.kv_heads < 4 * threads;
    for (int64_t s = 0; s < batch.sequences; ++s) {
        for (int64_t first = batch.query_start[s]; first < batch.query_start[s + 1]; first += step) {
            const int64_t count = std::min<int64_t>(step, batch.query_start[s + 1] - first);
            for (int32_t head = 0; head < a.kv_heads; ++head) {
                add_units(batch, a, apart, Unit{static_cast<int32_t>(s), head, first, count, -1, 0, 0, 0.0}, plan);
            }
        }
    }
    std::sort(plan.units.begin(), plan.units.end(), [](const Unit& x, const Unit& y) { return x.cost > y.cost; });
}

void rotate_head(const Rotation& rotation, int64_t t, bool at_sink, const float* x, int64_t head_dim, float* out) {
    const int64_t pairs = rotation.pairs;
    const float* cos = (at_sink ? rotation.sink_cos : rotation.cos) + t * pairs;
    const float* sin = (at_sink ? rotation.sink_sin : rotation.sin) + t * pairs;
    if (rotation.interleaved) {
        for (int64_t i = 0; i < pairs; ++i) {
            const float first = x[2 * i], second = x[2 * i + 1];
            out[2 * i] = first * cos[i] - second * sin[i];
            out[2 * i + 1] = second * cos[i] + first * sin[i];
        }
    } else {
        for (int64_t i = 0; i < pairs; ++i) {
            const float first = x[i], second = x[i + pairs];
            out[i] = first * cos[i] - second * sin[i];
            out[i + pairs] = second * cos[i] + first * sin[i];
        }
    }
    std::copy(x + 2 * pairs, x + head_dim, out + 2 * pairs);
}

namespace {

constexpr float kHalfTop = 65504.0f;  // a larger value would become an infinity

inline uint16_t to_half(float x) { return float_to_half(x > kHalfTop ? kHalfTop : x < -kHalfTop ? -kHalfTop : x); }

// One head's key and value to its place in a block; `hd` is the padded head.
template <class T, class F>
void put_head(T* head, int64_t block_size, int64_t place, int64_t hd, const float* k, const float* v, F&& as_element) {
    T* keys = head + place / 8 * 8 * hd + place % 8;
    T* values = head + block_size * hd + place * hd;
    for (int64_t d = 0; d < hd; ++d) keys[d * 8] = as_element(k[d]);
    for (int64_t d = 0; d < hd; ++d) values[d] = as_element(v[d]);
}

}  // namespace

void store_token(const Batch& batch, const Cache& cache, const Attention& a, const Rotation& rotation, int64_t t,
                 const float* k, const float* v, float* scratch) {
    const int64_t hd = a.head_dim, padded = a.padded(), slot = batch.slots[t], bs = cache.block_size;
    uint8_t* block = cache.layer + slot / bs * cache.block_bytes;
    float *key = scratch, *value = scratch + padded;
    std::fill_n(scratch, 2 * padded, 0.0f);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        rotate_head(rotation, t, false, k + head * hd, hd, key);
        std::copy_n(v + head * hd, hd, value);
        const int64_t first = head * 2 * bs * padded;
        if (cache.half) {
            put_head(reinterpret_cast<uint16_t*>(block) + first, bs, slot % bs, padded, key, value, to_half);
        } else {
            put_head(reinterpret_cast<float*>(block) + first, bs, slot % bs, padded, key, value, [](float x) { return x; });
        }
    }
}

}  // namespace es
