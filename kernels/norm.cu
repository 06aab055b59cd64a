// Normalisation over all but the last dimension: statistics of blocks, applying them, and the gradients; also sums per channel.
//
// x, y, dy are C-contiguous (rows, C). Statistics are double, (count, mean, M2) per thread, merged by Chan's formula over
// the block, then over `chunks` of rows, and handed on as sums about a shift that all ranks share, in two parts each, so that ranks
// merge by adding (`Engine.norm_sums`):
//
//     norm_partials -> norm_sums -> (sum over ranks) -> norm_moments, norm_running
//     norm_found             sums and moments where cuDNN has found the statistics of the one rank that there is
//     norm_apply             relu?((x - mean) * invstd * scale + bias + residual)
//     norm_backward_partials g = relu? (y > 0) * (dy + more) : dy, and partial sums of g and g * (x - mean), in one pass
//     norm_backward_sums     sum of g, sum of g * xhat
//     norm_backward_data     scale * invstd * (dy - sums[0]/count - xhat*sums[1]/count) + more
//     column_partials, column_sums   scale * sum over rows, per group of rows (bias: one group; spatial sums: one per sample)
//     bias_add               x + b
//
// P is the type of scale and bias. Pointers that may be null: residual, scale, bias, more. Launch: 256 threads; grid x deals out tiles of
// channels (64 threads, of 16 bytes each, per tile); grid y, chunks of `each` rows in the kernels that make partial sums (one chunk at
// least), any number elsewhere; grid z groups. The kernels that end sums (norm_sums, norm_backward_sums, column_sums): grid x over 32
// channels each. Those on a single number per channel: any grid.
// Limits: 65 535 chunks of rows; groups are dealt out along z, rows and channels come in any number, offsets have 64 bits.
//
// Called by the norm, bias and spatial sum methods of lbpar/engine/cupy.
#include "channels.cuh"
#include "double_double.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(THREADS, 2)

// partial: double (chunks, 2, C), mean and M2 of each chunk.
KERNEL(class T) norm_partials(double* partial, const T* x, i64 rows, i64 channels, i64 each) {
    const Chunk chunk = chunk_of(rows, blockIdx.y, each);
    for_tiles<T>(channels, [&](const Place& p, auto width) {
        constexpr int N = decltype(width)::value, RUN = 32;
        double mine[N][2] = {};
        i64 count = 0;
        for (i64 start = chunk.first + p.row; p.active && start < chunk.last; start += RUN * p.rows) {
            const Vector<T, N> origin = load_vector<N>(x + start * channels + p.channel);
            Acc<T> first[N] = {}, second[N] = {};  // moments about the first value of the run
            int n = 1;
            for (i64 row = start + p.rows; n < RUN && row < chunk.last; ++n, row += p.rows) {
                const Vector<T, N> v = load_vector<N>(x + row * channels + p.channel);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const Acc<T> d = wide(v.v[j]) - wide(origin.v[j]);
                    first[j] += d;
                    second[j] += d * d;
                }
            }
            const double share = reciprocal(n);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const double offset = first[j] * share, spread = second[j] - first[j] * offset;
                const double run[2] = {wide(origin.v[j]) + offset, spread > 0 || spread != spread ? spread : 0};
                MergeMoments()(mine[j], count, run, n);
            }
            count += n;
        }
        merge_rows<2, N>(mine, count, p, MergeMoments());
        if (p.active && p.row == 0) {
#pragma unroll
            for (int j = 0; j < N; ++j)
                for (int k = 0; k < 2; ++k) partial[(blockIdx.y * i64(2) + k) * channels + p.channel + j] = mine[j][k];
        }
    }, x);
}

// Sums of a channel about a shift, from its mean and the sum of squares about that.
__device__ __forceinline__ void about_shift(
    double* sums, i64 channels, i64 c, double count, double mean, double squares, double shift) {
    const Pair distance = exact_sum(mean, -shift), zero = {0, 0};
    const Pair first = count > 0 ? product(distance, {count, 0}) : zero;
    const Pair second = count > 0 ? sum(product(first, distance), squares) : zero;
    const Pair both[2] = {first, second};
    for (int k = 0; k < 2; ++k) {
        const double high = leading(both[k].high);
        sums[2 * k * channels + c] = high;
        sums[(2 * k + 1) * channels + c] = (both[k].high - high) + both[k].low;
    }
}

// sums: double (4, C), see `Engine.norm_sums`.
__global__ void __launch_bounds__(THREADS, 2)
norm_sums(double* sums, const double* partial, const double* shift, i64 rows, i64 channels, i64 chunks, i64 each) {
    double mine[1][2] = {};
    const Place p = merge_chunks<2>(mine, partial, rows, channels, chunks, each, MergeMoments());
    if (!p.active) return;
    about_shift(sums, channels, p.channel, static_cast<double>(rows), mine[0][0], mine[0][1], shift[p.channel]);
}

// The same, unless sums are null, and moments, from a mean and 1/sqrt(var + eps) that a library has found.
__global__ void norm_found(
    double* sums, double* moments, const float* means, const float* invstds, const double* shift, double count, double eps, i64 channels) {
    for (i64 c = grid_thread(); c < channels; c += grid_threads()) {
        const double mean = means[c], invstd = invstds[c], variance = 1 / (invstd * invstd) - eps;
        const double spread = variance > 0 || variance != variance ? variance : 0;
        if (sums) about_shift(sums, channels, c, count, mean, count * spread, shift[c]);
        moments[c] = mean;
        moments[channels + c] = invstd;
        moments[2 * channels + c] = spread;
    }
}

struct Offset {
    double mean, variance;  // mean less shift; biased
};
__device__ __forceinline__ Offset offset_and_variance(const double* sums, i64 channels, i64 c, double count) {
    const Pair first = exact_sum(sums[c], sums[channels + c]), second = exact_sum(sums[2 * channels + c], sums[3 * channels + c]);
    const Pair square = product(first, first), scaled = product(second, {count, 0});
    const double variance = ((scaled.high - square.high) + (scaled.low - square.low)) / (count * count);
    return {first.high / count, variance > 0 || variance != variance ? variance : 0};
}

// moments: double (3, C): mean, 1/sqrt(var + eps), biased variance.
__global__ void norm_moments(double* moments, const double* sums, const double* shift, double count, double eps, i64 channels) {
    for (i64 c = grid_thread(); c < channels; c += grid_threads()) {
        const Offset o = offset_and_variance(sums, channels, c, count > 1 ? count : 1);
        moments[c] = shift[c] + o.mean;
        moments[channels + c] = 1 / sqrt(o.variance + eps);
        moments[2 * channels + c] = o.variance;
    }
}

__global__ void norm_running(double* mean, double* var, const double* sums, double momentum, double count, i64 channels) {
    for (i64 c = grid_thread(); c < channels; c += grid_threads()) {
        const Offset o = offset_and_variance(sums, channels, c, count);
        mean[c] += momentum * o.mean;
        var[c] += momentum * (o.variance * (count / (count > 2 ? count - 1 : 1)) - var[c]);
    }
}

__global__ void norm_invstd(double* invstd, const double* var, double eps, i64 channels) {
    for (i64 c = grid_thread(); c < channels; c += grid_threads()) invstd[c] = 1 / sqrt(var[c] + eps);
}

KERNEL(class T, class P, bool RELU)
norm_apply(T* y, const T* x, const T* residual, const double* mean, const double* invstd, const P* scale, const P* bias, i64 rows, i64 channels) {
    for_rows<T>(rows, channels, [&](i64 channel, auto width) {
        constexpr int N = decltype(width)::value;
        struct {
            Acc<T> centre[N], factor[N], rest[N];
        } of;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const i64 c = channel + j;
            const double factor = scale ? invstd[c] * wide(scale[c]) : invstd[c];
            of.centre[j] = static_cast<Acc<T>>(mean[c]);
            of.factor[j] = static_cast<Acc<T>>(factor);
            of.rest[j] = static_cast<Acc<T>>((of.centre[j] - mean[c]) * factor + (bias ? wide(bias[c]) : 0));
        }
        return [=](i64 row) {
            const i64 at = row * channels + channel;
            const Vector<T, N> in = load_vector<N>(x + at);
            Vector<T, N> more = in, out;
            if (residual) more = load_vector<N>(residual + at);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                Acc<T> v = (wide(in.v[j]) - of.centre[j]) * of.factor[j] + of.rest[j];
                if (residual) v += wide(more.v[j]);
                if (RELU && v <= 0) v = 0;
                out.v[j] = narrow<T>(v);
            }
            store_vector(y + at, out);
        };
    }, y, x, residual);
}

// partial: double (chunks, 2, C). g is written if RELU; more may be null.
KERNEL(class T, bool RELU)
norm_backward_partials(double* partial, T* g, const T* x, const T* y, const T* dy, const T* more, const double* mean, i64 rows, i64 channels, i64 each) {
    const Chunk chunk = chunk_of(rows, blockIdx.y, each);
    for_tiles<T>(channels, [&](const Place& p, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> centre[N];
#pragma unroll
        for (int j = 0; j < N; ++j) centre[j] = p.active ? static_cast<Acc<T>>(mean[p.channel + j]) : 0;
        double total[N][2];
        sum_rows<T>(total, p, chunk, [&](i64 row, Acc<T>(&run)[N][2]) {
            const i64 at = row * channels + p.channel;
            const Vector<T, N> in = load_vector<N>(x + at);
            Vector<T, N> slope = load_vector<N>(dy + at);
            if (RELU) {
                const Vector<T, N> result = load_vector<N>(y + at);
                Vector<T, N> other = slope;
                if (more) other = load_vector<N>(more + at);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const Acc<T> whole = more ? wide(slope.v[j]) + wide(other.v[j]) : wide(slope.v[j]);
                    slope.v[j] = narrow<T>(wide(result.v[j]) > 0 ? whole : Acc<T>(0));
                }
                store_vector(g + at, slope);
            }
#pragma unroll
            for (int j = 0; j < N; ++j) {
                run[j][0] += wide(slope.v[j]);
                run[j][1] += wide(slope.v[j]) * (wide(in.v[j]) - centre[j]);
            }
        });
        if (p.active && p.row == 0) {
#pragma unroll
            for (int j = 0; j < N; ++j)
                for (int k = 0; k < 2; ++k) partial[(blockIdx.y * i64(2) + k) * channels + p.channel + j] = total[j][k];
        }
    }, g, x, y, dy, more);
}

// sums: double (2, C). A is the accumulation type of the partial sums.
KERNEL(class A)
norm_backward_sums(double* sums, const double* partial, const double* mean, const double* invstd, i64 channels, i64 chunks) {
    double mine[1][2] = {};
    const Place p = merge_chunks<2>(mine, partial, 0, channels, chunks, 0, MergeSums<2>());
    if (!p.active) return;
    const double m = mean[p.channel];
    sums[p.channel] = mine[0][0];
    sums[channels + p.channel] = (mine[0][1] + (static_cast<A>(m) - m) * mine[0][0]) * invstd[p.channel];
}

// more: null, or (rows, more_channels) of which the first C are added.
KERNEL(class T, class P)
norm_backward_data(T* dx, const T* x, const T* dy, const T* more, const double* mean, const double* invstd, const P* scale,
                   const double* sums, double count, i64 rows, i64 channels, i64 more_channels) {
    const T* start = more + (more_channels % LANES<T> ? 1 : 0);  // rows of `more` must be aligned as well
    for_rows<T>(rows, channels, [&](i64 channel, auto width) {
        constexpr int N = decltype(width)::value;
        struct {
            Acc<T> centre[N], factor[N], slope[N], rest[N];
        } of;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const i64 c = channel + j;
            const double factor = scale ? invstd[c] * wide(scale[c]) : invstd[c], slope = -factor * invstd[c] * sums[channels + c] / count;
            of.centre[j] = static_cast<Acc<T>>(mean[c]);
            of.factor[j] = static_cast<Acc<T>>(factor);
            of.slope[j] = static_cast<Acc<T>>(slope);
            of.rest[j] = static_cast<Acc<T>>((of.centre[j] - mean[c]) * slope - factor * sums[c] / count);
        }
        return [=](i64 row) {
            const i64 at = row * channels + channel;
            const Vector<T, N> in = load_vector<N>(x + at), g = load_vector<N>(dy + at);
            Vector<T, N> other = g, out;
            if (more) other = load_vector<N>(more + row * more_channels + channel);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                Acc<T> v = (wide(in.v[j]) - of.centre[j]) * of.slope[j] + of.rest[j] + wide(g.v[j]) * of.factor[j];
                if (more) v += wide(other.v[j]);
                out.v[j] = narrow<T>(v);
            }
            store_vector(dx + at, out);
        };
    }, dx, x, dy, more ? start : dx);
}

// partial: double (groups, chunks, C); x (groups, rows, C).
KERNEL(class T) column_partials(double* partial, const T* x, i64 groups, i64 rows, i64 channels, i64 each) {
    const Chunk chunk = chunk_of(rows, blockIdx.y, each);
    for (i64 group = blockIdx.z; group < groups; group += gridDim.z) {
        for_tiles<T>(channels, [&](const Place& p, auto width) {
            constexpr int N = decltype(width)::value;
            double total[N][1];
            sum_rows<T>(total, p, chunk, [&](i64 row, Acc<T>(&run)[N][1]) {
                const Vector<T, N> in = load_vector<N>(x + (group * rows + row) * channels + p.channel);
#pragma unroll
                for (int j = 0; j < N; ++j) run[j][0] += wide(in.v[j]);
            });
            if (p.active && p.row == 0) {
#pragma unroll
                for (int j = 0; j < N; ++j) partial[(group * gridDim.y + blockIdx.y) * channels + p.channel + j] = total[j][0];
            }
        }, x);
    }
}

// out: (groups, C), `scale` times the sums; grid z over groups.
KERNEL(class T) column_sums(T* out, const double* partial, double scale, i64 groups, i64 channels, i64 chunks) {
    for (i64 group = blockIdx.z; group < groups; group += gridDim.z) {
        double mine[1][1] = {};
        const Place p = merge_chunks<1>(mine, partial + group * chunks * channels, 0, channels, chunks, 0, MergeSums<1>());
        if (p.active) out[group * channels + p.channel] = narrow<T>(static_cast<Acc<T>>(scale * mine[0][0]));
    }
}

KERNEL(class T, class P) bias_add(T* y, const T* x, const P* b, i64 rows, i64 channels) {
    for_rows<T>(rows, channels, [&](i64 channel, auto width) {
        constexpr int N = decltype(width)::value;
        struct {
            Acc<T> b[N];
        } of;
#pragma unroll
        for (int j = 0; j < N; ++j) of.b[j] = static_cast<Acc<T>>(wide(b[channel + j]));
        return [=](i64 row) {
            Vector<T, N> v = load_vector<N>(x + row * channels + channel);
#pragma unroll
            for (int j = 0; j < N; ++j) v.v[j] = narrow<T>(wide(v.v[j]) + of.b[j]);
            store_vector(y + row * channels + channel, v);
        };
    }, y, x);
}
