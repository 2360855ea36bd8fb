// Causal attention over the paged cache, read in place through block tables, for ragged rows.
// Knows blocks, positions and heads; sequences, streams and requests are the engine's. An element of the cache is
// float16, or float32 in float32 mode.
//
// One block of one layer: for each kv head its keys [block_size / 8][padded][8] (eight keys side by side), then its
// values [block_size][padded]; padded is head_dim up to a multiple of 8, the rest zeros.
//
// A query sees two ranges of keys: its sinks [0, sinks), seen from the virtual position, and the recent ones.
// Recent keys are taken in splits of 256 keys and tiles of 32, both at absolute positions; each split is an online
// softmax of its own and splits are merged in order. So the result depends neither on chunking nor on threads.
#pragma once
#include <cstdint>
#include <vector>

#include "attention_tile.h"

namespace es {

constexpr int kSplit = 256;

// One step's ragged batch; the fields of DecoderInput.
struct Batch {
    const int64_t* ids;
    const int64_t* positions;
    const int64_t* slots;
    const int32_t* query_start;
    const int32_t* tables;
    const int32_t* sink_blocks;
    const int64_t* recent_base;
    const int32_t* sinks;
    const int64_t* windows;
    const int64_t* logit_rows;
    int64_t table_stride;
    int64_t tokens;
    int64_t sequences;
    int64_t rows;
};

struct Cache {
    uint8_t* layer;        // the layer's first block
    int64_t block_size;
    int64_t block_bytes;
    int32_t half;          // float16 elements
};

// Rotations of the step's tokens: cos and sin [tokens][pairs]; `sink_*` at the virtual positions.
struct Rotation {
    int32_t pairs = 0;     // 0: no rotation
    int32_t interleaved = 0;
    const float *cos = nullptr, *sin = nullptr, *sink_cos = nullptr, *sink_sin = nullptr;
};

struct Attention {
    int32_t heads, kv_heads, head_dim;
    int64_t window;            // the layer's own, 0: none
    float scale, softcap;      // softcap 0: none
    const float* slopes;       // ALiBi, or null
    const float* sink_logits;  // or null

    int64_t padded() const { return (head_dim + 7) / 8 * 8; }
};

// The part of a sequence's keys that one unit of work covers.
struct Unit {
    int32_t sequence, kv_head;
    int64_t first, count;        // tokens
    int64_t split, num_splits;   // split -1: all of them; otherwise this one, into partial number `partial`
    int64_t partial;
    double cost;
};

// The units of a step for one layer window, heaviest first.
struct Plan {
    std::vector<Unit> units;
    std::vector<Unit> merges;    // tiles whose splits were computed apart: `partial` is their first one
    int64_t partials = 0;
};

void plan_attention(const Batch& batch, const Attention& attention, int threads, Plan& plan);

// Floats of scratch a thread needs for units of `attention`.
int64_t attention_scratch(const Attention& attention);
int64_t partial_floats(const Attention& attention);  // of one partial

void attend_unit(const Batch& batch, const Cache& cache, const Attention& attention, const Rotation& rotation,
                 const Unit& unit, const float* q, int64_t q_stride, float* out, int64_t out_stride, float* partials,
                 float* scratch);
void merge_unit(const Attention& attention, const Unit& unit, float* out, int64_t out_stride, const float* partials,
                float* scratch);

// Rotates the keys of token `t` and writes keys and values to its slot.
void store_token(const Batch& batch, const Cache& cache, const Attention& attention, const Rotation& rotation, int64_t t,
                 const float* k, const float* v, float* scratch);

// x [head_dim] rotated with row `t` of the tables; `at_sink` takes the virtual position.
void rotate_head(const Rotation& rotation, int64_t t, bool at_sink, const float* x, int64_t head_dim, float* out);

// A sequence's effective window and sinks in this layer.
struct View {
    int64_t window;
    int64_t sinks;
};
View view_of(const Batch& batch, const Attention& attention, int64_t sequence);

// Whether no key has fallen out of what a query at `position` sees.
inline bool sees_all(const View& view, int64_t position) { return position < view.sinks + view.window; }

}  // namespace es
