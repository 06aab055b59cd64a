// Double-double arithmetic (Dekker 1971): a number as an unevaluated sum of two doubles. lbpar/engine/double_double.py has the same.
#pragma once

#include "common.cuh"

struct Pair {
    double high, low;
};

__device__ __forceinline__ Pair exact_sum(double a, double b) {
    const double s = a + b, t = s - a;
    return {s, (a - (s - t)) + (b - t)};
}
__device__ __forceinline__ Pair sum(const Pair& p, double b) {
    const Pair s = exact_sum(p.high, b);
    return exact_sum(s.high, s.low + p.low);
}
__device__ __forceinline__ Pair product(const Pair& p, const Pair& q) {
    const double high = rounded_product(p.high, q.high), rest = fma(p.high, q.high, -high);
    return exact_sum(high, rest + (p.high * q.low + p.low * q.high));
}
// `a` rounded to 32 bits: such parts of many blocks add up without rounding.
__device__ __forceinline__ double leading(double a) {
    const double scaled = rounded_product(a, 2097153.0);  // 2^21 + 1
    return scaled - (scaled - a);
}
