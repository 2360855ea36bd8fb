// From logits to ids: what Python hands to the sampler, and what it gets back. Mirrored in kernels/sampling.py.
// Knows one row's controls as numbers and arrays; no requests, no text. The order of the controls is that of
// engine/sampler_reference.py, which is the oracle.
#pragma once
#include <cstdint>

namespace es {

// One choice's controls and memory; lives as long as the choice. A pointer is null where its control is off.
struct Controls {
    const int32_t* bias_ids;
    const double* bias_values;
    const int32_t* allowed;
    const int32_t* words;      // the ids of all bad words, one after another
    const int64_t* word_ends;  // word w is words[word_ends[w - 1] .. word_ends[w])
    const int32_t* breakers;
    const int32_t* history;   // the stream's last ids, oldest first
    const int32_t* seen;      // tokens that have occurred, each once
    const int32_t* anywhere;  // how often each of them, in prompt and output
    const int32_t* output;    // and in the output
    int64_t num_bias, num_allowed, num_words, num_breakers, num_history, num_seen;
    uint64_t seed;
    double temperature, dynatemp_range, dynatemp_exponent, top_p, min_p, typical_p, top_n_sigma;
    double xtc_probability, xtc_threshold, dry_multiplier, dry_base, repetition_penalty, presence_penalty;
    double frequency_penalty;
    int64_t top_k, dry_allowed_length, dry_range;
    int64_t logprobs;  // candidates wanted; -1 for no log-probability at all
    int64_t trace;     // whether stages are wanted
};

struct SampleRow {
    const Controls* controls;
    const int32_t* banned;
    int64_t num_banned;
    int64_t choice;
    int64_t index;
};

enum Status : int32_t { kFine = 0, kNotFinite = 1, kAllCut = 2 };

struct SampleResult {
    int32_t token;
    int32_t status;
    double logprob;
    double entropy;
    int64_t rank;
};

constexpr int kStages = 7;

// Where the candidates of all rows go: `width` a row.
struct Candidates {
    int64_t width;
    int32_t* ids;      // [rows, width]
    double* logprobs;  // [rows, width]
    double* stages;    // [rows, width + 1, kStages], the chosen token behind the candidates
};

}  // namespace es

extern "C" {
// One token a row. `logits` [rows, vocabulary]; `probabilities`, if not null, gets each row's final distribution.
void es_sample(const float* logits, int64_t rows, int64_t vocabulary, const es::SampleRow* wanted,
               es::SampleResult* results, const es::Candidates* candidates, float* probabilities);
// Log-probability, rank and candidates of one given id a row, under the model's own distribution.
void es_logprobs(const float* logits, int64_t rows, int64_t vocabulary, const int32_t* ids, int64_t count,
                 es::SampleResult* results, const es::Candidates* candidates);
}
