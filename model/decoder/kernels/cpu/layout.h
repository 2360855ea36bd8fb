// How weights lie in memory: one form for all row counts, made once at load.
// Knows formats and sizes. A matrix [out, in] is cut into tiles of 16 (or 8) outputs; a tile holds all `in`
// weights of its outputs, interleaved, so that one vector holds the same place of eight outputs.
//
//   kNibble  tile of 16, per group of 32 inputs 320 bytes: 256 of nibbles (byte [i][o][k]: low = input 4i+k,
//            high = input 16+4i+k), then 16 scales d and 16 minima m in float16:      w = d * q + m
//   kByte    tile of 8, per group of 32 inputs 288 bytes: 256 of bytes [i][o][k] (input 4i+k), then 8 d, 8 m
//   kByteSigned  the same without m, 272 bytes; q holds w / d + 128 and m is -128 d
//   kFloat, kHalf, kBfloat  tile of 16: [in][16] elements
#pragma once
#include <cstdint>

namespace es {

enum Format : int32_t { kNibble = 0, kByte = 1, kByteSigned = 2, kFloat = 3, kHalf = 4, kBfloat = 5 };

constexpr int kGroup = 32;

// What a quantised row has beside its bytes: three entries a group of inputs, and the row's scale.
inline int64_t meta_floats(int64_t in) { return in / kGroup * 3 + 1; }

inline bool quantised(int32_t format) { return format <= kByteSigned; }
inline int tile_width(int32_t format) { return format == kByte || format == kByteSigned ? 8 : 16; }

inline int64_t tile_bytes(int32_t format, int64_t in) {
    switch (format) {
        case kNibble: return in / kGroup * 320;
        case kByte: return in / kGroup * 288;
        case kByteSigned: return in / kGroup * 272;
        case kFloat: return in * 64;
        default: return in * 32;
    }
}

inline int64_t tiles(int32_t format, int64_t out) { return (out + tile_width(format) - 1) / tile_width(format); }

// One weight of a linear op. `bias` may be null; `column` is where its outputs start in the result.
struct Part {
    const uint8_t* weight;
    const float* bias;
    int64_t out;
    int64_t in;
    int64_t column;
    int32_t format;
    int32_t unused;
};

// Row `row` of a matrix as float32 [in] (embedding lookup).
void unpack_row(int32_t format, const uint8_t* weight, int64_t row, int64_t in, float* to);

}  // namespace es
