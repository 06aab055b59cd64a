// Kernels of the emulation's own tests: right ones, and what it must refuse.
#include "common.cuh"

template <class T>
__global__ void double_all(T* y, const T* x, i64 n) {
    for (i64 i = grid_thread(); i < n; i += grid_threads()) y[i] = narrow<T>(2 * wide(x[i]));
}

template <class T>
__global__ void there_and_back(T* y, float* w, const float* x, i64 n) {
    const i64 i = grid_thread();
    if (i < n) y[i] = narrow<T>(x[i]), w[i] = wide(y[i]);
}

template <int THREADS>
__global__ void sum_of(float* y, const float* x, i64 n) {
    float total = 0;
    for (i64 i = threadIdx.x; i < n; i += THREADS) total += x[i];
    total = block_sum<THREADS>(total);
    if (threadIdx.x == 0) *y = total;
}

// Reverses blocks of blockDim.x elements through shared memory.
template <bool BARRIER>
__global__ void reverse(int* y, const int* x) {
    extern __shared__ int tile[];
    const int i = threadIdx.x, n = blockDim.x;
    tile[i] = x[i];
    if (BARRIER) __syncthreads();
    y[i] = tile[n - 1 - i];
}

template <bool WAIT>
__global__ void through_shared(float* y, const float* x) {
    __shared__ float tile[32];
    copy_async<4>(&tile[threadIdx.x], &x[threadIdx.x]);
    copy_commit();
    if (WAIT) copy_wait<0>();
    __syncthreads();
    y[threadIdx.x] = tile[31 - threadIdx.x];
}

__global__ void barrier_left_out(int* y) {
    if (threadIdx.x > 3) return;
    __syncthreads();
    y[threadIdx.x] = 1;
}

__global__ void unwritten_shared(float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 1;
    y[threadIdx.x] = tile[threadIdx.x + 1];
}

__global__ void votes(u32* y) {
    const int lane = threadIdx.x % 32;
    y[threadIdx.x] = __ballot_sync(ALL_LANES, lane % 3 == 0) + __shfl_down_sync(ALL_LANES, lane, 1u);
}

template <class Index>
__global__ void by_index(float* y, Index rows, Index columns) {
    const Index n = rows * columns;
    for (Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (Index)blockDim.x) y[i] = 1;
}

struct Sizes {
    i64 n;
    int step;
};
__global__ void struct_by_value(int* y, Sizes s) {
    if (grid_thread() < s.n) y[grid_thread()] = static_cast<int>(grid_thread()) * s.step;
}
