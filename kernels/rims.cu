// Convolution of thin boxes of the output, all of them in one launch: the rims that read what a halo exchange brings, computed when
// it has come, while convolution.cu computed the interior meanwhile.
//
//   y[n, o, f] = relu(bias + sum over t, c of x[n, o@t, c] * w[f, t, c])    for the outputs o of each box, and no others
//
// Layout and formula as in convolution.cu, whose tiles these are: interior and rims together are bit for bit the y that one launch
// of conv_forward gives (without splits). Boxes may be empty and must not overlap.
// Limits: 8 boxes (three dimensions have 6 rims), 65 535 groups; sums are not split, so that rims of few positions leave
// multiprocessors idle.
// Grid: (tiles of all boxes, groups) of Shape::THREADS threads.
// Called by: the cupy engine, through lbpar/engine/cupy/launch_conv.py.
// Limited by latency: a rim has some tens of tiles, each as deep as all taps and channels.

#include "convolution.cuh"

constexpr int MOST_RIMS = 8;

struct Rim {
    i64 first_tile, origin[3];
    Divisor positions[3];
};

struct RimSizes {
    WindowSizes window;
    i64 count;
    Rim rims[MOST_RIMS];
};

CONVOLUTION_TEMPLATE
__global__ void __launch_bounds__(BM / WM * BN, (blocks_of<Math, BM, BN, WM, VEC_A, VEC_B>()))
    conv_rims(ELEMENT* y, const ELEMENT* x, const ELEMENT* w, const ELEMENT* bias, const __grid_constant__ RimSizes z) {
    extern __shared__ __align__(128) char memory[];
    const i64 tile = blockIdx.x;
    int r = 0;
    while (r + 1 < z.count && z.rims[r + 1].first_tile <= tile) ++r;
    const Rim& rim = z.rims[r];
    Window<Index> window = forward_window<Index>(z.window, blockIdx.y);
#pragma unroll
    for (int d = 0; d < 3; ++d) window.axis[d] = forward_axis<Index>(z.window.axis[d], rim.origin[d], rim.positions[d]);
    forward_tile<Math, Index, BM, BN, WM, STAGES, VEC_A, VEC_B>(y, nullptr, x, w, bias, z.window, window, blockIdx.y, 0,
                                                                tile - rim.first_tile, memory);
}
