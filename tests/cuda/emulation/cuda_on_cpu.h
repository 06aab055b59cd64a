// Just enough of CUDA C++ to run the files of kernels/ as C++ on a CPU, for tests only.
//
// `emulator.py` writes a copy of a kernel file in which `__shared__` declarations (one variable a line) stand as references to
// memory of the block, includes this header before it, and a launcher for each instantiation that is asked for.
#pragma once

#define CUDA_ON_CPU 1

#include <math.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "block.h"
#include "half.h"
#include "small_integers.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __grid_constant__
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct emulated_index {
    emulated::Unsigned x = 0, y = 0, z = 0;
};
inline emulated_index threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) double2 { double x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// -- barriers, shuffles, asynchronous copies ---------------------------------------------------------------------------------------

#define __syncthreads() emulated::block.barrier(__LINE__)
#define __syncwarp(...) emulated::sync_warp(__VA_ARGS__)

namespace emulated {

inline void sync_warp(unsigned mask = 0xffffffffu) { block.leave(block.meet(mask, 0)); }

template <class T>
T shuffle(unsigned mask, T value, int from, bool inside) {
    static_assert(sizeof(T) <= 8, "shuffles hand over 8 bytes");
    uint64_t raw = 0;
    std::memcpy(&raw, &value, sizeof(T));
    Exchange& e = block.meet(mask, raw);
    if (inside) {
        if (!(e.mask >> from & 1u)) block.fail("reads from a lane that takes no part in the shuffle");
        std::memcpy(&value, &e.value[from], sizeof(T));
    }
    block.leave(e);
    return value;
}

inline int lane() { return block.self & 31; }

// sm_80's cp.async: the copy happens when it is waited for, and no earlier.
inline void copy_async(void* to, const void* from, int bytes) {
    block.threads[static_cast<size_t>(block.self)].copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes});
}
inline void copy_commit() { block.threads[static_cast<size_t>(block.self)].copies.push_back({nullptr, nullptr, 0}); }
inline void copy_wait(int groups_left) { block.finish_copies(block.threads[static_cast<size_t>(block.self)], groups_left); }

template <class T>
T* dynamic_shared() { return reinterpret_cast<T*>(block.shared); }

}  // namespace emulated

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
    const int own = emulated::lane();
    return emulated::shuffle(mask, v, (own & ~(width - 1)) | (source & (width - 1)), true);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    const int own = emulated::lane(), from = own + static_cast<int>(delta);
    return emulated::shuffle(mask, v, from & 31, from < (own | (width - 1)) + 1);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    const int own = emulated::lane(), from = own - static_cast<int>(delta);
    return emulated::shuffle(mask, v, from & 31, from >= (own & ~(width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
    const int own = emulated::lane(), from = own ^ bits;
    return emulated::shuffle(mask, v, from & 31, from < (own | (width - 1)) + 1);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    emulated::Exchange& e = emulated::block.meet(mask, predicate != 0);
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; ++i)
        if (e.mask >> i & 1u) bits |= static_cast<unsigned>(e.value[i]) << i;
    emulated::block.leave(e);
    return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// -- atomics: one thread runs at a time ----------------------------------------------------------------------------------------------

template <class T, class U>
T atomicAdd(T* p, U v) { T old = *p; *p = static_cast<T>(old + static_cast<T>(v)); return old; }
template <class T, class U>
T atomicMax(T* p, U v) { T old = *p; if (static_cast<T>(v) > old) *p = static_cast<T>(v); return old; }
template <class T, class U>
T atomicMin(T* p, U v) { T old = *p; if (static_cast<T>(v) < old) *p = static_cast<T>(v); return old; }
template <class T, class U>
T atomicOr(T* p, U v) { T old = *p; *p = static_cast<T>(old | static_cast<T>(v)); return old; }
template <class T, class U>
T atomicExch(T* p, U v) { T old = *p; *p = static_cast<T>(v); return old; }
template <class T>
T atomicCAS(T* p, T expected, T v) { T old = *p; if (old == expected) *p = v; return old; }
inline void __threadfence() {}
inline void __threadfence_block() {}

// -- arithmetic ------------------------------------------------------------------------------------------------------------------------

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
template <class T>
T __ldg(const T* p) { return *p; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
// Rounded operations that a device's compiler does not join into fused ones.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline float __uint_as_float(unsigned u) { return emulated::float_of(u); }
inline float __int_as_float(int u) { return emulated::float_of(static_cast<unsigned>(u)); }
inline unsigned __float_as_uint(float f) { return emulated::bits_of(f); }
inline int __float_as_int(float f) { return static_cast<int>(emulated::bits_of(f)); }
inline double __longlong_as_double(long long u) { double d; std::memcpy(&d, &u, 8); return d; }
inline long long __double_as_longlong(double d) { long long u; std::memcpy(&u, &d, 8); return u; }
inline int __float2int_rn(float f) { return static_cast<int>(std::nearbyint(f)); }
[[noreturn]] inline void __trap() { emulated::block.fail("__trap"); }

#include "launch.h"
