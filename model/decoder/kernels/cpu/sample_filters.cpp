// Filters on the survivors of a row: see sample_filters.h. A selection costs a few passes whatever the distribution.
#include "sample_filters.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace es {

namespace {

// Larger values have larger bits; +0 and -0 are the same.
inline uint32_t bits_of(float value) {
    value += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Keys above `key` are kept, and the first `ties` that equal it, which are `whole` or only some.
struct Border {
    float key;
    int64_t ties;
    bool whole;
};

// Sum of up to 64 weights from `begin` on.
double sum_block(const List& list, int64_t begin) {
    const int64_t end = std::min(begin + kBlock, list.size);
    __m256 sum = _mm256_setzero_ps();
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) sum = _mm256_add_ps(sum, _mm256_loadu_ps(&list.weights[i]));
    if (i < end) sum = _mm256_add_ps(sum, Lanes(end - i).load(&list.weights[i]));
    return sum8(sum);
}

constexpr int kFirstShift = 21, kBuckets = 2048;

// Walks from the highest bucket down until `target` is reached, adding to `above` what lies higher. Where rounding
// leaves the target just out of reach it ends at the lowest bucket that holds anything.
int64_t crossing(const double* mass, int64_t buckets, double target, double& above) {
    int64_t lowest = -1;
    double before = above;
    for (int64_t bucket = buckets - 1; bucket >= 0; --bucket) {
        if (mass[bucket] == 0.0) continue;
        lowest = bucket;
        before = above;
        above += mass[bucket];
        if (above >= target) break;
    }
    above = before;
    return std::max<int64_t>(lowest, 0);
}

// The border within the survivors at `places`, whose keys begin with the same bits: sort them, walk down.
template <typename Weight>
Border walk(const float* keys, std::vector<int32_t>& places, double target, double above, Weight weight) {
    auto later = [&](int32_t a, int32_t b) { return keys[a] != keys[b] ? keys[a] > keys[b] : a < b; };
    std::sort(places.begin(), places.end(), later);
    size_t at = 0;
    while (at < places.size()) {
        above += weight(places[at++]);
        if (above >= target) break;
    }
    const float key = keys[places[at - 1]];
    size_t first = at - 1, end = at;
    while (first > 0 && keys[places[first - 1]] == key) --first;
    while (end < places.size() && keys[places[end]] == key) ++end;
    return {key, static_cast<int64_t>(at - first), end == at};
}

// Where the survivors in order of falling keys first reach `target`: a histogram over the keys' upper bits, another
// one over the next bits of those in the crossing bucket, then a sort of the few that are left.
template <typename Weight>
Border find_border(const float* keys, int64_t size, double target, Weight weight, double above = 0.0) {
    static thread_local std::vector<double> mass(2 * kBuckets);
    static thread_local std::vector<int32_t> places, fewer;
    std::fill(mass.begin(), mass.end(), 0.0);
    for (int64_t i = 0; i < size; ++i) {  // two histograms, since neighbours often fall into one bucket
        mass[(i & 1) * kBuckets + (bits_of(keys[i]) >> kFirstShift)] += weight(i);
    }
    for (int64_t bucket = 0; bucket < kBuckets; ++bucket) mass[bucket] += mass[kBuckets + bucket];
    const uint32_t first = static_cast<uint32_t>(crossing(mass.data(), kBuckets, target, above));
    if (static_cast<int64_t>(places.size()) < size) places.resize(size);
    int64_t count = 0;
    for (int64_t i = 0; i < size; ++i) {
        places[count] = static_cast<int32_t>(i);
        count += bits_of(keys[i]) >> kFirstShift == first;
    }
    std::fill(mass.begin(), mass.begin() + kBuckets, 0.0);
    auto second_of = [&](int32_t place) { return bits_of(keys[place]) >> 10 & (kBuckets - 1); };
    for (int64_t i = 0; i < count; ++i) mass[second_of(places[i])] += weight(places[i]);
    const uint32_t second = static_cast<uint32_t>(crossing(mass.data(), kBuckets, target, above));
    fewer.clear();
    for (int64_t i = 0; i < count; ++i) {
        if (second_of(places[i]) == second) fewer.push_back(places[i]);
    }
    if (fewer.empty()) return {kCut, 0, true};  // nothing weighs anything: all are kept
    return walk(keys, fewer, target, above, weight);
}

inline void move_survivor(List& list, int64_t from, int64_t to) {
    list.scores[to] = list.scores[from];
    list.weights[to] = list.weights[from];
    list.ids[to] = list.ids[from];
}

template <typename Kept>
void compact(List& list, Kept kept) {
    int64_t n = 0;
    for (int64_t i = 0; i < list.size; ++i) {
        bool keep = kept(i);
        move_survivor(list, i, n);
        n += keep;
    }
    list.size = n;
}

void keep_border(List& list, const float* keys, Border border) {
    if (border.whole) {
        compact(list, [&](int64_t i) { return keys[i] >= border.key; });
    } else {
        compact(list, [&](int64_t i) {
            if (keys[i] == border.key) return border.ties-- > 0;
            return keys[i] > border.key;
        });
    }
}

}  // namespace

double sum_weights(const List& list) {
    double total = 0.0;
    for (int64_t i = 0; i < list.size; i += kBlock) total += sum_block(list, i);
    return total;
}

// The survivors between two scores, one that reaches the mass and one that does not, hold the border.
void select(const Dense& row, const float* weights, double mass, double unit, List& list) {
    float high = INFINITY, low = kCut;
    double above = 0.0;
    for (double depth = unit; depth < 128.0 * unit; depth *= 2.0) {
        const float next = static_cast<float>(row.peak - depth);
        const double reached = measure(row, next, weights);
        if (reached >= mass) {
            low = next;
            break;
        }
        high = next;
        above = reached;
    }
    for (int halving = 0; halving < 3 && low > kCut; ++halving) {
        const float middle = 0.5f * (low + std::min(high, row.peak));
        const double reached = measure(row, middle, weights);
        if (reached >= mass) {
            low = middle;
        } else {
            high = middle;
            above = reached;
        }
    }
    gather(row, low, weights, list, high);
    if (list.size == 0) return gather(row, low, weights, list);  // rounding: the mass is all there is
    const float* listed = list.weights.data();
    auto weight = [=](int64_t i) { return weights ? listed[i] : 1.0f; };
    const Border border = find_border(list.scores.data(), list.size, mass, weight, above);
    gather(row, border.key, weights, list);
    if (!border.whole) keep_border(list, list.scores.data(), border);
}

void keep_top_k(List& list, int64_t count) {
    if (count >= list.size) return;
    const float* keys = list.scores.data();
    keep_border(list, keys, find_border(keys, list.size, static_cast<double>(count), [](int64_t) { return 1.0; }));
}

void keep_top_p(List& list, double mass) {
    const float *keys = list.scores.data(), *weights = list.weights.data();
    keep_border(list, keys, find_border(keys, list.size, mass, [=](int64_t i) { return weights[i]; }));
}

void keep_at_least(List& list, float least) {
    float best = *std::max_element(list.scores.begin(), list.scores.begin() + list.size);
    least = std::min(least, best);
    compact(list, [&](int64_t i) { return list.scores[i] >= least; });
}

double sum_moments(const List& list, float peak, double factor) {
    double sum = 0.0;
    for (int64_t i = 0; i < list.size; ++i) {
        if (list.weights[i] > 0.0f) sum += list.weights[i] * (static_cast<double>(list.scores[i]) - peak) * factor;
    }
    return sum;
}

void keep_typical(List& list, float peak, double factor, double mean, double mass) {
    static thread_local std::vector<float> keys;
    if (static_cast<int64_t>(keys.size()) < list.size) keys.resize(list.size);
    for (int64_t i = 0; i < list.size; ++i) {
        double log_weight = (static_cast<double>(list.scores[i]) - peak) * factor;
        keys[i] = -static_cast<float>(std::fabs(log_weight - mean));
    }
    const float* weights = list.weights.data();
    keep_border(list, keys.data(), find_border(keys.data(), list.size, mass, [=](int64_t i) { return weights[i]; }));
}

void cut_top_choices(List& list, double threshold) {
    const double least = std::max(threshold * sum_weights(list), 1e-300);  // cut ones are no choice at all
    int64_t likely = 0, last = -1;
    for (int64_t i = 0; i < list.size; ++i) {
        if (list.weights[i] < least) continue;
        ++likely;
        if (last < 0 || list.scores[i] <= list.scores[last]) last = i;
    }
    if (likely < 2) return;
    compact(list, [&, last](int64_t i) { return list.weights[i] < least || i == last; });
}

int32_t draw(const List& list, double place) {
    const double target = place * sum_weights(list);
    double sum = 0.0;
    int64_t block = 0, chosen = 0;
    for (int64_t i = 0; i < list.size; i += kBlock) {
        double more = sum_block(list, i);
        if (more == 0.0) continue;
        block = i;
        if (sum + more > target) break;
        sum += more;
    }
    chosen = block;
    for (int64_t i = block; i < std::min(block + kBlock, list.size); ++i) {
        if (list.weights[i] == 0.0f) continue;
        sum += list.weights[i];
        chosen = i;
        if (sum > target) break;
    }
    return list.ids[chosen];
}

int64_t place_of(const List& list, int32_t id) {
    auto end = list.ids.begin() + list.size;
    auto found = std::lower_bound(list.ids.begin(), end, id);
    return found != end && *found == id ? found - list.ids.begin() : -1;
}

}  // namespace es
