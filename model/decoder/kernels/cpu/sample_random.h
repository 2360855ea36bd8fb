// Counted randomness: a number as a function of (seed, choice, index, purpose) alone; Philox4x32, ten rounds
// (Salmon et al., 2011). The same bits as in engine/sampler_random.py; a test holds both to the published vectors.
#pragma once
#include <cstdint>

namespace es {

enum Purpose : uint32_t { kDraw = 0, kXtc = 1 };

inline void philox(uint32_t counter[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
        uint32_t c1 = counter[1], c3 = counter[3];
        counter[0] = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
        counter[1] = static_cast<uint32_t>(second);
        counter[2] = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
        counter[3] = static_cast<uint32_t>(first);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

// In [0, 1), 53 random bits.
inline double uniform(uint64_t seed, uint64_t choice, uint64_t index, Purpose purpose) {
    uint32_t words[4] = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(choice),
                         purpose};
    philox(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    uint64_t bits = (uint64_t{words[1]} << 32 | words[0]) >> 11;
    return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace es
