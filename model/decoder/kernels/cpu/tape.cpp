// The tape's own business: made from the recorder's arrays, memory grown to a step's size, one call to run it.
#include "tape.h"

#include <algorithm>

#include "pool.h"
#include "simd.h"
#include "tape_state.h"

namespace es {

Attention attention_of(const Op& op) {
    return {op.heads, op.kv_heads, op.head_dim, op.window, op.scale, op.softcap, op.slopes, op.sink_logits};
}

namespace {

int64_t widest_input(const Tape& tape) {
    int64_t widest = 0;
    for (const Part& part : tape.parts) widest = std::max(widest, part.in);
    return widest;
}

// Memory for steps of up to `tokens` tokens. Products read rows by fours, so three more than that.
void grow(Tape& tape, int64_t tokens) {
    if (tokens <= tape.capacity) return;
    tape.capacity = tokens;
    const auto rows = static_cast<size_t>(tokens + 3);
    const auto in = static_cast<size_t>(widest_input(tape));
    for (size_t i = 0; i < tape.widths.size(); ++i) tape.buffers[i].resize(rows * static_cast<size_t>(tape.widths[i]));
    tape.q.resize(rows * in);
    tape.meta.resize(rows * static_cast<size_t>(meta_floats(widest_input(tape))));
    tape.rows.resize(rows * in);
    tape.owner.resize(rows);
    for (size_t i = 0; i < tape.rotations.size(); ++i) {
        const size_t size = rows * static_cast<size_t>(tape.rotations[i].pairs);
        for (auto* table : {&tape.turned[i].cos, &tape.turned[i].sin, &tape.turned[i].sink_cos, &tape.turned[i].sink_sin}) {
            table->resize(size);
        }
    }
}

void prepare_threads(Tape& tape, int threads) {
    if (static_cast<int>(tape.privates.size()) == threads) return;
    int64_t scratch = 0;
    for (const Op& op : tape.ops) {
        if (op.code == kAttend || op.code == kStore) scratch = std::max(scratch, attention_scratch(attention_of(op)));
    }
    const auto in = static_cast<size_t>(widest_input(tape));
    tape.privates.assign(static_cast<size_t>(threads), Private{});
    for (Private& own : tape.privates) {
        own.row.resize(in);
        own.q.resize(4 * in);
        own.meta.resize(4 * static_cast<size_t>(meta_floats(widest_input(tape))));
        own.scratch.resize(static_cast<size_t>(scratch));
    }
}

void prepare(Tape& tape, const Step& step, int threads) {
    tape.step = step;
    grow(tape, step.batch.tokens);
    prepare_threads(tape, threads);
    for (auto& counter : tape.counters) counter.store(0, std::memory_order_relaxed);
    for (int64_t s = 0; s < step.batch.sequences; ++s) {
        for (int64_t t = step.batch.query_start[s]; t < step.batch.query_start[s + 1]; ++t) {
            tape.owner[static_cast<size_t>(t)] = static_cast<int32_t>(s);
        }
    }
    tape.plans.clear();
    int64_t floats = 0;
    for (const Op& op : tape.ops) {
        if (op.code != kAttend) continue;
        const Attention a = attention_of(op);
        auto [found, fresh] = tape.plans.try_emplace(PlanKey{op.window, op.heads, op.kv_heads});
        if (fresh) plan_attention(step.batch, a, threads, found->second);
        floats = std::max(floats, found->second.partials * partial_floats(a));
    }
    if (static_cast<int64_t>(tape.partials.size()) < floats) tape.partials.resize(static_cast<size_t>(floats));
}

void run_team(void* argument, int thread, int threads) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // tiny numbers count as zero: they would cost hundreds of cycles each
    static_cast<Tape*>(argument)->run(thread, threads);
    _mm_setcsr(before);
}

}  // namespace
}  // namespace es

extern "C" {

// The arrays are copied; what their pointers name (weights, norms, slopes) must outlive the tape.
void* es_tape_new(const es::Op* ops, int64_t num_ops, const es::Part* parts, int64_t num_parts, const int64_t* widths,
                  int64_t num_buffers, const es::RotationSpec* rotations, int64_t num_rotations) {
    auto* tape = new es::Tape;
    tape->ops.assign(ops, ops + num_ops);
    tape->parts.assign(parts, parts + num_parts);
    tape->widths.assign(widths, widths + num_buffers);
    tape->rotations.assign(rotations, rotations + num_rotations);
    tape->buffers.resize(static_cast<size_t>(num_buffers));
    tape->turned.resize(static_cast<size_t>(num_rotations));
    tape->counters = std::vector<std::atomic<int64_t>>(static_cast<size_t>(num_ops) * 2);
    int64_t pairs = 0;
    for (const auto& rotation : tape->rotations) pairs += rotation.pairs;
    tape->frequencies.reserve(static_cast<size_t>(pairs));
    for (auto& rotation : tape->rotations) {
        const size_t first = tape->frequencies.size();
        tape->frequencies.insert(tape->frequencies.end(), rotation.frequencies, rotation.frequencies + rotation.pairs);
        rotation.frequencies = tape->frequencies.data() + first;
    }
    for (auto& op : tape->ops) op.parts = tape->parts.data() + op.first_part;
    return tape;
}

void es_tape_run(void* handle, const es::Step* step) {
    auto& tape = *static_cast<es::Tape*>(handle);
    es::prepare(tape, *step, es_pool_threads());
    es_team_run(es::run_team, &tape);
}

// For the test that holds the mirrors in structs.py to these: sizes of Slice, Part, Op, RotationSpec, Batch, Step.
void es_struct_sizes(int64_t* sizes) {
    const int64_t all[] = {sizeof(es::Slice), sizeof(es::Part), sizeof(es::Op), sizeof(es::RotationSpec), sizeof(es::Batch), sizeof(es::Step)};
    std::copy_n(all, 6, sizes);
}

// The ticks of each kind of op since the last call.
void es_tape_ticks(void* handle, int64_t* ticks) {
    auto& tape = *static_cast<es::Tape*>(handle);
    std::copy_n(tape.ticks, es::kCodes, ticks);
    std::fill_n(tape.ticks, es::kCodes, 0);
}

void es_tape_free(void* handle) { delete static_cast<es::Tape*>(handle); }

}  // extern "C"
