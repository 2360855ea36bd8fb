// Which instruction set computes, chosen once at load from what the processor and its system offer.
// Knows paths by name and the functions each brings; every path gives the same bits, so the choice is one of speed.
#pragma once
#include <cstdint>

#include "attention_tile.h"
#include "matmul.h"

namespace es {

enum Level : int32_t { kAvx2 = 0, kAvx512 = 1 };

struct Path {
    const char* name;
    // Products are handed out in units: a tile, or as many as the path takes together.
    int64_t (*units)(const Part& part);
    // Unit `unit` of a part by `count` rows; quantised parts read `q`, the others `x`.
    void (*product)(const Part& part, int64_t unit, const QuantRows& q, const FloatRows& x, int64_t count, const Target& to,
                    Panel& panel);
    // See attention_tile.h.
    decltype(&es::multiply_keys) multiply_keys;
    decltype(&es::add_values) add_values;
};

const Path& chosen_path();

}  // namespace es

extern "C" {
const char* es_level_name(void);
// For tests: take another path from now on; no step may be running. Returns the level taken: the one asked for, or
// the highest the processor can run.
int32_t es_choose(int32_t level);
}
