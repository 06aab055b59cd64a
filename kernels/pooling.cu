// Pooling over windows of blocks with ghosts, sums over space undone, and nearest-neighbour upsampling.
//
//     max_pool_forward     y[o] = max over taps k of x[o*stride + k*dilation - pad], arg[o] = number of the first tap that has it
//                          (of the last NaN, where there are any); -inf and, without any tap inside, -1
//     max_pool_backward    dx[i] = sum of dy[o] over the windows whose maximum is i, in the order of taps: no atomics, the same bits each time
//     avg_pool_forward     y[o] = factors[0][o0] factors[1][o1] factors[2][o2] * sum over taps inside
//     avg_pool_backward    dx[i] = sum over the windows that hold i of dy[o] and its factors
//     spatial_broadcast    dx[n, s, c] = scale * dy[n, c]
//     upsample_forward     y[j] = x[(j + offset) / factor]        upsample_backward    dx[i] = sum over factor^d elements of dy
//
// Arrays are (N, *S, C), channels last, with three spatial dimensions: those that are missing have extent, kernel, stride, dilation
// and factor 1 and stand first. `pad` is any number: negative ones crop. A is the type of arg and holds the number of taps (signed char
// or int). Factors (1 / divisor, 0 for a divisor of 0) are of type Acc<T>, those of the three dimensions one behind the other.
// Launch: 256 threads, any number of blocks. `Index` is i32 where all arrays have fewer than 2^31 elements.
// Limits: three spatial dimensions; 127 taps where A is signed char, else 2^31 - 1.
//
// Called by the pooling and upsampling methods of lbpar/engine/cupy; cuDNN's frontend has no pooling.
#include "common.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(256, 2)

struct Pool {  // by value
    i64 batch, channels, in[3], out[3], pad[3];
    int kernel[3], stride[3], dilation[3];
};

// Element i of an array (batch, *S, units), in units of channels.
template <class Index>
struct Position {
    Index sample, at[3], unit;
};
template <class Index>
__device__ __forceinline__ Position<Index> position(Index i, const i64 (&spatial)[3], i64 units) {
    Position<Index> p;
    const Index u = static_cast<Index>(units);
    p.unit = i % u;
    i = i / u;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
        const Index n = static_cast<Index>(spatial[d]);
        p.at[d] = i % n;
        i = i / n;
    }
    p.sample = i;
    return p;
}
template <class Index>
__device__ __forceinline__ i64 offset(i64 sample, Index a, Index b, Index c, const i64 (&spatial)[3], i64 channels, i64 channel) {
    return (((sample * spatial[0] + a) * spatial[1] + b) * spatial[2] + c) * channels + channel;
}

// Calls f(first element of the unit, its position, channel) for each unit of N channels.
template <int N, class Index, class F>
__device__ __forceinline__ void for_units(i64 batch, const i64 (&spatial)[3], i64 channels, F f) {
    const i64 units = channels / N, n = batch * spatial[0] * spatial[1] * spatial[2] * units;
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const Position<Index> p = position(static_cast<Index>(i), spatial, units);
        f(i * N, p, static_cast<i64>(p.unit) * N);
    }
}

// Calls f(tap, element of x) for the taps of output p that lie inside the input, in order.
template <class Index, class F>
__device__ __forceinline__ void for_taps(const Pool& s, const Position<Index>& p, i64 channel, F f) {
    Index start[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) start[d] = p.at[d] * s.stride[d] - static_cast<Index>(s.pad[d]);
    for (int a = 0; a < s.kernel[0]; ++a) {
        const Index i = start[0] + a * s.dilation[0];
        if (i < 0 || i >= s.in[0]) continue;
        for (int b = 0; b < s.kernel[1]; ++b) {
            const Index j = start[1] + b * s.dilation[1];
            if (j < 0 || j >= s.in[1]) continue;
            for (int c = 0; c < s.kernel[2]; ++c) {
                const Index k = start[2] + c * s.dilation[2];
                if (k < 0 || k >= s.in[2]) continue;
                f((a * s.kernel[1] + b) * s.kernel[2] + c, offset(p.sample, i, j, k, s.in, s.channels, channel));
            }
        }
    }
}

// The output whose tap is at this input, -1 if there is none.
template <class Index>
__device__ __forceinline__ Index output_of(const Pool& s, int d, Index at, int tap) {
    const Index from = at + static_cast<Index>(s.pad[d]) - tap * s.dilation[d];
    if (from < 0) return -1;
    const Index o = from / s.stride[d];
    return o * s.stride[d] == from && o < s.out[d] ? o : Index(-1);
}

// Calls f(tap, output in three numbers, element of y) for the windows that hold input p, in the order of taps.
template <class Index, class F>
__device__ __forceinline__ void for_windows(const Pool& s, const Position<Index>& p, i64 channel, F f) {
    for (int a = 0; a < s.kernel[0]; ++a) {
        const Index i = output_of(s, 0, p.at[0], a);
        if (i < 0) continue;
        for (int b = 0; b < s.kernel[1]; ++b) {
            const Index j = output_of(s, 1, p.at[1], b);
            if (j < 0) continue;
            for (int c = 0; c < s.kernel[2]; ++c) {
                const Index k = output_of(s, 2, p.at[2], c);
                if (k < 0) continue;
                f((a * s.kernel[1] + b) * s.kernel[2] + c, i, j, k, offset(p.sample, i, j, k, s.out, s.channels, channel));
            }
        }
    }
}

KERNEL(class T, class A, class Index) max_pool_forward(T* y, A* arg, const T* x, const __grid_constant__ Pool s) {
    by_width<T>(s.channels, [&](auto width) {
        constexpr int N = decltype(width)::value;
        for_units<N, Index>(s.batch, s.out, s.channels, [&](i64 at, const Position<Index>& p, i64 channel) {
            Acc<T> best[N];
            Vector<A, N> which;
            int first = -1;
#pragma unroll
            for (int j = 0; j < N; ++j) best[j] = -infinity(), which.v[j] = -1;
            for_taps(s, p, channel, [&](int tap, i64 from) {
                const Vector<T, N> in = load_vector<N>(x + from);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const Acc<T> v = wide(in.v[j]);
                    if (first < 0 || v > best[j] || v != v) which.v[j] = static_cast<A>(tap);
                    if (v > best[j] || v != v) best[j] = v;
                }
                first = tap;
            });
            Vector<T, N> out;
#pragma unroll
            for (int j = 0; j < N; ++j) out.v[j] = narrow<T>(best[j]);
            store_vector(y + at, out);
            store_vector(arg + at, which);
        });
    }, y, arg, x);
}

KERNEL(class T, class A, class Index) max_pool_backward(T* dx, const T* dy, const A* arg, const __grid_constant__ Pool s) {
    by_width<T>(s.channels, [&](auto width) {
        constexpr int N = decltype(width)::value;
        for_units<N, Index>(s.batch, s.in, s.channels, [&](i64 at, const Position<Index>& p, i64 channel) {
            Acc<T> sum[N] = {};
            for_windows(s, p, channel, [&](int tap, Index, Index, Index, i64 from) {
                const Vector<A, N> which = load_vector<N>(arg + from);
                const Vector<T, N> g = load_vector<N>(dy + from);
#pragma unroll
                for (int j = 0; j < N; ++j)
                    if (which.v[j] == tap) sum[j] += wide(g.v[j]);
            });
            Vector<T, N> out;
#pragma unroll
            for (int j = 0; j < N; ++j) out.v[j] = narrow<T>(sum[j]);
            store_vector(dx + at, out);
        });
    }, dx, dy, arg);
}

KERNEL(class T, class Index) avg_pool_forward(T* y, const T* x, const Acc<T>* factors, const __grid_constant__ Pool s) {
    by_width<T>(s.channels, [&](auto width) {
        constexpr int N = decltype(width)::value;
        for_units<N, Index>(s.batch, s.out, s.channels, [&](i64 at, const Position<Index>& p, i64 channel) {
            Acc<T> sum[N] = {};
            for_taps(s, p, channel, [&](int, i64 from) {
                const Vector<T, N> in = load_vector<N>(x + from);
#pragma unroll
                for (int j = 0; j < N; ++j) sum[j] += wide(in.v[j]);
            });
            const Acc<T> factor = factors[p.at[0]] * factors[s.out[0] + p.at[1]] * factors[s.out[0] + s.out[1] + p.at[2]];
            Vector<T, N> out;
#pragma unroll
            for (int j = 0; j < N; ++j) out.v[j] = narrow<T>(sum[j] * factor);
            store_vector(y + at, out);
        });
    }, y, x);
}

KERNEL(class T, class Index) avg_pool_backward(T* dx, const T* dy, const Acc<T>* factors, const __grid_constant__ Pool s) {
    by_width<T>(s.channels, [&](auto width) {
        constexpr int N = decltype(width)::value;
        for_units<N, Index>(s.batch, s.in, s.channels, [&](i64 at, const Position<Index>& p, i64 channel) {
            Acc<T> sum[N] = {};
            for_windows(s, p, channel, [&](int, Index a, Index b, Index c, i64 from) {
                const Acc<T> factor = factors[a] * factors[s.out[0] + b] * factors[s.out[0] + s.out[1] + c];
                const Vector<T, N> g = load_vector<N>(dy + from);
#pragma unroll
                for (int j = 0; j < N; ++j) sum[j] += wide(g.v[j]) * factor;
            });
            Vector<T, N> out;
#pragma unroll
            for (int j = 0; j < N; ++j) out.v[j] = narrow<T>(sum[j]);
            store_vector(dx + at, out);
        });
    }, dx, dy);
}

// -- space that is only repeated or added up --------------------------------------------------------------------------------------

KERNEL(class T, class Index) spatial_broadcast(T* dx, const T* dy, double scale, i64 batch, i64 positions, i64 channels) {
    const i64 spatial[3] = {1, 1, positions};
    const Acc<T> factor = static_cast<Acc<T>>(scale);
    by_width<T>(channels, [&](auto width) {
        constexpr int N = decltype(width)::value;
        for_units<N, Index>(batch, spatial, channels, [&](i64 at, const Position<Index>& p, i64 channel) {
            Vector<T, N> v = load_vector<N>(dy + static_cast<i64>(p.sample) * channels + channel);
#pragma unroll
            for (int j = 0; j < N; ++j) v.v[j] = narrow<T>(wide(v.v[j]) * factor);
            store_vector(dx + at, v);
        });
    }, dx, dy);
}

struct Upsample {  // by value; `out` are the extents of y and dy
    i64 batch, channels, in[3], out[3], offset[3];
    int factor[3];
};

KERNEL(class T, class Index) upsample_forward(T* y, const T* x, const __grid_constant__ Upsample s) {
    by_width<T>(s.channels, [&](auto width) {
        constexpr int N = decltype(width)::value;
        for_units<N, Index>(s.batch, s.out, s.channels, [&](i64 at, const Position<Index>& p, i64 channel) {
            Index from[3];
#pragma unroll
            for (int d = 0; d < 3; ++d) from[d] = (p.at[d] + static_cast<Index>(s.offset[d])) / s.factor[d];
            store_vector(y + at, load_vector<N>(x + offset(p.sample, from[0], from[1], from[2], s.in, s.channels, channel)));
        });
    }, y, x);
}

KERNEL(class T, class Index) upsample_backward(T* dx, const T* dy, const __grid_constant__ Upsample s) {
    by_width<T>(s.channels, [&](auto width) {
        constexpr int N = decltype(width)::value;
        for_units<N, Index>(s.batch, s.in, s.channels, [&](i64 at, const Position<Index>& p, i64 channel) {
            Acc<T> sum[N] = {};
            for (int a = 0; a < s.factor[0]; ++a)
                for (int b = 0; b < s.factor[1]; ++b)
                    for (int c = 0; c < s.factor[2]; ++c) {
                        const Index i = p.at[0] * s.factor[0] + a, j = p.at[1] * s.factor[1] + b, k = p.at[2] * s.factor[2] + c;
                        const Vector<T, N> g = load_vector<N>(dy + offset(p.sample, i, j, k, s.out, s.channels, channel));
#pragma unroll
                        for (int l = 0; l < N; ++l) sum[l] += wide(g.v[l]);
                    }
            Vector<T, N> out;
#pragma unroll
            for (int j = 0; j < N; ++j) out.v[j] = narrow<T>(sum[j]);
            store_vector(dx + at, out);
        });
    }, dx, dy);
}
