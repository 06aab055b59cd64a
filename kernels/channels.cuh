// Walking over a matrix of rows and channels, where each thread keeps to the same few channels: what belongs to a channel is then
// loaded once, and sums over rows stay in registers.
#pragma once

#include "common.cuh"

constexpr int THREADS = 256;
constexpr int COLUMNS = 64;  // most threads beside each other in a row; the others of a block take the rows below

// The place of a thread in a tile of up to COLUMNS * N channels; N channels of its own from `channel` on.
struct Place {
    i64 channel;
    int row, rows, columns;
    bool active;
};
template <int N>
__device__ __forceinline__ Place place_in(i64 tile, i64 channels) {
    Place p;
    const i64 left = channels / N - tile * COLUMNS;
    p.columns = left < COLUMNS ? static_cast<int>(left) : COLUMNS;
    p.rows = THREADS / p.columns;
    p.row = static_cast<int>(threadIdx.x) / p.columns;
    p.channel = (tile * COLUMNS + static_cast<int>(threadIdx.x) % p.columns) * N;
    p.active = p.row < p.rows;
    return p;
}

// Calls f(place, Width<N>()) for each tile of this block; tiles are dealt out along grid x.
template <class T, class F, class... P>
__device__ __forceinline__ void for_tiles(i64 channels, F f, const P*... addresses) {
    by_width<T>(channels, [&](auto width) {
        constexpr int N = decltype(width)::value;
        for (i64 t = blockIdx.x; t * COLUMNS * N < channels; t += gridDim.x) f(place_in<N>(t, channels), width);
    }, addresses...);
}

// Calls f(row) for the rows of each tile, dealt out along grid y; f is what `start(channel, width)` gives, which readies what belongs to the
// channels.
template <class T, class Start, class... P>
__device__ __forceinline__ void for_rows(i64 rows, i64 channels, Start start, const P*... addresses) {
    for_tiles<T>(channels, [&](const Place& p, auto width) {
        if (!p.active) return;
        auto f = start(p.channel, width);
        for (i64 row = blockIdx.y * i64(p.rows) + p.row; row < rows; row += gridDim.y * i64(p.rows)) f(row);
    }, addresses...);
}

// Part `number` of the rows, `each` long but for the last.
struct Chunk {
    i64 first, last;
};
__device__ __forceinline__ Chunk chunk_of(i64 rows, i64 number, i64 each) {
    const i64 first = number * each;
    return {first < rows ? first : rows, first + each < rows ? first + each : rows};
}

// 1 / n for a count above 0, to a rounding: a division of doubles is a call, with registers stored around it.
__device__ __forceinline__ double reciprocal(i64 n) {
    const double d = static_cast<double>(n);
    double r = __fdividef(1.0f, static_cast<float>(n));
    r = r * (2 - d * r);
    r = r * (2 - d * r);
    return r * (2 - d * r);
}

// K numbers per channel, merged over the rows of a block by `merge(mine, my count, other's, other's count)`, which also adds the
// counts; threads of row 0 then hold the result. All threads of the block must call it.
template <int K, int N, class Merge>
__device__ __forceinline__ void merge_rows(double (&mine)[N][K], i64& count, const Place& p, Merge merge) {
    __shared__ double values[N * K * THREADS];
    __shared__ i64 counts[THREADS];
    const int t = threadIdx.x;
    for (int rows = p.rows; rows > 1; rows = (rows + 1) / 2) {
        const int half = (rows + 1) / 2;
        if (p.active && p.row >= half && p.row < rows) {
            counts[t] = count;
#pragma unroll
            for (int i = 0; i < N * K; ++i) values[i * THREADS + t] = mine[i / K][i % K];
        }
        __syncthreads();
        if (p.active && p.row < rows - half) {
            const int other = t + half * p.columns;
            const i64 more = counts[other];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                double theirs[K];
#pragma unroll
                for (int k = 0; k < K; ++k) theirs[k] = values[(j * K + k) * THREADS + other];
                merge(mine[j], count, theirs, more);
            }
            count += more;
        }
    }
    __syncthreads();
}

template <int K>
struct MergeSums {
    __device__ __forceinline__ void operator()(double (&a)[K], i64, const double (&b)[K], i64) const {
#pragma unroll
        for (int k = 0; k < K; ++k) a[k] += b[k];
    }
};

// Mean and sum of squared deviations (Chan, Golub and LeVeque 1979).
struct MergeMoments {
    __device__ __forceinline__ void operator()(double (&a)[2], i64 n, const double (&b)[2], i64 m) const {
        if (m == 0) return;
        const double share = static_cast<double>(m) * reciprocal(n + m), distance = b[0] - a[0];
        a[1] += b[1] + distance * distance * share * static_cast<double>(n);
        a[0] += distance * share;
    }
};

// Sums over rows of K terms of each element: `terms(row, j, out)` gives them for channel place.channel + j. Runs of rows
// are added in Acc<T>, runs in double.
template <class T, int K, int N, class Terms>
__device__ __forceinline__ void sum_rows(double (&total)[N][K], const Place& p, const Chunk& chunk, Terms terms) {
    constexpr int RUN = 32;
#pragma unroll
    for (int i = 0; i < N * K; ++i) total[i / K][i % K] = 0;
    for (i64 start = chunk.first + p.row; p.active && start < chunk.last; start += RUN * p.rows) {
        Acc<T> run[N][K] = {};
        for (int r = 0; r < RUN; ++r) {
            const i64 row = start + r * p.rows;
            if (row >= chunk.last) break;
            terms(row, run);
        }
#pragma unroll
        for (int i = 0; i < N * K; ++i) total[i / K][i % K] += run[i / K][i % K];
    }
    i64 count = 0;
    merge_rows<K, N>(total, count, p, MergeSums<K>());
}

// Ends sums: K numbers per chunk and channel, `partial` (chunks, K, C), merged; a block takes 32 channels along grid x, and the
// active threads of the place that is returned hold one result each.
template <int K, class Merge>
__device__ __forceinline__ Place merge_chunks(double (&mine)[1][K], const double* partial, i64 rows, i64 channels, i64 chunks, i64 each, Merge merge) {
    Place p;
    p.columns = 32, p.rows = THREADS / 32, p.row = threadIdx.x / 32;
    p.channel = blockIdx.x * i64(32) + threadIdx.x % 32;
    p.active = p.channel < channels;
    i64 count = 0;
    for (i64 c = p.row; p.active && c < chunks; c += p.rows) {
        const Chunk chunk = chunk_of(rows, c, each);
        double more[K];
        for (int k = 0; k < K; ++k) more[k] = partial[(c * K + k) * channels + p.channel];
        merge(mine[0], count, more, chunk.last - chunk.first);
        count += chunk.last - chunk.first;
    }
    merge_rows<K, 1>(mine, count, p, merge);
    p.active = p.active && p.row == 0;
    return p;
}
