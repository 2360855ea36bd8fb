// Filters on the survivors of a row: see sample_filters.h. The selection reads a score's bits from the top, eleven
// at a time, so it costs three passes whatever the distribution is.
#include "sample_filters.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace es {

namespace {

// Larger scores have larger keys; +0 and -0 are the same.
inline uint32_t key_of(float score) {
    score += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Keys above `key` are kept, and the first `ties` that equal it.
struct Border {
    uint32_t key;
    int64_t ties;
};

struct Digit {
    int shift;
    uint32_t buckets;
};
constexpr Digit kDigits[] = {{21, 2048}, {10, 2048}, {0, 1024}};

template <typename Weight>
Border find_border(const std::vector<uint32_t>& keys, int64_t size, double target, Weight weight) {
    static thread_local std::vector<double> mass(2048);
    uint32_t prefix = 0, mask = 0;
    double above = 0.0;
    for (const Digit& digit : kDigits) {
        std::fill(mass.begin(), mass.begin() + digit.buckets, 0.0);
        for (int64_t i = 0; i < size; ++i) {
            if ((keys[i] & mask) == prefix) mass[(keys[i] >> digit.shift) & (digit.buckets - 1)] += weight(i);
        }
        int64_t lowest = -1, found = -1;
        for (int64_t bucket = digit.buckets - 1; bucket >= 0; --bucket) {
            if (mass[bucket] == 0.0) continue;
            lowest = bucket;
            if (above + mass[bucket] >= target) {
                found = bucket;
                break;
            }
            above += mass[bucket];
        }
        if (found < 0) {  // rounding left the target just out of reach: everything here is kept
            found = lowest < 0 ? 0 : lowest;
            target = std::numeric_limits<double>::infinity();
            if (lowest >= 0) above -= mass[lowest];
        }
        prefix |= static_cast<uint32_t>(found) << digit.shift;
        mask |= (digit.buckets - 1) << digit.shift;
    }
    int64_t ties = 0;
    for (int64_t i = 0; i < size && (ties == 0 || above < target); ++i) {
        if (keys[i] != prefix) continue;
        above += weight(i);
        ++ties;
    }
    return {prefix, ties};
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

void keep_border(List& list, const std::vector<uint32_t>& keys, Border border) {
    compact(list, [&](int64_t i) {
        if (keys[i] == border.key) return border.ties-- > 0;
        return keys[i] > border.key;
    });
}

std::vector<uint32_t>& keys_of(const List& list) {
    static thread_local std::vector<uint32_t> keys;
    if (static_cast<int64_t>(keys.size()) < list.size) keys.resize(list.size);
    for (int64_t i = 0; i < list.size; ++i) keys[i] = key_of(list.scores[i]);
    return keys;
}

}  // namespace

double sum_weights(const List& list) {
    double sums[4] = {0.0, 0.0, 0.0, 0.0};
    for (int64_t i = 0; i < list.size; ++i) sums[i & 3] += list.weights[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void keep_top_k(List& list, int64_t count) {
    if (count >= list.size) return;
    auto& keys = keys_of(list);
    keep_border(list, keys, find_border(keys, list.size, static_cast<double>(count), [](int64_t) { return 1.0; }));
}

void keep_top_p(List& list, double mass) {
    auto& keys = keys_of(list);
    keep_border(list, keys, find_border(keys, list.size, mass, [&](int64_t i) { return list.weights[i]; }));
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
    static thread_local std::vector<uint32_t> keys;
    if (static_cast<int64_t>(keys.size()) < list.size) keys.resize(list.size);
    for (int64_t i = 0; i < list.size; ++i) {
        double log_weight = (static_cast<double>(list.scores[i]) - peak) * factor;
        keys[i] = key_of(-static_cast<float>(std::fabs(log_weight - mean)));
    }
    keep_border(list, keys, find_border(keys, list.size, mass, [&](int64_t i) { return list.weights[i]; }));
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
    int64_t chosen = 0;
    for (int64_t i = 0; i < list.size; ++i) {
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
