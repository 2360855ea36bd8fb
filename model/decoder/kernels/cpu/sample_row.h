// One row on its way through the sampler: its memory, its model distribution and what is traced of it.
#pragma once
#include <cstdint>
#include <vector>

#include "sample.h"
#include "sample_dense.h"

namespace es {

// One thread's memory, reused for all rows it samples.
struct Workspace {
    std::vector<float> model, model_peaks, scores, peaks, weights, scratch;
    std::vector<double> sums;
    std::vector<int32_t> order;
    List list;
};

Workspace& workspace();

// `logits` [vocabulary] as a padded row with its maxima: in place where 64 divides the vocabulary, else copied.
// Returns false where they are not numbers.
bool open_row(const float* logits, int64_t vocabulary, std::vector<float>& copy, std::vector<float>& peaks, Dense* row);

// The model's own distribution of a row.
struct ModelView {
    const Dense& row;
    double log_sum;  // log-probability = score - log_sum
    double entropy;
    double logprob(int32_t id) const { return row.scores[id] - log_sum; }
};

ModelView look(const Dense& row, bool entropy);
// The `count` likeliest ids and their log-probabilities, best first, ties by id.
void best_candidates(const ModelView& view, int64_t count, Workspace& space, int32_t* ids, double* logprobs);

// What the playground shows: the candidates' probabilities after each stage, for one row.
class Trace {
  public:
    Trace(const int32_t* ids, int64_t count) : ids_(ids), count_(count), alive_(count * kStages, 1) {}
    // The stage's weights are exp((score - peak) * factor), their sum `sum`.
    void note(int stage, const Dense& row, double factor, double sum);
    // Only the list survives.
    void note(int stage, const List& list, double sum);
    // The filter is off.
    void same(int stage);
    // From `stage` on nothing but the chosen token is possible.
    void certain(int stage) { certain_ = stage; }
    // Probabilities [count + 1, kStages], `token` last.
    void write(int32_t token, double* stages) const;

  private:
    const int32_t* ids_;
    int64_t count_;
    std::vector<uint8_t> alive_;  // [count, kStages]
    const Dense* rows_[kStages] = {};
    double factors_[kStages] = {}, sums_[kStages] = {};
    int certain_ = kStages;
};

}  // namespace es
