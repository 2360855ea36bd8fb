// See attention_tile_avx512.h. Sixteen rows by sixteen keys, or by sixteen channels, at a time; each sum runs in the
// order of attention_tile.cpp.
#include "attention_tile_avx512.h"

#include "avx512.h"

ES_AVX512_BEGIN

namespace es::avx512 {
namespace {

const float* floats(const uint8_t* p) { return reinterpret_cast<const float*>(p); }

// Keys of two chunks of eight, which may be the same one.
template <int R>
void key_rows(const float* first, const float* second, int64_t head_dim, const float* q, bool both, float* scores) {
    __m512 sum[R];
    ES_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
    RowWalk<float, R> x(q, head_dim);
    for (int64_t d = 0; d < head_dim; ++d, first += 8, second += 8, x.advance(1)) {
        const __m512d low = _mm512_castpd256_pd512(_mm256_castps_pd(_mm256_loadu_ps(first)));
        const __m512 keys = _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(_mm256_loadu_ps(second)), 1));
        ES_UNROLL
        for (int r = 0; r < R; ++r) sum[r] = _mm512_fmadd_ps(keys, _mm512_set1_ps(*x[r]), sum[r]);
    }
    const __mmask16 stored = both ? 0xffff : 0xff;
    ES_UNROLL
    for (int r = 0; r < R; ++r) _mm512_mask_storeu_ps(scores + r * kTile, stored, sum[r]);
}

// Channels named by `mask` of R rows.
template <int R>
void value_rows(const uint8_t* const* v, int64_t head_dim, __mmask16 mask, const float* weights, const float* factors,
                int64_t from, int64_t to, float* mixed, int64_t channel) {
    mixed += channel;
    __m512 sum[R];
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, mixed + r * head_dim), _mm512_set1_ps(factors[r]));
    }
    RowWalk<float, R> weight(weights + from, kTile);
    for (int64_t j = from; j < to; ++j, weight.advance(1)) {
        const __m512 value = _mm512_maskz_loadu_ps(mask, floats(v[j >> 3]) + (j & 7) * head_dim + channel);
        ES_UNROLL
        for (int r = 0; r < R; ++r) sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(*weight[r]), value, sum[r]);
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) _mm512_mask_storeu_ps(mixed + r * head_dim, mask, sum[r]);
}

// body(row, Count of how many) over all rows, sixteen at a time and the rest in powers of two.
template <int R>
struct Count {
    static constexpr int value = R;
};

template <class F>
void by_sixteen(int64_t rows, F&& body) {
    int64_t r = 0;
    for (; rows - r >= 16; r += 16) body(r, Count<16>{});
    if (rows & 8) body(r, Count<8>{}), r += 8;
    if (rows & 4) body(r, Count<4>{}), r += 4;
    if (rows & 2) body(r, Count<2>{}), r += 2;
    if (rows & 1) body(r, Count<1>{});
}

}  // namespace

void multiply_keys(const KeyTile& tile, int64_t head_dim, const float* q, int64_t rows, int64_t from, int64_t to,
                   float* scores) {
    if (tile.half || rows <= kFewRows) return es::multiply_keys(tile, head_dim, q, rows, from, to, scores);
    for (int64_t chunk = from; chunk < to; chunk += 2) {
        const bool both = chunk + 1 < to;
        const float *first = floats(tile.k[chunk]), *second = both ? floats(tile.k[chunk + 1]) : first;
        by_sixteen(rows, [&](int64_t r, auto count) {
            key_rows<count.value>(first, second, head_dim, q + r * head_dim, both, scores + r * kTile + chunk * 8);
        });
    }
}

void add_values(const KeyTile& tile, int64_t head_dim, const float* weights, const float* factors, int64_t rows,
                int64_t from, int64_t to, float* mixed) {
    if (tile.half || rows <= kFewRows) return es::add_values(tile, head_dim, weights, factors, rows, from, to, mixed);
    for (int64_t channel = 0; channel < head_dim; channel += 16) {
        const __mmask16 mask = channel + 16 <= head_dim ? 0xffff : 0xff;  // head_dim is a multiple of eight
        by_sixteen(rows, [&](int64_t r, auto count) {
            value_rows<count.value>(tile.v, head_dim, mask, weights + r * kTile, factors + r, from, to, mixed + r * head_dim, channel);
        });
    }
}

}  // namespace es::avx512

ES_AVX512_END
