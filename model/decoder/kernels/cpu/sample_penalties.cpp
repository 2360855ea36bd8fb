// Bias, bans and penalties: see sample_penalties.h. Ids were checked at the door; here they index.
#include "sample_penalties.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "sample_dense.h"

namespace es {

namespace {

constexpr double kMaxDryLog = 69.07755278982137;  // ln 1e30: float32 must hold the penalty

void constrain(const SampleRow& row, int64_t vocabulary, float* scores) {
    const Controls& c = *row.controls;
    for (int64_t i = 0; i < c.num_bias; ++i) {
        scores[c.bias_ids[i]] = static_cast<float>(scores[c.bias_ids[i]] + c.bias_values[i]);
    }
    if (c.num_allowed) {
        static thread_local std::vector<float> kept;
        kept.resize(c.num_allowed);
        for (int64_t i = 0; i < c.num_allowed; ++i) kept[i] = scores[c.allowed[i]];
        std::fill(scores, scores + vocabulary, kCut);
        for (int64_t i = 0; i < c.num_allowed; ++i) scores[c.allowed[i]] = kept[i];
    }
    for (int64_t word = 0, begin = 0; word < c.num_words; begin = c.word_ends[word++]) {
        int64_t before = c.word_ends[word] - begin - 1;
        if (before <= c.num_history &&
            std::equal(c.words + begin, c.words + begin + before, c.history + c.num_history - before)) {
            scores[c.words[begin + before]] = kCut;
        }
    }
    for (int64_t i = 0; i < row.num_banned; ++i) scores[row.banned[i]] = kCut;
}

void penalise(const Controls& c, float* scores) {
    for (int64_t i = 0; i < c.num_seen; ++i) {
        double score = scores[c.seen[i]];
        if (c.repetition_penalty != 1.0 && c.anywhere[i] > 0) {
            score = score > 0.0 ? score / c.repetition_penalty : score * c.repetition_penalty;
        }
        if (c.output[i] > 0) score -= c.presence_penalty + c.frequency_penalty * c.output[i];
        scores[c.seen[i]] = static_cast<float>(score);
    }
}

bool breaks(const Controls& c, int32_t id) {
    const int32_t* end = c.breakers + c.num_breakers;
    return std::find(c.breakers, end, id) != end;
}

// Tokens that have followed the stream's last ids before, and how many of those ids were the same there.
using Followers = std::vector<std::pair<int32_t, int64_t>>;

// Looks back from each place where the last id stands. Returns false, with half the work done, where the stream repeats
// itself so much that this would take long.
bool followers_by_looking(const int32_t* ids, int64_t count, int64_t limit, Followers& found) {
    int64_t work = 8 * count;
    for (int64_t place = 0; place + 1 < count; ++place) {
        if (ids[place] != ids[count - 1]) continue;
        const int64_t most = std::min(limit, place + 1);
        int64_t length = 1;
        while (length < most && ids[place - length] == ids[count - 1 - length]) ++length;
        found.emplace_back(ids[place + 1], length);
        if ((work -= length) < 0) return false;
    }
    return true;
}

// The same in linear time, whatever the stream: the Z function of the reversed stream (Gusfield, "Algorithms on strings,
// trees and sequences", 1.4).
void followers_by_matching(const int32_t* ids, int64_t count, int64_t limit, Followers& found) {
    static thread_local std::vector<int64_t> lengths;
    lengths.assign(count, 0);
    auto reversed = [&](int64_t i) { return ids[count - 1 - i]; };
    int64_t left = 0, right = 0;  // [left, right) is the match that reaches furthest
    for (int64_t i = 1; i < count; ++i) {
        int64_t length = i < right ? std::min(right - i, lengths[i - left]) : 0;
        while (i + length < count && reversed(length) == reversed(i + length)) ++length;
        lengths[i] = length;
        if (i + length > right) {
            left = i;
            right = i + length;
        }
        if (length > 0) found.emplace_back(reversed(i - 1), std::min(length, limit));
    }
}

void dry(const Controls& c, float* scores) {
    const int64_t count = std::min(c.num_history, c.dry_range);
    if (count < 2) return;
    const int32_t* ids = c.history + c.num_history - count;
    int64_t limit = 0;  // ids at the end that no breaker interrupts
    while (limit < count && !breaks(c, ids[count - 1 - limit])) ++limit;
    if (limit < std::max<int64_t>(c.dry_allowed_length, 1)) return;
    static thread_local Followers found;
    found.clear();
    if (!followers_by_looking(ids, count, limit, found)) {
        found.clear();
        followers_by_matching(ids, count, limit, found);
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first < b.first : a.second > b.second;
    });
    for (size_t i = 0; i < found.size(); ++i) {
        const auto [token, length] = found[i];
        if (i > 0 && token == found[i - 1].first) continue;  // only the longest phrase counts
        if (length < c.dry_allowed_length || breaks(c, token)) continue;
        double exponent = (length - c.dry_allowed_length) * std::log(c.dry_base) + std::log(c.dry_multiplier);
        scores[token] = static_cast<float>(scores[token] - std::exp(std::min(exponent, kMaxDryLog)));
    }
}

}  // namespace

bool adjusts(const SampleRow& row) {
    const Controls& c = *row.controls;
    return c.num_bias || c.num_allowed || c.num_words || row.num_banned || c.num_seen || c.dry_multiplier > 0.0;
}

void adjust(const SampleRow& row, int64_t vocabulary, float* scores) {
    constrain(row, vocabulary, scores);
    penalise(*row.controls, scores);
    if (row.controls->dry_multiplier > 0.0) dry(*row.controls, scores);
}

}  // namespace es
