// Weighted sums of a few elements along one dimension: interpolation, rims that mirror or repeat, and their gradients.
//
//     along_lines   y[o, j, k] = sum over taps t of weight[t, j] * x[o, index[t, j], k]
//
// x is C-contiguous (outer, n, inner), y (outer, m, inner) of its type, index i64 and weight double (taps, m); weights of 0 fill up, and
// what they point to is not read. Sums are in Acc<T>. Index is the type in which positions are divided. Launch: 256 threads, any number of blocks:
// threads stride over y, 16 bytes at a time where `inner` and addresses allow.
// Limits: `Index` is i32 where y has fewer than 2^31 elements; offsets have 64 bits.
//
// Called by the lines method of lbpar/engine/cupy.
#include "common.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(256, 2)

struct Lines {  // by value
    i64 outer, in, out, inner, taps;
};

KERNEL(class T, class Index) along_lines(T* y, const T* x, const i64* index, const double* weight, const __grid_constant__ Lines s) {
    by_width<T>(s.inner, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const i64 n = s.outer * s.out * (s.inner / N);
        const Index units = static_cast<Index>(s.inner / N), out = static_cast<Index>(s.out);
        for (i64 i = grid_thread(); i < n; i += grid_threads()) {
            const Index row = static_cast<Index>(i) / units, unit = static_cast<Index>(i) - row * units;
            const i64 start = static_cast<i64>(row / out) * s.in, column = static_cast<i64>(unit) * N, j = static_cast<i64>(row % out);
            Acc<T> sum[N] = {};
            for (i64 t = j; t < s.taps * s.out; t += s.out) {
                const Acc<T> by = static_cast<Acc<T>>(weight[t]);
                if (by == 0) continue;
                const Vector<T, N> v = load_vector<N>(x + (start + index[t]) * s.inner + column);
#pragma unroll
                for (int k = 0; k < N; ++k) sum[k] += by * wide(v.v[k]);
            }
            Vector<T, N> to;
#pragma unroll
            for (int k = 0; k < N; ++k) to.v[k] = narrow<T>(sum[k]);
            store_vector(y + i * N, to);
        }
    }, x, y);
}
