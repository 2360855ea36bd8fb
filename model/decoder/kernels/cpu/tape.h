// A tape: the decoder's forward pass as a flat list of ops, recorded once, replayed by one call a step.
// Knows ops, buffers and pointers; the recorder in Python (tape.py) mirrors these structs field by field.
#pragma once
#include <cstdint>

#include "attention.h"
#include "layout.h"

namespace es {

enum Code : int32_t {
    kEmbed = 0, kAddPositions = 1, kNorm = 2, kLinear = 3, kActivate = 4, kAdd = 5, kScale = 6, kClip = 7,
    kSoftcap = 8, kStore = 9, kAttend = 10, kSelect = 11, kRotations = 12, kCodes = 13
};
enum Prologue : int32_t { kNone = 0, kNormFirst = 1, kActivateFirst = 2 };

// Columns [offset, offset + width) of a buffer; buffer -1 is absent, -2 the step's logits.
struct Slice {
    int32_t buffer;
    int32_t offset;
    int32_t width;
    int32_t stride;  // floats a row of the buffer
};

struct Op {
    int32_t code;
    int32_t selected;    // works on the selected rows (logits), not on all tokens
    Slice in, in2, in3;  // in2: y of kAdd, the residual of kLinear, k of kStore; in3: v of kStore
    Slice out;
    int32_t prologue;
    int32_t norm_kind, groups;
    int32_t activation, gated;
    int32_t first_part, num_parts;
    int32_t layer, heads, kv_heads, head_dim;
    int32_t rotation;    // index into the tape's rotations, -1 none
    int32_t offset;      // of positions
    int32_t unused;
    int64_t window;
    float eps, factor;   // factor: scale, limit or cap
    float scale, softcap;
    const float* weight; // norm weight, position table
    const float* bias;
    const Part* parts;   // filled in from first_part
    const float* slopes;
    const float* sink_logits;
};

struct RotationSpec {
    const double* frequencies;  // [pairs], radians a position
    double factor;              // cos and sin are multiplied by it
    int32_t pairs, interleaved;
};

// What one step brings: the batch, the cache of each layer, where the logits go.
struct Step {
    Batch batch;
    uint8_t* const* layers;
    const int64_t* block_bytes;  // of each layer
    int64_t block_size;
    int32_t half;
    int32_t unused;
    float* logits;               // [rows, vocabulary]
};

}  // namespace es
