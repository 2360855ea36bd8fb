// See attention.h. Work is cut into (sequence, kv head, up to 24 query rows); all query heads of a kv head share the
// conversion of its keys and values.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_tile.h"
#include "path.h"
#include "simd.h"

namespace es {
namespace {

constexpr int64_t kRows = 48;
constexpr int64_t kNoWindow = int64_t{1} << 62;

int64_t group_heads(const Attention& a) { return a.heads / a.kv_heads; }

int64_t tile_tokens(const Attention& a) { return std::max<int64_t>(1, kRows / group_heads(a)); }

int64_t unit_rows(const Attention& a) { return tile_tokens(a) * group_heads(a); }

struct Range {
    int64_t begin, end;
};

// `held`: the first position behind the sinks whose block is in the table, see inputs.py.
Range recent_keys(const View& view, int64_t held, int64_t position) {
    return {std::max({position - view.window + 1, view.sinks, held}), position + 1};
}

// The rows of a unit with their running softmax.
struct Rows {
    int64_t count, group;      // rows; heads a token
    float* q;                  // [rows][head_dim], rotated for the range at hand
    float *top, *sum, *mixed;  // [rows], [rows], [rows][head_dim]
};

void start(Rows& rows, int64_t head_dim) {
    std::fill_n(rows.top, rows.count, -std::numeric_limits<float>::infinity());
    std::fill_n(rows.sum, rows.count, 0.0f);
    std::fill_n(rows.mixed, rows.count * head_dim, 0.0f);
}

// Joins another softmax into row `r` (Milakov and Gimelshein 2018, arXiv:1805.02867, eq. 4).
void merge_row(Rows& into, int64_t r, int64_t head_dim, float top, float sum, const float* mixed) {
    if (top == -std::numeric_limits<float>::infinity()) return;
    float* own = into.mixed + r * head_dim;
    if (into.top[r] == -std::numeric_limits<float>::infinity()) {
        into.top[r] = top;
        into.sum[r] = sum;
        std::copy_n(mixed, head_dim, own);
        return;
    }
    const float both = std::max(into.top[r], top);
    const __m256 e = exp8(_mm256_setr_ps(into.top[r] - both, top - both, 0, 0, 0, 0, 0, 0));
    float factors[8];
    _mm256_storeu_ps(factors, e);
    into.top[r] = both;
    into.sum[r] = into.sum[r] * factors[0] + sum * factors[1];
    const __m256 a = _mm256_set1_ps(factors[0]), b = _mm256_set1_ps(factors[1]);
    for (int64_t d = 0; d < head_dim; d += 8) {
        const __m256 theirs = _mm256_mul_ps(_mm256_loadu_ps(mixed + d), b);
        _mm256_storeu_ps(own + d, _mm256_fmadd_ps(_mm256_loadu_ps(own + d), a, theirs));
    }
}

struct Work {
    const Batch& batch;
    const Cache& cache;
    const Attention& attention;
    const Unit& unit;
    View view;
    KeyTile tile;
    float* scores;  // [rows][32]
};

const uint8_t* block_of(const Work& work, int64_t key) {
    const Batch& b = work.batch;
    const int64_t s = work.unit.sequence, logical = key / work.cache.block_size;
    const int64_t entry = logical < b.sink_blocks[s] ? logical : b.sink_blocks[s] + logical - b.recent_base[s];
    return work.cache.layer + b.tables[s * b.table_stride + entry] * work.cache.block_bytes;
}

struct Piece {  // of eight keys and values of one head
    const uint8_t *k, *v;
};

Piece piece_at(const Work& work, int64_t key) {
    const int64_t hd = work.attention.padded(), bs = work.cache.block_size, element = work.cache.half ? 2 : 4;
    const uint8_t* k = block_of(work, key) + (work.unit.kv_head * 2 * bs + key % bs) * hd * element;
    return {k, k + bs * hd * element};
}

// Where keys [begin, end) of the tile that starts at `base` lie; what is outside stays unread. Few rows also get the
// places of the tile after it, as far as keys reach to `last`.
void find_tile(Work& work, int64_t base, Range keys, int64_t last, bool few) {
    const int64_t from = (keys.begin - base) / 8, to = (keys.end - base + 7) / 8;
    work.tile.half = work.cache.half != 0;
    for (int64_t chunk = from; chunk < to; ++chunk) {
        const Piece piece = piece_at(work, base + chunk * 8);
        work.tile.k[chunk] = piece.k;
        work.tile.v[chunk] = piece.v;
    }
    std::fill_n(work.tile.next_k, kTile / 8, work.tile.k[from]);
    std::fill_n(work.tile.next_v, kTile / 8, work.tile.v[from]);
    if (!few && work.tile.half) return convert_tile(work.tile, work.attention.padded(), from, to);
    for (int64_t chunk = 0; few && chunk < kTile / 8 && base + kTile + chunk * 8 < last; ++chunk) {
        const Piece piece = piece_at(work, base + kTile + chunk * 8);
        work.tile.next_k[chunk] = piece.k;
        work.tile.next_v[chunk] = piece.v;
    }
}

// One tile into the running softmax of all rows. `ranges` are the keys each token sees.
void add_tile(Work& work, Rows& rows, int64_t base, Range all, const Range* ranges, const float* from_position) {
    const Attention& a = work.attention;
    const Range keys{std::max(all.begin, base), std::min(all.end, base + kTile)};
    find_tile(work, base, keys, all.end, rows.count <= kFewRows);
    const Path& path = chosen_path();
    path.multiply_keys(work.tile, a.padded(), rows.q, rows.count, (keys.begin - base) / 8, (keys.end - base + 7) / 8, work.scores);
    float factors[kMaxRows];
    const int64_t head0 = work.unit.kv_head * rows.group;
    for (int64_t r = 0; r < rows.count; ++r) {
        const int64_t t = r / rows.group, head = head0 + r % rows.group;
        const int64_t lo = std::max<int64_t>(ranges[t].begin - base, 0), hi = std::min<int64_t>(ranges[t].end - base, kTile);
        factors[r] = 1.0f;
        float* p = work.scores + r * kTile;
        if (lo >= hi) {
            std::fill_n(p, kTile, 0.0f);
            continue;
        }
        const ScoreRule rule{a.scale, a.softcap, a.slopes ? a.slopes[head] : 0.0f, from_position[t] - static_cast<float>(base)};
        factors[r] = softmax_row(rule, static_cast<int>(lo), static_cast<int>(hi), p, rows.top[r], rows.sum[r]);
    }
    path.add_values(work.tile, a.padded(), work.scores, factors, rows.count, keys.begin - base, keys.end - base, rows.mixed);
}

void load_queries(const Work& work, const Rotation& rotation, bool at_sink, const float* q, int64_t stride, Rows& rows) {
    const int64_t hd = work.attention.head_dim, head0 = work.unit.kv_head * rows.group;
    for (int64_t r = 0; r < rows.count; ++r) {
        const int64_t t = work.unit.first + r / rows.group;
        float* to = rows.q + r * work.attention.padded();
        rotate_head(rotation, t, at_sink, q + t * stride + (head0 + r % rows.group) * hd, hd, to);
        std::fill(to + hd, to + work.attention.padded(), 0.0f);
    }
}

struct Seen {  // of each token of the unit
    Range recent[kRows], sinks[kRows];
    float from[kRows], from_sink[kRows];
    Range all_recent, all_sinks;
};

void look(const Work& work, Seen& seen) {
    const int64_t n = work.unit.count, base = work.batch.recent_base[work.unit.sequence];
    const int64_t held = base > work.batch.sink_blocks[work.unit.sequence] ? base * work.cache.block_size : 0;
    seen.all_recent = {std::numeric_limits<int64_t>::max(), 0};
    seen.all_sinks = {0, 0};
    for (int64_t i = 0; i < n; ++i) {
        const int64_t p = work.batch.positions[work.unit.first + i];
        // A query from which nothing has fallen out is computed as if there were no retention, with its very bits.
        const bool whole = held == 0 && sees_all(work.view, p);
        const Range recent = whole ? Range{0, p + 1} : recent_keys(work.view, held, p);
        const Range sinks{0, whole ? 0 : std::min(work.view.sinks, p + 1)};
        seen.recent[i] = recent;
        seen.sinks[i] = sinks;
        seen.from[i] = static_cast<float>(p);
        seen.from_sink[i] =
            static_cast<float>(work.view.sinks > 0 ? std::min(p, work.view.sinks + work.view.window - 1) : p);
        if (recent.begin < recent.end) {
            seen.all_recent = {std::min(seen.all_recent.begin, recent.begin), std::max(seen.all_recent.end, recent.end)};
        }
        seen.all_sinks.end = std::max(seen.all_sinks.end, sinks.end);
    }
}

void add_split(Work& work, Rows& rows, const Seen& seen, int64_t split) {
    const int64_t begin = std::max(seen.all_recent.begin, split * kSplit) / kTile * kTile;
    const int64_t end = std::min(seen.all_recent.end, (split + 1) * kSplit);
    for (int64_t base = begin; base < end; base += kTile) {
        add_tile(work, rows, base, seen.all_recent, seen.recent, seen.from);
    }
}

void add_sinks(Work& work, Rows& rows, const Seen& seen) {
    for (int64_t base = 0; base < seen.all_sinks.end; base += kTile) {
        add_tile(work, rows, base, seen.all_sinks, seen.sinks, seen.from_sink);
    }
}

// Every split in order; the first one runs in `rows` itself, which equals merging it into nothing.
void add_all_splits(Work& work, Rows& rows, Rows& apart, const Seen& seen, bool fresh) {
    if (seen.all_recent.begin >= seen.all_recent.end) return;
    const int64_t hd = work.attention.padded();
    for (int64_t split = seen.all_recent.begin / kSplit; split <= (seen.all_recent.end - 1) / kSplit; ++split) {
        if (fresh) {
            add_split(work, rows, seen, split);
            fresh = false;
            continue;
        }
        start(apart, hd);
        add_split(work, apart, seen, split);
        for (int64_t r = 0; r < rows.count; ++r) merge_row(rows, r, hd, apart.top[r], apart.sum[r], apart.mixed + r * hd);
    }
}

void finish(const Attention& a, const Unit& unit, const Rows& rows, float* out, int64_t out_stride) {
    const int64_t head0 = unit.kv_head * rows.group;
    for (int64_t r = 0; r < rows.count; ++r) {
        const int64_t head = head0 + r % rows.group;
        float sum = rows.sum[r], factor = 1.0f;
        if (a.sink_logits) {
            const float both = std::max(rows.top[r], a.sink_logits[head]);
            factor = std::exp(rows.top[r] - both);
            sum = sum * factor + std::exp(a.sink_logits[head] - both);
        }
        const __m256 by = _mm256_set1_ps(factor / sum);
        float* to = out + (unit.first + r / rows.group) * out_stride + head * a.head_dim;
        for (int64_t d = 0; d < a.head_dim; d += 8) {
            Lanes(a.head_dim - d).store(to + d, _mm256_mul_ps(_mm256_loadu_ps(rows.mixed + r * a.padded() + d), by));
        }
    }
}

float* carve(float*& scratch, int64_t floats) {
    float* piece = scratch;
    scratch += (floats + 15) / 16 * 16;
    return piece;
}

Rows carve_rows(const Attention& a, const Unit& unit, float* q, float*& scratch) {
    const int64_t count = unit.count * group_heads(a);
    return {count, group_heads(a), q, carve(scratch, count), carve(scratch, count), carve(scratch, count * a.padded())};
}

}  // namespace

View view_of(const Batch& batch, const Attention& attention, int64_t sequence) {
    const int64_t own = attention.window > 0 ? attention.window : kNoWindow;
    const int64_t kept = batch.windows[sequence];
    if (kept < own) return {kept, batch.sinks[sequence]};
    return {own, 0};
}

int64_t attention_scratch(const Attention& a) {
    const int64_t rows = unit_rows(a), hd = a.padded();
    return 2 * kTile * hd + rows * kTile + 3 * rows * hd + 4 * rows + 16 * 16;
}

int64_t partial_floats(const Attention& a) { return unit_rows(a) * (a.padded() + 2); }

void attend_unit(const Batch& batch, const Cache& cache, const Attention& attention, const Rotation& rotation,
                 const Unit& unit, const float* q, int64_t q_stride, float* out, int64_t out_stride, float* partials,
                 float* scratch) {
    const int64_t hd = attention.padded(), count = unit.count * group_heads(attention);
    const KeyTile tile{{}, {}, {}, {}, false, carve(scratch, 2 * kTile * hd)};
    Work work{batch, cache, attention, unit, view_of(batch, attention, unit.sequence), tile, carve(scratch, count * kTile)};
    float* queries = carve(scratch, count * hd);
    Rows rows = carve_rows(attention, unit, queries, scratch), apart = carve_rows(attention, unit, queries, scratch);
    Seen seen;
    look(work, seen);
    start(rows, hd);
    const bool sinks = seen.all_sinks.end > 0 && unit.split <= 0;
    if (sinks) {
        load_queries(work, rotation, true, q, q_stride, rows);
        add_sinks(work, rows, seen);
    }
    load_queries(work, rotation, false, q, q_stride, rows);
    if (unit.split < 0) {
        add_all_splits(work, rows, apart, seen, !sinks);
        finish(attention, unit, rows, out, out_stride);
        return;
    }
    if (unit.split > 0) add_split(work, rows, seen, seen.all_recent.begin / kSplit + unit.split - 1);
    float* to = partials + unit.partial * unit_rows(attention) * (hd + 2);
    for (int64_t r = 0; r < count; ++r, to += hd + 2) {
        to[0] = rows.top[r];
        to[1] = rows.sum[r];
        std::copy_n(rows.mixed + r * hd, hd, to + 2);
    }
}

void merge_unit(const Attention& attention, const Unit& unit, float* out, int64_t out_stride, const float* partials,
                float* scratch) {
    const int64_t hd = attention.padded();
    Rows rows = carve_rows(attention, unit, nullptr, scratch);
    start(rows, hd);
    for (int64_t split = 0; split < unit.num_splits; ++split) {
        const float* from = partials + (unit.partial + split) * unit_rows(attention) * (hd + 2);
        for (int64_t r = 0; r < rows.count; ++r, from += hd + 2) merge_row(rows, r, hd, from[0], from[1], from + 2);
    }
    finish(attention, unit, rows, out, out_stride);
}

}  // namespace es
