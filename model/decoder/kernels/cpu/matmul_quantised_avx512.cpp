// Quantised products for AVX-512 VNNI. vpdpbusd multiplies unsigned weights by signed rows and adds four products to
// a 32-bit sum, exactly; so a group's dot is the integer the AVX2 path finds, and the same float operations in the
// same order on it give the same bits. Tiles are read as they lie in memory, for one row and for many: a tile of
// nibbles is sixteen outputs wide, one register; of bytes two tiles fill one.
#include "avx512.h"
#include "matmul_avx512.h"

ES_AVX512_BEGIN

namespace es::avx512 {
namespace {

constexpr int kRows = 8;  // of a block: eight dots, eight sums, and six registers for weights and scales

inline __m512i load64(const uint8_t* p) { return _mm512_loadu_si512(p); }

inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

inline __m512i broadcast4(const int8_t* p) {
    int32_t quad;
    std::memcpy(&quad, p, 4);
    return _mm512_set1_epi32(quad);
}

// The dot is below 2^21, so it is exact as a float, and its product with the steps is rounded once, as AVX2's conversion
// of the whole number rounds it.
inline __m512 step(__m512 sum, __m512i dot, __m512 d, __m512 m, const float* meta) {
    sum = _mm512_fmadd_ps(m, _mm512_set1_ps(meta[1]), sum);
    return _mm512_fmadd_ps(d, _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(meta[2])), sum);
}

// One group of sixteen outputs: the weights of two quads of inputs at a time, and the scales.
struct Nibbles {
    static constexpr int64_t kBytes = 320;
    const uint8_t* at;

    void advance() { at += kBytes; }
    void prefetch(int64_t distance) const {
        ES_UNROLL
        for (int line = 0; line < 5; ++line) _mm_prefetch(reinterpret_cast<const char*>(at) + distance + 64 * line, _MM_HINT_T0);
    }
    // Input quads i and i + 4.
    void quads(int i, __m512i& low, __m512i& high) const {
        const __m512i mask = _mm512_set1_epi8(15), both = load64(at + 64 * i);
        low = _mm512_and_si512(both, mask);
        high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
    __m512 scale() const { return _mm512_cvtph_ps(load32(at + 256)); }
    __m512 minimum(__m512) const { return _mm512_cvtph_ps(load32(at + 288)); }
};

// The same of two tiles of eight outputs.
template <bool with_minimum>
struct Bytes {
    static constexpr int64_t kBytes = with_minimum ? 288 : 272;
    const uint8_t *at, *second;

    void advance() { at += kBytes, second += kBytes; }
    void prefetch(int64_t distance) const {
        ES_UNROLL
        for (int line = 0; line < 5; ++line) {
            _mm_prefetch(reinterpret_cast<const char*>(at) + distance + 64 * line, _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(second) + distance + 64 * line, _MM_HINT_T0);
        }
    }
    __m512i quad(int i) const {
        return _mm512_inserti64x4(_mm512_castsi256_si512(load32(at + 32 * i)), load32(second + 32 * i), 1);
    }
    void quads(int i, __m512i& low, __m512i& high) const { low = quad(i), high = quad(i + 4); }
    __m512 halves(int offset) const {
        return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(load16(at + offset)), load16(second + offset), 1));
    }
    __m512 scale() const { return halves(256); }
    __m512 minimum(__m512 d) const {
        if constexpr (with_minimum) return halves(272);
        return _mm512_mul_ps(d, _mm512_set1_ps(-128.0f));
    }
};

// values [R][16]. `ahead`: bytes to what comes next, fetched while this is computed; 0 for nothing.
template <class Weights, int R>
void rows_by_sixteen(Weights weights, int64_t groups, const int8_t* q, int64_t in, const float* meta, int64_t ahead,
                     float* values) {
    __m512 sum[R];
    ES_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
    RowWalk<int8_t, R> x(q, in);
    RowWalk<float, R> x_meta(meta, meta_floats(in));
    for (int64_t g = 0; g < groups; ++g, weights.advance(), x.advance(kGroup), x_meta.advance(3)) {
        if (ahead) weights.prefetch(ahead);
        __m512i dot[R];
        ES_UNROLL
        for (int r = 0; r < R; ++r) dot[r] = _mm512_setzero_si512();
        ES_UNROLL
        for (int i = 0; i < 4; ++i) {
            __m512i low, high;
            weights.quads(i, low, high);
            ES_UNROLL
            for (int r = 0; r < R; ++r) {
                dot[r] = _mm512_dpbusd_epi32(dot[r], low, broadcast4(x[r] + 4 * i));
                dot[r] = _mm512_dpbusd_epi32(dot[r], high, broadcast4(x[r] + 16 + 4 * i));
            }
        }
        const __m512 d = weights.scale(), m = weights.minimum(d);
        ES_UNROLL
        for (int r = 0; r < R; ++r) sum[r] = step(sum[r], dot[r], d, m, x_meta[r]);
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(values + 16 * r, _mm512_mul_ps(sum[r], _mm512_set1_ps(x_meta[r][0])));
}

template <class Weights>
void up_to_eight(Weights weights, int64_t groups, const int8_t* q, int64_t in, const float* meta, int64_t ahead, int64_t count,
                 float* values) {
    switch (count) {
        case 1: return rows_by_sixteen<Weights, 1>(weights, groups, q, in, meta, ahead, values);
        case 2: return rows_by_sixteen<Weights, 2>(weights, groups, q, in, meta, ahead, values);
        case 3: return rows_by_sixteen<Weights, 3>(weights, groups, q, in, meta, ahead, values);
        case 4: return rows_by_sixteen<Weights, 4>(weights, groups, q, in, meta, ahead, values);
        case 5: return rows_by_sixteen<Weights, 5>(weights, groups, q, in, meta, ahead, values);
        case 6: return rows_by_sixteen<Weights, 6>(weights, groups, q, in, meta, ahead, values);
        case 7: return rows_by_sixteen<Weights, 7>(weights, groups, q, in, meta, ahead, values);
        default: return rows_by_sixteen<Weights, kRows>(weights, groups, q, in, meta, ahead, values);
    }
}

// A block of rows of two tiles of bytes, [rows][16], to the target: the second tile may not exist.
void finish_pair(const Part& part, int64_t first, const float* values, int64_t row, int64_t count, const Target& to) {
    float apart[2][kRows * 8];
    for (int64_t r = 0; r < count; ++r) {
        std::memcpy(apart[0] + 8 * r, values + 16 * r, 32);
        std::memcpy(apart[1] + 8 * r, values + 16 * r + 8, 32);
    }
    finish_tile(part, first, apart[0], row, count, to);
    if (first + 1 < tiles(part.format, part.out)) finish_tile(part, first + 1, apart[1], row, count, to);
}

template <class Weights>
void all_rows(const Part& part, int64_t tile, const Weights& weights, int64_t ahead, const QuantRows& rows, int64_t count,
              const Target& to) {
    const int64_t groups = part.in / kGroup;
    float values[16 * kRows];
    for (int64_t row = 0; row < count; row += kRows) {
        const int64_t now = count - row < kRows ? count - row : kRows;
        // A few rows go at the speed of memory, whose own prefetching does as well; later blocks find their weights near.
        const bool fetch = count > 4 && row == 0;
        up_to_eight(weights, groups, rows.q + row * part.in, part.in, rows.meta + row * meta_floats(part.in), fetch ? ahead : 0, now, values);
        if (part.format == kNibble) {
            finish_tile(part, tile, values, row, now, to);
        } else {
            finish_pair(part, tile, values, row, now, to);
        }
    }
}

}  // namespace

void quantised_unit(const Part& part, int64_t unit, const QuantRows& rows, int64_t count, const Target& to) {
    const int64_t bytes = tile_bytes(part.format, part.in);
    if (part.format == kNibble) return all_rows(part, unit, Nibbles{part.weight + unit * bytes}, bytes, rows, count, to);
    const int64_t tile = 2 * unit;
    const uint8_t* first = part.weight + tile * bytes;
    const uint8_t* second = tile + 1 < tiles(part.format, part.out) ? first + bytes : first;
    if (part.format == kByte) {
        all_rows(part, tile, Bytes<true>{first, second}, 2 * bytes, rows, count, to);
    } else {
        all_rows(part, tile, Bytes<false>{first, second}, 2 * bytes, rows, count, to);
    }
}

}  // namespace es::avx512

ES_AVX512_END
