// Where a convolution reads and writes: positions of an array, taps around them, and both passes' geometry by the same formula.
//
// Arrays are channels-last, (N, D, H, W, G*C); two dimensions are three with a depth of 1. Along each axis position p and tap j read
//
//   source[mul*p + add + step*j]        zero outside of [0, source extent)
//
// forward            p an output o of the box that is asked for, j a tap k:      o = origin + p,  mul = stride, add = origin*stride - pad,
//                    step = dilation
// gradient of x      inputs of a box fall into `stride` phases, input i = origin + phase + stride*p; the taps that reach it are
//                    k = k0 + spacing*j with k*dilation = i + pad (mod stride), spacing = stride/gcd(stride, dilation), and the output
//                    that tap reads is p + (origin + phase + pad - k*dilation)/stride:  mul = 1, step = -reach, reach = spacing*dilation/stride.
//                    So a phase is a convolution of stride 1 with some of the taps: nothing is scattered, no zero is multiplied.
// Called by: convolution.cu, rims.cu, grouped.cu. Sizes are packed by lbpar/engine/cupy/launch_conv.py.
#pragma once

#include "common.cuh"

// Division by a number that the host knows, for dividends from 0 to 2^31 - 1: n/value = (n + high 32 bits of n*multiplier) >> shift.
struct Divisor {
    i64 value;
    u32 multiplier, shift;
};
__device__ __forceinline__ int divide(int n, const Divisor& by) {
    return static_cast<int>((__umulhi(static_cast<u32>(n), by.multiplier) + static_cast<u32>(n)) >> by.shift);
}
template <class Index>
__device__ __forceinline__ Index divide(Index n, const Divisor& by) {
    return static_cast<Index>(static_cast<i64>(n) / by.value);
}

struct AxisSizes {
    i64 source, target, kernel, stride, dilation, pad, origin, extent, spacing, reach;  // origin, extent: of the box of the target
    Divisor positions[2], taps[2];  // a phase has one of two numbers of positions and of taps; forward has the first
};

struct WindowSizes {
    AxisSizes axis[3];
    i64 samples, groups;
    Divisor channels;  // of the source, per group
    i64 columns;  // per group: of the target; for the gradient of w: of dy
    i64 depth, splits, add, relu, vectors;  // depth: k (or positions) of a split
};

template <class Index>
struct Axis {
    Divisor positions, taps;
    Index mul, add, step, source;
    Index first_tap, tap_step, kernel;  // tap j is the filter's first_tap + tap_step*j
    Index target, target_mul, target_add;  // position p is the target's target_mul*p + target_add
};

template <class Index>
__device__ __forceinline__ Axis<Index> forward_axis(const AxisSizes& a, i64 origin, const Divisor& positions) {
    return {positions, a.taps[0], static_cast<Index>(a.stride), static_cast<Index>(origin * a.stride - a.pad),
            static_cast<Index>(a.dilation), static_cast<Index>(a.source), 0, 1, static_cast<Index>(a.kernel),
            static_cast<Index>(a.target), 1, static_cast<Index>(origin)};
}

template <class Index>
__device__ __forceinline__ Axis<Index> adjoint_axis(const AxisSizes& a, i64 origin, i64 extent, const Divisor (&positions)[2], int phase) {
    const Index stride = static_cast<Index>(a.stride), dilation = static_cast<Index>(a.dilation);
    const Index spacing = static_cast<Index>(a.spacing), kernel = static_cast<Index>(a.kernel);
    const Index first = static_cast<Index>(origin) + phase, rest = first + static_cast<Index>(a.pad);
    Index k = 0;
    while (k < spacing && k < kernel && (rest - k * dilation) % stride != 0) ++k;
    const bool found = k < spacing && k < kernel;
    Axis<Index> axis{positions[phase < extent % a.stride ? 0 : 1], a.taps[k < kernel % spacing ? 0 : 1],
                     1, found ? (rest - k * dilation) / stride : Index(0), -static_cast<Index>(a.reach), static_cast<Index>(a.source),
                     k, spacing, kernel, static_cast<Index>(a.target), stride, first};
    if (!found) axis.taps.value = 0;
    return axis;
}

template <class Index>
struct Position {
    Index at[3], offset;
};
template <class Index>
struct Tap {
    Index at[3], offset;
};

__device__ __forceinline__ bool inside(int i, int extent) { return static_cast<u32>(i) < static_cast<u32>(extent); }
template <class Index>
__device__ __forceinline__ bool inside(Index i, Index extent) {
    return (i >= 0) & (i < extent);
}

template <class Index>
struct Window {
    Axis<Index> axis[3];
    Divisor channels;  // of a source's group
    Index samples, source_pitch, target_pitch, first_channel;  // pitches: channels of all groups

    __device__ __forceinline__ Index positions() const {
        return samples * static_cast<Index>(axis[0].positions.value * axis[1].positions.value * axis[2].positions.value);
    }
    __device__ __forceinline__ Index taps() const {
        return static_cast<Index>(axis[0].taps.value * axis[1].taps.value * axis[2].taps.value);
    }

    // Sample, and where along each axis, of a position's number.
    __device__ __forceinline__ Index split(Index m, Index (&p)[3]) const {
#pragma unroll
        for (int d = 2; d >= 0; --d) {
            const Index rest = divide(m, axis[d].positions);
            p[d] = m - rest * static_cast<Index>(axis[d].positions.value);
            m = rest;
        }
        return m;
    }

    __device__ __forceinline__ Position<Index> position(Index m) const {
        Index p[3];
        Index offset = split(m, p);
        Position<Index> r;
#pragma unroll
        for (int d = 0; d < 3; ++d) {
            r.at[d] = p[d] * axis[d].mul + axis[d].add;
            offset = offset * axis[d].source + r.at[d];
        }
        r.offset = offset * source_pitch + first_channel;
        return r;
    }

    // Where along each axis, of a tap's number.
    __device__ __forceinline__ void split_tap(Index tap, Index (&j)[3]) const {
#pragma unroll
        for (int d = 2; d > 0; --d) {
            const Index rest = divide(tap, axis[d].taps);
            j[d] = tap - rest * static_cast<Index>(axis[d].taps.value);
            tap = rest;
        }
        j[0] = tap;
    }

    // The tap and channel of k = tap*channels + channel.
    __device__ __forceinline__ Tap<Index> tap(Index k) const {
        const Index number = divide(k, channels);
        Tap<Index> r;
        split_tap(number, r.at);
        Index offset = 0;
#pragma unroll
        for (int d = 0; d < 3; ++d) {
            r.at[d] *= axis[d].step;
            offset = offset * axis[d].source + r.at[d];
        }
        r.offset = offset * source_pitch + (k - number * static_cast<Index>(channels.value));
        return r;
    }

    __device__ __forceinline__ bool reads(const Position<Index>& p, const Tap<Index>& t) const {
        return inside(p.at[0] + t.at[0], axis[0].source) & inside(p.at[1] + t.at[1], axis[1].source) &
               inside(p.at[2] + t.at[2], axis[2].source);  // no branches
    }

    // The filter's number of a tap's number.
    __device__ __forceinline__ Index filter_tap(Index tap) const {
        Index j[3], number = 0;
        split_tap(tap, j);
#pragma unroll
        for (int d = 0; d < 3; ++d) number = number * axis[d].kernel + axis[d].first_tap + axis[d].tap_step * j[d];
        return number;
    }
    __device__ __forceinline__ Index filter_taps() const { return axis[0].kernel * axis[1].kernel * axis[2].kernel; }

    // Offset of a position's first channel (of all groups) in the target.
    __device__ __forceinline__ Index target(Index m) const {
        Index p[3];
        Index offset = split(m, p);
#pragma unroll
        for (int d = 0; d < 3; ++d) offset = offset * axis[d].target + axis[d].target_mul * p[d] + axis[d].target_add;
        return offset * target_pitch;
    }
};

// The window of a group for the box that the sizes give.
template <class Index>
__device__ __forceinline__ Window<Index> forward_window(const WindowSizes& z, i64 group) {
    Window<Index> w;
#pragma unroll
    for (int d = 0; d < 3; ++d) w.axis[d] = forward_axis<Index>(z.axis[d], z.axis[d].origin, z.axis[d].positions[0]);
    w.channels = z.channels;
    w.samples = static_cast<Index>(z.samples);
    w.source_pitch = static_cast<Index>(z.groups * z.channels.value);
    w.target_pitch = static_cast<Index>(z.groups * z.columns);
    w.first_channel = static_cast<Index>(group * z.channels.value);
    return w;
}

template <class Index>
__device__ __forceinline__ Window<Index> adjoint_window(const WindowSizes& z, i64 group, int phase) {
    Window<Index> w = forward_window<Index>(z, group);
#pragma unroll
    for (int d = 2; d >= 0; --d) {
        const int stride = static_cast<int>(z.axis[d].stride);
        const AxisSizes& a = z.axis[d];
        w.axis[d] = adjoint_axis<Index>(a, a.origin, a.extent, a.positions, phase % stride);
        phase /= stride;
    }
    return w;
}

// Thin boxes of a target, all of them in one launch: the rims that read what a halo exchange brings, computed when it has come.
constexpr int MOST_RIMS = 8;

struct Rim {
    i64 first_block, origin[3], extent[3];
    Divisor positions[3][2];  // as those of AxisSizes
};

struct RimSizes {
    WindowSizes window;  // but for origins, extents and positions
    i64 count;
    Rim rims[MOST_RIMS];
};

// The box that a block works on.
__device__ __forceinline__ const Rim& rim_of(const RimSizes& z, i64 block) {
    int r = 0;
    while (r + 1 < z.count && z.rims[r + 1].first_block <= block) ++r;
    return z.rims[r];
}

template <bool ADJOINT, class Index>
__device__ __forceinline__ Window<Index> rim_window(const RimSizes& z, const Rim& rim, i64 group, int phase) {
    Window<Index> w = forward_window<Index>(z.window, group);
#pragma unroll
    for (int d = 2; d >= 0; --d) {
        const AxisSizes& a = z.window.axis[d];
        if constexpr (ADJOINT) {
            const int stride = static_cast<int>(a.stride);
            w.axis[d] = adjoint_axis<Index>(a, rim.origin[d], rim.extent[d], rim.positions[d], phase % stride);
            phase /= stride;
        } else {
            w.axis[d] = forward_axis<Index>(a, rim.origin[d], rim.positions[d][0]);
        }
    }
    return w;
}
