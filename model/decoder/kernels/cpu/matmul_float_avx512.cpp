// Float products for AVX-512: one fused multiply-add an input, in order, as on AVX2, sixteen outputs at a time.
// vdpbf16ps is not used: it wants rows rounded to bfloat16 and adds in pairs, so its bits would be others, and of
// worse rows.
#include "avx512.h"
#include "matmul_avx512.h"

ES_AVX512_BEGIN

namespace es::avx512 {
namespace {

constexpr int kRows = 16;  // of a block: enough that widening the weights costs little

template <int32_t format>
inline __m512 weights_at(const uint8_t* tile, int64_t k) {
    if constexpr (format == kFloat) return _mm512_loadu_ps(reinterpret_cast<const float*>(tile) + 16 * k);
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile) + k);
    if constexpr (format == kHalf) return _mm512_cvtph_ps(narrow);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

template <int32_t format, int R>
void rows_by_tile(const uint8_t* tile, int64_t in, const float* x, int64_t stride, float* values) {
    __m512 sum[R];
    ES_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
    RowWalk<float, R> at(x, stride);
    for (int64_t k = 0; k < in; ++k, at.advance(1)) {
        const __m512 w = weights_at<format>(tile, k);
        ES_UNROLL
        for (int r = 0; r < R; ++r) sum[r] = _mm512_fmadd_ps(w, _mm512_set1_ps(*at[r]), sum[r]);
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(values + 16 * r, sum[r]);
}

// A block of up to `count` rows; returns how many.
template <int32_t format>
int64_t some_rows(const uint8_t* tile, int64_t in, const float* x, int64_t stride, int64_t count, float* values) {
    if (count >= kRows) return rows_by_tile<format, kRows>(tile, in, x, stride, values), kRows;
    if (count >= 8) return rows_by_tile<format, 8>(tile, in, x, stride, values), 8;
    if (count >= 4) return rows_by_tile<format, 4>(tile, in, x, stride, values), 4;
    switch (count) {
        case 3: return rows_by_tile<format, 3>(tile, in, x, stride, values), 3;
        case 2: return rows_by_tile<format, 2>(tile, in, x, stride, values), 2;
        default: return rows_by_tile<format, 1>(tile, in, x, stride, values), 1;
    }
}

template <int32_t format>
void all_rows(const Part& part, int64_t tile, const FloatRows& rows, int64_t count, const Target& to) {
    const uint8_t* weights = part.weight + tile * tile_bytes(part.format, part.in);
    float values[16 * kRows];
    for (int64_t row = 0; row < count;) {
        const int64_t now = some_rows<format>(weights, part.in, rows.x + row * rows.stride, rows.stride, count - row, values);
        finish_tile(part, tile, values, row, now, to);
        row += now;
    }
}

}  // namespace

void float_unit(const Part& part, int64_t unit, const FloatRows& rows, int64_t count, const Target& to) {
    switch (part.format) {
        case kFloat: return all_rows<kFloat>(part, unit, rows, count, to);
        case kHalf: return all_rows<kHalf>(part, unit, rows, count, to);
        default: return all_rows<kBfloat>(part, unit, rows, count, to);
    }
}

}  // namespace es::avx512

ES_AVX512_END
