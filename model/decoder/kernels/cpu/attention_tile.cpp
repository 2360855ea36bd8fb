// See attention_tile.h.
#include "attention_tile.h"

#include <algorithm>

#include "attention.h"
#include "simd.h"

namespace es {
namespace {

template <int R, int C>
void key_block(const float* k, int64_t head_dim, const float* q, float* scores) {
    __m256 sum[R][C];
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        ES_UNROLL
        for (int c = 0; c < C; ++c) sum[r][c] = _mm256_setzero_ps();
    }
    for (int64_t d = 0; d < head_dim; ++d) {
        __m256 keys[C];
        ES_UNROLL
        for (int c = 0; c < C; ++c) keys[c] = _mm256_loadu_ps(k + (c * head_dim + d) * 8);
        ES_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m256 x = _mm256_broadcast_ss(q + r * head_dim + d);
            ES_UNROLL
            for (int c = 0; c < C; ++c) sum[r][c] = _mm256_fmadd_ps(keys[c], x, sum[r][c]);
        }
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        ES_UNROLL
        for (int c = 0; c < C; ++c) _mm256_storeu_ps(scores + r * kTile + c * 8, sum[r][c]);
    }
}

template <int C>
void key_columns(const float* k, int64_t head_dim, const float* q, int64_t rows, float* scores) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) key_block<6, C>(k, head_dim, q + r * head_dim, scores + r * kTile);
    q += r * head_dim;
    scores += r * kTile;
    switch (rows - r) {
        case 5: return key_block<5, C>(k, head_dim, q, scores);
        case 4: return key_block<4, C>(k, head_dim, q, scores);
        case 3: return key_block<3, C>(k, head_dim, q, scores);
        case 2: return key_block<2, C>(k, head_dim, q, scores);
        case 1: return key_block<1, C>(k, head_dim, q, scores);
        default: return;
    }
}

template <int R, int C>
void value_block(const float* v, int64_t head_dim, const float* weights, const float* factors, int64_t from, int64_t to,
                 float* mixed) {
    __m256 sum[R][C];
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        const __m256 by = _mm256_set1_ps(factors[r]);
        ES_UNROLL
        for (int c = 0; c < C; ++c) sum[r][c] = _mm256_mul_ps(_mm256_loadu_ps(mixed + r * head_dim + c * 8), by);
    }
    for (int64_t j = from; j < to; ++j) {
        __m256 value[C];
        ES_UNROLL
        for (int c = 0; c < C; ++c) value[c] = _mm256_loadu_ps(v + j * head_dim + c * 8);
        ES_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m256 p = _mm256_broadcast_ss(weights + r * kTile + j);
            ES_UNROLL
            for (int c = 0; c < C; ++c) sum[r][c] = _mm256_fmadd_ps(p, value[c], sum[r][c]);
        }
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        ES_UNROLL
        for (int c = 0; c < C; ++c) _mm256_storeu_ps(mixed + r * head_dim + c * 8, sum[r][c]);
    }
}

template <int R>
void value_rows(const float* v, int64_t head_dim, const float* weights, const float* factors, int64_t from, int64_t to,
                float* mixed) {
    int64_t d = 0;
    for (; d + 16 <= head_dim; d += 16) value_block<R, 2>(v + d, head_dim, weights, factors, from, to, mixed + d);
    for (; d < head_dim; d += 8) value_block<R, 1>(v + d, head_dim, weights, factors, from, to, mixed + d);
}

inline __m256i lanes_within(int first, int lo, int hi) {  // keys first .. first+7 that lie in [lo, hi)
    const __m256i key = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), key), _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), key));
}

}  // namespace

void clear_chunk(KeyTile& tile, int64_t head_dim, int64_t chunk) {
    std::fill_n(tile.k + chunk * 8 * head_dim, 8 * head_dim, 0.0f);
    std::fill_n(tile.v + chunk * 8 * head_dim, 8 * head_dim, 0.0f);
}

void convert_chunk(KeyTile& tile, int64_t head_dim, int64_t chunk, const uint8_t* k, const uint8_t* v, bool half,
                   int64_t from, int64_t to) {
    float* keys = tile.k + chunk * 8 * head_dim;
    float* values = tile.v + chunk * 8 * head_dim;
    const int64_t all = 8 * head_dim;
    if (half) {
        const auto* k16 = reinterpret_cast<const uint16_t*>(k);
        const auto* v16 = reinterpret_cast<const uint16_t*>(v);
        for (int64_t i = 0; i < all; i += 8) _mm256_storeu_ps(keys + i, half8(k16 + i));
        for (int64_t i = from * head_dim; i < to * head_dim; i += 8) _mm256_storeu_ps(values + i, half8(v16 + i));
    } else {
        std::memcpy(keys, k, static_cast<size_t>(all) * 4);
        std::memcpy(values + from * head_dim, v + from * head_dim * 4, static_cast<size_t>((to - from) * head_dim) * 4);
    }
    std::fill_n(values, from * head_dim, 0.0f);
    std::fill_n(values + to * head_dim, (8 - to) * head_dim, 0.0f);
}

void multiply_keys(const KeyTile& tile, int64_t head_dim, const float* q, int64_t rows, int64_t from, int64_t to,
                   float* scores) {
    int64_t chunk = from;
    for (; chunk + 2 <= to; chunk += 2) key_columns<2>(tile.k + chunk * 8 * head_dim, head_dim, q, rows, scores + chunk * 8);
    if (chunk < to) key_columns<1>(tile.k + chunk * 8 * head_dim, head_dim, q, rows, scores + chunk * 8);
}

float softmax_row(const ScoreRule& rule, int lo, int hi, float* p, float& top, float& sum) {
    const __m256 scale = _mm256_set1_ps(rule.scale), lowest = _mm256_set1_ps(-__builtin_inff());
    __m256 score[kTile / 8], largest = lowest;
    __m256i seen[kTile / 8];
    ES_UNROLL
    for (int c = 0; c < kTile / 8; ++c) {
        seen[c] = lanes_within(8 * c, lo, hi);
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(p + 8 * c), scale);
        if (rule.softcap != 0.0f) {
            const __m256 cap = _mm256_set1_ps(rule.softcap);
            s = _mm256_mul_ps(cap, tanh8(_mm256_div_ps(s, cap)));
        }
        if (rule.slope != 0.0f) {
            const __m256 key = _mm256_add_ps(_mm256_set1_ps(static_cast<float>(8 * c)), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
            s = _mm256_sub_ps(s, _mm256_mul_ps(_mm256_set1_ps(rule.slope), _mm256_sub_ps(_mm256_set1_ps(rule.from), key)));
        }
        score[c] = _mm256_blendv_ps(lowest, s, _mm256_castsi256_ps(seen[c]));
        largest = _mm256_max_ps(largest, score[c]);
    }
    const float now = std::max(top, max8(largest));
    const __m256 peak = _mm256_set1_ps(now);
    __m256 total[kTile / 8];
    ES_UNROLL
    for (int c = 0; c < kTile / 8; ++c) {
        total[c] = _mm256_and_ps(exp8(_mm256_sub_ps(score[c], peak)), _mm256_castsi256_ps(seen[c]));
        _mm256_storeu_ps(p + 8 * c, total[c]);
    }
    const float added = sum8(_mm256_add_ps(_mm256_add_ps(total[0], total[1]), _mm256_add_ps(total[2], total[3])));
    const float shrink = _mm256_cvtss_f32(exp8(_mm256_set1_ps(top - now)));  // of nothing (top -inf): tiny times zero
    sum = sum * shrink + added;
    top = now;
    return shrink;
}

void add_values(const KeyTile& tile, int64_t head_dim, const float* weights, const float* factors, int64_t rows,
                int64_t from, int64_t to, float* mixed) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) {
        value_rows<6>(tile.v, head_dim, weights + r * kTile, factors + r, from, to, mixed + r * head_dim);
    }
    for (; r + 3 <= rows; r += 3) {
        value_rows<3>(tile.v, head_dim, weights + r * kTile, factors + r, from, to, mixed + r * head_dim);
    }
    for (; r < rows; ++r) value_rows<1>(tile.v, head_dim, weights + r * kTile, factors + r, from, to, mixed + r * head_dim);
}

}  // namespace es
