// float16 and bfloat16 in software, rounded to the nearest, ties to even; names as in cuda_fp16.h and cuda_bf16.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulated {

inline uint32_t bits_of(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}

inline float float_of(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

inline uint16_t to_half(float value) {
    const uint32_t u = bits_of(value), sign = u >> 16 & 0x8000u, size = u & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fff;                                    // NaN, as the device's conversion gives it
    if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (size < 0x38800000u) {                                                 // denormal: 2^-24 is the unit
        const float scaled = float_of(size) * 16777216.0f;  // exact
        uint32_t whole = static_cast<uint32_t>(scaled);
        const float rest = scaled - static_cast<float>(whole);
        whole += rest > 0.5f || (rest == 0.5f && (whole & 1u));
        return static_cast<uint16_t>(sign | whole);
    }
    const uint32_t rounded = size + 0xfffu + (size >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float from_half(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        const float size = static_cast<float>(fraction) * (1.0f / 16777216.0f);
        return sign ? -size : size;
    }
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t to_bfloat16(float value) {
    const uint32_t u = bits_of(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

inline float from_bfloat16(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

}  // namespace emulated

// No arithmetic on purpose: kernels compute in float.
struct __half {
    uint16_t raw;
};
struct __nv_bfloat16 {
    uint16_t raw;
};
struct alignas(4) __half2 {
    __half x, y;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __half2float(__half h) { return emulated::from_half(h.raw); }
inline __half __float2half_rn(float f) { return {emulated::to_half(f)}; }
inline float __bfloat162float(__nv_bfloat16 b) { return emulated::from_bfloat16(b.raw); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return {emulated::to_bfloat16(f)}; }
