// Row-wise arithmetic: norms, activations, and rows quantised to int8 for the products.
// Knows one row at a time, so a row's bits never depend on its neighbours.
#pragma once
#include <cstdint>

namespace es {

enum NormKind : int32_t { kRms = 0, kLayer = 1 };
enum Activation : int32_t { kRelu = 0, kGelu = 1, kGeluTanh = 2, kSilu = 3 };

struct Norm {
    const float* weight;  // [width], or null
    const float* bias;    // [width], or null
    float eps;
    int32_t kind;
};

void norm_row(const Norm& norm, const float* x, int64_t width, float* out);

// out[i] = act(x[i]), or with `gated` act(x[i]) * x[width + i]; `width` is that of `out`.
void activate_row(int32_t activation, bool gated, const float* x, int64_t width, float* out);

// Groups of 32: q = round(x / (scale * steps)), where scale is the row's, max|x| / 127 / 2047, and steps the group's, a
// whole number from 1 to 2047, so that the largest entry of a group lands at 127 or just below. meta: for each group
// steps twice as 16 bits, steps * sum(q), steps; behind the last one scale. A NaN or an infinity makes the row's scale NaN
// or infinite, so that it shows in the result.
void quantise_row(const float* x, int64_t width, int8_t* q, float* meta);

}  // namespace es
