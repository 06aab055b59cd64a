// Convolution of thin boxes of the output, or of the gradient for the input, all of them in one launch: the rims that read what a halo
// exchange brings, computed when it has come, while convolution.cu computed the interior meanwhile.
//
//   conv_rims         y[n, o, f] = relu(bias + sum over t, c of x[n, o@t, c] * w[f, t, c])    for the outputs o of each box, and no others
//   conv_data_rims    dx[n, i, c] = sum over t, f of dy[n, i@t, f] * w[f, t, c]               for the inputs i of each box, and no others
//
// Layout and formulas as in convolution.cu, whose tiles these are: interior and rims together are bit for bit what one launch of
// conv_forward or conv_backward_data gives (without splits). Boxes must not overlap. Groups of few channels have theirs in grouped.cu.
// Limits: 8 boxes (three dimensions have 6 rims), 65 535 groups and phases; sums are not split, so that rims of few positions leave
// multiprocessors idle.
// Grid: (tiles of all boxes, groups, phases) of Shape::THREADS threads.
// Called by: the cupy engine, through lbpar/engine/cupy/launch_conv.py.
// Limited by latency: a rim has some tens of tiles, each as deep as all taps and channels.

#include "convolution.cuh"

CONVOLUTION_TEMPLATE
__global__ void __launch_bounds__(BM / WM * BN, (blocks_of<Math, BM, BN, WM, VEC_A, VEC_B>()))
    conv_rims(ELEMENT* y, const ELEMENT* x, const ELEMENT* w, const ELEMENT* bias, const __grid_constant__ RimSizes z) {
    extern __shared__ __align__(128) char memory[];
    const Rim& rim = rim_of(z, blockIdx.x);
    const Window<Index> window = rim_window<false, Index>(z, rim, blockIdx.y, 0);
    forward_tile<Math, Index, BM, BN, WM, STAGES, VEC_A, VEC_B>(y, nullptr, x, w, bias, z.window, window, blockIdx.y, 0,
                                                                blockIdx.x - rim.first_block, memory);
}

CONVOLUTION_TEMPLATE
__global__ void __launch_bounds__(BM / WM * BN, (blocks_of<Math, BM, BN, WM, VEC_A, VEC_B, true>()))
    conv_data_rims(ELEMENT* dx, const ELEMENT* dy, const ELEMENT* w, const __grid_constant__ RimSizes z) {
    extern __shared__ __align__(128) char memory[];
    const Rim& rim = rim_of(z, blockIdx.x);
    const Window<Index> window = rim_window<true, Index>(z, rim, blockIdx.y, static_cast<int>(blockIdx.z));
    data_tile<Math, Index, BM, BN, WM, STAGES, VEC_A, VEC_B>(dx, nullptr, dy, w, z.window, window, blockIdx.y, 0,
                                                             blockIdx.x - rim.first_block, memory);
}
