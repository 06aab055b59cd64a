// Convolution by implicit GEMM: the three passes as products of matrices that are never built, see window.cuh for who reads what.
//
//   forward    y[n, o, g*F + f] = relu(bias + sum over taps t, c of x[n, o@t, g*C + c] * w[g*F + f, t, c])     m = (n, o), k = (t, c)
//   data       dx[n, i, g*C + c] = sum over t, f of dy[n, i@t, g*F + f] * w[g*F + f, t, c]                     m = (n, i), k = (t, f)
//   weights    dw[g*F + f, t, c] = sum over n, o of dy[n, o, g*F + f] * x[n, o@t, g*C + c]                     m = f, n = (t, c), k = (n, o)
//
// Layout: x (N, D, H, W, G*C), w (G*F, taps, C), y (N, D', H', W', G*F), channels-last without gaps; C and F per group here.
// A transposed convolution is the data pass. Pads before an axis may be negative or of any size, behind it they follow from the
// extents. Forward and data compute a box of y or dx and leave the rest alone. `add` adds to what is there.
// Limits: at most 65 535 groups, and 65 535 phases times splits; VEC_A and VEC_B divide C or F (whichever runs along the operand)
// and addresses. Groups of few channels waste most of a tile: grouped.cu is for them. A 1x1 convolution of stride 1 is a gemm.
// Grid: (tiles of m * tiles of n, groups, phases * splits). With splits, parts of the sum go to partial[split], of the result's
// shape, for sum_splits (gemm.cu): the order of sums, and so every bit, depends on sizes and
// the card only.
// Called by: the cupy engine, through lbpar/engine/cupy/launch_conv.py; rims.cu has both of several boxes.
// Limited by the rate of tensor cores from about 64 channels on; below, by the instructions that gather (about two a copied
// 16 bytes, and a division by multiplication for each tap and position). Bytes come from L2: neighbouring taps read the same lines.

#include "convolution.cuh"

// Taps and channels for n, positions for k.
template <class T, class Index>
struct GatheredTaps {
    static constexpr bool ALONG_K = false;
    using Fixed = Tap<Index>;
    const T* base;
    Index extent;
    const Window<Index>& window;
    __device__ __forceinline__ Fixed fixed(Index n) const { return window.tap(n); }
    __device__ __forceinline__ Position<Index> moving(Index k) const { return window.position(k); }
    __device__ __forceinline__ const T* pointer(const Fixed& t, const Position<Index>& p) const {
        return window.reads(p, t) ? base + (p.offset + t.offset) : nullptr;
    }
};

template <class T, class S, class Index>
struct FilterOutput : Output<T, S, Index> {
    Index rows, pitch;
    __device__ __forceinline__ Index row(Index m) const { return m * pitch; }
};

CONVOLUTION_TEMPLATE
__global__ void __launch_bounds__(BM / WM * BN, (blocks_of<Math, BM, BN, WM, VEC_A, VEC_B>()))
    conv_forward(ELEMENT* y, SUM* partial, const ELEMENT* x, const ELEMENT* w, const ELEMENT* bias, const __grid_constant__ WindowSizes z) {
    extern __shared__ __align__(128) char memory[];
    const i64 split = blockIdx.z;
    const Window<Index> window = forward_window<Index>(z, blockIdx.y);
    forward_tile<Math, Index, BM, BN, WM, STAGES, VEC_A, VEC_B>(y, partial ? partial + split * target_size(z) : nullptr, x, w, bias,
                                                                z, window, blockIdx.y, split, blockIdx.x, memory);
}

CONVOLUTION_TEMPLATE
__global__ void __launch_bounds__(BM / WM * BN, (blocks_of<Math, BM, BN, WM, VEC_A, VEC_B, true>()))
    conv_backward_data(ELEMENT* dx, SUM* partial, const ELEMENT* dy, const ELEMENT* w, const __grid_constant__ WindowSizes z) {
    extern __shared__ __align__(128) char memory[];
    const i64 group = blockIdx.y, split = blockIdx.z % z.splits;
    const Window<Index> window = adjoint_window<Index>(z, group, static_cast<int>(blockIdx.z / z.splits));
    data_tile<Math, Index, BM, BN, WM, STAGES, VEC_A, VEC_B>(dx, partial, dy, w, z, window, group, split, blockIdx.x, memory);
}

CONVOLUTION_TEMPLATE
__global__ void __launch_bounds__(BM / WM * BN, (blocks_of<Math, BM, BN, WM, VEC_A, VEC_B, true>()))
    conv_backward_weights(ELEMENT* dw, SUM* partial, const ELEMENT* dy, const ELEMENT* x, const __grid_constant__ WindowSizes z) {
    CONVOLUTION_TYPES;
    extern __shared__ __align__(128) char memory[];
    const i64 group = blockIdx.y, split = blockIdx.z;
    const Window<Index> window = forward_window<Index>(z, group);
    const Index columns = window.taps() * static_cast<Index>(z.channels.value);
    const i64 across = (columns + BN - 1) / BN;
    const Index m = static_cast<Index>(blockIdx.x / across) * BM, n = static_cast<Index>(blockIdx.x % across) * BN;
    const Index begin = static_cast<Index>(split * z.depth), end = min(window.positions(), begin + static_cast<Index>(z.depth));
    const Matrix<T, Index, false> left{dy + group * z.columns, window.target_pitch, static_cast<Index>(z.columns)};
    const GatheredTaps<T, Index> right{x, columns, window};
    T* shared = reinterpret_cast<T*>(memory);
    Tile<Kind, decltype(left), decltype(right)> product;
    product.multiply(left, right, m, n, begin, end, shared);
    const i64 first = group * z.columns * columns;
    const FilterOutput<T, S, Index> out{{dw + first, partial ? partial + split * z.groups * z.columns * columns + first : nullptr, nullptr,
                                         S(1), S(z.add ? 1 : 0), columns, false, z.vectors != 0},
                                        static_cast<Index>(z.columns), columns};
    product.store(out, m, n, shared);
}
