// Normalisation within samples (instance, group and layer norm): statistics of each row and group of channels.
//
// x, y, dy are C-contiguous (rows, positions, groups, width): width channels for each group, C = groups * width of them in all. Statistics are
// double, (rows, groups); scale and bias (C) of type P, each may be null. With g = scale * dy and xhat = (x - mean) * invstd:
//
//     sample_norm_sums            moments about 0 as `Engine.norm_sums` gives them: (4, rows, groups)
//     sample_norm_apply           y = xhat * scale + bias
//     sample_norm_backward_sums   sums of g and of g * xhat: (2, rows, groups)
//     sample_norm_scale_partials  per channel and chunk of all positions, sums of dy and of dy * xhat: double (2, chunks, C); column_sums
//                                 of norm.cu ends them
//     sample_norm_backward_data   dx = invstd * (g - sums[0]/count - xhat * sums[1]/count)
//
// Launch: 256 threads. Sums: WIDTH threads (32 or 256) share a row and group; any number of blocks. Apply and backward_data: any number,
// threads stride over elements; `Index` is i32 where there are fewer than 2^31. scale_partials: as column_partials in norm.cu.
// Terms are computed in double: these kernels wait for memory.
// Limits: 65 535 chunks of positions; rows, groups and widths in any number.
//
// Called by the norm methods of lbpar/engine/cupy.
#include "channels.cuh"
#include "double_double.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(THREADS, 2)

struct Groups {  // by value
    i64 rows, positions, groups, width;
    double count;
};

// Calls start(unit) for each row and group, then f(offset of the element, its channel) with WIDTH threads, then end(unit, thread).
template <int WIDTH, class Start, class F, class End>
__device__ __forceinline__ void for_units(const Groups& s, Start start, F f, End end) {
    const i64 channels = s.groups * s.width, size = s.positions * s.width;
    const i64 first = grid_thread() / WIDTH, step = grid_threads() / WIDTH;
    const int lane = static_cast<int>(threadIdx.x) % WIDTH;
    for (i64 unit = first; unit < s.rows * s.groups; unit += step) {
        const i64 row = unit / s.groups, channel = unit % s.groups * s.width, base = row * s.positions * channels + channel;
        start(unit, base);
        for (i64 i = lane; i < size; i += WIDTH) f(base + i / s.width * channels + i % s.width, channel + i % s.width);
        end(unit, lane);
    }
}
template <int WIDTH>
__device__ __forceinline__ double sum_of(double v) {
    if constexpr (WIDTH == 32)
        return warp_reduce(v, Sum());
    else
        return block_sum<WIDTH>(v);
}

KERNEL(class T, int WIDTH) sample_norm_sums(double* sums, const T* x, const __grid_constant__ Groups s) {
    const i64 units = s.rows * s.groups, size = s.positions * s.width;
    double origin = 0, first = 0, second = 0;
    for_units<WIDTH>(
        s,
        [&](i64, i64 base) {
            origin = size ? static_cast<double>(wide(x[base])) : 0;
            first = second = 0;
        },
        [&](i64 at, i64) {
            const double d = static_cast<double>(wide(x[at])) - origin;
            first += d;
            second += d * d;
        },
        [&](i64 unit, int lane) {
            const double one = sum_of<WIDTH>(first), two = sum_of<WIDTH>(second);
            if (lane) return;
            const Pair distance = {origin, 0}, total = sum(product(distance, {static_cast<double>(size), 0}), one);
            const Pair squares = sum(product(sum(total, one), distance), two);
            const Pair both[2] = {total, squares};
            for (int k = 0; k < 2; ++k) {
                const double high = leading(both[k].high);
                sums[2 * k * units + unit] = high;
                sums[(2 * k + 1) * units + unit] = (both[k].high - high) + both[k].low;
            }
        });
}

KERNEL(class T, class P, int WIDTH)
sample_norm_backward_sums(double* sums, const T* x, const T* dy, const double* mean, const double* invstd, const P* scale,
                          const __grid_constant__ Groups s) {
    double centre = 0, plain = 0, crossed = 0;
    for_units<WIDTH>(
        s,
        [&](i64 unit, i64) {
            centre = mean[unit];
            plain = crossed = 0;
        },
        [&](i64 at, i64 channel) {
            const double g = static_cast<double>(wide(dy[at])) * (scale ? static_cast<double>(wide(scale[channel])) : 1);
            plain += g;
            crossed += g * (static_cast<double>(wide(x[at])) - centre);
        },
        [&](i64 unit, int lane) {
            const double one = sum_of<WIDTH>(plain), two = sum_of<WIDTH>(crossed);
            if (lane) return;
            sums[unit] = one;
            sums[s.rows * s.groups + unit] = two * invstd[unit];
        });
}

KERNEL(class T)
sample_norm_scale_partials(double* partial, const T* x, const T* dy, const double* mean, const double* invstd, const __grid_constant__ Groups s, i64 each) {
    const i64 rows = s.rows * s.positions, channels = s.groups * s.width;
    const Chunk chunk = chunk_of(rows, blockIdx.y, each);
    for_tiles<T>(channels, [&](const Place& p, auto width) {
        constexpr int N = decltype(width)::value;
        double total[N][2];
        sum_rows<T>(total, p, chunk, [&](i64 row, Acc<T>(&run)[N][2]) {
            const i64 at = row * channels + p.channel, unit = row / s.positions * s.groups;
            const Vector<T, N> in = load_vector<N>(x + at), slope = load_vector<N>(dy + at);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const i64 of = unit + (p.channel + j) / s.width;
                run[j][0] += wide(slope.v[j]);
                run[j][1] += wide(slope.v[j]) * static_cast<Acc<T>>((static_cast<double>(wide(in.v[j])) - mean[of]) * invstd[of]);
            }
        });
        if (p.active && p.row == 0) {
#pragma unroll
            for (int j = 0; j < N; ++j)
                for (int k = 0; k < 2; ++k) partial[(k * i64(gridDim.y) + blockIdx.y) * channels + p.channel + j] = total[j][k];
        }
    }, x, dy);
}

// Calls f(element, channel, row and group) for all elements.
template <class Index, class F>
__device__ __forceinline__ void for_elements(const Groups& s, F f) {
    const Index channels = static_cast<Index>(s.groups * s.width), width = static_cast<Index>(s.width);
    const Index groups = static_cast<Index>(s.groups), size = static_cast<Index>(s.positions * s.groups * s.width);
    const i64 n = s.rows * s.positions * s.groups * s.width;
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const Index at = static_cast<Index>(i), channel = at % channels;
        f(i, channel, at / size * groups + channel / width);
    }
}

KERNEL(class T, class P, class Index)
sample_norm_apply(T* y, const T* x, const double* mean, const double* invstd, const P* scale, const P* bias, const __grid_constant__ Groups s) {
    for_elements<Index>(s, [&](i64 i, Index channel, Index unit) {
        const double factor = scale ? invstd[unit] * wide(scale[channel]) : invstd[unit];
        y[i] = narrow<T>(static_cast<Acc<T>>((static_cast<double>(wide(x[i])) - mean[unit]) * factor + (bias ? wide(bias[channel]) : 0)));
    });
}

KERNEL(class T, class P, class Index)
sample_norm_backward_data(T* dx, const T* x, const T* dy, const double* mean, const double* invstd, const double* sums, const P* scale,
                          const __grid_constant__ Groups s) {
    const i64 units = s.rows * s.groups;
    const double share = 1 / s.count;
    for_elements<Index>(s, [&](i64 i, Index channel, Index unit) {
        const double g = scale ? static_cast<double>(wide(dy[i])) * wide(scale[channel]) : static_cast<double>(wide(dy[i]));
        const double xhat = (static_cast<double>(wide(x[i])) - mean[unit]) * invstd[unit];
        dx[i] = narrow<T>(static_cast<Acc<T>>(invstd[unit] * (g - share * (sums[unit] + xhat * sums[units + unit]))));
    });
}
