// The two products of attention with AVX-512 registers, for many rows: the AVX2 path's bits. Needs has_avx512().
// A few rows go at the speed of memory and take the AVX2 functions of attention_tile.h.
#pragma once
#include "attention_tile.h"

namespace es::avx512 {

void multiply_keys(const KeyTile& tile, int64_t head_dim, const float* q, int64_t rows, int64_t from, int64_t to,
                   float* scores);
void add_values(const KeyTile& tile, int64_t head_dim, const float* weights, const float* factors, int64_t rows,
                int64_t from, int64_t to, float* mixed);

}  // namespace es::avx512
