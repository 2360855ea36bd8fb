// The inner loops of attention on one tile of 32 keys: conversion, scores, softmax, values.
// Knows vectors of eight keys or eight channels; each row's arithmetic is the same whatever rows are beside it.
#pragma once
#include <cstdint>

namespace es {

constexpr int kTile = 32;
constexpr int64_t kMaxRows = 128;  // query rows of one unit
constexpr int64_t kFewRows = 6;    // up to here keys and values are converted as they are read

// 32 keys and values where they lie, eight by eight; float16, or float32 (in the cache, or converted in `floats`).
struct KeyTile {
    const uint8_t* k[kTile / 8];  // [head_dim][8] elements
    const uint8_t* v[kTile / 8];  // [8][head_dim] elements
    // The same of the tile after this one (anything readable where there is none): the products for few rows ask
    // memory for it as they go, because no prefetcher follows a block table.
    const uint8_t* next_k[kTile / 8];
    const uint8_t* next_v[kTile / 8];
    bool half;
    float* floats;                // room for 2 * 32 * head_dim
};

// How a product of query and key becomes a score. `from` is the query's (virtual) position minus the tile's first.
struct ScoreRule {
    float scale, softcap, slope, from;
};

// float16 to float32, once for many rows (for a few, the products convert as they read); chunks [from, to).
void convert_tile(KeyTile& tile, int64_t head_dim, int64_t from, int64_t to);

// scores [rows][32] for chunks [from, to) of eight keys.
void multiply_keys(const KeyTile& tile, int64_t head_dim, const float* q, int64_t rows, int64_t from, int64_t to,
                   float* scores);

// Products in `p` become weights relative to the new `top`; keys outside [lo, hi) weigh nothing.
// Returns the factor by which what was mixed before shrinks.
float softmax_row(const ScoreRule& rule, int lo, int hi, float* p, float& top, float& sum);

// mixed [rows][head_dim] = mixed * factor + weights [rows][32] times values of keys [from, to); others are not read.
void add_values(const KeyTile& tile, int64_t head_dim, const float* weights, const float* factors, int64_t rows,
                int64_t from, int64_t to, float* mixed);

}  // namespace es
