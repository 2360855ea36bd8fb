// The 512-bit intrinsics our AVX-512 files use, for processors that have none of them: SIMDe's, and five it lacks.
// Knows nothing of kernels. Each is exact, or rounds once as the instruction does, so results compare bit for bit.
#pragma once
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

// Not inlined: there are hundreds of calls, and it is long.
__attribute__((noinline)) inline __m512i es_emulated_dpbusd(__m512i sum, __m512i weights, __m512i rows) {
    return simde_mm512_dpbusd_epi32(sum, weights, rows);
}
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 es_emulated_dpbusd

inline __m512 es_emulated_join(__m256 low, __m256 high) {
    float both[16];
    _mm256_storeu_ps(both, low);
    _mm256_storeu_ps(both + 8, high);
    return _mm512_loadu_ps(both);
}

inline __m512i es_emulated_join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

inline __m256i es_emulated_half(__m512i v, int high) {
    return high ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v);
}

#define _mm512_cvtph_ps es_emulated_cvtph_ps
inline __m512 _mm512_cvtph_ps(__m256i v) {
    return es_emulated_join(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}

#define _mm512_cvtepi32_ps es_emulated_cvtepi32_ps
inline __m512 _mm512_cvtepi32_ps(__m512i v) {
    return es_emulated_join(_mm256_cvtepi32_ps(es_emulated_half(v, 0)), _mm256_cvtepi32_ps(es_emulated_half(v, 1)));
}

#define _mm512_cvtepu16_epi32 es_emulated_cvtepu16_epi32
inline __m512i _mm512_cvtepu16_epi32(__m256i v) {
    return es_emulated_join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}

#define _mm512_maskz_loadu_ps es_emulated_maskz_loadu_ps
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
    float lanes[16] = {};
    for (int i = 0; i < 16; ++i) {
        if (mask >> i & 1) lanes[i] = from[i];
    }
    return _mm512_loadu_ps(lanes);
}

#define _mm512_mask_storeu_ps es_emulated_mask_storeu_ps
inline void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 v) {
    float lanes[16];
    _mm512_storeu_ps(lanes, v);
    for (int i = 0; i < 16; ++i) {
        if (mask >> i & 1) to[i] = lanes[i];
    }
}
