// From a checkpoint's bytes to the interleaved forms of layout.h, and one row back.
// Knows GGUF's block layouts (ggml-quants: scale, minimum, fifth bits, nibbles) and ours; computes nothing else.
#include <algorithm>
#include <vector>

#include "layout.h"
#include "pool.h"
#include "simd.h"

namespace es {
namespace {

enum Kind : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ5_0 = 2, kQ5_1 = 3, kQ8_0 = 4 };

struct Group {  // w = d * q + m
    uint8_t q[kGroup];
    uint16_t d, m;
};

uint16_t read16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | (p[1] << 8)); }

int64_t block_bytes(int32_t kind) {
    const int64_t bytes[] = {18, 20, 22, 24, 34};
    return bytes[kind];
}

void read_group(int32_t kind, const uint8_t* p, Group& g) {
    g.d = read16(p);
    if (kind == kQ8_0) {
        for (int i = 0; i < kGroup; ++i) g.q[i] = static_cast<uint8_t>(p[2 + i] ^ 0x80);
        g.m = float_to_half(half_to_float(g.d) * -128.0f);
        return;
    }
    const bool minimum = kind == kQ4_1 || kind == kQ5_1, five = kind == kQ5_0 || kind == kQ5_1;
    const uint8_t* bits = p + (minimum ? 4 : 2);
    const uint8_t* nibbles = bits + (five ? 4 : 0);
    uint32_t fifth = 0;
    if (five) std::memcpy(&fifth, bits, 4);
    for (int i = 0; i < 16; ++i) {
        g.q[i] = static_cast<uint8_t>((nibbles[i] & 15) | ((fifth >> i & 1) << 4));
        g.q[i + 16] = static_cast<uint8_t>((nibbles[i] >> 4) | ((fifth >> (i + 16) & 1) << 4));
    }
    // -8 d and -16 d are exact: a float16 times a power of two (d never comes near its limits).
    g.m = minimum ? read16(p + 2) : float_to_half(half_to_float(g.d) * (five ? -16.0f : -8.0f));
}

void put_nibbles(uint8_t* to, int o, const Group& g) {
    for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < 4; ++k) to[i * 64 + o * 4 + k] = static_cast<uint8_t>(g.q[4 * i + k] | g.q[16 + 4 * i + k] << 4);
    }
    std::memcpy(to + 256 + 2 * o, &g.d, 2);
    std::memcpy(to + 288 + 2 * o, &g.m, 2);
}

void put_bytes(uint8_t* to, int o, const Group& g, bool with_minimum) {
    for (int i = 0; i < 8; ++i) std::memcpy(to + i * 32 + o * 4, g.q + 4 * i, 4);
    std::memcpy(to + 256 + 2 * o, &g.d, 2);
    if (with_minimum) std::memcpy(to + 272 + 2 * o, &g.m, 2);
}

struct PackJob {
    int32_t kind, format;
    const uint8_t* from;
    uint8_t* to;
    int64_t out, in;
};

void pack_quantised_tiles(void* argument, int64_t begin, int64_t end, int) {
    const auto& job = *static_cast<PackJob*>(argument);
    const int64_t groups = job.in / kGroup, row = groups * block_bytes(job.kind);
    const int width = tile_width(job.format);
    const int64_t bytes = tile_bytes(job.format, kGroup);
    Group g;
    for (int64_t tile = begin; tile < end; ++tile) {
        uint8_t* to = job.to + tile * tile_bytes(job.format, job.in);
        for (int o = 0; o < width; ++o) {
            const int64_t output = tile * width + o;
            for (int64_t i = 0; i < groups; ++i) {
                if (output < job.out) {
                    read_group(job.kind, job.from + output * row + i * block_bytes(job.kind), g);
                } else {
                    std::memset(&g, 0, sizeof g);
                }
                if (job.format == kNibble) {
                    put_nibbles(to + i * bytes, o, g);
                } else {
                    put_bytes(to + i * bytes, o, g, job.format == kByte);
                }
            }
        }
    }
}

// Float matrices: `kind` and `format` are both among kFloat, kHalf, kBfloat.
float read_float(int32_t format, const uint8_t* p, int64_t i) {
    if (format == kFloat) return reinterpret_cast<const float*>(p)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(p)[i];
    return format == kHalf ? half_to_float(bits) : bf_to_float(bits);
}

void pack_float_tiles(void* argument, int64_t begin, int64_t end, int) {
    const auto& job = *static_cast<PackJob*>(argument);
    for (int64_t tile = begin; tile < end; ++tile) {
        uint8_t* to = job.to + tile * tile_bytes(job.format, job.in);
        for (int64_t k = 0; k < job.in; ++k) {
            for (int o = 0; o < 16; ++o) {
                const int64_t output = tile * 16 + o;
                const float value = output < job.out ? read_float(job.kind, job.from, output * job.in + k) : 0.0f;
                if (job.format == kFloat) {
                    reinterpret_cast<float*>(to)[k * 16 + o] = value;
                } else {
                    reinterpret_cast<uint16_t*>(to)[k * 16 + o] =
                        job.format == kHalf ? float_to_half(value) : float_to_bf(value);
                }
            }
        }
    }
}

void unpack_quantised_row(int32_t format, const uint8_t* tile, int o, int64_t in, float* to) {
    const int64_t bytes = tile_bytes(format, kGroup);
    for (int64_t g = 0; g < in / kGroup; ++g, tile += bytes, to += kGroup) {
        const float d = half_to_float(read16(tile + 256 + 2 * o));
        if (format == kNibble) {
            const float m = half_to_float(read16(tile + 288 + 2 * o));
            for (int i = 0; i < 16; ++i) {
                const uint8_t pair = tile[(i / 4) * 64 + o * 4 + i % 4];
                to[i] = d * static_cast<float>(pair & 15) + m;
                to[i + 16] = d * static_cast<float>(pair >> 4) + m;
            }
        } else if (format == kByte) {
            const float m = half_to_float(read16(tile + 272 + 2 * o));
            for (int i = 0; i < kGroup; ++i) to[i] = d * static_cast<float>(tile[(i / 4) * 32 + o * 4 + i % 4]) + m;
        } else {
            for (int i = 0; i < kGroup; ++i) to[i] = d * static_cast<float>(tile[(i / 4) * 32 + o * 4 + i % 4] - 128);
        }
    }
}

}  // namespace

void unpack_row(int32_t format, const uint8_t* weight, int64_t row, int64_t in, float* to) {
    const int width = tile_width(format);
    const uint8_t* tile = weight + row / width * tile_bytes(format, in);
    const int o = static_cast<int>(row % width);
    if (quantised(format)) {
        unpack_quantised_row(format, tile, o, in, to);
    } else {
        for (int64_t k = 0; k < in; ++k) to[k] = read_float(format, tile, k * 16 + o);
    }
}

}  // namespace es

extern "C" {

int64_t es_packed_bytes(int32_t format, int64_t out, int64_t in) {
    return es::tiles(format, out) * es::tile_bytes(format, in);
}

// kind: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 as 0..4 for a quantised format; a float format's number otherwise.
void es_pack(int32_t kind, int32_t format, const uint8_t* from, uint8_t* to,
                                                    int64_t out, int64_t in) {
    es::PackJob job{kind, format, from, to, out, in};
    es_parallel_for(es::tiles(format, out), 4, es::quantised(format) ? es::pack_quantised_tiles : es::pack_float_tiles, &job);
}

void es_unpack_row(int32_t format, const uint8_t* weight, int64_t row, int64_t in,
                                                          float* to) {
    es::unpack_row(format, weight, row, in, to);
}

}  // extern "C"
