// Activations that are functions of a number and of one option: a struct each, with the function and its slope.
//
//     Elu          x > 0 ? x : a (exp(x) - 1)                       slope from y
//     Gelu         x (1 + erf(x / sqrt 2)) / 2                      from x
//     GeluTanh     x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2  from x
//     Silu         x / (1 + exp(-x))                                from x
//     Softplus     log(1 + exp(a x)) / a                            from y
//     HardSigmoid  a x + 1/2, cut off at 0 and 1                    from y
//     HardSwish    x times (x / 6 + 1/2, cut off at 0 and 1)        from x
//
// activation_forward: y = of(x); activation_backward: dx = slope(kept) dy, with kept x or y. NaN stays NaN. Arrays are C-contiguous of n
// elements, results may lie where an input does. Launch: blocks of 256 threads along x, any number: threads stride over the array.
// Limits: none but memory; n and offsets have 64 bits.
//
// Called by the pointwise methods of lbpar/engine/cupy.
#include "common.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(256, 2)
#define FUNCTION template <class V> static __device__ __forceinline__ V

template <class V>
__device__ __forceinline__ V cut_off(V v) {
    return v < 0 ? V(0) : v > 1 ? V(1) : v;
}

struct Elu {
    FUNCTION of(V x, V a) { return x > 0 ? x : a * expm1(x); }
    FUNCTION slope(V y, V a) { return y > 0 ? V(1) : y + a; }
};

struct Gelu {
    FUNCTION share(V x) { return V(0.5) * (1 + erf(x * V(0.70710678118654752440))); }
    FUNCTION of(V x, V) { return x * share(x); }
    FUNCTION slope(V x, V) { return share(x) + x * exp(V(-0.5) * x * x) * V(0.39894228040143267794); }
};

struct GeluTanh {
    FUNCTION inner(V x) { return tanh(V(0.79788456080286535588) * (x + V(0.044715) * x * x * x)); }
    FUNCTION of(V x, V) { return V(0.5) * x * (1 + inner(x)); }
    FUNCTION slope(V x, V) {
        const V t = inner(x);
        return V(0.5) * (1 + t) + V(0.5 * 0.79788456080286535588) * x * (1 - t * t) * (1 + V(3 * 0.044715) * x * x);
    }
};

struct Silu {
    FUNCTION of(V x, V) { return x * Sigmoid()(x); }
    FUNCTION slope(V x, V) {
        const V s = Sigmoid()(x);
        return s * (1 + x * (1 - s));
    }
};

struct Softplus {
    FUNCTION of(V x, V a) { return (x < 0 ? V(0) : x) + log1p(exp(x < 0 ? a * x : -a * x)) / a; }
    FUNCTION slope(V y, V a) { return -expm1(-a * y); }
};

struct HardSigmoid {
    FUNCTION of(V x, V a) { return cut_off(a * x + V(0.5)); }
    FUNCTION slope(V y, V a) { return y > 0 && y < 1 ? a : V(0); }
};

struct HardSwish {
    FUNCTION of(V x, V) { return x * cut_off(x / 6 + V(0.5)); }
    FUNCTION slope(V x, V) { return x > 3 ? V(1) : x < -3 ? V(0) : x / 3 + V(0.5); }
};

KERNEL(class T, class F) activation_forward(T* y, const T* x, double option, i64 n) {
    const Acc<T> a = static_cast<Acc<T>>(option);
    map_elements([a](Acc<T> v) { return F::of(v, a); }, n, y, x);
}
KERNEL(class T, class F) activation_backward(T* dx, const T* kept, const T* dy, double option, i64 n) {
    const Acc<T> a = static_cast<Acc<T>>(option);
    map_elements([a](Acc<T> v, Acc<T> g) { return F::slope(v, a) * g; }, n, dx, kept, dy);
}
