// The sampler: all rows of a step in one call, rows spread over the pool's threads. See sample.h.
// A row's token depends on that row alone: every sum is taken in one order, whoever computes it.
#include "sample.h"

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "sample_filters.h"
#include "sample_penalties.h"
#include "sample_random.h"
#include "sample_row.h"

namespace es {

namespace {

constexpr double kMinTemperature = 1e-6;  // where dynamic temperature comes down to nothing

// A row between penalties and draw.
struct Warm {
    const SampleRow& row;
    const Dense& model;
    const Dense& scores;  // after penalties
    double factor;        // 1 / temperature
    bool xtc;             // whether XTC cuts at this token
    Trace* trace;
    Workspace& space;
    double total = 0.0;   // of all weights, where they were computed
    double moment = 0.0;  // of weight * log weight
    float sigma_least = kCut;
};

double inverse_temperature(const Controls& c, const Dense& scores) {
    if (c.dynatemp_range <= 0.0) return 1.0 / c.temperature;
    const double low = std::max(0.0, c.temperature - c.dynatemp_range), high = c.temperature + c.dynatemp_range;
    const int64_t alive = count_alive(scores);
    if (alive < 2) return 1.0 / std::max(c.temperature, kMinTemperature);
    double moment = 0.0;
    double sum = sum_exp(scores, &moment);
    double share = std::max(0.0, std::log(sum) - moment / sum) / std::log(static_cast<double>(alive));
    return 1.0 / std::max(low + (high - low) * std::pow(share, c.dynatemp_exponent), kMinTemperature);
}

bool filters(const Controls& c, bool xtc) {
    return c.top_k > 0 || c.top_p < 1.0 || c.min_p > 0.0 || c.typical_p < 1.0 || c.top_n_sigma > 0.0 || xtc;
}

// A score under which the first filter that is on can need nothing, so that the rest of the row is never listed.
float least_needed(const Warm& w) {
    const Controls& c = *w.row.controls;
    const double all = static_cast<double>(w.scores.blocks * kBlock);
    double log_weight;
    if (c.min_p > 0.0) {
        log_weight = std::log(c.min_p) - 1e-3;
    } else if (c.typical_p < 1.0) {  // and beyond twice the mean surprise come only the unlikely ones
        double mean = w.moment / w.total, log_total = std::log(w.total);
        log_weight = std::min(std::log(0.99 * (1.0 - c.typical_p) * w.total / all), 2.0 * (mean - log_total) + log_total - 1e-3);
    } else {
        return w.sigma_least;
    }
    return static_cast<float>(w.scores.peak + log_weight / w.factor);
}

void note(const Warm& w, int stage, bool on, const List& list) {
    if (w.trace == nullptr) return;
    if (on) {
        w.trace->note(stage, list, sum_weights(list));
    } else {
        w.trace->same(stage);
    }
}

// The survivors of top_k and top_p, with weights.
void cut_by_rank(Warm& w, List& list) {
    const Controls& c = *w.row.controls;
    const float* weights = w.total > 0.0 ? w.space.weights.data() : nullptr;
    if (c.top_k > w.scores.blocks) {
        select(w.scores, nullptr, static_cast<double>(c.top_k), 1.0 / w.factor, list);
        weigh(list, w.scores.peak, w.factor);
    } else if (c.top_k > 0) {
        gather(w.scores, reached_by(w.scores, c.top_k, w.space.scratch), nullptr, list);
        keep_top_k(list, c.top_k);
        weigh(list, w.scores.peak, w.factor);
    } else if (c.top_p < 1.0) {
        select(w.scores, weights, c.top_p * w.total, 1.0 / w.factor, list);
    } else {
        gather(w.scores, least_needed(w), weights, list);
    }
    note(w, 3, c.top_k > 0, list);
    if (c.top_k > 0 && c.top_p < 1.0) keep_top_p(list, c.top_p * sum_weights(list));
    note(w, 4, c.top_p < 1.0, list);
}

void cut_rest(Warm& w, List& list) {
    const Controls& c = *w.row.controls;
    if (c.min_p > 0.0) keep_at_least(list, static_cast<float>(w.scores.peak + std::log(c.min_p) / w.factor));
    note(w, 5, c.min_p > 0.0, list);
    if (c.typical_p < 1.0) {
        const bool first = c.top_k <= 0 && c.top_p >= 1.0 && c.min_p <= 0.0;  // then the list is not the whole row
        const double total = first ? w.total : sum_weights(list);
        const double moment = first ? w.moment : sum_moments(list, w.scores.peak, w.factor);
        keep_typical(list, w.scores.peak, w.factor, moment / total, c.typical_p * total);
    }
    if (c.top_n_sigma > 0.0) keep_at_least(list, w.sigma_least);
    if (w.xtc) cut_top_choices(list, c.xtc_threshold);
    note(w, 6, c.typical_p < 1.0 || c.top_n_sigma > 0.0 || w.xtc, list);
}

// Draw from a whole row: the block first, then the place in it.
int32_t draw_dense(const Warm& w, double place) {
    const double target = place * w.total;
    double sum = 0.0;
    int64_t chosen = 0;
    for (int64_t block = 0; block < w.scores.blocks; ++block) {
        if (w.space.sums[block] == 0.0) continue;
        chosen = block;
        if (sum + w.space.sums[block] > target) break;
        sum += w.space.sums[block];
    }
    int64_t token = -1;
    for (int64_t i = chosen * kBlock; i < (chosen + 1) * kBlock; ++i) {
        if (w.space.weights[i] == 0.0f) continue;
        sum += w.space.weights[i];
        token = i;
        if (sum > target) break;
    }
    return static_cast<int32_t>(token);
}

void write_dense(const Warm& w, int64_t vocabulary, float* probabilities) {
    for (int64_t i = 0; i < vocabulary; ++i) probabilities[i] = static_cast<float>(w.space.weights[i] / w.total);
}

void write_list(const List& list, int64_t vocabulary, float* probabilities) {
    std::fill(probabilities, probabilities + vocabulary, 0.0f);
    const double total = sum_weights(list);
    for (int64_t i = 0; i < list.size; ++i) probabilities[list.ids[i]] = static_cast<float>(list.weights[i] / total);
}

int32_t sample_warm(Warm& w, int64_t vocabulary, float* probabilities) {
    const Controls& c = *w.row.controls;
    Workspace& space = w.space;
    if (c.top_k <= 0 || w.trace) {
        space.weights.resize(w.scores.blocks * kBlock);
        space.sums.resize(w.scores.blocks);
        const bool typical = c.typical_p < 1.0;
        w.total = weigh(w.scores, w.factor, space.weights.data(), space.sums.data(), typical ? &w.moment : nullptr);
    }
    if (w.trace) w.trace->note(2, w.scores, w.factor, w.total);
    const double place = uniform(c.seed, w.row.choice, w.row.index, kDraw);
    if (!filters(c, w.xtc)) {
        for (int stage = 3; w.trace && stage < kStages; ++stage) w.trace->same(stage);
        if (probabilities) write_dense(w, vocabulary, probabilities);
        return draw_dense(w, place);
    }
    if (c.top_n_sigma > 0.0) w.sigma_least = static_cast<float>(w.scores.peak - c.top_n_sigma * deviation(w.model));
    cut_by_rank(w, space.list);
    cut_rest(w, space.list);
    if (probabilities) write_list(space.list, vocabulary, probabilities);
    return draw(space.list, place);
}

int32_t sample_greedy(const Dense& scores, Trace* trace, int64_t vocabulary, float* probabilities) {
    const int32_t token = first_peak(scores);
    if (trace) trace->certain(2);
    if (probabilities) {
        std::fill(probabilities, probabilities + vocabulary, 0.0f);
        probabilities[token] = 1.0f;
    }
    return token;
}

// The row after penalties: the model's own where there are none. Returns what is wrong with it.
Status open_scores(const SampleRow& row, const Dense& model, int64_t vocabulary, Workspace& space, Dense* scores) {
    *scores = model;
    if (adjusts(row)) {
        space.scores.assign(model.scores, model.scores + model.blocks * kBlock);
        adjust(row, vocabulary, space.scores.data());
        if (!open_row(space.scores.data(), model.blocks * kBlock, space.scores, space.peaks, scores)) return kNotFinite;
    }
    return scores->peak > kCut ? kFine : kAllCut;
}

struct SampleJob {
    const float* logits;
    int64_t vocabulary;
    const SampleRow* rows;
    SampleResult* results;
    const Candidates* out;
    float* probabilities;
};

void sample_row(const SampleJob& job, int64_t at, Workspace& space) {
    const SampleRow& row = job.rows[at];
    const Controls& c = *row.controls;
    SampleResult& result = job.results[at];
    float* probabilities = job.probabilities ? job.probabilities + at * job.vocabulary : nullptr;
    Dense model, scores;
    result = {-1, kNotFinite, 0.0, 0.0, 0};
    if (!open_row(job.logits + at * job.vocabulary, job.vocabulary, space.model, space.model_peaks, &model)) return;
    result.status = open_scores(row, model, job.vocabulary, space, &scores);
    if (result.status != kFine) return;
    const bool scored = c.logprobs >= 0 || c.trace;
    const int64_t width = job.out->width, count = scored ? std::min(std::max<int64_t>(c.logprobs, 0), width) : 0;
    int32_t* ids = job.out->ids + at * width;
    const ModelView view = scored ? look(model, c.trace) : ModelView{model, 0.0, 0.0};
    best_candidates(view, count, space, ids, job.out->logprobs + at * width);
    Trace trace(ids, c.trace ? count : 0);
    if (c.trace) {
        trace.note(0, model, 1.0, sum_exp(model, nullptr));
        trace.note(1, scores, 1.0, sum_exp(scores, nullptr));
    }
    Trace* traced = c.trace ? &trace : nullptr;
    if (c.temperature == 0.0) {
        result.token = sample_greedy(scores, traced, job.vocabulary, probabilities);
    } else {
        const bool xtc = c.xtc_probability > 0.0 && uniform(c.seed, row.choice, row.index, kXtc) < c.xtc_probability;
        Warm warm{row, model, scores, inverse_temperature(c, scores), xtc, traced, space};
        result.token = sample_warm(warm, job.vocabulary, probabilities);
    }
    if (!scored) return;
    result.logprob = view.logprob(result.token);
    result.rank = rank_of(model, result.token);
    result.entropy = view.entropy;
    if (c.trace) trace.write(result.token, job.out->stages + at * (width + 1) * kStages);
}

void sample_rows(void* argument, int64_t begin, int64_t end, int) {
    const auto& job = *static_cast<SampleJob*>(argument);
    for (int64_t at = begin; at < end; ++at) sample_row(job, at, workspace());
}

}  // namespace

}  // namespace es

extern "C" void es_sample(const float* logits, int64_t rows, int64_t vocabulary, const es::SampleRow* wanted,
                          es::SampleResult* results, const es::Candidates* candidates, float* probabilities) {
    es::SampleJob job{logits, vocabulary, wanted, results, candidates, probabilities};
    es_parallel_for(rows, 1, es::sample_rows, &job);
}

// For tests: the counted random number, and the sizes of the structs.
extern "C" double es_sample_uniform(uint64_t seed, uint64_t choice, uint64_t index, uint32_t purpose) {
    return es::uniform(seed, choice, index, static_cast<es::Purpose>(purpose));
}

extern "C" int64_t es_sample_struct_bytes(int which) {
    const int64_t bytes[] = {sizeof(es::Controls), sizeof(es::SampleRow), sizeof(es::SampleResult), sizeof(es::Candidates)};
    return bytes[which];
}
