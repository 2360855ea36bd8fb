// Bias, bans and penalties: the controls that change single scores of a row, before any filter.
#pragma once
#include <cstdint>

#include "sample.h"

namespace es {

// Whether any of them is on for this row.
bool adjusts(const SampleRow& row);
// Applies them in their order to scores [vocabulary], which begin as a copy of the model's logits.
void adjust(const SampleRow& row, int64_t vocabulary, float* scores);

}  // namespace es
