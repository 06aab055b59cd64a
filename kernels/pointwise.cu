// What each element of a result takes from the same element of the inputs, or from its neighbours along the channels.
//
//     relu_forward           max(x, 0), NaN stays NaN       relu_backward           dy where y > 0, else 0
//     leaky_relu_forward     x > 0 ? x : slope x            leaky_relu_backward     y > 0 ? dy : slope dy
//     sigmoid_forward        1 / (1 + exp(-x))              sigmoid_backward        dy y (1 - y)
//     tanh_forward           scale tanh(x)                  tanh_backward           dy (scale - y y / scale)
//     add_all, multiply_all  of up to 8 arrays, left to right, rounded once
//     axpy                   a x + more, each rounded as on the CPU; no more: a x
//     convert                another element type
//     local_response_norm_*, channel_shuffle: see `Engine` in lbpar/engine/base.py
//
// Arrays are C-contiguous of n elements, results may lie where an input does (not for the norm and the shuffle). Launch: blocks of 256
// threads along x, any number: threads stride over the array. `Index` is i32 where n stays below 2^31.
// Limits: 8 arrays of a sum or product, of which further ones take another launch; offsets have 64 bits.
//
// Called by the pointwise methods of lbpar/engine/cupy.
#include "common.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(256, 2)

KERNEL(class T) relu_forward(T* y, const T* x, i64 n) {
    map_elements([](Acc<T> v) { return v > 0 || v != v ? v : Acc<T>(0); }, n, y, x);
}
KERNEL(class T) relu_backward(T* dx, const T* y, const T* dy, i64 n) {
    map_elements([](Acc<T> v, Acc<T> g) { return v > 0 ? g : Acc<T>(0); }, n, dx, y, dy);
}

KERNEL(class T) leaky_relu_forward(T* y, const T* x, double slope, i64 n) {
    const Acc<T> s = static_cast<Acc<T>>(slope);
    map_elements([s](Acc<T> v) { return v > 0 ? v : s * v; }, n, y, x);
}
KERNEL(class T) leaky_relu_backward(T* dx, const T* y, const T* dy, double slope, i64 n) {
    const Acc<T> s = static_cast<Acc<T>>(slope);
    map_elements([s](Acc<T> v, Acc<T> g) { return v > 0 ? g : s * g; }, n, dx, y, dy);
}

KERNEL(class T) sigmoid_forward(T* y, const T* x, i64 n) { map_elements(Sigmoid(), n, y, x); }
KERNEL(class T) sigmoid_backward(T* dx, const T* y, const T* dy, i64 n) {
    map_elements([](Acc<T> v, Acc<T> g) { return (1 - v) * v * g; }, n, dx, y, dy);
}

KERNEL(class T) tanh_forward(T* y, const T* x, double scale, i64 n) {
    const Acc<T> s = static_cast<Acc<T>>(scale);
    map_elements([s](Acc<T> v) { return s * tanh(v); }, n, y, x);
}
KERNEL(class T) tanh_backward(T* dx, const T* y, const T* dy, double scale, i64 n) {
    const Acc<T> s = static_cast<Acc<T>>(scale), r = static_cast<Acc<T>>(-1 / scale);
    map_elements([s, r](Acc<T> v, Acc<T> g) { return (v * v * r + s) * g; }, n, dx, y, dy);
}

struct Inputs {  // by value
    const void* of[8];
    i64 count;
};
template <class T, class Join>
__device__ __forceinline__ void join_all(T* y, const Inputs& all, i64 n, Join join) {
    if (all.count == 2) return map_elements(join, n, y, static_cast<const T*>(all.of[0]), static_cast<const T*>(all.of[1]));
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        Acc<T> v = wide(static_cast<const T*>(all.of[0])[i]);
#pragma unroll
        for (int k = 1; k < 8; ++k)
            if (k < all.count) v = join(v, wide(static_cast<const T*>(all.of[k])[i]));
        y[i] = narrow<T>(v);
    }
}
KERNEL(class T) add_all(T* y, const __grid_constant__ Inputs all, i64 n) {
    join_all(y, all, n, Sum());
}
KERNEL(class T) multiply_all(T* y, const __grid_constant__ Inputs all, i64 n) {
    join_all(y, all, n, [](Acc<T> a, Acc<T> b) { return a * b; });
}

KERNEL(class T) axpy(T* y, const T* x, const T* more, double factor, i64 n) {
    const Acc<T> a = static_cast<Acc<T>>(factor);
    if (more)
        map_elements([a](Acc<T> v, Acc<T> m) { return rounded_sum(rounded_product(a, v), m); }, n, y, x, more);
    else
        map_elements([a](Acc<T> v) { return a * v; }, n, y, x);
}

KERNEL(class To, class From) convert(To* y, const From* x, i64 n) {
    map_elements([](Acc<From> v) { return v; }, n, y, x);
}

// -- neighbours along the channels ----------------------------------------------------------------------------------------------

struct ResponseNorm {  // by value; x has `held` channels, y, scale have `channels`
    i64 rows, held, channels;
    int size, own, first;
    double alpha, beta, k;
};

template <class T>
__device__ __forceinline__ T minus_power(T scale, double beta) {
    if (beta != 0.75) return pow(scale, static_cast<T>(-beta));
    const T root = sqrt(scale);
    return 1 / (root * sqrt(root));
}

// Sum of f(x) over the window of channels [start, start + size) that x holds.
template <class T, class F>
__device__ __forceinline__ Acc<T> window_sum(const T* x, i64 held, i64 start, int size, F f) {
    Acc<T> sum = 0;
    for (i64 c = start > 0 ? start : 0; c < start + size && c < held; ++c) sum += f(wide(x[c]));
    return sum;
}

KERNEL(class T, class Index) local_response_norm_forward(T* y, T* scale, const T* x, const __grid_constant__ ResponseNorm s) {
    const i64 n = s.rows * s.channels;
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const i64 row = static_cast<Index>(i) / static_cast<Index>(s.channels), j = i - row * s.channels;
        const T* of = x + row * s.held;
        const Acc<T> squares = window_sum(of, s.held, j + s.first, s.size, [](Acc<T> v) { return v * v; });
        const Acc<T> divisor = squares * static_cast<Acc<T>>(s.alpha / s.size) + static_cast<Acc<T>>(s.k);
        scale[i] = narrow<T>(divisor);
        y[i] = narrow<T>(wide(of[s.own + j]) * minus_power(divisor, s.beta));
    }
}

KERNEL(class T) local_response_norm_ratio(T* ratio, const T* y, const T* dy, const T* scale, i64 n) {
    map_elements([](Acc<T> v, Acc<T> g, Acc<T> s) { return g * v / s; }, n, ratio, y, dy, scale);
}

// dx, x, dy and scale have `channels`, ratio has `held`.
KERNEL(class T, class Index)
local_response_norm_backward(T* dx, const T* x, const T* dy, const T* scale, const T* ratio, const __grid_constant__ ResponseNorm s) {
    const i64 n = s.rows * s.channels;
    const Acc<T> factor = static_cast<Acc<T>>(-2 * s.alpha * s.beta / s.size);
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const i64 row = static_cast<Index>(i) / static_cast<Index>(s.channels), j = i - row * s.channels;
        const Acc<T> sum = window_sum(ratio + row * s.held, s.held, j + s.first, s.size, [](Acc<T> v) { return v; });
        dx[i] = narrow<T>(wide(dy[i]) * minus_power(wide(scale[i]), s.beta) + factor * wide(x[i]) * sum);
    }
}

// The last dimension as a table of rows and columns, transposed; `Unit` is any type of the elements' size.
KERNEL(class Unit, class Index) channel_shuffle(Unit* y, const Unit* x, i64 n, i64 rows, i64 columns) {
    const Index r = static_cast<Index>(rows), c = static_cast<Index>(columns), all = r * c;
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const Index at = static_cast<Index>(i), within = at % all;
        y[i] = x[at - within + within % r * c + within / r];
    }
}
