// Products of float32 rows with float32, float16 or bfloat16 weights: one fused multiply-add an input, in order.
#include <algorithm>

#include "matmul.h"
#include "simd.h"

namespace es {
namespace {

// Two vectors of eight outputs at input k of a tile.
template <int32_t format>
inline void weights_at(const uint8_t* tile, int64_t k, __m256& first, __m256& second) {
    if constexpr (format == kFloat) {
        const float* w = reinterpret_cast<const float*>(tile) + 16 * k;
        first = _mm256_loadu_ps(w);
        second = _mm256_loadu_ps(w + 8);
    } else {
        const uint16_t* w = reinterpret_cast<const uint16_t*>(tile) + 16 * k;
        first = format == kHalf ? half8(w) : bf8(w);
        second = format == kHalf ? half8(w + 8) : bf8(w + 8);
    }
}

template <int32_t format, int R>
void rows_by_tile(const uint8_t* tile, int64_t in, const float* x, int64_t stride, float* values) {
    __m256 sum[R][2];
    ES_UNROLL
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < in; ++k) {
        __m256 w0, w1;
        weights_at<format>(tile, k, w0, w1);
        ES_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m256 v = _mm256_broadcast_ss(x + r * stride + k);
            sum[r][0] = _mm256_fmadd_ps(w0, v, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(w1, v, sum[r][1]);
        }
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        _mm256_storeu_ps(values + 16 * r, sum[r][0]);
        _mm256_storeu_ps(values + 16 * r + 8, sum[r][1]);
    }
}

template <int32_t format>
void up_to_six(const uint8_t* tile, int64_t in, const float* x, int64_t stride, int64_t count, float* values) {
    switch (count) {
        case 1: return rows_by_tile<format, 1>(tile, in, x, stride, values);
        case 2: return rows_by_tile<format, 2>(tile, in, x, stride, values);
        case 3: return rows_by_tile<format, 3>(tile, in, x, stride, values);
        case 4: return rows_by_tile<format, 4>(tile, in, x, stride, values);
        case 5: return rows_by_tile<format, 5>(tile, in, x, stride, values);
        default: return rows_by_tile<format, 6>(tile, in, x, stride, values);
    }
}

template <int32_t format>
void widen(const uint8_t* tile, int64_t in, float* to) {
    for (int64_t k = 0; k < in; ++k) {
        __m256 w0, w1;
        weights_at<format>(tile, k, w0, w1);
        _mm256_storeu_ps(to + 16 * k, w0);
        _mm256_storeu_ps(to + 16 * k + 8, w1);
    }
}

}  // namespace

float* Panel::at_least(int64_t floats) {
    if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(static_cast<size_t>(floats + 16));
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) & ~static_cast<uintptr_t>(63));
}

void float_tile(const Part& part, int64_t tile, const FloatRows& rows, int64_t count, const Target& to, Panel& panel) {
    const uint8_t* weights = part.weight + tile * tile_bytes(part.format, part.in);
    int32_t format = part.format;
    if (count > 6 && format != kFloat) {  // many rows: widen the tile once for all of them
        float* wide = panel.at_least(part.in * 16);
        format == kHalf ? widen<kHalf>(weights, part.in, wide) : widen<kBfloat>(weights, part.in, wide);
        weights = reinterpret_cast<const uint8_t*>(wide);
        format = kFloat;
    }
    alignas(32) float values[96];
    for (int64_t row = 0; row < count; row += 6) {
        const int64_t now = std::min<int64_t>(6, count - row);
        const float* x = rows.x + row * rows.stride;
        if (format == kFloat) {
            up_to_six<kFloat>(weights, part.in, x, rows.stride, now, values);
        } else if (format == kHalf) {
            up_to_six<kHalf>(weights, part.in, x, rows.stride, now, values);
        } else {
            up_to_six<kBfloat>(weights, part.in, x, rows.stride, now, values);
        }
        finish_tile(part, tile, values, row, now, to);
    }
}

void finish_tile(const Part& part, int64_t tile, const float* values, int64_t row, int64_t count, const Target& to) {
    const int width = tile_width(part.format);
    const int64_t first = tile * width;
    const int64_t valid = std::min<int64_t>(width, part.out - first);
    for (int64_t r = 0; r < count; ++r, values += width) {
        float* out = to.out + (row + r) * to.out_stride + part.column + first;
        const float* add = to.add ? to.add + (row + r) * to.add_stride + part.column + first : nullptr;
        for (int o = 0; o < valid; o += 8) {
            const Lanes lanes(valid - o);
            __m256 v = _mm256_loadu_ps(values + o);
            if (part.bias) v = _mm256_add_ps(v, lanes.load(part.bias + first + o));
            if (add) v = _mm256_add_ps(lanes.load(add + o), v);
            lanes.store(out + o, v);
        }
    }
}

}  // namespace es
