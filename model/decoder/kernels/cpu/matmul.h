// Products of rows with one tile of a weight. Knows a tile at a time; who computes which tile is the tape's business.
// One algorithm and one order of sums for all row counts: 1 row gives the bits of 512.
#pragma once
#include <cstdint>
#include <vector>

#include "layout.h"

namespace es {

// Rows of one input, padded to a multiple of four rows (what stands in the padding does not matter).
struct QuantRows {
    const int8_t* q;    // [rows][in]
    const float* meta;  // [rows][meta_floats(in)], see rows.h
};

struct FloatRows {
    const float* x;
    int64_t stride;
};

// Where a tile's results go: out[row][column + o] = value + bias (+ add[row][column + o]; `add` may be `out`).
struct Target {
    float* out;
    int64_t out_stride;
    const float* add;
    int64_t add_stride;
};

// A thread's unpacked tile, grown to the widest input.
struct Panel {
    std::vector<float> memory;
    float* at_least(int64_t floats);
};

void quantised_tile(const Part& part, int64_t tile, const QuantRows& rows, int64_t count, const Target& to, Panel& panel);
void float_tile(const Part& part, int64_t tile, const FloatRows& rows, int64_t count, const Target& to, Panel& panel);

// values [rows][stride of 16 or 8 floats] → the target, for `count` rows of this tile starting at `row`.
void finish_tile(const Part& part, int64_t tile, const float* values, int64_t row, int64_t count, const Target& to);

}  // namespace es
