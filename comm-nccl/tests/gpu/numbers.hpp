// Numbers of 16 bits in the words of f32.

#pragma once

#include <cstring>

namespace stand_in {

template <class To, class From> To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

/// The nearest of what has `drop` fewer bits of fraction; of two that are as near the one whose last bit is 0.
inline unsigned nearest_even(unsigned value, unsigned drop) {
    return value + (1u << (drop - 1)) - 1 + (value >> drop & 1);
}

struct Bf16 {
    unsigned short value;
    static unsigned short of(float number) {
        if (number != number) return 0x7fff;
        return nearest_even(bits<unsigned>(number), 16) >> 16;
    }
    static float to(unsigned short value) { return bits<float>(unsigned(value) << 16); }
};

struct F16 {
    unsigned short value;
    static unsigned short of(float number) {
        unsigned all = bits<unsigned>(number), sign = all >> 16 & 0x8000, size = all & 0x7fffffff;
        if (size > 0x7f800000) return 0x7fff;
        // From 65,520 on the nearest is infinity.
        if (size >= 0x477ff000) return sign | 0x7c00;
        // Below 2^-14 units are 2^-24, whose number a sum with 0.5 leaves in the last bits.
        if (size < 0x38800000) return sign | (bits<unsigned>(bits<float>(size) + 0.5f) - bits<unsigned>(0.5f));
        return sign | (nearest_even(size - 0x38000000, 13) >> 13);
    }
    static float to(unsigned short value) {
        unsigned sign = unsigned(value & 0x8000) << 16, exponent = value >> 10 & 31, fraction = value & 0x3ff;
        float size = exponent == 0    ? float(fraction) * 0x1p-24f
                     : exponent == 31 ? bits<float>(0x7f800000 | fraction << 13)
                                      : bits<float>((exponent + 112) << 23 | fraction << 13);
        return bits<float>(bits<unsigned>(size) | sign);
    }
};

} // namespace stand_in
