// Passes over a whole row of scores: see sample_dense.h.
#include "sample_dense.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "simd.h"

namespace es {

namespace {

constexpr float kSmallestLog = -87.0f;  // weights below e^-87 of the best count as none

// For each mask of lanes: the lanes' numbers, those that are set first.
constexpr auto kCompress = [] {
    std::array<std::array<int32_t, 8>, 256> table{};
    for (int mask = 0; mask < 256; ++mask) {
        int at = 0;
        for (int lane = 0; lane < 8; ++lane) {
            if (mask >> lane & 1) table[mask][at++] = lane;
        }
    }
    return table;
}();

const __m256 kCut8 = _mm256_set1_ps(kCut);

inline __m256 weight8(__m256 scaled) {
    return _mm256_and_ps(exp8(scaled), _mm256_cmp_ps(scaled, _mm256_set1_ps(kSmallestLog), _CMP_GT_OQ));
}

// Sum of a block's weights (and of weight * log weight); `Keep` writes the weights.
template <bool Keep, bool Moment>
double block_weights(const float* scores, __m256 peak, __m256 factor, float* weights, double& moment) {
    __m256 sum = _mm256_setzero_ps(), first = _mm256_setzero_ps();
    for (int64_t i = 0; i < kBlock; i += 8) {
        __m256 scaled = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(scores + i), peak), factor);
        __m256 weight = weight8(scaled);
        if (Keep) _mm256_storeu_ps(weights + i, weight);
        if (Moment) first = _mm256_fmadd_ps(weight, _mm256_max_ps(scaled, _mm256_set1_ps(kSmallestLog)), first);
        sum = _mm256_add_ps(sum, weight);
    }
    if (Moment) moment += sum8(first);
    return sum8(sum);
}

template <bool Keep, bool Moment>
double weigh_row(const Dense& row, double factor, float* weights, double* sums, double* moment) {
    const __m256 peak8 = _mm256_set1_ps(row.peak), factor8 = _mm256_set1_ps(static_cast<float>(factor));
    double total = 0.0, first = 0.0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        double sum = block_weights<Keep, Moment>(row.scores + block * kBlock, peak8, factor8,
                                                 Keep ? weights + block * kBlock : nullptr, first);
        if (Keep) sums[block] = sum;
        total += sum;
    }
    if (Moment) *moment = first;
    return total;
}

}  // namespace

void List::reserve(int64_t count) {
    scores.resize(count + 8);
    weights.resize(count + 8);
    ids.resize(count + 8);
}

bool find_peaks(const float* scores, int64_t blocks, float* peaks, float* peak) {
    __m256 odd = _mm256_setzero_ps();
    float best = kCut;
    for (int64_t block = 0; block < blocks; ++block) {
        const float* p = scores + block * kBlock;
        __m256 top = _mm256_loadu_ps(p);
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(top, top, _CMP_UNORD_Q));
        for (int64_t i = 8; i < kBlock; i += 8) {
            __m256 x = _mm256_loadu_ps(p + i);
            odd = _mm256_or_ps(odd, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
            top = _mm256_max_ps(top, x);
        }
        peaks[block] = max8(top);
        best = std::max(best, peaks[block]);
    }
    *peak = best;
    return _mm256_movemask_ps(odd) == 0 && best < std::numeric_limits<float>::infinity();
}

int32_t first_peak(const Dense& row) {
    int64_t block = std::find(row.peaks, row.peaks + row.blocks, row.peak) - row.peaks;
    const float* begin = row.scores + block * kBlock;
    return static_cast<int32_t>(std::find(begin, begin + kBlock, row.peak) - row.scores);
}

double weigh(const Dense& row, double factor, float* weights, double* sums, double* moment) {
    return moment ? weigh_row<true, true>(row, factor, weights, sums, moment)
                  : weigh_row<true, false>(row, factor, weights, sums, nullptr);
}

void weigh(List& list, float peak, double factor) {
    const __m256 peak8 = _mm256_set1_ps(peak), factor8 = _mm256_set1_ps(static_cast<float>(factor));
    for (int64_t i = 0; i < list.size; i += 8) {  // a list has room for eight more
        __m256 scaled = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(&list.scores[i]), peak8), factor8);
        _mm256_storeu_ps(&list.weights[i], weight8(scaled));
    }
}

double sum_exp(const Dense& row, double* moment) {
    return moment ? weigh_row<false, true>(row, 1.0, nullptr, nullptr, moment)
                  : weigh_row<false, false>(row, 1.0, nullptr, nullptr, nullptr);
}

int64_t count_alive(const Dense& row) {
    int64_t count = 0;
    for (int64_t i = 0; i < row.blocks * kBlock; i += 8) {
        __m256 alive = _mm256_cmp_ps(_mm256_loadu_ps(row.scores + i), kCut8, _CMP_GT_OQ);
        count += __builtin_popcount(_mm256_movemask_ps(alive));
    }
    return count;
}

double deviation(const Dense& row) {
    const double count = static_cast<double>(count_alive(row));
    double mean = 0.0, square = 0.0;
    for (int pass = 0; pass < 2; ++pass) {  // the mean first: squares of large numbers would swallow the spread
        const __m256 centre = _mm256_set1_ps(pass ? static_cast<float>(mean) : row.peak);
        double total = 0.0;
        for (int64_t block = 0; block < row.blocks; ++block) {
            __m256 sum = _mm256_setzero_ps();
            for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += 8) {
                __m256 x = _mm256_loadu_ps(row.scores + i);
                __m256 away = _mm256_and_ps(_mm256_sub_ps(x, centre), _mm256_cmp_ps(x, kCut8, _CMP_GT_OQ));
                sum = _mm256_add_ps(sum, pass ? _mm256_mul_ps(away, away) : away);
            }
            total += sum8(sum);
        }
        if (pass) {
            square = total / count;
        } else {
            mean = row.peak + total / count;
        }
    }
    return std::sqrt(square);
}

int64_t rank_of(const Dense& row, int32_t id) {
    const float mine = row.scores[id];
    const __m256 mine8 = _mm256_set1_ps(mine);
    int64_t before = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (row.peaks[block] < mine) continue;
        const float* p = row.scores + block * kBlock;
        for (int64_t i = 0; i < kBlock; i += 8) {
            before += __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(p + i), mine8, _CMP_GT_OQ)));
        }
        if (row.peaks[block] >= mine && block * kBlock < id) {
            int64_t end = std::min<int64_t>(kBlock, id - block * kBlock);
            before += std::count(p, p + end, mine);
        }
    }
    return before;
}

double measure(const Dense& row, float least, const float* weights) {
    const __m256 least8 = _mm256_set1_ps(least), one8 = _mm256_set1_ps(1.0f);
    double total = 0.0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (row.peaks[block] < least) continue;
        __m256 sum = _mm256_setzero_ps();
        for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += 8) {
            __m256 x = _mm256_loadu_ps(row.scores + i);
            __m256 kept = _mm256_and_ps(_mm256_cmp_ps(x, least8, _CMP_GE_OQ), _mm256_cmp_ps(x, kCut8, _CMP_GT_OQ));
            sum = _mm256_add_ps(sum, _mm256_and_ps(kept, weights ? _mm256_loadu_ps(weights + i) : one8));
        }
        total += sum8(sum);
    }
    return total;
}

void gather(const Dense& row, float least, const float* weights, List& list, float below) {
    list.reserve(row.blocks * kBlock);
    const __m256 least8 = _mm256_set1_ps(std::max(least, -std::numeric_limits<float>::max()));
    const __m256 below8 = _mm256_set1_ps(below);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    int64_t n = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (row.peaks[block] < least || row.peaks[block] == kCut) continue;
        for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += 8) {
            __m256 x = _mm256_loadu_ps(row.scores + i);
            __m256 kept = _mm256_and_ps(_mm256_cmp_ps(x, least8, _CMP_GE_OQ), _mm256_cmp_ps(x, below8, _CMP_LT_OQ));
            int mask = _mm256_movemask_ps(kept);  // no look whether it is 0: a branch that cannot be foretold costs more
            __m256i order = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kCompress[mask].data()));
            _mm256_storeu_ps(&list.scores[n], _mm256_permutevar8x32_ps(x, order));
            __m256i ids = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(i)), _mm256_permutevar8x32_epi32(lanes, order));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(&list.ids[n]), ids);
            if (weights) {
                _mm256_storeu_ps(&list.weights[n], _mm256_permutevar8x32_ps(_mm256_loadu_ps(weights + i), order));
            }
            n += __builtin_popcount(mask);
        }
    }
    list.size = n;
}

float reached_by(const Dense& row, int64_t count, std::vector<float>& scratch) {
    if (count > row.blocks) return kCut;
    scratch.assign(row.peaks, row.peaks + row.blocks);
    std::nth_element(scratch.begin(), scratch.begin() + (count - 1), scratch.end(), std::greater<float>());
    return scratch[count - 1];
}

}  // namespace es
