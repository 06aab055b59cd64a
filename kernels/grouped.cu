// Convolution with few channels per group, depth-wise above all: sums without matrices, since a tile's columns would lie idle.
//
//   forward, data   target[n, p, g*N + j] = relu(bias + sum over taps t, c of source[n, p@t, g*C + c] * weight(g, t, c, j))
//                   forward: source x, weight w[g*N + j, t, c];   data (ADJOINT): source dy, weight w[g*C + c, t, j]
//   weights         dw[g*F + f, t, c] = sum over n, o of dy[n, o, g*F + f] * x[n, o@t, g*C + c]
//
// Layout as in convolution.cu, positions and taps as in window.cuh. Forward and data: a thread has ROWS positions and VEC neighbouring
// channels of one of each per group, or one channel if VEC is 1. Weights: lanes have filters, warps of a block have every WARPS-th
// position and are added up in order; blocks along z have parts of the positions, which sum_splits (gemm.cu) adds up in order.
// conv_grouped_rims computes forward or data for several boxes of the target in one launch, as rims.cu does.
// Limits: 65 535 phases, chunks of taps and splits; 8 boxes. VEC > 1 only where C = N = 1, and VEC divides the groups.
// Grid: forward and data, blocks of 256 threads along x, phases along z; weights, (32 pairs of a filter and a channel, 8 taps, splits) of (32, 8)
// threads.
// Called by: the cupy engine, through lbpar/engine/cupy/launch_conv.py.
// Limited by memory where C = F = 1: about taps/2 operations for a byte, with source lines read again from L1 and L2.

#include "window.cuh"

constexpr int ROWS = 4, WARPS = 8, TAPS = 8;

// What one thread has of a box; `of_group` gives the box's window for a group.
template <class T, class Index, bool ADJOINT, int VEC, class OfGroup>
__device__ __forceinline__ void grouped_sums(T* target, const T* source, const T* w, const T* bias, const WindowSizes& z, i64 thread,
                                             const OfGroup& of_group) {
    using S = Acc<T>;
    const i64 all = z.groups * z.columns, chunks = all / VEC;
    const i64 first = thread / chunks * ROWS;
    const Index channel = static_cast<Index>(thread % chunks * VEC), columns = static_cast<Index>(z.columns);
    const Index group = channel / columns, column = channel % columns;
    const Window<Index> window = of_group(group);
    const Index rows = window.positions(), taps = window.taps(), channels = static_cast<Index>(z.channels.value);
    if (first >= rows) return;
    Position<Index> at[ROWS];
    S sums[ROWS][VEC];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        at[r] = window.position(static_cast<Index>(min(first + r, static_cast<i64>(rows) - 1)));
#pragma unroll
        for (int v = 0; v < VEC; ++v) sums[r][v] = 0;
    }
    for (Index t = 0; t < taps; ++t) {
        const Tap<Index> tap = window.tap(t * channels);
        const Index in_filter = window.filter_tap(t), of_filter = window.filter_taps();
        for (Index c = 0; c < channels; ++c) {
            const Index filter = ADJOINT ? group * channels + c : channel;
            const T* weights = w + (filter * of_filter + in_filter) * (ADJOINT ? columns : channels) + (ADJOINT ? column : c);
            S weight[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) weight[v] = wide(weights[v * of_filter]);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (!window.reads(at[r], tap)) continue;
                const auto x = load_vector<VEC>(source + (at[r].offset + tap.offset + c));
#pragma unroll
                for (int v = 0; v < VEC; ++v) sums[r][v] += wide(x.v[v]) * weight[v];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (first + r >= rows) return;
        T* to = target + window.target(static_cast<Index>(first + r)) + channel;
        Vector<T, VEC> result = {};
        if (z.add) result = load_vector<VEC>(to);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            S sum = sums[r][v];
            if (bias) sum += wide(bias[channel + v]);
            if (z.add) sum += wide(result.v[v]);
            result.v[v] = narrow<T>(z.relu && sum < 0 ? S(0) : sum);
        }
        store_vector(to, result);
    }
}

template <class T, class Index, bool ADJOINT, int VEC>
__global__ void __launch_bounds__(256, 2) conv_grouped(T* target, const T* source, const T* w, const T* bias, const __grid_constant__ WindowSizes z) {
    grouped_sums<T, Index, ADJOINT, VEC>(target, source, w, bias, z, grid_thread(), [&](Index group) {
        if constexpr (ADJOINT) return adjoint_window<Index>(z, group, static_cast<int>(blockIdx.z));
        else return forward_window<Index>(z, group);
    });
}

template <class T, class Index, bool ADJOINT, int VEC>
__global__ void __launch_bounds__(256, 2) conv_grouped_rims(T* target, const T* source, const T* w, const T* bias, const __grid_constant__ RimSizes z) {
    const Rim& rim = rim_of(z, blockIdx.x);
    const i64 thread = (blockIdx.x - rim.first_block) * blockDim.x + threadIdx.x;
    grouped_sums<T, Index, ADJOINT, VEC>(target, source, w, bias, z.window, thread, [&](Index group) {
        return rim_window<ADJOINT, Index>(z, rim, group, static_cast<int>(blockIdx.z));
    });
}

// Blocks of (32, WARPS): x has 32 of the pairs (c, filter), y TAPS of the taps, z `depth` positions.
template <class T, class Index>
__global__ void __launch_bounds__(32 * WARPS, 2) conv_grouped_weights(T* dw, Acc<T>* partial, const T* dy, const T* x, const __grid_constant__ WindowSizes z) {
    using S = Acc<T>;
    __shared__ S of_warps[WARPS][TAPS][32];
    const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
    const i64 filters = z.groups * z.columns, pair = static_cast<i64>(blockIdx.x) * 32 + lane;
    const bool mine = pair < filters * z.channels.value;
    const Index filter = mine ? static_cast<Index>(pair % filters) : Index(0), c = mine ? static_cast<Index>(pair / filters) : Index(0);
    const Window<Index> window = forward_window<Index>(z, filter / static_cast<Index>(z.columns));
    const Index taps = window.taps(), channels = static_cast<Index>(z.channels.value);
    const Index first_tap = static_cast<Index>(blockIdx.y) * TAPS;
    Tap<Index> tap[TAPS];
    S sums[TAPS];
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
        sums[t] = 0;
        tap[t] = window.tap((first_tap + t < taps ? first_tap + t : taps - 1) * channels + c);
    }
    const Index begin = static_cast<Index>(blockIdx.z * z.depth), end = min(window.positions(), begin + static_cast<Index>(z.depth));
    for (Index p = begin + warp; p < end; p += WARPS) {
        const Position<Index> at = window.position(p);
        const S factor = wide(dy[p * window.target_pitch + filter]);
#pragma unroll
        for (int t = 0; t < TAPS; ++t)
            if (window.reads(at, tap[t])) sums[t] += factor * wide(x[at.offset + tap[t].offset]);
    }
#pragma unroll
    for (int t = 0; t < TAPS; ++t) of_warps[warp][t][lane] = sums[t];
    __syncthreads();
    for (int t = warp; t < TAPS; t += WARPS) {
        if (!mine || first_tap + t >= taps) continue;
        S sum = 0;
        for (int i = 0; i < WARPS; ++i) sum += of_warps[i][t][lane];
        const i64 to = (static_cast<i64>(filter) * taps + first_tap + t) * channels + c;
        if (partial) partial[blockIdx.z * filters * taps * channels + to] = sum;
        else dw[to] = narrow<T>(z.add ? sum + wide(dw[to]) : sum);
    }
}
