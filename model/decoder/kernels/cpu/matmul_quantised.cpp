// Quantised products for AVX2: weights of 4 bits (or 8, as two nibbles) times int8 rows, in groups of 32.
//
// vpmaddubsw multiplies unsigned weights by signed rows and adds pairs: a nibble times a row entry summed over a
// whole group stays below 15 * 127 * 2 * 8 = 30480 in a 16-bit lane, so a group needs one widening, not eight.
// A byte is 16 * high + low: two nibble sums, joined by the widening's factors 16 and 1.
// A group of a row is scaled by a whole number of steps (rows.h), and the widening multiplies by it for nothing:
// products are what the vector pipes have least of. Per group, output and row:
//   sum += m * (steps * sum of q);  sum += d * (steps * dot);  and at the end the row's own scale.
#include "matmul.h"
#include "simd.h"

namespace es {
namespace {

// In a panel a group is 8 quads of inputs, each two vectors of 32 bytes: outputs 0-7 and 8-15 (nibbles), or the
// low and high nibbles of 8 outputs (bytes); its scales are d and m of the outputs as float32.
constexpr int kPanelGroup = 512;

inline void unpack_nibbles(const uint8_t* tile, int64_t groups, uint8_t* w, float* scales) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g, tile += 320, w += kPanelGroup, scales += 32) {
        for (int i = 0; i < 8; ++i) {
            __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32 * i));
            _mm256_store_si256(reinterpret_cast<__m256i*>(w + 32 * i), _mm256_and_si256(v, mask));
            _mm256_store_si256(reinterpret_cast<__m256i*>(w + 256 + 32 * i), _mm256_and_si256(_mm256_srli_epi16(v, 4), mask));
        }
        for (int i = 0; i < 4; ++i) {
            _mm256_store_ps(scales + 8 * i, half8(reinterpret_cast<const uint16_t*>(tile + 256) + 8 * i));
        }
    }
}

inline __m256 byte_minimum(const uint8_t* group, bool with_minimum, __m256 d) {
    if (with_minimum) return half8(reinterpret_cast<const uint16_t*>(group + 272));
    return _mm256_mul_ps(d, _mm256_set1_ps(-128.0f));
}

inline void unpack_bytes(const uint8_t* tile, int64_t groups, bool with_minimum, uint8_t* w, float* scales) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g, tile += with_minimum ? 288 : 272, w += kPanelGroup, scales += 16) {
        for (int i = 0; i < 8; ++i) {
            __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32 * i));
            _mm256_store_si256(reinterpret_cast<__m256i*>(w + 64 * i), _mm256_and_si256(v, mask));
            _mm256_store_si256(reinterpret_cast<__m256i*>(w + 64 * i + 32), _mm256_and_si256(_mm256_srli_epi16(v, 4), mask));
        }
        const __m256 d = half8(reinterpret_cast<const uint16_t*>(tile + 256));
        _mm256_store_ps(scales, d);
        _mm256_store_ps(scales + 8, byte_minimum(tile, with_minimum, d));
    }
}

inline void fetch(const uint8_t* group) {
    ES_UNROLL
    for (int line = 0; line < 5; ++line) _mm_prefetch(reinterpret_cast<const char*>(group) + 64 * line, _MM_HINT_T0);
}

inline __m256i steps_of(const float* meta) { return _mm256_castps_si256(_mm256_broadcast_ss(meta)); }  // in both halves of a lane

// `dot` is multiplied by the steps already.
inline __m256 step(__m256 sum, __m256i dot, __m256 d, __m256 m, __m256 steps_sum) {
    sum = _mm256_fmadd_ps(m, steps_sum, sum);
    return _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(dot), sum);
}

inline __m256i join(__m256i low, __m256i high, __m256i steps) {
    return _mm256_add_epi32(_mm256_madd_epi16(low, steps), _mm256_madd_epi16(high, _mm256_slli_epi16(steps, 4)));
}

// Four rows by one group of a panel, in registers: eight 16-bit sums, written out because gcc spills them.
#define ES_FIRST(Q, ROW, A, B)                        \
    "vpbroadcastd " #Q "*4" ROW ",%[x]\n"             \
    "vpmaddubsw %[x],%[w0],%[" A "]\n"                \
    "vpmaddubsw %[x],%[w1],%[" B "]\n"
#define ES_NEXT(Q, ROW, A, B)                         \
    "vpbroadcastd " #Q "*4" ROW ",%[x]\n"             \
    "vpmaddubsw %[x],%[w0],%[t]\n"                    \
    "vpaddw %[t],%[" A "],%[" A "]\n"                 \
    "vpmaddubsw %[x],%[w1],%[x]\n"                    \
    "vpaddw %[x],%[" B "],%[" B "]\n"
#define ES_QUAD(Q, DO)                                \
    "vmovdqa " #Q "*64(%[w]),%[w0]\n"                 \
    "vmovdqa " #Q "*64+32(%[w]),%[w1]\n"              \
    DO(Q, "(%[row])", "a0", "b0")                     \
    DO(Q, "(%[row],%[ld])", "a1", "b1")               \
    DO(Q, "(%[row],%[ld],2)", "a2", "b2")             \
    DO(Q, "(%[row3])", "a3", "b3")

inline void group_of_four(const uint8_t* w, const int8_t* row, int64_t ld, __m256i a[4], __m256i b[4]) {
    __m256i w0, w1, x, t;
    asm(ES_QUAD(0, ES_FIRST) ES_QUAD(1, ES_NEXT) ES_QUAD(2, ES_NEXT) ES_QUAD(3, ES_NEXT)
        ES_QUAD(4, ES_NEXT) ES_QUAD(5, ES_NEXT) ES_QUAD(6, ES_NEXT) ES_QUAD(7, ES_NEXT)
        : [a0] "=&x"(a[0]), [a1] "=&x"(a[1]), [a2] "=&x"(a[2]), [a3] "=&x"(a[3]), [b0] "=&x"(b[0]), [b1] "=&x"(b[1]),
          [b2] "=&x"(b[2]), [b3] "=&x"(b[3]), [w0] "=&x"(w0), [w1] "=&x"(w1), [x] "=&x"(x), [t] "=&x"(t)
        : [w] "r"(w), [row] "r"(row), [row3] "r"(row + 3 * ld), [ld] "r"(ld)
        : "memory");
}

// `ahead` is the packed tile that comes next: it is fetched while this one is computed, a group at a time.
void four_rows_nibbles(const uint8_t* w, const float* s, int64_t groups, const int8_t* q, int64_t in, const float* meta,
                       const uint8_t* ahead, float* values) {
    const int64_t ld = meta_floats(in);
    alignas(32) float sum[8][8] = {};
    for (int64_t g = 0; g < groups; ++g, w += kPanelGroup, s += 32, q += kGroup, meta += 3) {
        if (ahead) fetch(ahead + g * 320);
        __m256i a[4], b[4];
        group_of_four(w, q, in, a, b);
        const __m256 d0 = _mm256_load_ps(s), d1 = _mm256_load_ps(s + 8), m0 = _mm256_load_ps(s + 16), m1 = _mm256_load_ps(s + 24);
        ES_UNROLL
        for (int r = 0; r < 4; ++r) {
            const __m256i steps = steps_of(meta + r * ld);
            const __m256 sx = _mm256_broadcast_ss(meta + r * ld + 1);
            _mm256_store_ps(sum[2 * r], step(_mm256_load_ps(sum[2 * r]), _mm256_madd_epi16(a[r], steps), d0, m0, sx));
            _mm256_store_ps(sum[2 * r + 1], step(_mm256_load_ps(sum[2 * r + 1]), _mm256_madd_epi16(b[r], steps), d1, m1, sx));
        }
    }
    ES_UNROLL
    for (int i = 0; i < 8; ++i) {  // meta stands at the rows' scales now
        _mm256_storeu_ps(values + 8 * i, _mm256_mul_ps(_mm256_load_ps(sum[i]), _mm256_broadcast_ss(meta + i / 2 * ld)));
    }
}

void four_rows_bytes(const uint8_t* w, const float* s, int64_t groups, const int8_t* q, int64_t in, const float* meta,
                     const uint8_t* ahead, float* values) {
    const int64_t ld = meta_floats(in);
    __m256 sum[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t g = 0; g < groups; ++g, w += kPanelGroup, s += 16, q += kGroup, meta += 3) {
        if (ahead) fetch(ahead + g * 288);
        __m256i a[4], b[4];
        group_of_four(w, q, in, a, b);
        const __m256 d = _mm256_load_ps(s), m = _mm256_load_ps(s + 8);
        ES_UNROLL
        for (int r = 0; r < 4; ++r) {
            sum[r] = step(sum[r], join(a[r], b[r], steps_of(meta + r * ld)), d, m, _mm256_broadcast_ss(meta + r * ld + 1));
        }
    }
    ES_UNROLL
    for (int r = 0; r < 4; ++r) _mm256_storeu_ps(values + 8 * r, _mm256_mul_ps(sum[r], _mm256_broadcast_ss(meta + r * ld)));
}

inline __m256i broadcast4(const int8_t* p) {
    int32_t quad;
    std::memcpy(&quad, p, 4);
    return _mm256_set1_epi32(quad);
}

// One or two rows straight from the packed tile: this is what a single stream runs, at the speed of memory.
template <int R>
void few_rows_nibbles(const uint8_t* tile, int64_t groups, const int8_t* q, int64_t in, const float* meta, float* values) {
    const __m256i mask = _mm256_set1_epi8(15);
    const int64_t ld = meta_floats(in);
    __m256 sum[R][2];
    ES_UNROLL
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, tile += 320, q += kGroup, meta += 3) {
        __m256i dot[R][2];
        ES_UNROLL
        for (int r = 0; r < R; ++r) dot[r][0] = dot[r][1] = _mm256_setzero_si256();
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) {
                __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 64 * i + 32 * half));
                const __m256i low = _mm256_and_si256(v, mask), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
                ES_UNROLL
                for (int r = 0; r < R; ++r) {
                    __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(low, broadcast4(q + r * in + 4 * i)),
                                                    _mm256_maddubs_epi16(high, broadcast4(q + r * in + 16 + 4 * i)));
                    dot[r][half] = _mm256_add_epi16(dot[r][half], both);
                    pin(dot[r][half]);
                }
            }
        }
        const auto* s = reinterpret_cast<const uint16_t*>(tile + 256);
        ES_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m256i steps = steps_of(meta + r * ld);
            const __m256 sx = _mm256_broadcast_ss(meta + r * ld + 1);
            sum[r][0] = step(sum[r][0], _mm256_madd_epi16(dot[r][0], steps), half8(s), half8(s + 16), sx);
            sum[r][1] = step(sum[r][1], _mm256_madd_epi16(dot[r][1], steps), half8(s + 8), half8(s + 24), sx);
        }
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) {
        const __m256 scale = _mm256_broadcast_ss(meta + r * ld);
        _mm256_storeu_ps(values + 16 * r, _mm256_mul_ps(sum[r][0], scale));
        _mm256_storeu_ps(values + 16 * r + 8, _mm256_mul_ps(sum[r][1], scale));
    }
}

template <int R>
void few_rows_bytes(const uint8_t* tile, int64_t groups, bool with_minimum, const int8_t* q, int64_t in, const float* meta,
                    float* values) {
    const __m256i mask = _mm256_set1_epi8(15);
    const int64_t ld = meta_floats(in);
    __m256 sum[R];
    ES_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, tile += with_minimum ? 288 : 272, q += kGroup, meta += 3) {
        __m256i low[R], high[R];
        ES_UNROLL
        for (int r = 0; r < R; ++r) low[r] = high[r] = _mm256_setzero_si256();
        for (int i = 0; i < 8; ++i) {
            __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32 * i));
            const __m256i l = _mm256_and_si256(v, mask), h = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
            ES_UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256i x = broadcast4(q + r * in + 4 * i);
                low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(l, x));
                high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(h, x));
                pin(low[r]);
                pin(high[r]);
            }
        }
        const __m256 d = half8(reinterpret_cast<const uint16_t*>(tile + 256));
        const __m256 m = byte_minimum(tile, with_minimum, d);
        ES_UNROLL
        for (int r = 0; r < R; ++r) {
            sum[r] = step(sum[r], join(low[r], high[r], steps_of(meta + r * ld)), d, m, _mm256_broadcast_ss(meta + r * ld + 1));
        }
    }
    ES_UNROLL
    for (int r = 0; r < R; ++r) _mm256_storeu_ps(values + 8 * r, _mm256_mul_ps(sum[r], _mm256_broadcast_ss(meta + r * ld)));
}

template <int R>
void few_rows(const Part& part, const uint8_t* tile, const QuantRows& rows, float* values) {
    const int64_t groups = part.in / kGroup;
    if (part.format == kNibble) {
        few_rows_nibbles<R>(tile, groups, rows.q, part.in, rows.meta, values);
    } else {
        few_rows_bytes<R>(tile, groups, part.format == kByte, rows.q, part.in, rows.meta, values);
    }
}

}  // namespace

void quantised_tile(const Part& part, int64_t tile, const QuantRows& rows, int64_t count, const Target& to, Panel& panel) {
    const int64_t groups = part.in / kGroup;
    const uint8_t* packed = part.weight + tile * tile_bytes(part.format, part.in);
    alignas(32) float values[64];
    if (count <= 4) {
        switch (count) {
            case 1: few_rows<1>(part, packed, rows, values); break;
            case 2: few_rows<2>(part, packed, rows, values); break;
            case 3: few_rows<3>(part, packed, rows, values); break;
            default: few_rows<4>(part, packed, rows, values);
        }
        finish_tile(part, tile, values, 0, count, to);
        return;
    }
    const bool nibbles = part.format == kNibble;
    const uint8_t* next = packed + tile_bytes(part.format, part.in);
    float* scales = panel.at_least(groups * (kPanelGroup / 4 + 32));
    auto* w = reinterpret_cast<uint8_t*>(scales + groups * 32);
    if (nibbles) {
        unpack_nibbles(packed, groups, w, scales);
    } else {
        unpack_bytes(packed, groups, part.format == kByte, w, scales);
    }
    for (int64_t row = 0; row < count; row += 4) {
        (nibbles ? four_rows_nibbles : four_rows_bytes)(w, scales, groups, rows.q + row * part.in, part.in,
                                                        rows.meta + row * meta_floats(part.in), row == 0 ? next : nullptr, values);
        finish_tile(part, tile, values, row, count - row < 4 ? count - row : 4, to);
    }
}

}  // namespace es
