// What the AVX-512 files stand on. Only functions between ES_AVX512_BEGIN and ES_AVX512_END are compiled for such
// processors: headers come before, so that no inline function of theirs reaches the linker in a form that faults
// elsewhere. Whoever calls one has asked has_avx512.
// The tests name a header as ES_EMULATED, which makes the 512-bit intrinsics of narrower ones: then the same source
// runs on a processor without them.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 takes the deliberately undefined operands in its own header for a mistake (gcc bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "simd.h"

#if defined(ES_EMULATED)
#include ES_EMULATED
#define ES_AVX512_BEGIN
#define ES_AVX512_END
#elif defined(__clang__)
#define ES_AVX512_BEGIN \
    _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl,avx512vnni\"))), apply_to = function)")
#define ES_AVX512_END _Pragma("clang attribute pop")
#else
#define ES_AVX512_BEGIN _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,avx512vl,avx512vnni\")")
#define ES_AVX512_END _Pragma("GCC pop_options")
#endif

namespace es {

// Where `R` rows stand in their walk along the inputs. Three rows share a pointer, since base, base + stride and
// base + 2 stride are each one operand of an instruction; with a pointer a row gcc keeps half of them in memory.
template <class T, int R>
struct RowWalk {
    static constexpr int kPointers = (R + 2) / 3;
    const T* at[kPointers];
    int64_t stride;

    RowWalk(const T* first, int64_t stride) : stride(stride) {
        ES_UNROLL
        for (int p = 0; p < kPointers; ++p) at[p] = first + 3 * p * stride;
    }
    const T* operator[](int row) const { return at[row / 3] + row % 3 * stride; }
    void advance(int64_t by) {
        ES_UNROLL
        for (int p = 0; p < kPointers; ++p) at[p] += by;
    }
};

// The processor has what ES_AVX512_BEGIN names, and the system keeps its registers (the builtin asks for both).
inline bool has_avx512() {
#if defined(ES_EMULATED)
    return true;
#else
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
}

}  // namespace es
