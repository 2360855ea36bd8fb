// Runs a tape's ops: every thread walks them all, takes shares of each op's rows, tiles or units, and meets the
// others at a barrier after it. Shares are handed out dynamically; no result depends on who computed it.
#include <algorithm>
#include <cmath>

#include "path.h"
#include "pool.h"
#include "rows.h"
#include "simd.h"
#include "tape_state.h"

namespace es {
namespace {

struct Runner {
    Tape& tape;
    const Op& op;
    std::atomic<int64_t>* counter;  // two of this op's own
    Private& own;
    int threads;

    int64_t count() const { return op.selected ? tape.step.batch.rows : tape.step.batch.tokens; }

    float* at(const Slice& s) const {
        return (s.buffer == -2 ? tape.step.logits : tape.buffers[static_cast<size_t>(s.buffer)].data()) + s.offset;
    }
    float* row(const Slice& s, int64_t r) const { return at(s) + r * s.stride; }

    template <class F>
    void share(int which, int64_t items, int64_t grain, F&& body) const {
        while (true) {
            const int64_t begin = counter[which].fetch_add(grain, std::memory_order_relaxed);
            if (begin >= items) return;
            const int64_t end = std::min(items, begin + grain);
            for (int64_t i = begin; i < end; ++i) body(i);
        }
    }

    template <class F>
    void each_row(F&& body) const {
        const int64_t n = count();
        share(0, n, std::max<int64_t>(1, n / (threads * 8)), body);
    }

    bool any_part(bool quant) const;
    void prepare_row(int64_t r, int8_t* q, float* meta, float* kept) const;
    void linear() const;
    void tiles_of(const QuantRows& q, const FloatRows& x, int64_t n) const;
    Cache cache() const;
    Rotation rotation() const;
    void attend() const;
    void store() const;
    void rotations() const;
    void embed() const;
    void norm() const;
    void each_value() const;
    void run() const;
};

bool Runner::any_part(bool quant) const {
    return std::any_of(op.parts, op.parts + op.num_parts, [&](const Part& p) { return quantised(p.format) == quant; });
}

// Row `r` of a linear's input: prologue, then int8 into `q`, or float32 into `kept`, or both, where not null.
void Runner::prepare_row(int64_t r, int8_t* q, float* meta, float* kept) const {
    const int64_t in = op.parts[0].in;
    const float* x = row(op.in, r);
    float* filled = kept ? kept + r * in : own.row.data();
    if (op.prologue == kNormFirst) {
        norm_row(Norm{op.weight, op.bias, op.eps, op.norm_kind}, x, in, filled);
        x = filled;
    } else if (op.prologue == kActivateFirst) {
        activate_row(op.activation, op.gated != 0, x, in, filled);
        x = filled;
    }
    if (q) quantise_row(x, in, q + r * in, meta + r * meta_floats(in));
}

void Runner::tiles_of(const QuantRows& q, const FloatRows& x, int64_t n) const {
    const Target to{at(op.out), op.out.stride, op.in2.buffer == -1 ? nullptr : at(op.in2), op.in2.stride};
    const Path& path = chosen_path();
    int64_t total = 0;
    for (int i = 0; i < op.num_parts; ++i) total += path.units(op.parts[i]);
    const int64_t grain = std::clamp<int64_t>(total / (threads * 6), 1, 16);
    share(1, total, grain, [&](int64_t unit) {
        const Part* part = op.parts;
        for (; unit >= path.units(*part); ++part) unit -= path.units(*part);
        path.product(*part, unit, q, x, n, to, own.panel);
    });
}

void Runner::linear() const {
    const int64_t n = count(), in = op.parts[0].in;
    const bool quant = any_part(true), keep = any_part(false) && op.prologue != kNone;
    const bool alone = n == 1;  // every thread prepares the row for itself: cheaper than to meet
    int8_t* q = alone ? own.q.data() : tape.q.data();
    float* meta = alone ? own.meta.data() : tape.meta.data();
    float* kept = alone ? own.row.data() : tape.rows.data();
    auto prepare = [&](int64_t r) { prepare_row(r, quant ? q : nullptr, meta, keep ? kept : nullptr); };
    if (alone) {
        prepare(0);
    } else if (quant || keep) {
        each_row(prepare);
        es_team_barrier();
    }
    tiles_of(QuantRows{q, meta}, FloatRows{keep ? kept : at(op.in), keep ? in : op.in.stride}, n);
}

Cache Runner::cache() const {
    const Step& s = tape.step;
    return {s.layers[op.layer], s.block_size, s.block_bytes[op.layer], s.half};
}

Rotation Runner::rotation() const {
    if (op.rotation < 0) return {};
    const Turned& t = tape.turned[static_cast<size_t>(op.rotation)];
    const RotationSpec& spec = tape.rotations[static_cast<size_t>(op.rotation)];
    return {spec.pairs, spec.interleaved, t.cos.data(), t.sin.data(), t.sink_cos.data(), t.sink_sin.data()};
}

void Runner::attend() const {
    const Attention a = attention_of(op);
    const Plan& plan = tape.plans.at(PlanKey{op.window, op.heads, op.kv_heads});
    const Cache where = cache();
    const Rotation turned = rotation();
    share(0, static_cast<int64_t>(plan.units.size()), 1, [&](int64_t i) {
        attend_unit(tape.step.batch, where, a, turned, plan.units[static_cast<size_t>(i)], at(op.in), op.in.stride,
                    at(op.out), op.out.stride, tape.partials.data(), own.scratch.data());
    });
    if (plan.merges.empty()) return;
    es_team_barrier();
    share(1, static_cast<int64_t>(plan.merges.size()), 1, [&](int64_t i) {
        merge_unit(a, plan.merges[static_cast<size_t>(i)], at(op.out), op.out.stride, tape.partials.data(), own.scratch.data());
    });
}

void Runner::store() const {
    const Attention a = attention_of(op);
    const Cache where = cache();
    const Rotation turned = rotation();
    each_row([&](int64_t t) {
        store_token(tape.step.batch, where, a, turned, t, row(op.in2, t), row(op.in3, t), own.scratch.data());
    });
}

// cos and sin at a position (Su et al. 2021, arXiv:2104.09864), angles in float64.
void turn(const RotationSpec& spec, int64_t position, float* cos, float* sin) {
    for (int i = 0; i < spec.pairs; ++i) {
        const double angle = static_cast<double>(position) * spec.frequencies[i];
        cos[i] = static_cast<float>(std::cos(angle) * spec.factor);
        sin[i] = static_cast<float>(std::sin(angle) * spec.factor);
    }
}

void Runner::rotations() const {
    const Batch& b = tape.step.batch;
    each_row([&](int64_t t) {
        const int32_t s = tape.owner[static_cast<size_t>(t)];
        for (size_t i = 0; i < tape.rotations.size(); ++i) {
            const RotationSpec& spec = tape.rotations[i];
            Turned& to = tape.turned[i];
            turn(spec, b.positions[t], to.cos.data() + t * spec.pairs, to.sin.data() + t * spec.pairs);
            if (b.sinks[s] == 0) continue;
            const int64_t virtual_position = std::min(b.positions[t], b.sinks[s] + b.windows[s] - 1);
            turn(spec, virtual_position, to.sink_cos.data() + t * spec.pairs, to.sink_sin.data() + t * spec.pairs);
        }
    });
}

void Runner::embed() const {
    const Part& table = op.parts[0];
    each_row([&](int64_t t) {
        float* out = row(op.out, t);
        unpack_row(table.format, table.weight, tape.step.batch.ids[t], table.in, out);
        if (op.factor != 1.0f) {
            for (int64_t i = 0; i < table.in; ++i) out[i] *= op.factor;
        }
    });
}

void Runner::norm() const {
    const int64_t width = op.in.width / op.groups;
    const Norm norm{op.weight, op.bias, op.eps, op.norm_kind};
    each_row([&](int64_t r) {
        for (int64_t g = 0; g < op.groups; ++g) norm_row(norm, row(op.in, r) + g * width, width, row(op.out, r) + g * width);
    });
}

// Ops of one value each; plain loops, which the compiler vectorises.
void Runner::each_value() const {
    const int64_t width = op.out.width;
    each_row([&](int64_t r) {
        const int64_t from = op.code == kSelect ? tape.step.batch.logit_rows[r] : r;
        const float* x = row(op.in, from);
        float* out = row(op.out, r);
        if (op.code == kSelect) {
            std::copy_n(x, width, out);
        } else if (op.code == kAdd) {
            const float* y = row(op.in2, r);
            for (int64_t i = 0; i < width; ++i) out[i] = x[i] + y[i];
        } else if (op.code == kAddPositions) {
            const float* y = op.weight + (tape.step.batch.positions[r] + op.offset) * width;
            for (int64_t i = 0; i < width; ++i) out[i] = x[i] + y[i];
        } else if (op.code == kScale) {
            for (int64_t i = 0; i < width; ++i) out[i] = x[i] * op.factor;
        } else if (op.code == kClip) {
            for (int64_t i = 0; i < width; ++i) out[i] = x[i] > op.factor ? op.factor : x[i] < -op.factor ? -op.factor : x[i];
        } else if (op.code == kSoftcap) {
            const __m256 cap = _mm256_set1_ps(op.factor);
            for (int64_t i = 0; i < width; i += 8) {
                const Lanes lanes(width - i);
                lanes.store(out + i, _mm256_mul_ps(cap, tanh8(_mm256_div_ps(lanes.load(x + i), cap))));
            }
        } else {
            activate_row(op.activation, op.gated != 0, x, width, out);
        }
    });
}

void Runner::run() const {
    switch (op.code) {
        case kEmbed: return embed();
        case kNorm: return norm();
        case kLinear: return linear();
        case kStore: return store();
        case kAttend: return attend();
        case kRotations: return rotations();
        default: return each_value();
    }
}

}  // namespace

void Tape::run(int thread, int threads) {
    for (size_t i = 0; i < ops.size(); ++i) {
        const auto start = static_cast<int64_t>(__rdtsc());
        Runner{*this, ops[i], &counters[2 * i], privates[static_cast<size_t>(thread)], threads}.run();
        es_team_barrier();
        if (thread == 0) ticks[ops[i].code] += static_cast<int64_t>(__rdtsc()) - start;
    }
}

}  // namespace es
