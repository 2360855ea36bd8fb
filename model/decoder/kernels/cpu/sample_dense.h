// Passes over a whole row of scores, 64 at a time. Knows vectors of floats; no controls.
// A row is padded with -inf to a multiple of 64, and -inf means "cut". Each block's largest score is kept, so that
// later passes can leave out the blocks that hold nothing of interest.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace es {

constexpr int64_t kBlock = 64;
constexpr float kCut = -std::numeric_limits<float>::infinity();

inline int64_t num_blocks(int64_t vocabulary) { return (vocabulary + kBlock - 1) / kBlock; }

// A row of scores with its blocks' maxima.
struct Dense {
    const float* scores;  // [blocks * 64]
    const float* peaks;   // [blocks]
    int64_t blocks;
    float peak;
};

// The survivors of a filter, in order of their ids.
struct List {
    std::vector<float> scores, weights;
    std::vector<int32_t> ids;
    int64_t size = 0;
    void reserve(int64_t count);
};

// Maxima of all blocks; returns false where a score is NaN or +inf.
bool find_peaks(const float* scores, int64_t blocks, float* peaks, float* peak);
// The first of the largest scores.
int32_t first_peak(const Dense& row);
// weights = exp((scores - peak) * factor), 0 for cut ones; block sums in `sums`; returns the sum of all.
// `moment`, if not null, gets the sum of weight * (score - peak) * factor.
double weigh(const Dense& row, double factor, float* weights, double* sums, double* moment);
// The same for the survivors of a filter; the same bits.
void weigh(List& list, float peak, double factor);
// The same sum without keeping the weights.
double sum_exp(const Dense& row, double* moment);
// Standard deviation of the scores that are not cut.
double deviation(const Dense& row);
int64_t count_alive(const Dense& row);
// How many scores stand before scores[id]: larger, or equal with a smaller id.
int64_t rank_of(const Dense& row, int32_t id);
// All ids with least <= score < below, and their weights where there are any.
void gather(const Dense& row, float least, const float* weights, List& list, float below = INFINITY);
// Sum of the weights (their number, where `weights` is null) of all scores >= least.
double measure(const Dense& row, float least, const float* weights);
// A score that at least `count` of the row's scores reach, as large as the maxima alone can tell.
float reached_by(const Dense& row, int64_t count, std::vector<float>& scratch);

}  // namespace es
