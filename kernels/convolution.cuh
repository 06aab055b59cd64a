// The forward and the data pass of a convolution as products of matrices that are never built: one tile, of any box of the target.
//
//   forward    y[n, o, g*F + f] = relu(bias + sum over taps t, c of x[n, o@t, g*C + c] * w[g*F + f, t, c])     m = (n, o), k = (t, c)
//   data       dx[n, i, g*C + c] = sum over t, f of dy[n, i@t, g*F + f] * w[g*F + f, t, c]                     m = (n, i), k = (t, f)
//
// The order in which k is added up depends on neither box nor tile: boxes that together make y, or dx, give the bits of one computed at once.
// Called by: convolution.cu, rims.cu.
#pragma once

#include "tile.cuh"
#include "window.cuh"

// Positions of the source for m, taps and channels for k.
template <class T, class Index>
struct Gathered {
    static constexpr bool ALONG_K = true;
    using Fixed = Position<Index>;
    const T* base;
    Index extent;
    const Window<Index>& window;
    __device__ __forceinline__ Fixed fixed(Index m) const { return window.position(m); }
    __device__ __forceinline__ Tap<Index> moving(Index k) const { return window.tap(k); }
    __device__ __forceinline__ const T* pointer(const Fixed& p, const Tap<Index>& t) const {
        return window.reads(p, t) ? base + (p.offset + t.offset) : nullptr;
    }
};

// The filters for the data pass: channels c for n, (tap, f) for k.
template <class T, class Index>
struct Filters {
    static constexpr bool ALONG_K = false;
    using Fixed = Index;
    const T* base;  // of the group
    Index extent;
    const Window<Index>& window;
    __device__ __forceinline__ Index fixed(Index n) const { return n; }
    __device__ __forceinline__ Index moving(Index k) const {
        const Index tap = divide(k, window.channels), f = k - tap * static_cast<Index>(window.channels.value);
        return (f * window.filter_taps() + window.filter_tap(tap)) * extent;
    }
    __device__ __forceinline__ const T* pointer(Index n, Index k) const { return base + n + k; }
};

template <class T, class S, class Index>
struct TargetOutput : Output<T, S, Index> {
    Index rows;
    const Window<Index>& window;
    __device__ __forceinline__ Index row(Index m) const { return window.target(m); }
};

#define CONVOLUTION_TEMPLATE template <class Math, class Index, int BM, int BN, int WM, int STAGES, int VEC_A, int VEC_B>
#define CONVOLUTION_TYPES                                             \
    using Kind = Shape<Math, Index, BM, BN, WM, STAGES, VEC_A, VEC_B>; \
    using T = typename Kind::T;                                       \
    using S = typename Kind::S
#define ELEMENT typename Arithmetic<Math>::Element
#define SUM typename Arithmetic<Math>::Sum

// Tile number `tile` of the box that the window is of.
CONVOLUTION_TEMPLATE
__device__ __forceinline__ void forward_tile(ELEMENT* y, SUM* partial, const ELEMENT* x, const ELEMENT* w, const ELEMENT* bias,
                                             const WindowSizes& z, const Window<Index>& window, i64 group, i64 split, i64 tile,
                                             char* memory) {
    CONVOLUTION_TYPES;
    const i64 across = (z.columns + BN - 1) / BN;
    const Index m = static_cast<Index>(tile / across) * BM, n = static_cast<Index>(tile % across) * BN;
    const Index k = window.taps() * static_cast<Index>(z.channels.value), rows = window.positions();
    const Index begin = static_cast<Index>(split * z.depth), end = min(k, begin + static_cast<Index>(z.depth));
    const Gathered<T, Index> left{x, rows, window};
    const Matrix<T, Index, true> right{w + group * z.columns * k, k, static_cast<Index>(z.columns)};
    T* shared = reinterpret_cast<T*>(memory);
    Tile<Kind, decltype(left), decltype(right)> product;
    product.multiply(left, right, m, n, begin, end, shared);
    const i64 first = group * z.columns;
    const TargetOutput<T, S, Index> out{{y + first, partial ? partial + first : nullptr, bias ? bias + first : nullptr, S(1),
                                         S(z.add ? 1 : 0), static_cast<Index>(z.columns), z.relu != 0, z.vectors != 0},
                                        rows, window};
    product.store(out, m, n, shared);
}

__device__ __forceinline__ i64 target_size(const WindowSizes& z) {
    return z.samples * z.axis[0].target * z.axis[1].target * z.axis[2].target * z.groups * z.columns;
}

// The same of the data pass; `partial` has the parts of all splits.
CONVOLUTION_TEMPLATE
__device__ __forceinline__ void data_tile(ELEMENT* dx, SUM* partial, const ELEMENT* dy, const ELEMENT* w, const WindowSizes& z,
                                          const Window<Index>& window, i64 group, i64 split, i64 tile, char* memory) {
    CONVOLUTION_TYPES;
    const i64 across = (z.columns + BN - 1) / BN;
    const Index m = static_cast<Index>(tile / across) * BM, n = static_cast<Index>(tile % across) * BN;
    const Index rows = window.positions();
    if (m >= rows) return;  // of a phase with fewer positions than others
    const Index k = window.taps() * static_cast<Index>(z.channels.value), columns = static_cast<Index>(z.columns);
    const Index begin = static_cast<Index>(split * z.depth), end = min(k, begin + static_cast<Index>(z.depth));
    const Gathered<T, Index> left{dy, rows, window};
    const Filters<T, Index> right{w + group * z.channels.value * window.filter_taps() * z.columns, columns, window};
    T* shared = reinterpret_cast<T*>(memory);
    Tile<Kind, decltype(left), decltype(right)> product;
    product.multiply(left, right, m, n, begin, end, shared);
    const i64 first = group * z.columns;
    const TargetOutput<T, S, Index> out{{dx + first, partial ? partial + split * target_size(z) + first : nullptr, nullptr, S(1),
                                         S(z.add ? 1 : 0), columns, false, z.vectors != 0},
                                        rows, window};
    product.store(out, m, n, shared);
}
