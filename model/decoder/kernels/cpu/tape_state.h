// What a tape holds between and during steps: ops, buffers, plans, and each thread's own memory.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "tape.h"

namespace es {

struct Private {  // of one thread
    Panel panel;
    std::vector<float> row, meta, scratch;
    std::vector<int8_t> q;
};

struct Turned {  // a rotation's tables for the step at hand, [tokens][pairs]
    std::vector<float> cos, sin, sink_cos, sink_sin;
};

using PlanKey = std::tuple<int64_t, int32_t, int32_t>;  // layer window, heads, kv heads

struct Tape {
    std::vector<Op> ops;
    std::vector<Part> parts;
    std::vector<int64_t> widths;  // of buffers
    std::vector<RotationSpec> rotations;
    std::vector<double> frequencies;

    Step step{};
    int64_t capacity = 0;
    std::vector<std::vector<float>> buffers;
    std::vector<Turned> turned;
    std::vector<int8_t> q;             // rows of the linear at hand, [tokens][in]
    std::vector<float> meta, rows;
    std::vector<int32_t> owner;        // the sequence of each token
    std::map<PlanKey, Plan> plans;
    std::vector<float> partials;
    std::vector<std::atomic<int64_t>> counters;  // two for each op
    std::vector<Private> privates;
    int64_t ticks[kCodes] = {};        // the processor's clock spent in each kind of op, as thread 0 sees it

    void run(int thread, int threads);  // one thread's walk over the ops
};

Attention attention_of(const Op& op);

}  // namespace es
