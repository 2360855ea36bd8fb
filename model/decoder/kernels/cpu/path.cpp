// See path.h.
#include "path.h"

#include "attention_tile_avx512.h"
#include "avx512.h"
#include "matmul_avx512.h"

namespace es {
namespace {

int64_t each_tile(const Part& part) { return tiles(part.format, part.out); }

void avx2_product(const Part& part, int64_t tile, const QuantRows& q, const FloatRows& x, int64_t count, const Target& to,
                  Panel& panel) {
    if (quantised(part.format)) {
        quantised_tile(part, tile, q, count, to, panel);
    } else {
        float_tile(part, tile, x, count, to, panel);
    }
}

void avx512_product(const Part& part, int64_t unit, const QuantRows& q, const FloatRows& x, int64_t count, const Target& to,
                    Panel&) {
    if (quantised(part.format)) {
        avx512::quantised_unit(part, unit, q, count, to);
    } else {
        avx512::float_unit(part, unit, x, count, to);
    }
}

const Path kPaths[] = {{"avx2", each_tile, avx2_product, multiply_keys, add_values},
                       {"avx512", avx512::units, avx512_product, avx512::multiply_keys, avx512::add_values}};

int32_t best() { return has_avx512() ? kAvx512 : kAvx2; }

int32_t level = best();

}  // namespace

const Path& chosen_path() { return kPaths[level]; }

}  // namespace es

extern "C" {

const char* es_level_name(void) { return es::kPaths[es::level].name; }

int32_t es_choose(int32_t level) {
    es::level = level < es::best() ? level : es::best();
    return es::level;
}

}  // extern "C"
