// What one warp multiplies: fragments of two matrices in shared memory, and their products added up in registers.
//
//   acc[m][n] += sum over k of a[m][k] * b[n][k]          m < F::M, n < F::N, k < F::K
//
// `Fragments<Math, A_K, B_K>` is one of five classes F with the same members, chosen by the kind of arithmetic and the
// architecture that is compiled for. A_K says that k runs along rows of a's tile in shared memory (`a[m*pitch + k]`), else m does
// (`a[k*pitch + m]`); B_K alike. Kinds of arithmetic:
//
//   __half, __nv_bfloat16   tensor cores, sums in float; m16n8k16 from sm_80, m8n8k4 (__half only) before that
//   tf32                    elements are float, rounded to 10 bits of mantissa as they are multiplied; tensor cores from sm_80
//   double                  tensor cores from sm_80
//   float                   fused multiply-adds without tensor cores: exact float32
//   what has no tensor cores on an architecture is converted to float and multiplied by fused multiply-adds.
//
// Fragments are those of the PTX instructions (PTX ISA, "Matrix fragments for mma"), written as inline PTX: where an element lies
// is known, and no header but those of the element types is needed. Tests supply the instructions in C++, lane by lane.
// Called by: tile.cuh.
#pragma once

#include "common.cuh"

#if defined(CUDA_ON_CPU)
#include <mma_on_cpu.h>  // of tests
#else
#define MMA_ARCH __CUDA_ARCH__

// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 point at the rows of matrix i. Lane l gets elements 2(l%4) and the next of
// row l/4, or, transposed, of column l/4.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

#define MMA_16(type)                                                                                                          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                               \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                            \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
__device__ __forceinline__ void mma_m16n8k16(float* c, const unsigned* a, const unsigned* b, __half) { MMA_16("f16"); }
__device__ __forceinline__ void mma_m16n8k16(float* c, const unsigned* a, const unsigned* b, __nv_bfloat16) { MMA_16("bf16"); }
#undef MMA_16

__device__ __forceinline__ void mma_m16n8k8(float* c, const unsigned* a, const unsigned* b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#define MMA_8(layouts)                                                                                                        \
    asm volatile("mma.sync.aligned.m8n8k4." layouts ".f32.f16.f16.f32 "                                                       \
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"                  \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])             \
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]))
template <bool A_ROWS, bool B_COLUMNS>
__device__ __forceinline__ void mma_m8n8k4(float* c, const unsigned* a, const unsigned* b) {
    if constexpr (A_ROWS && B_COLUMNS) MMA_8("row.col");
    else if constexpr (A_ROWS) MMA_8("row.row");
    else if constexpr (B_COLUMNS) MMA_8("col.col");
    else MMA_8("col.row");
}
#undef MMA_8

__device__ __forceinline__ void mma_m8n8k4(double* c, double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1]) : "d"(a), "d"(b));
}

__device__ __forceinline__ unsigned to_tf32(float x) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
#endif

struct tf32 {};

template <class Math>
struct Arithmetic {
    using Element = Math;
    using Sum = Acc<Math>;
    static constexpr bool FUSED = sizeof(Math) >= 4;  // more registers than tensor cores take
};
template <>
struct Arithmetic<tf32> {
    using Element = float;
    using Sum = float;
    static constexpr bool FUSED = false;
};

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) & 31; }

// 16-bit elements on tensor cores: one ldmatrix for a fragment of either operand, two instructions for a product.
template <class T, bool A_K, bool B_K>
struct Fragments16 {
    static constexpr int M = 16, N = 16, K = 16, SUMS = 8, UNROLL = 2;
    using A = unsigned[4];
    using B = unsigned[4];
    static __device__ int row(int lane, int i) { return lane / 4 + (i & 2) * 4; }
    static __device__ int column(int lane, int i) { return (i & 4) * 2 + lane % 4 * 2 + (i & 1); }
    static __device__ void load_a(A& a, const T* tile, int pitch, int lane) {
        if constexpr (A_K) load_matrices<false>(a, tile + (lane & 15) * pitch + (lane >> 4) * 8);
        else load_matrices<true>(a, tile + ((lane & 7) + (lane >> 4) * 8) * pitch + (lane & 8));
    }
    static __device__ void load_b(B& b, const T* tile, int pitch, int lane) {
        if constexpr (B_K) load_matrices<false>(b, tile + ((lane & 7) + (lane >> 4) * 8) * pitch + (lane & 8));
        else load_matrices<true>(b, tile + (lane & 15) * pitch + (lane >> 4) * 8);
    }
    static __device__ void multiply(float (&sums)[SUMS], const A& a, const B& b) {
        mma_m16n8k16(sums, a, b, T());
        mma_m16n8k16(sums + 4, a, b + 2, T());
    }
};

// Floats rounded to TF32 on tensor cores. To ldmatrix a float is two neighbours of 16 bits, which serves where k runs along rows.
template <bool A_K, bool B_K>
struct FragmentsTf32 {
    static constexpr int M = 16, N = 16, K = 8, SUMS = 8, UNROLL = 2;
    using A = unsigned[4];
    using B = unsigned[4];
    static __device__ int row(int lane, int i) { return lane / 4 + (i & 2) * 4; }
    static __device__ int column(int lane, int i) { return (i & 4) * 2 + lane % 4 * 2 + (i & 1); }
    static __device__ void load_a(A& a, const float* tile, int pitch, int lane) {
        if constexpr (A_K) load_matrices<false>(a, tile + (lane & 15) * pitch + (lane >> 4) * 4);
        else gather(a, tile, pitch, lane, 1, 2);
        round(a);
    }
    static __device__ void load_b(B& b, const float* tile, int pitch, int lane) {
        if constexpr (B_K) load_matrices<false>(b, tile + ((lane & 7) + (lane >> 4) * 8) * pitch + (lane & 8) / 2);
        else gather(b, tile, pitch, lane, 2, 1);
        round(b);
    }
    static __device__ void multiply(float (&sums)[SUMS], const A& a, const B& b) {
        mma_m16n8k8(sums, a, b);
        mma_m16n8k8(sums + 4, a, b + 2);
    }

  private:
    // Register i is 8 rows further if its bit `of_row` is set, and 4 k further if `of_k` is.
    static __device__ void gather(unsigned (&r)[4], const float* tile, int pitch, int lane, int of_row, int of_k) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            r[i] = __float_as_uint(tile[(lane % 4 + (i & of_k ? 4 : 0)) * pitch + lane / 4 + (i & of_row ? 8 : 0)]);
    }
    static __device__ void round(unsigned (&r)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = to_tf32(__uint_as_float(r[i]));
    }
};

// Doubles on tensor cores: products and sums are as exact as fused multiply-adds.
template <bool A_K, bool B_K>
struct FragmentsDouble {
    static constexpr int M = 8, N = 8, K = 4, SUMS = 2, UNROLL = 2;
    using A = double[1];
    using B = double[1];
    static __device__ int row(int lane, int) { return lane / 4; }
    static __device__ int column(int lane, int i) { return lane % 4 * 2 + i; }
    static __device__ void load_a(A& a, const double* tile, int pitch, int lane) {
        a[0] = tile[A_K ? lane / 4 * pitch + lane % 4 : lane % 4 * pitch + lane / 4];
    }
    static __device__ void load_b(B& b, const double* tile, int pitch, int lane) {
        b[0] = tile[B_K ? lane / 4 * pitch + lane % 4 : lane % 4 * pitch + lane / 4];
    }
    static __device__ void multiply(double (&sums)[SUMS], const A& a, const B& b) { mma_m8n8k4(sums, a[0], b[0]); }
};

// The first tensor cores (sm_70): an instruction multiplies four pairs of 8x4 matrices, one for each four lanes and the four
// lanes 16 above them; put together they make 16x16.
template <bool A_K, bool B_K>
struct FragmentsVolta {
    static constexpr int M = 16, N = 16, K = 4, SUMS = 8, UNROLL = 4;
    using A = unsigned[2];
    using B = unsigned[2];
    static __device__ int row(int lane, int i) { return (lane & 4) * 2 + (lane & 1) + (i & 2) + lane / 16 * 4; }
    static __device__ int column(int lane, int i) { return (lane & 8) + (i & 4) + (lane & 2) + (i & 1); }
    static __device__ void load_a(A& a, const __half* tile, int pitch, int lane) { load(a, tile, pitch, lane, (lane & 4) * 2, A_K); }
    static __device__ void load_b(B& b, const __half* tile, int pitch, int lane) { load(b, tile, pitch, lane, lane & 8, B_K); }
    static __device__ void multiply(float (&sums)[SUMS], const A& a, const B& b) { mma_m8n8k4<A_K, B_K>(sums, a, b); }

  private:
    static __device__ void load(unsigned (&r)[2], const __half* tile, int pitch, int lane, int first, bool along_k) {
        const int low = lane & 3, high = lane / 16 * 4;
        const auto v = load_vector<4>(tile + (along_k ? (first + low + high) * pitch : low * pitch + first + high));
        memcpy(r, &v, sizeof(r));
    }
};

// Fused multiply-adds: each lane has 4x4 of 16x32 elements and takes 4 k at once. Along k the rows of a lane lie 4 (columns: 8)
// apart and along m (n) they are neighbours, so that lanes read 16 bytes each without bank conflicts either way.
template <class T, class Sum, bool A_K, bool B_K>
struct FragmentsFma {
    static constexpr int M = 16, N = 32, K = 4, SUMS = 16, UNROLL = 1;
    using A = Sum[4][4];  // [k][m]
    using B = Sum[4][4];
    static __device__ int row(int lane, int i) { return A_K ? i / 4 * 4 + lane / 8 : lane / 8 * 4 + i / 4; }
    static __device__ int column(int lane, int i) { return B_K ? i % 4 * 8 + lane % 8 : lane % 8 * 4 + i % 4; }
    static __device__ void load_a(A& a, const T* tile, int pitch, int lane) { load<A_K, 4>(a, tile, pitch, lane / 8); }
    static __device__ void load_b(B& b, const T* tile, int pitch, int lane) { load<B_K, 8>(b, tile, pitch, lane % 8); }
    static __device__ void multiply(Sum (&sums)[SUMS], const A& a, const B& b) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] += a[k][i / 4] * b[k][i % 4];
    }

  private:
    template <bool ALONG_K, int LANES>
    static __device__ void load(Sum (&r)[4][4], const T* tile, int pitch, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const auto v = load_vector<4>(ALONG_K ? tile + (i * LANES + lane) * pitch : tile + i * pitch + lane * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) (ALONG_K ? r[j][i] : r[i][j]) = wide(v.v[j]);
        }
    }
};

template <class Math, bool A_K, bool B_K>
struct Choice {
    using Element = typename Arithmetic<Math>::Element;
    using Type = FragmentsFma<Element, typename Arithmetic<Math>::Sum, A_K, B_K>;
};
#if MMA_ARCH >= 800
template <bool A_K, bool B_K>
struct Choice<__half, A_K, B_K> {
    using Type = Fragments16<__half, A_K, B_K>;
};
template <bool A_K, bool B_K>
struct Choice<__nv_bfloat16, A_K, B_K> {
    using Type = Fragments16<__nv_bfloat16, A_K, B_K>;
};
template <bool A_K, bool B_K>
struct Choice<tf32, A_K, B_K> {
    using Type = FragmentsTf32<A_K, B_K>;
};
template <bool A_K, bool B_K>
struct Choice<double, A_K, B_K> {
    using Type = FragmentsDouble<A_K, B_K>;
};
#else
template <bool A_K, bool B_K>
struct Choice<__half, A_K, B_K> {
    using Type = FragmentsVolta<A_K, B_K>;
};
#endif
template <class Math, bool A_K, bool B_K>
using Fragments = typename Choice<Math, A_K, B_K>::Type;
