// Moves of boxes: what is sent, received, joined, cut out or copied between layouts.
//
//     move_pieces    to[...] = from[...]         add_pieces    to[...] += from[...]
//     move_rows      the same, with rows of some dimensions given by lists (`np.ix_`)
//     add_rows       the same, where a list may name a row twice: each counts
//
// A piece is a box of up to five dimensions, in units of bytes (moves) or elements (sums): extents, and the steps of both
// sides per dimension, last dimension fastest. All pieces of a move go in one launch: ghosts of all neighbours, or blocks of channels,
// samples and space for all peers, straight to and from the buffers that are sent. Whoever makes pieces joins dimensions that
// are contiguous on both sides, takes units as large as alignment allows (16 bytes at best), and puts dimensions of extent 1
// first. Pieces must not overlap on the side that is written.
//
// Launch: blocks of 256 threads, one block per tile of 1024 units; `first_tile` counts the tiles before each piece. `Index` is
// i32 where every piece has less than 2^31 units; offsets are 64-bit in any case.
// Limits: five dimensions, 24 pieces a launch; further ones go in another.
//
// Called by `Device.pack`, `unpack`, `copy` and `Engine.concat` of lbpar/engine/cupy.
#include "common.cuh"

constexpr int DIMS = 5;
constexpr int THREADS = 256;
constexpr int EACH = 4;  // units of a thread

struct Piece {
    void* to;
    const void* from;
    i64 extent[DIMS], to_step[DIMS], from_step[DIMS];
};

// Passed by value: at most 24 pieces stay below the 4 KiB that parameters may take.
template <int COUNT>
struct Pieces {
    Piece piece[COUNT];
    i64 first_tile[COUNT + 1];
};

// Lists of rows, null for a dimension without; on the side read from, or on the side written.
struct Rows {
    const i64* of[DIMS];
    i64 written;
};

__device__ __forceinline__ i64 units_of(const Piece& p) {
    return p.extent[0] * p.extent[1] * p.extent[2] * p.extent[3] * p.extent[4];
}

struct Offsets {
    i64 to, from;
};

template <class Index>
__device__ __forceinline__ Offsets offsets(const Piece& p, Index unit) {
    Offsets o = {0, 0};
#pragma unroll
    for (int d = DIMS - 1; d >= 0; --d) {
        const Index n = static_cast<Index>(p.extent[d]);
        if (n == 1) continue;
        const Index rest = d ? unit / n : Index(0);
        const i64 i = unit - rest * n;
        o.to += i * p.to_step[d];
        o.from += i * p.from_step[d];
        unit = rest;
    }
    return o;
}

template <class Index>
__device__ __forceinline__ Offsets offsets(const Piece& p, const Rows& rows, Index unit) {
    Offsets o = {0, 0};
#pragma unroll
    for (int d = DIMS - 1; d >= 0; --d) {
        const Index n = static_cast<Index>(p.extent[d]);
        const Index rest = d ? unit / n : Index(0);
        const i64 i = unit - rest * n, row = rows.of[d] ? rows.of[d][i] : i;
        o.to += (rows.written ? row : i) * p.to_step[d];
        o.from += (rows.written ? i : row) * p.from_step[d];
        unit = rest;
    }
    return o;
}

// The piece and the first unit of this block's tile.
template <int COUNT>
__device__ __forceinline__ int piece_of_tile(const Pieces<COUNT>& all) {
    int k = 0;
    while (k + 1 < COUNT && all.first_tile[k + 1] <= static_cast<i64>(blockIdx.x)) ++k;
    return k;
}

template <class Unit, class Index, int COUNT>
__global__ void __launch_bounds__(THREADS) move_pieces(const __grid_constant__ Pieces<COUNT> all) {
    const int k = piece_of_tile(all);
    const Piece& p = all.piece[k];
    const i64 n = units_of(p), first = (blockIdx.x - all.first_tile[k]) * (THREADS * EACH) + threadIdx.x;
    Unit held[EACH];
    i64 to[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        if (first + j * THREADS >= n) break;
        const Offsets o = offsets(p, static_cast<Index>(first + j * THREADS));
        held[j] = static_cast<const Unit*>(p.from)[o.from];
        to[j] = o.to;
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (first + j * THREADS < n) static_cast<Unit*>(p.to)[to[j]] = held[j];
}

// N elements of type T are a unit.
template <class T, int N, class Index, int COUNT>
__global__ void __launch_bounds__(THREADS) add_pieces(const __grid_constant__ Pieces<COUNT> all) {
    typedef Vector<T, N> Unit;
    const int k = piece_of_tile(all);
    const Piece& p = all.piece[k];
    const i64 n = units_of(p), first = (blockIdx.x - all.first_tile[k]) * (THREADS * EACH) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        if (first + j * THREADS >= n) break;
        const Offsets o = offsets(p, static_cast<Index>(first + j * THREADS));
        const Unit more = static_cast<const Unit*>(p.from)[o.from];
        Unit sum = static_cast<Unit*>(p.to)[o.to];
#pragma unroll
        for (int i = 0; i < N; ++i) sum.v[i] = narrow<T>(wide(sum.v[i]) + wide(more.v[i]));
        static_cast<Unit*>(p.to)[o.to] = sum;
    }
}

template <class Unit, class Index>
__global__ void __launch_bounds__(THREADS) move_rows(const __grid_constant__ Piece p, const __grid_constant__ Rows rows) {
    const i64 n = units_of(p);
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const Offsets o = offsets(p, rows, static_cast<Index>(i));
        static_cast<Unit*>(p.to)[o.to] = static_cast<const Unit*>(p.from)[o.from];
    }
}

// Adds to an element that other threads may be adding to.
template <class T, class Bits>
__device__ __forceinline__ void add_among_others(T* to, T more) {
    Bits* bits = reinterpret_cast<Bits*>(to);
    Bits seen = *bits, expected;
    do {
        expected = seen;
        T value;
        memcpy(&value, &expected, sizeof(T));
        value = narrow<T>(wide(value) + wide(more));
        Bits wanted;
        memcpy(&wanted, &value, sizeof(T));
        seen = atomicCAS(bits, expected, wanted);
    } while (seen != expected);
}
template <class T>
struct BitsOf {
    typedef unsigned short type;
};
template <>
struct BitsOf<float> {
    typedef u32 type;
};
template <>
struct BitsOf<double> {
    typedef u64 type;
};

template <class T, class Index>
__global__ void __launch_bounds__(THREADS) add_rows(const __grid_constant__ Piece p, const __grid_constant__ Rows rows) {
    const i64 n = units_of(p);
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const Offsets o = offsets(p, rows, static_cast<Index>(i));
        add_among_others<T, typename BitsOf<T>::type>(static_cast<T*>(p.to) + o.to, static_cast<const T*>(p.from)[o.from]);
    }
}
