// What all CUDA kernels share: element types, loads and stores, index arithmetic, reductions.
//
// Element types are float, double, __half and __nv_bfloat16. Half types are only ever stored: arithmetic is in `Acc<T>`, float
// for them and for float, double for double.
//
// Index arithmetic: what grows with an array is i64. `i32` is for kernels that take their index type as a template argument, for
// arrays whose every offset fits; tests build it as a type that overflows early. `int` counts what stays small: dimensions, taps,
// threads. `__shared__` variables are declared one a line, for the emulation of tests.
#pragma once

#ifndef CUDA_ON_CPU
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef int i32;
#endif

typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 ALL_LANES = 0xffffffffu;

// -- element types ------------------------------------------------------------------------------------------------------------

template <class T>
struct Accumulated {
    typedef float type;
};
template <>
struct Accumulated<double> {
    typedef double type;
};
template <class T>
using Acc = typename Accumulated<T>::type;

__device__ __forceinline__ float wide(float v) { return v; }
__device__ __forceinline__ double wide(double v) { return v; }
__device__ __forceinline__ float wide(__half v) { return __half2float(v); }
__device__ __forceinline__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }

// `narrow<T>(v)`: v rounded to the nearest T.
template <class T>
struct Narrow {
    template <class V>
    static __device__ __forceinline__ T from(V v) {
        return static_cast<T>(v);
    }
};
template <>
struct Narrow<__half> {
    static __device__ __forceinline__ __half from(float v) { return __float2half_rn(v); }
};
template <>
struct Narrow<__nv_bfloat16> {
    static __device__ __forceinline__ __nv_bfloat16 from(float v) { return __float2bfloat16_rn(v); }
};
template <class T, class V>
__device__ __forceinline__ T narrow(V v) {
    return Narrow<T>::from(v);
}

// N elements that are loaded and stored at once; the address must be a multiple of their size, or of 16.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
    T v[N];
};
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* p) {
    return *reinterpret_cast<const Vector<T, N>*>(p);
}
template <int N, class T>
__device__ __forceinline__ void store_vector(T* p, const Vector<T, N>& v) {
    *reinterpret_cast<Vector<T, N>*>(p) = v;
}

// How many elements a thread takes at once: 16 bytes.
template <class T>
constexpr int LANES = 16 / sizeof(T);

__device__ constexpr int largest(int a) { return a; }
template <class... More>
__device__ constexpr int largest(int a, int b, More... more) {
    return largest(a > b ? a : b, static_cast<int>(more)...);
}

template <class... P>
__device__ __forceinline__ bool aligned(const P*... p) {
    return ((reinterpret_cast<u64>(p) | ...) & 15) == 0;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Calls f(Width<N>()) with as many elements at once as channels (of rows one behind the other) and addresses allow: LANES<T> or one.
template <int N>
struct Width {
    static constexpr int value = N;
};
template <class T, class F, class... P>
__device__ __forceinline__ void by_width(i64 channels, F f, const P*... addresses) {
    if (channels % LANES<T> == 0 && aligned(addresses...))
        f(Width<LANES<T>>());
    else
        f(Width<1>());
}

// Products and sums that the compiler does not join: rounded one after the other, as on the CPU.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double rounded_sum(double a, double b) { return __dadd_rn(a, b); }

struct Sigmoid {  // from exp(-|x|), which neither overflows nor loses small values
    template <class V>
    __device__ __forceinline__ V operator()(V x) const {
        const V e = exp(x < 0 ? x : -x);
        return (x >= 0 ? V(1) : e) / (1 + e);
    }
};

// -- loops over a grid --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ i64 grid_thread() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 grid_threads() { return static_cast<i64>(gridDim.x) * blockDim.x; }

// y[i] = f(x[i], ...) for i < n, in steps of up to 16 bytes where all addresses are multiples of that; f takes and gives numbers of
// accumulation types. y may be one of the x.
template <class T, class F, class... X>
__device__ __forceinline__ void map_elements(F f, i64 n, T* y, const X*... x) {
    constexpr int N = 16 / largest(sizeof(T), sizeof(X)...);
    i64 done = 0;
    if (aligned(y, x...)) {
        done = n - n % N;
        for (i64 i = grid_thread() * N; i < done; i += grid_threads() * N) {
            Vector<T, N> out;
            auto apply = [&](const Vector<X, N>&... in) {
#pragma unroll
                for (int j = 0; j < N; ++j) out.v[j] = narrow<T>(f(wide(in.v[j])...));
            };
            apply(load_vector<N>(x + i)...);
            store_vector(y + i, out);
        }
    }
    for (i64 i = done + grid_thread(); i < n; i += grid_threads()) y[i] = narrow<T>(f(wide(x[i])...));
}

// -- copies to shared memory that a thread does not wait for (sm_80; elsewhere they happen at once) --------------------------------

// 4, 8 or 16 bytes, both addresses multiples of that.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#if defined(CUDA_ON_CPU)
    emulated::copy_async(shared, global, BYTES);
#elif __CUDA_ARCH__ >= 800
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], %2;\n" ::"r"(to), "l"(global), "n"(BYTES) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(to), "l"(global), "n"(BYTES) : "memory");
#else
    struct alignas(BYTES) Bytes {
        char v[BYTES];
    };
    *static_cast<Bytes*>(shared) = *static_cast<const Bytes*>(global);
#endif
}

// Copies since the last call form a group; `copy_wait<N>` waits for all groups but the last N.
__device__ __forceinline__ void copy_commit() {
#if defined(CUDA_ON_CPU)
    emulated::copy_commit();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}
template <int GROUPS_LEFT>
__device__ __forceinline__ void copy_wait() {
#if defined(CUDA_ON_CPU)
    emulated::copy_wait(GROUPS_LEFT);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;\n" ::"n"(GROUPS_LEFT) : "memory");
#endif
}

// -- reductions ---------------------------------------------------------------------------------------------------------------

struct Sum {
    template <class V>
    __device__ __forceinline__ V operator()(V a, V b) const {
        return a + b;
    }
};
struct Larger {  // NaN wins, as in NumPy
    template <class V>
    __device__ __forceinline__ V operator()(V a, V b) const {
        return a > b || a != a ? a : b;
    }
};

// Over the lanes of a warp (WIDTH of them, a power of two); every lane gets the result.
template <int WIDTH = 32, class V, class Join>
__device__ __forceinline__ V warp_reduce(V v, Join join) {
#pragma unroll
    for (int bits = WIDTH / 2; bits > 0; bits /= 2) v = join(v, __shfl_xor_sync(ALL_LANES, v, bits));
    return v;
}
template <class V>
__device__ __forceinline__ V warp_sum(V v) {
    return warp_reduce(v, Sum());
}

// Over a block of THREADS threads along x (a multiple of 32); every thread gets the result. All threads must call it.
template <int THREADS, class V, class Join>
__device__ __forceinline__ V block_reduce(V v, Join join) {
    static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps");
    __shared__ V of_warps[THREADS / 32];
    v = warp_reduce(v, join);
    __syncthreads();  // an earlier call's readers are done
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = of_warps[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) v = join(v, of_warps[i]);
    return v;
}
template <int THREADS, class V>
__device__ __forceinline__ V block_sum(V v) {
    return block_reduce<THREADS>(v, Sum());
}
