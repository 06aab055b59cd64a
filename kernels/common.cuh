// Index helpers shared by all kernels of lbpar.
//
// Arrays are C-contiguous and channels-last: x, y are (N, [D], H, W, C), weights (F, [kD], kH, kW, C/groups).
// Letters: N samples, D H W space, C channels of the input, F filters; o an output position, i an input position,
// k a tap of the window. One spatial dimension of a window reads
//
//     i = o * stride + k * dilation - pad          (pad may be negative: then it crops)
//
// and a tap whose i lies outside [0, in) counts as zero (max pooling skips it).
//
// Element indices are 64-bit: a block of 512^3 voxels with 32 channels has 2^32 elements.
// No standard header is included, so the run-time compiler needs no include path but this folder. The helpers are
// plain functions and compile with a host compiler too, which is how they are tested on machines without a device.
#pragma once

#ifdef __CUDACC__
#define LBPAR_FN __host__ __device__ __forceinline__
#elif defined(__CUDACC_RTC__)
#define LBPAR_FN __device__ __forceinline__
#else
#define LBPAR_FN inline
#endif

namespace lbpar {

using index_t = long long;

// ceil(a / b) for a >= 0, b > 0: the number of blocks of b that cover a.
LBPAR_FN constexpr index_t div_up(index_t a, index_t b) { return (a + b - 1) / b; }

// floor(a / b) for any a, b > 0. C++ rounds towards zero, which is wrong left of a padded border.
LBPAR_FN constexpr index_t div_floor(index_t a, index_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Block `part` of `extent` elements cut into `parts`: the first blocks are one larger (layout's rule).
LBPAR_FN constexpr index_t block_size(index_t extent, index_t parts, index_t part) {
    return extent / parts + (part < extent % parts ? 1 : 0);
}
LBPAR_FN constexpr index_t block_start(index_t extent, index_t parts, index_t part) {
    const index_t rest = extent % parts;
    return part * (extent / parts) + (part < rest ? part : rest);
}

// One spatial dimension of a local kernel call.
struct Window {
    int kernel, stride, dilation, pad;

    // Input position that output o reads through tap k; may lie outside the input.
    LBPAR_FN constexpr index_t input(index_t o, int k) const {
        return o * stride + static_cast<index_t>(k) * dilation - pad;
    }

    // The output that reads input i through tap k, or -1 if none does (the adjoint's question; out = output extent).
    LBPAR_FN constexpr index_t output(index_t i, int k, index_t out) const {
        const index_t at = i + pad - static_cast<index_t>(k) * dilation;
        return at >= 0 && at % stride == 0 && at / stride < out ? at / stride : -1;
    }

    // First tap of output o that reads i >= 0, and one past the last tap that reads i < in.
    LBPAR_FN constexpr int tap_begin(index_t o) const {
        const index_t first = input(o, 0);
        const index_t k = first >= 0 ? 0 : div_up(-first, dilation);
        return k < kernel ? static_cast<int>(k) : kernel;
    }
    LBPAR_FN constexpr int tap_end(index_t o, index_t in) const {
        const index_t room = in - input(o, 0);
        const index_t k = room <= 0 ? 0 : div_up(room, dilation);
        return k < kernel ? static_cast<int>(k) : kernel;
    }
};

// Position of a flat index in an array of RANK dimensions, the last one fastest.
template <int RANK>
struct Position {
    index_t at[RANK];

    LBPAR_FN constexpr Position(index_t flat, const index_t (&extent)[RANK]) : at{} {
        for (int d = RANK - 1; d > 0; --d) {
            at[d] = flat % extent[d];
            flat /= extent[d];
        }
        at[0] = flat;
    }

    // Flat index of this position in an array of other extents, after adding `shift` (a block's offset).
    LBPAR_FN constexpr index_t flat(const index_t (&extent)[RANK], const index_t (&shift)[RANK]) const {
        index_t out = at[0] + shift[0];
        for (int d = 1; d < RANK; ++d) out = out * extent[d] + at[d] + shift[d];
        return out;
    }
};

}  // namespace lbpar

#ifdef __CUDACC__
// Grid-stride loop: right for any launch size, also for n = 0.
#define LBPAR_FOR(i, n)                                                                                      \
    for (::lbpar::index_t i = ::lbpar::index_t(blockIdx.x) * blockDim.x + threadIdx.x; i < (n);              \
         i += ::lbpar::index_t(gridDim.x) * blockDim.x)
#endif
