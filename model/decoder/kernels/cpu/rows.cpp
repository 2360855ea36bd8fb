// See rows.h. Sums run over eight lanes in the order of the row, whatever else is in the batch.
#include "rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "layout.h"
#include "simd.h"

namespace es {
namespace {

// body(i, lanes) for each vector of the row; the last one may be partial.
template <class F>
inline void for_lanes(int64_t width, F&& body) {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) body(i, Lanes{});
    if (i < width) body(i, Lanes(width - i));
}

inline __m256 load(const float* p, Lanes lanes) { return lanes.load(p); }

float row_sum(const float* x, int64_t width) {
    __m256 sum = _mm256_setzero_ps();
    for_lanes(width, [&](int64_t i, Lanes lanes) { sum = _mm256_add_ps(sum, load(x + i, lanes)); });
    return sum8(sum);
}

float squared_sum(const float* x, int64_t width, float mean) {
    __m256 sum = _mm256_setzero_ps();
    const __m256 middle = _mm256_set1_ps(mean);
    for_lanes(width, [&](int64_t i, Lanes lanes) {
        __m256 d = _mm256_and_ps(_mm256_sub_ps(load(x + i, lanes), middle), _mm256_castsi256_ps(lanes.mask));
        sum = _mm256_fmadd_ps(d, d, sum);
    });
    return sum8(sum);
}

inline __m256 sigmoid8(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

template <int32_t kind>
inline __m256 act8(__m256 x) {
    const __m256 half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
    if constexpr (kind == kRelu) {
        return _mm256_max_ps(_mm256_setzero_ps(), x);  // this order of operands keeps a NaN
    } else if constexpr (kind == kGelu) {
        return _mm256_mul_ps(_mm256_mul_ps(half, x), _mm256_add_ps(one, erf8(_mm256_mul_ps(x, _mm256_set1_ps(0.70710678f)))));
    } else if constexpr (kind == kGeluTanh) {
        __m256 cubic = _mm256_mul_ps(_mm256_mul_ps(x, x), _mm256_mul_ps(x, _mm256_set1_ps(0.044715f)));
        __m256 inner = _mm256_mul_ps(_mm256_set1_ps(0.79788456f), _mm256_add_ps(x, cubic));
        return _mm256_mul_ps(_mm256_mul_ps(half, x), _mm256_add_ps(one, tanh8(inner)));
    } else {
        return _mm256_mul_ps(x, sigmoid8(x));
    }
}

template <int32_t kind>
void activate_kind(bool gated, const float* x, int64_t width, float* out) {
    for_lanes(width, [&](int64_t i, Lanes lanes) {
        __m256 y = act8<kind>(load(x + i, lanes));
        if (gated) y = _mm256_mul_ps(y, load(x + width + i, lanes));
        lanes.store(out + i, y);
    });
}

constexpr float kMostSteps = 2047.0f;  // 16 * 2047 still fits the 16 bits by which products are widened

// The largest magnitude of 32 floats as bits: those of |NaN| are above infinity's, so neither gets lost.
int32_t magnitude_bits(const float* x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + 8 * i)), magnitude));
    }
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

// Rounds 32 floats to int8 in the order of the row, and gives their sum.
int quantise_group(const float* x, __m256 inverse, int8_t* q) {
    __m256i v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), inverse));
    __m256i low = _mm256_packs_epi32(v[0], v[1]), high = _mm256_packs_epi32(v[2], v[3]);
    __m256i bytes = _mm256_packs_epi16(low, high);  // 4-byte pieces lie as 0 2 4 6 | 1 3 5 7
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

}  // namespace

void norm_row(const Norm& norm, const float* x, int64_t width, float* out) {
    const float n = static_cast<float>(width);
    const float mean = norm.kind == kLayer ? row_sum(x, width) / n : 0.0f;
    const float factor = 1.0f / std::sqrt(squared_sum(x, width, mean) / n + norm.eps);
    const __m256 middle = _mm256_set1_ps(mean), by = _mm256_set1_ps(factor);
    for_lanes(width, [&](int64_t i, Lanes lanes) {
        __m256 y = _mm256_mul_ps(_mm256_sub_ps(load(x + i, lanes), middle), by);
        if (norm.weight) y = _mm256_mul_ps(y, load(norm.weight + i, lanes));
        if (norm.bias) y = _mm256_add_ps(y, load(norm.bias + i, lanes));
        lanes.store(out + i, y);
    });
}

void activate_row(int32_t activation, bool gated, const float* x, int64_t width, float* out) {
    switch (activation) {
        case kRelu: return activate_kind<kRelu>(gated, x, width, out);
        case kGelu: return activate_kind<kGelu>(gated, x, width, out);
        case kGeluTanh: return activate_kind<kGeluTanh>(gated, x, width, out);
        default: return activate_kind<kSilu>(gated, x, width, out);
    }
}

void quantise_row(const float* x, int64_t width, int8_t* q, float* meta) {
    const int64_t groups = width / kGroup;
    int32_t all = 0;
    for (int64_t g = 0; g < groups; ++g) {
        const int32_t top = magnitude_bits(x + g * kGroup);
        std::memcpy(meta + 3 * g, &top, 4);
        all = std::max(all, top);
    }
    const float top = std::bit_cast<float>(all);
    const bool usable = top > 1e-30f && top < std::numeric_limits<float>::infinity();
    const float scale = top / (127.0f * kMostSteps), to_steps = usable ? kMostSteps / top : 0.0f;
    for (int64_t g = 0; g < groups; ++g, meta += 3) {
        const float wanted = std::ceil(meta[0] * to_steps);
        const int32_t steps = usable ? static_cast<int32_t>(std::clamp(wanted, 1.0f, kMostSteps)) : 1;
        const float inverse = usable ? 1.0f / (scale * static_cast<float>(steps)) : 0.0f;
        const int sum = quantise_group(x + g * kGroup, _mm256_set1_ps(inverse), q + g * kGroup);
        const int32_t twice = steps << 16 | steps;
        std::memcpy(meta, &twice, 4);
        meta[1] = static_cast<float>(steps * sum);
        meta[2] = static_cast<float>(steps);
    }
    meta[0] = scale;
}

}  // namespace es
