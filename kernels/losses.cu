// Losses of logits whose classes [class_start, class_start + C) may be a part of all, at any number of positions (voxels); `Engine` in
// lbpar/engine/base.py says how the calls follow each other and what is reduced over ranks between them.
//
//     softmax_sums      per position: sum of exp(x - m); x[target] - m if that is local, else 0; sum of x - m
//     cross_entropy_partials, cross_entropy_backward     with label smoothing
//     softmax_rank      how many local classes come before the target; count_hits: how many positions rank below each of tops
//     mse_*, bce_*, error_*      of targets of another type U; error_*: the sum of a function F of x - t
//     sum_partials      out[k] = scale * sum of partial[k]: ends all *_partials of scalars
//
// x is C-contiguous (rows, C), m (rows) of its type, target (rows) of an integer type I; sums double (3, rows), as are all sums and
// losses. Terms are computed in Acc<T>, and added in double over positions. Launch: 256 threads; *_partials and count_hits: the blocks along
// grid x are the partial sums; sum_partials: one block, grid y over k; others any grid. WIDTH lanes (1, 8, 32) share a row.
// Limits: 8 tops a launch, 2^31 - 1 local classes (ranks are counted in int); positions in any number, offsets have 64 bits.
//
// Called by the loss methods of lbpar/engine/cupy.
#include "rows.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(256, 2)
#define PLAIN_KERNEL __global__ void __launch_bounds__(256, 2)

PLAIN_KERNEL sum_partials(double* out, const double* partial, double scale, i64 count) {
    double sum = 0;
    for (i64 i = threadIdx.x; i < count; i += 256) sum += partial[blockIdx.y * count + i];
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) out[blockIdx.y] = scale * sum;
}

// The target among the local classes, which may lie outside of them.
template <class I>
__device__ __forceinline__ i64 local(const I* target, i64 row, i64 class_start) {
    return static_cast<i64>(target[row]) - class_start;
}

KERNEL(class T, class I, int WIDTH)
softmax_sums(double* sums, const T* x, const T* m, const I* target, i64 class_start, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        const T* of = x + row * channels;
        const Acc<T> most = there ? wide(m[row]) : Acc<T>(0);
        Acc<T> exponentials = 0, differences = 0;
        if (there)
            for (i64 c = lane; c < channels; c += WIDTH) {
                const Acc<T> d = wide(of[c]) - most;
                exponentials += exp(d);
                differences += d;
            }
        exponentials = warp_reduce<WIDTH>(exponentials, Sum());
        differences = warp_reduce<WIDTH>(differences, Sum());
        if (there && lane == 0) {
            const i64 t = local(target, row, class_start);
            sums[row] = exponentials;
            sums[rows + row] = t >= 0 && t < channels ? static_cast<double>(wide(of[t])) - most : 0;
            sums[2 * rows + row] = differences;
        }
    });
}

PLAIN_KERNEL cross_entropy_partials(double* partial, const double* sums, double smoothing, double classes, i64 rows) {
    partial_sum(partial, rows, [&](i64 i) {
        const double each = log(sums[i]) - (1 - smoothing) * sums[rows + i];
        return smoothing != 0 ? each - smoothing / classes * sums[2 * rows + i] : each;  // unsmoothed, -inf is a legal logit
    });
}

KERNEL(class T, class I, int WIDTH)
cross_entropy_backward(T* dx, const T* x, const T* m, const double* sums, const I* target, i64 class_start, double smoothing,
                       double classes, double scale, i64 rows, i64 channels) {
    const Acc<T> even = static_cast<Acc<T>>(smoothing / classes), hit = static_cast<Acc<T>>(1 - smoothing), by = static_cast<Acc<T>>(scale);
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        if (!there) return;
        const Acc<T> most = wide(m[row]), factor = static_cast<Acc<T>>(1 / sums[row]);
        const i64 t = local(target, row, class_start);
        for (i64 c = lane; c < channels; c += WIDTH) {
            Acc<T> g = exp(wide(x[row * channels + c]) - most) * factor - even;
            if (c == t) g -= hit;
            dx[row * channels + c] = narrow<T>(g * by);
        }
    });
}

KERNEL(class T, class I, int WIDTH)
softmax_rank(double* rank, const T* x, const T* m, const double* sums, const I* target, i64 class_start, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        const double own = there ? sums[rows + row] : 0, most = there ? static_cast<double>(wide(m[row])) : 0;
        const i64 t = there ? local(target, row, class_start) : 0;
        const int before = row_reduce<WIDTH>(channels, there, lane, 0, [&](i64 c) {
            const double d = static_cast<double>(wide(x[row * channels + c])) - most;
            return static_cast<int>(d > own || (c < t && d == own));
        }, Sum());
        if (there && lane == 0) rank[row] = sums[row] - sums[row] == 0 ? static_cast<double>(before) : static_cast<double>(infinity());
    });
}

struct Tops {  // by value
    double of[8];
};
// Grid y over tops. Positions whose target is `ignore` do not count; target may be null. A top that is not a number counts all others.
KERNEL(class I) count_hits(double* partial, const double* rank, const I* target, const __grid_constant__ Tops tops, i64 ignore, i64 n) {
    partial_sum(partial, n, [&](i64 i) {
        const bool known = !target || static_cast<i64>(target[i]) != ignore;
        return known && !(rank[i] >= tops.of[blockIdx.y]) ? 1.0 : 0.0;
    });
}

KERNEL(class T, class U) mse_partials(double* partial, const T* x, const U* t, i64 n) {
    partial_sum(partial, n, [&](i64 i) {
        const Acc<T> d = wide(x[i]) - static_cast<Acc<T>>(wide(t[i]));
        return static_cast<double>(d * d);
    });
}
KERNEL(class T, class U) mse_backward(T* dx, const T* x, const U* t, double scale, i64 n) {
    const Acc<T> by = static_cast<Acc<T>>(2 * scale);
    map_elements([by](Acc<T> v, Acc<U> w) { return (v - static_cast<Acc<T>>(w)) * by; }, n, dx, x, t);
}

struct L1 {
    template <class V>
    static __device__ __forceinline__ V of(V d) { return d < 0 ? -d : d; }
    template <class V>
    static __device__ __forceinline__ V slope(V d) { return d > 0 ? V(1) : d < 0 ? V(-1) : d; }
};
struct Huber {  // of half the square up to 1, beyond of the size less a half
    template <class V>
    static __device__ __forceinline__ V of(V d) {
        const V size = L1::of(d);
        return size <= 1 ? d * d / 2 : size - V(0.5);
    }
    template <class V>
    static __device__ __forceinline__ V slope(V d) { return d > 1 ? V(1) : d < -1 ? V(-1) : d; }
};
KERNEL(class T, class U, class F) error_partials(double* partial, const T* x, const U* t, i64 n) {
    partial_sum(partial, n, [&](i64 i) { return static_cast<double>(F::of(wide(x[i]) - static_cast<Acc<T>>(wide(t[i])))); });
}
KERNEL(class T, class U, class F) error_backward(T* dx, const T* x, const U* t, double scale, i64 n) {
    const Acc<T> by = static_cast<Acc<T>>(scale);
    map_elements([by](Acc<T> v, Acc<U> w) { return F::slope(v - static_cast<Acc<T>>(w)) * by; }, n, dx, x, t);
}

// max(x, 0) - x*t + log(1 + exp(-|x|)), which never overflows.
KERNEL(class T, class U) bce_partials(double* partial, const T* x, const U* t, i64 n) {
    partial_sum(partial, n, [&](i64 i) {
        const Acc<T> v = wide(x[i]), w = static_cast<Acc<T>>(wide(t[i]));
        return static_cast<double>((v < 0 ? 0 : v) - v * w + log1p(exp(v < 0 ? v : -v)));
    });
}
KERNEL(class T, class U) bce_backward(T* dx, const T* x, const U* t, double scale, i64 n) {
    const Acc<T> by = static_cast<Acc<T>>(scale);
    map_elements([by](Acc<T> v, Acc<U> w) { return (Sigmoid()(v) - static_cast<Acc<T>>(w)) * by; }, n, dx, x, t);
}
