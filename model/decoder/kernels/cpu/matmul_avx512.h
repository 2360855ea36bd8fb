// Products with AVX-512 registers: the AVX2 path's bits, sixteen outputs at a time. Needs has_avx512().
#pragma once
#include "matmul.h"

namespace es::avx512 {

// A unit is sixteen outputs: one tile, or two of bytes.
inline int64_t units(const Part& part) { return (part.out + 15) / 16; }

void quantised_unit(const Part& part, int64_t unit, const QuantRows& rows, int64_t count, const Target& to);
void float_unit(const Part& part, int64_t unit, const FloatRows& rows, int64_t count, const Target& to);

}  // namespace es::avx512
