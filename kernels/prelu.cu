// PReLU with a slope per channel, or one for all.
//
//     prelu_forward          x > 0 ? x : slope * x
//     prelu_backward_data    x > 0 ? dy : slope * dy
//     prelu_slope_partials   per channel and chunk of rows: sum of dy * min(x, 0); `column_sums` (norm.cu) ends it
//
// x, dy and results are C-contiguous (rows, C), slope is of a type P of parameters, (C) or, if `one`, a single number; partial is double
// (chunks, C). Launch: 256 threads; grid x deals out tiles of channels (64 threads, of 16 bytes each, per tile); grid y, chunks of `each`
// rows in prelu_slope_partials (one at least), any number elsewhere.
// Limits: 65 535 chunks of rows; offsets have 64 bits.
//
// Called by the PReLU methods of lbpar/engine/cupy.
#include "channels.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(THREADS, 2)

// y = x > 0 ? v : slope * v
template <class T, class P>
__device__ __forceinline__ void slope_rows(T* y, const T* x, const T* v, const P* slope, bool one, i64 rows, i64 channels) {
    for_rows<T>(rows, channels, [&](i64 channel, auto width) {
        constexpr int N = decltype(width)::value;
        struct {
            Acc<T> slope[N];
        } of;
#pragma unroll
        for (int j = 0; j < N; ++j) of.slope[j] = static_cast<Acc<T>>(slope[one ? 0 : channel + j]);
        return [=](i64 row) {
            const i64 at = row * channels + channel;
            const Vector<T, N> side = load_vector<N>(x + at);
            Vector<T, N> in = load_vector<N>(v + at);
#pragma unroll
            for (int j = 0; j < N; ++j)
                if (!(wide(side.v[j]) > 0)) in.v[j] = narrow<T>(of.slope[j] * wide(in.v[j]));
            store_vector(y + at, in);
        };
    }, y, x, v);
}

KERNEL(class T, class P) prelu_forward(T* y, const T* x, const P* slope, bool one, i64 rows, i64 channels) {
    slope_rows(y, x, x, slope, one, rows, channels);
}
KERNEL(class T, class P) prelu_backward_data(T* dx, const T* x, const T* dy, const P* slope, bool one, i64 rows, i64 channels) {
    slope_rows(dx, x, dy, slope, one, rows, channels);
}

KERNEL(class T) prelu_slope_partials(double* partial, const T* x, const T* dy, i64 rows, i64 channels, i64 each) {
    const Chunk chunk = chunk_of(rows, blockIdx.y, each);
    for_tiles<T>(channels, [&](const Place& p, auto width) {
        constexpr int N = decltype(width)::value;
        double total[N][1];
        sum_rows<T>(total, p, chunk, [&](i64 row, Acc<T>(&run)[N][1]) {
            const i64 at = row * channels + p.channel;
            const Vector<T, N> in = load_vector<N>(x + at), slope = load_vector<N>(dy + at);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const Acc<T> v = wide(in.v[j]);
                run[j][0] += wide(slope.v[j]) * (v > 0 ? Acc<T>(0) : v);  // NaN stays NaN
            }
        });
        if (p.active && p.row == 0) {
#pragma unroll
            for (int j = 0; j < N; ++j) partial[blockIdx.y * channels + p.channel + j] = total[j][0];
        }
    }, x, dy);
}
