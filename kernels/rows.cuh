// Walking over rows of channels, a row by WIDTH lanes of a warp (1, 8 or 32): 1 for a few classes per voxel, 32 for a thousand.
#pragma once

#include "common.cuh"

// Calls f(row, whether there is such a row, this lane among the row's); all lanes of a warp call it equally often, so f may shuffle.
template <int WIDTH, class F>
__device__ __forceinline__ void for_rows_of_lanes(i64 rows, F f) {
    const int lane = threadIdx.x % WIDTH;
    for (i64 row = grid_thread() / WIDTH; row - row % (32 / WIDTH) < rows; row += grid_threads() / WIDTH) f(row, row < rows, lane);
}

// join over the row of f(channel); every lane of the row gets the result.
template <int WIDTH, class V, class F, class Join>
__device__ __forceinline__ V row_reduce(i64 channels, bool there, int lane, V start, F f, Join join) {
    V v = start;
    if (there)
        for (i64 c = lane; c < channels; c += WIDTH) v = join(v, f(c));
    return warp_reduce<WIDTH>(v, join);
}

// partial[grid y][block] = sum of f(i) for i < n, in double; `sum_partials` ends it.
template <class F>
__device__ __forceinline__ void partial_sum(double* partial, i64 n, F f) {
    double sum = 0;
    for (i64 i = grid_thread(); i < n; i += grid_threads()) sum += f(i);
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) partial[blockIdx.y * i64(gridDim.x) + blockIdx.x] = sum;
}
