// Filters on the survivors of a row, each by selection instead of sorting. Knows lists of scores and weights.
// Ties are in order of the ids; no filter cuts the last survivor.
#pragma once
#include <cstdint>
#include <vector>

#include "sample_dense.h"

namespace es {

double sum_weights(const List& list);
// The best of a whole row by score that together reach `mass` of `weights` (or that number, where `weights` is null).
// `unit`: in which steps of the score the border is first looked for; only the time depends on it.
void select(const Dense& row, const float* weights, double mass, double unit, List& list);
// Keep the `count` best by score.
void keep_top_k(List& list, int64_t count);
// Keep the best by score that together reach `mass`, the crossing one included.
void keep_top_p(List& list, double mass);
void keep_at_least(List& list, float least);
// Keep those whose log weight is nearest to the mean one until they reach `mass`; weights = exp((score - peak) * factor).
void keep_typical(List& list, float peak, double factor, double mean, double mass);
// Sum of weight * log weight.
double sum_moments(const List& list, float peak, double factor);
// Cut all of at least `threshold` (a share of the mass) but the least likely of them.
void cut_top_choices(List& list, double threshold);
// The id of the survivor at `place` in [0, 1) of the cumulative distribution.
int32_t draw(const List& list, double place);
// Place of an id in the list, or -1.
int64_t place_of(const List& list, int32_t id);

}  // namespace es
