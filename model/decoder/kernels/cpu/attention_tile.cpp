// See attention_tile.h.
#include "attention_tile.h"

#include <algorithm>

#include "attention.h"
#include "simd.h"

namespace es {
namespace {

template <bool half>
inline __m256 eight(const uint8_t* from, int64_t i) {  // elements i .. i+7
    if constexpr (half) return half8(reinterpret_cast<const uint16_t*>(from) + i);
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from) + i);
}

// Into the second-level cache: the first level has too few places for lines under way (measured at 8 streams of 8,000
// tokens: a step of 77 ms; 108 into the first level; 175 without asking).
inline void fetch(const uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T2); }

template <bool half, int R, int C>
void key_block(const uint8_t* const* k, int64_t head_dim, const float* q, float* scores) {
    __m256 sum[R][C];
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        ES_UNROLL
        for (int c = 0; c < C; ++c) sum[r][c] = _mm256_setzero_ps();
    }
    const uint8_t *first = k[0], *second = k[C - 1];
    for (int64_t d = 0; d < head_dim; ++d) {
        const __m256 keys[2] = {eight<half>(first, d * 8), eight<half>(second, d * 8)};
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

// A whole tile by up to three rows. Sixteen registers: the rows' entries, one vector of keys, twelve sums, which are
// enough not to wait for each other. Each sum has the order of key_block's.
template <bool half, int R>
void whole_tile_keys(const KeyTile& tile, int64_t head_dim, const float* q, float* scores) {
    constexpr int C = kTile / 8;
    __m256 sum[R][C];
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        ES_UNROLL
        for (int c = 0; c < C; ++c) sum[r][c] = _mm256_setzero_ps();
    }
    const uint8_t *k0 = tile.k[0], *k1 = tile.k[1], *k2 = tile.k[2], *k3 = tile.k[3];
    for (int64_t d = 0; d < head_dim; ++d) {
        fetch(tile.next_k[d % C] + d / C * (C * 8 * (half ? 2 : 4)));
        __m256 x[R];
        ES_UNROLL
        for (int r = 0; r < R; ++r) x[r] = _mm256_broadcast_ss(q + r * head_dim + d);
        const uint8_t* const columns[C] = {k0, k1, k2, k3};
        ES_UNROLL
        for (int c = 0; c < C; ++c) {
            const __m256 key = eight<half>(columns[c], d * 8);
            ES_UNROLL
            for (int r = 0; r < R; ++r) sum[r][c] = _mm256_fmadd_ps(key, x[r], sum[r][c]);
        }
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        ES_UNROLL
        for (int c = 0; c < C; ++c) _mm256_storeu_ps(scores + r * kTile + c * 8, sum[r][c]);
    }
}

template <bool half>
void few_rows_keys(const KeyTile& tile, int64_t head_dim, const float* q, int64_t rows, float* scores) {
    for (; rows >= 3; rows -= 3, q += 3 * head_dim, scores += 3 * kTile) whole_tile_keys<half, 3>(tile, head_dim, q, scores);
    if (rows == 2) whole_tile_keys<half, 2>(tile, head_dim, q, scores);
    if (rows == 1) whole_tile_keys<half, 1>(tile, head_dim, q, scores);
}

template <bool half, int C>
void key_columns(const uint8_t* const* k, int64_t head_dim, const float* q, int64_t rows, float* scores) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) key_block<half, 6, C>(k, head_dim, q + r * head_dim, scores + r * kTile);
    q += r * head_dim;
    scores += r * kTile;
    switch (rows - r) {
        case 5: return key_block<half, 5, C>(k, head_dim, q, scores);
        case 4: return key_block<half, 4, C>(k, head_dim, q, scores);
        case 3: return key_block<half, 3, C>(k, head_dim, q, scores);
        case 2: return key_block<half, 2, C>(k, head_dim, q, scores);
        case 1: return key_block<half, 1, C>(k, head_dim, q, scores);
        default: return;
    }
}

// One key's value, 8C columns, into R rows: what there is less of, rows or columns, is what waits in registers.
template <bool half, int R, int C>
inline void add_one_value(const uint8_t* v, const float* weights, __m256 (&sum)[R][C]) {
    if constexpr (R < C) {
        __m256 p[R];
        ES_UNROLL
        for (int r = 0; r < R; ++r) p[r] = _mm256_broadcast_ss(weights + r * kTile);
        ES_UNROLL
        for (int c = 0; c < C; ++c) {
            const __m256 value = eight<half>(v, c * 8);
            ES_UNROLL
            for (int r = 0; r < R; ++r) sum[r][c] = _mm256_fmadd_ps(p[r], value, sum[r][c]);
        }
    } else {
        __m256 value[C];
        ES_UNROLL
        for (int c = 0; c < C; ++c) value[c] = eight<half>(v, c * 8);
        ES_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m256 p = _mm256_broadcast_ss(weights + r * kTile);
            ES_UNROLL
            for (int c = 0; c < C; ++c) sum[r][c] = _mm256_fmadd_ps(p, value[c], sum[r][c]);
        }
    }
}

// Columns d .. d+8C-1 of R rows.
template <bool half, int R, int C>
void value_block(const KeyTile& tile, int64_t head_dim, int64_t d, const float* weights, const float* factors, int64_t from,
                 int64_t to, float* mixed) {
    __m256 sum[R][C];
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        const __m256 by = _mm256_set1_ps(factors[r]);
        ES_UNROLL
        for (int c = 0; c < C; ++c) sum[r][c] = _mm256_mul_ps(_mm256_loadu_ps(mixed + r * head_dim + d + c * 8), by);
    }
    for (int64_t j = from; j < to;) {
        const int64_t chunk = j / 8, end = std::min(to, (chunk + 1) * 8);
        const int64_t skip = j % 8 * head_dim + d;
        const uint8_t* v = tile.v[chunk] + skip * (half ? 2 : 4);
        const uint8_t* next = R <= 3 ? tile.next_v[chunk] + skip * (half ? 2 : 4) : nullptr;
        for (; j < end; ++j, v += head_dim * (half ? 2 : 4)) {
            if constexpr (R <= 3) {
                fetch(next);
                next += head_dim * (half ? 2 : 4);
            }
            add_one_value<half, R, C>(v, weights + j, sum);
        }
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        ES_UNROLL
        for (int c = 0; c < C; ++c) _mm256_storeu_ps(mixed + r * head_dim + d + c * 8, sum[r][c]);
    }
}

template <bool half, int R>
void value_rows(const KeyTile& tile, int64_t head_dim, const float* weights, const float* factors, int64_t from, int64_t to,
                float* mixed) {
    int64_t d = 0;
    if constexpr (R <= 3) {
        for (; d + 32 <= head_dim; d += 32) value_block<half, R, 4>(tile, head_dim, d, weights, factors, from, to, mixed);
    }
    for (; d + 16 <= head_dim; d += 16) value_block<half, R, 2>(tile, head_dim, d, weights, factors, from, to, mixed);
    for (; d < head_dim; d += 8) value_block<half, R, 1>(tile, head_dim, d, weights, factors, from, to, mixed);
}

template <bool half>
void all_values(const KeyTile& tile, int64_t head_dim, const float* weights, const float* factors, int64_t rows, int64_t from,
                int64_t to, float* mixed) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) {
        value_rows<half, 6>(tile, head_dim, weights + r * kTile, factors + r, from, to, mixed + r * head_dim);
    }
    for (; r + 3 <= rows; r += 3) {
        value_rows<half, 3>(tile, head_dim, weights + r * kTile, factors + r, from, to, mixed + r * head_dim);
    }
    for (; r < rows; ++r) {
        value_rows<half, 1>(tile, head_dim, weights + r * kTile, factors + r, from, to, mixed + r * head_dim);
    }
}

template <bool half>
void all_keys(const KeyTile& tile, int64_t head_dim, const float* q, int64_t rows, int64_t from, int64_t to, float* scores) {
    int64_t chunk = from;
    if (rows <= kFewRows && from == 0 && to == kTile / 8) return few_rows_keys<half>(tile, head_dim, q, rows, scores);
    for (; chunk + 2 <= to; chunk += 2) key_columns<half, 2>(tile.k + chunk, head_dim, q, rows, scores + chunk * 8);
    if (chunk < to) key_columns<half, 1>(tile.k + chunk, head_dim, q, rows, scores + chunk * 8);
}

inline __m256i lanes_within(int first, int lo, int hi) {  // keys first .. first+7 that lie in [lo, hi)
    const __m256i key = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), key), _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), key));
}

// `whole`: the row sees all keys of the tile, and nothing is to be masked.
template <bool whole>
float softmax(const ScoreRule& rule, int lo, int hi, float* p, float& top, float& sum) {
    const __m256 scale = _mm256_set1_ps(rule.scale), lowest = _mm256_set1_ps(-__builtin_inff());
    __m256 score[kTile / 8], largest = lowest;
    __m256i seen[kTile / 8] = {};
    ES_UNROLL
    for (int c = 0; c < kTile / 8; ++c) {
        if constexpr (!whole) seen[c] = lanes_within(8 * c, lo, hi);
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(p + 8 * c), scale);
        if (rule.softcap != 0.0f) {
            const __m256 cap = _mm256_set1_ps(rule.softcap);
            s = _mm256_mul_ps(cap, tanh8(_mm256_div_ps(s, cap)));
        }
        if (rule.slope != 0.0f) {
            const __m256 key = _mm256_add_ps(_mm256_set1_ps(static_cast<float>(8 * c)), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
            s = _mm256_sub_ps(s, _mm256_mul_ps(_mm256_set1_ps(rule.slope), _mm256_sub_ps(_mm256_set1_ps(rule.from), key)));
        }
        score[c] = whole ? s : _mm256_blendv_ps(lowest, s, _mm256_castsi256_ps(seen[c]));
        largest = _mm256_max_ps(largest, score[c]);
    }
    const float now = std::max(top, max8(largest));
    const __m256 peak = _mm256_set1_ps(now);
    __m256 total[kTile / 8];
    ES_UNROLL
    for (int c = 0; c < kTile / 8; ++c) {
        total[c] = exp8(_mm256_sub_ps(score[c], peak));
        if constexpr (!whole) total[c] = _mm256_and_ps(total[c], _mm256_castsi256_ps(seen[c]));
        _mm256_storeu_ps(p + 8 * c, total[c]);
    }
    const float added = sum8(_mm256_add_ps(_mm256_add_ps(total[0], total[1]), _mm256_add_ps(total[2], total[3])));
    if (top == now) {  // mostly: e^0 is exactly 1
        sum += added;
        return 1.0f;
    }
    const float shrink = _mm256_cvtss_f32(exp8(_mm256_set1_ps(top - now)));  // of nothing (top -inf): tiny times zero
    sum = sum * shrink + added;
    top = now;
    return shrink;
}

}  // namespace

void convert_tile(KeyTile& tile, int64_t head_dim, int64_t from, int64_t to) {
    const int64_t size = 8 * head_dim;
    for (int64_t chunk = from; chunk < to; ++chunk) {
        float* keys = tile.floats + chunk * size;
        float* values = tile.floats + (kTile / 8 + chunk) * size;
        for (int64_t i = 0; i < size; i += 8) _mm256_storeu_ps(keys + i, eight<true>(tile.k[chunk], i));
        for (int64_t i = 0; i < size; i += 8) _mm256_storeu_ps(values + i, eight<true>(tile.v[chunk], i));
        tile.k[chunk] = reinterpret_cast<const uint8_t*>(keys);
        tile.v[chunk] = reinterpret_cast<const uint8_t*>(values);
    }
    tile.half = false;
}

void multiply_keys(const KeyTile& tile, int64_t head_dim, const float* q, int64_t rows, int64_t from, int64_t to,
                   float* scores) {
    (tile.half ? all_keys<true> : all_keys<false>)(tile, head_dim, q, rows, from, to, scores);
}

float softmax_row(const ScoreRule& rule, int lo, int hi, float* p, float& top, float& sum) {
    return (lo <= 0 && hi >= kTile ? softmax<true> : softmax<false>)(rule, lo, hi, p, top, sum);
}

void add_values(const KeyTile& tile, int64_t head_dim, const float* weights, const float* factors, int64_t rows,
                int64_t from, int64_t to, float* mixed) {
    (tile.half ? all_values<true> : all_values<false>)(tile, head_dim, weights, factors, rows, from, to, mixed);
}

}  // namespace es
