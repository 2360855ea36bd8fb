// A row's own distribution, its candidates and its trace: see sample_row.h.
#include "sample_row.h"

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "sample_filters.h"

namespace es {

Workspace& workspace() {
    static thread_local Workspace space;
    return space;
}

bool open_row(const float* logits, int64_t vocabulary, std::vector<float>& copy, std::vector<float>& peaks, Dense* row) {
    const int64_t blocks = num_blocks(vocabulary);
    if (blocks * kBlock != vocabulary) {
        copy.resize(blocks * kBlock);
        std::copy(logits, logits + vocabulary, copy.begin());
        std::fill(copy.begin() + vocabulary, copy.end(), kCut);
        logits = copy.data();
    }
    peaks.resize(blocks);
    float peak;
    bool numbers = find_peaks(logits, blocks, peaks.data(), &peak);
    *row = {logits, peaks.data(), blocks, peak};
    return numbers;
}

ModelView look(const Dense& row, bool entropy) {
    double moment = 0.0;
    double sum = sum_exp(row, entropy ? &moment : nullptr);
    return {row, row.peak + std::log(sum), entropy ? std::max(0.0, std::log(sum) - moment / sum) : 0.0};
}

void best_candidates(const ModelView& view, int64_t count, Workspace& space, int32_t* ids, double* logprobs) {
    if (count == 0) return;
    List& list = space.list;
    gather(view.row, reached_by(view.row, count, space.scratch), nullptr, list);
    auto& order = space.order;
    order.resize(list.size);
    for (int64_t i = 0; i < list.size; ++i) order[i] = static_cast<int32_t>(i);
    int64_t there = std::min(count, list.size);
    std::partial_sort(order.begin(), order.begin() + there, order.end(), [&](int32_t a, int32_t b) {
        return list.scores[a] != list.scores[b] ? list.scores[a] > list.scores[b] : a < b;
    });
    for (int64_t i = 0; i < count; ++i) {
        ids[i] = i < there ? list.ids[order[i]] : -1;
        logprobs[i] = i < there ? view.logprob(ids[i]) : kCut;
    }
}

void Trace::note(int stage, const Dense& row, double factor, double sum) {
    rows_[stage] = &row;
    factors_[stage] = factor;
    sums_[stage] = sum;
}

void Trace::note(int stage, const List& list, double sum) {
    same(stage);
    sums_[stage] = sum;
    for (int64_t i = 0; i < count_; ++i) {
        alive_[i * kStages + stage] = place_of(list, ids_[i]) >= 0;
    }
}

void Trace::same(int stage) {
    rows_[stage] = rows_[stage - 1];
    factors_[stage] = factors_[stage - 1];
    sums_[stage] = sums_[stage - 1];
    for (int64_t i = 0; i < count_; ++i) alive_[i * kStages + stage] = alive_[i * kStages + stage - 1];
}

void Trace::write(int32_t token, double* stages) const {
    for (int64_t i = 0; i <= count_; ++i) {
        const int32_t id = i < count_ ? ids_[i] : token;
        for (int stage = 0; stage < kStages; ++stage) {
            double& probability = stages[i * kStages + stage];
            if (stage >= certain_) {
                probability = id == token ? 1.0 : 0.0;
            } else if (id < 0 || (i < count_ && !alive_[i * kStages + stage])) {
                probability = 0.0;
            } else {
                const Dense& row = *rows_[stage];
                double away = static_cast<double>(row.scores[id]) - row.peak;
                probability = std::exp(away * factors_[stage]) / sums_[stage];
            }
        }
    }
}

namespace {

struct LogprobJob {
    const float* logits;
    int64_t vocabulary, count;
    const int32_t* ids;
    SampleResult* results;
    const Candidates* out;
};

void score_rows(void* argument, int64_t begin, int64_t end, int) {
    const auto& job = *static_cast<LogprobJob*>(argument);
    Workspace& space = workspace();
    for (int64_t i = begin; i < end; ++i) {
        SampleResult& result = job.results[i];
        result = {job.ids[i], kFine, 0.0, 0.0, 0};
        Dense row;
        if (!open_row(job.logits + i * job.vocabulary, job.vocabulary, space.model, space.model_peaks, &row)) {
            result.status = kNotFinite;
            continue;
        }
        ModelView view = look(row, false);
        result.logprob = view.logprob(job.ids[i]);
        result.rank = rank_of(row, job.ids[i]);
        int64_t width = job.out->width;
        best_candidates(view, job.count, space, job.out->ids + i * width, job.out->logprobs + i * width);
    }
}

}  // namespace

}  // namespace es

extern "C" void es_logprobs(const float* logits, int64_t rows, int64_t vocabulary, const int32_t* ids, int64_t count,
                            es::SampleResult* results, const es::Candidates* candidates) {
    es::LogprobJob job{logits, vocabulary, count, ids, results, candidates};
    es_parallel_for(rows, 1, es::score_rows, &job);
}
