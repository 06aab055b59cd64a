// What one block of threads multiplies: a BM x BN tile of sums over k, of two operands that are gathered from global memory.
//
//   sums[m][n] = sum over k0 <= k < k1 of A(m, k) * B(n, k)
//
// An operand says where its elements lie, with this interface; GEMM and the three passes of a convolution differ in nothing else:
//
//   ALONG_K           neighbours in memory follow each other in k; else in m (n)
//   fixed(mn)         what is known of a row once and for all
//   moving(k)         what is known of a k, for all rows
//   pointer(f, v)     the element, nullptr where it counts as zero; VEC neighbours of it are valid too, and aligned
//   extent, base      number of rows; any valid address
//
// Copies to shared memory are of VEC elements (up to 16 bytes), asynchronous from sm_80 on with STAGES tiles in flight, else through
// registers, one tile ahead. A tile is 64 bytes deep in k. Rows in shared memory are padded so that neither ldmatrix nor the vector
// loads of the other fragments meet a bank twice.
// Called by: gemm.cu, convolution.cu, rims.cu.
//
// Intensity: a tile of BM x BN does 2*BM*BN/((BM + BN)*sizeof(T)) operations per byte from L2: 64 for 128x128 of 16-bit elements, so
// that the limit should be the rate of mma.sync, which on sm_90 and sm_100 is below that of wgmma and tcgen05 (not used here).
#pragma once

#include "mma.cuh"

// Like copy_async, but where `from` is nullptr zeros are written; `any` is some valid address.
template <int BYTES>
__device__ __forceinline__ void copy_async_or_zero(void* shared, const void* from, const void* any) {
#if defined(CUDA_ON_CPU)
    static const char zeros[16] = {};
    emulated::copy_async(shared, from ? from : zeros, BYTES);
#elif __CUDA_ARCH__ >= 800
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared)), bytes = from ? BYTES : 0;
    if (!from) from = any;
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
#endif
}

template <class Math_, class Index_, int BM_, int BN_, int WM_, int STAGES_, int VEC_A_, int VEC_B_>
struct Shape {
    using Math = Math_;
    using Index = Index_;
    using T = typename Arithmetic<Math>::Element;
    using S = typename Arithmetic<Math>::Sum;
    static constexpr int BM = BM_, BN = BN_, BK = 64 / sizeof(T), WM = WM_, WN = 32, STAGES = STAGES_, VEC_A = VEC_A_, VEC_B = VEC_B_;
    static constexpr int THREADS = BM / WM * (BN / WN) * 32;
    static constexpr int V = 16 / sizeof(T);
};

// Blocks that a multiprocessor should hold at once, which bounds registers: where nothing but whole vectors is copied they suffice.
// MANY: of a kernel that needs more than its sums do, where those fill registers as it is.
template <class Math, int BM, int BN, int WM, int VEC_A, int VEC_B, bool MANY = false>
__host__ __device__ constexpr int blocks_of() {
    using T = typename Arithmetic<Math>::Element;
    if (MMA_ARCH < 800 || VEC_A * sizeof(T) < 16 || VEC_B * sizeof(T) < 16) return 1;
    if (BM / WM * BN == 256) return MANY && Arithmetic<Math>::FUSED ? 1 : 2;
    return BM * BN > 64 * 64 || sizeof(T) == 8 ? 2 : 4;
}

// Elements of shared memory from one row of an operand's tile to the next.
template <class T, bool ALONG_K, int ROWS>
__host__ __device__ constexpr int pitch_of() {
    return ALONG_K ? 64 / sizeof(T) + (sizeof(T) == 8 ? 4 : 16 / sizeof(T)) : ROWS + (sizeof(T) == 8 ? 4 : 8);
}

// What one thread copies of an operand's tile: chunks of 16 bytes, one below the other.
template <class Operand, class Shape, int TILE, int VEC>
struct Loader {
    using T = typename Shape::T;
    using Index = typename Shape::Index;
    static constexpr bool ALONG_K = Operand::ALONG_K, ASYNC = MMA_ARCH >= 800 && VEC * sizeof(T) >= 4;
    static constexpr int V = Shape::V, PIECES = V / VEC, PITCH = pitch_of<T, ALONG_K, TILE>();
    static constexpr int ROWS = ALONG_K ? TILE : Shape::BK, CHUNKS = (ALONG_K ? Shape::BK : TILE) / V;
    static constexpr int STEP = Shape::THREADS / CHUNKS, PASSES = ROWS / STEP;
    static constexpr int FIXED = ALONG_K ? PASSES : PIECES, MOVING = ALONG_K ? PIECES : PASSES;
    static constexpr int SIZE = ROWS * PITCH;
    static_assert(Shape::THREADS % CHUNKS == 0 && ROWS % STEP == 0, "every thread copies the same number of chunks");

    typename Operand::Fixed fixed[FIXED];
    Vector<T, V> held[ASYNC ? 1 : PASSES];
    int row, column;

    __device__ __forceinline__ void start(const Operand& from, Index first) {
        row = static_cast<int>(threadIdx.x) / CHUNKS;
        column = static_cast<int>(threadIdx.x) % CHUNKS * V;
#pragma unroll
        for (int f = 0; f < FIXED; ++f) {
            const Index mn = first + (ALONG_K ? row + f * STEP : column + f * VEC);
            const Index last = from.extent - (ALONG_K ? 1 : VEC);  // rows beyond it are computed too, and not stored
            fixed[f] = from.fixed(mn < last ? mn : last);
        }
    }

    // Starts to copy the tile that begins at k.
    __device__ __forceinline__ void load(const Operand& from, T* tile, Index k, Index end) {
#pragma unroll
        for (int v = 0; v < MOVING; ++v) {
            const Index at = k + (ALONG_K ? column + v * VEC : row + v * STEP);
            const auto moving = from.moving(at < end ? at : k);
#pragma unroll
            for (int f = 0; f < FIXED; ++f) {
                const T* p = at < end ? from.pointer(fixed[f], moving) : nullptr;
                const int pass = ALONG_K ? f : v, piece = ALONG_K ? v : f;
                if constexpr (ASYNC) copy_async_or_zero<VEC * sizeof(T)>(tile + place(pass, piece), p, from.base);
                else take(held[pass].v + piece * VEC, p);
            }
        }
    }

    // Ends what `load` has not left to the hardware.
    __device__ __forceinline__ void land(T* tile) {
        if constexpr (!ASYNC)
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) store_vector(tile + place(pass, 0), held[pass]);
    }

  private:
    __device__ __forceinline__ int place(int pass, int piece) const { return (row + pass * STEP) * PITCH + column + piece * VEC; }
    static __device__ __forceinline__ void take(T* to, const T* p) {
        Vector<T, VEC> v = {};
        if (p) v = load_vector<VEC>(p);
#pragma unroll
        for (int i = 0; i < VEC; ++i) to[i] = v.v[i];
    }
};

template <class Shape, class OperandA, class OperandB>
struct Tile {
    using T = typename Shape::T;
    using S = typename Shape::S;
    using Index = typename Shape::Index;
    using F = Fragments<typename Shape::Math, OperandA::ALONG_K, OperandB::ALONG_K>;
    using A = Loader<OperandA, Shape, Shape::BM, Shape::VEC_A>;
    using B = Loader<OperandB, Shape, Shape::BN, Shape::VEC_B>;
    static constexpr int WM = Shape::WM, WN = Shape::WN, STAGE = A::SIZE + B::SIZE, STAGES = Shape::STAGES;
    static constexpr int ROW = WN + 8;  // of the sums that a warp stages for its stores: lanes write 8 bytes without conflicts

    S sums[WM / F::M][WN / F::N][F::SUMS];

    __device__ __forceinline__ void multiply(const OperandA& a, const OperandB& b, Index m, Index n, Index k, Index end, T* shared) {
#pragma unroll
        for (auto& row : sums)
            for (auto& fragment : row)
                for (auto& sum : fragment) sum = 0;
        const int tiles = k < end ? static_cast<int>((end - k + (Shape::BK - 1)) / Shape::BK) : 0;
        A from_a;
        B from_b;
        from_a.start(a, m);
        from_b.start(b, n);
        const auto load = [&](int tile) {
            T* stage = shared + tile % STAGES * STAGE;
            from_a.load(a, stage, k + tile * Shape::BK, end);
            from_b.load(b, stage + A::SIZE, k + tile * Shape::BK, end);
        };
        const auto land = [&](int tile) {
            T* stage = shared + tile % STAGES * STAGE;
            from_a.land(stage);
            from_b.land(stage + A::SIZE);
        };
        for (int tile = 0; tile < STAGES - 1; ++tile) {
            if (tile < tiles) load(tile), land(tile);
            copy_commit();
        }
        for (int tile = 0; tile < tiles; ++tile) {
            copy_wait<STAGES - 2>();
            __syncthreads();  // this tile has come, and all have done with the one that the next load overwrites
            const int next = tile + STAGES - 1;
            if (next < tiles) load(next);
            copy_commit();
            add_products(shared + tile % STAGES * STAGE);
            if (next < tiles) land(next);
        }
    }

    // Hands the sums to `out.store`, V neighbours along n at a time, by way of shared memory so that a warp writes whole lines.
    template <class Output>
    __device__ __forceinline__ void store(const Output& out, Index m, Index n, T* shared) {
        constexpr int V = Shape::V, LANES = WN / V, ROWS = 32 / LANES;
        const int lane = lane_of_warp(), column = lane % LANES * V;
        S* stage = reinterpret_cast<S*>(shared) + warp() * F::M * ROW;
        const Index own = n + warp_column() * WN + column;
        S bias[V];
        out.biases(own, bias);
        __syncthreads();  // the tiles are not needed any more
#pragma unroll
        for (int i = 0; i < WM / F::M; ++i) {
#pragma unroll
            for (int j = 0; j < WN / F::N; ++j)
#pragma unroll
                for (int s = 0; s < F::SUMS; ++s) stage[F::row(lane, s) * ROW + j * F::N + F::column(lane, s)] = sums[i][j][s];
            __syncwarp();
#pragma unroll 1
            for (int r = lane / LANES; r < F::M; r += ROWS) {
                const Index at = m + warp_row() * WM + i * F::M + r;
                if (at < out.rows) out.store(out.row(at), own, stage + r * ROW + column, bias);
            }
            __syncwarp();
        }
    }

  private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
    static __device__ __forceinline__ int warp_row() { return warp() / (Shape::BN / WN); }
    static __device__ __forceinline__ int warp_column() { return warp() % (Shape::BN / WN); }

    __device__ __forceinline__ void add_products(const T* stage) {
        const int lane = lane_of_warp();
        const T* a = stage + warp_row() * WM * (A::ALONG_K ? A::PITCH : 1);
        const T* b = stage + A::SIZE + warp_column() * WN * (B::ALONG_K ? B::PITCH : 1);
#pragma unroll F::UNROLL
        for (int k = 0; k < Shape::BK; k += F::K) {
            typename F::B right[WN / F::N];
#pragma unroll
            for (int j = 0; j < WN / F::N; ++j)
                F::load_b(right[j], b + (B::ALONG_K ? j * F::N * B::PITCH + k : k * B::PITCH + j * F::N), B::PITCH, lane);
#pragma unroll
            for (int i = 0; i < WM / F::M; ++i) {
                typename F::A left;
                F::load_a(left, a + (A::ALONG_K ? i * F::M * A::PITCH + k : k * A::PITCH + i * F::M), A::PITCH, lane);
#pragma unroll
                for (int j = 0; j < WN / F::N; ++j) F::multiply(sums[i][j], left, right[j]);
            }
        }
    }
};

// A matrix with rows `pitch` elements apart, one of m (n) and k along them.
template <class T, class Index, bool ALONG_K_>
struct Matrix {
    static constexpr bool ALONG_K = ALONG_K_;
    using Fixed = Index;
    const T* base;
    Index pitch, extent;
    __device__ __forceinline__ Index fixed(Index mn) const { return ALONG_K ? mn * pitch : mn; }
    __device__ __forceinline__ Index moving(Index k) const { return ALONG_K ? k : k * pitch; }
    __device__ __forceinline__ const T* pointer(Index fixed, Index moving) const { return base + fixed + moving; }
};

// What becomes of a sum: alpha*sum + bias[n] + beta*(what was there), relu of it. Sums of a part of k go to `partial` as they are,
// for sum_splits in gemm.cu.
template <class T, class S, class Index>
struct Output {
    T* to;
    S* partial;  // this split's part, or nullptr
    const T* bias;
    S alpha, beta;
    Index columns;
    bool relu, vectors;  // whether V neighbours may be written at once

    template <int V>
    __device__ __forceinline__ void biases(Index n, S (&own)[V]) const {
#pragma unroll
        for (int i = 0; i < V; ++i) own[i] = bias && n + i < columns ? wide(bias[n + i]) : S(0);
    }
    // `sums` are aligned to 16 bytes.
    template <int V>
    __device__ __forceinline__ void store(Index row, Index n, const S* sums, const S (&bias)[V]) const {
        constexpr int N = 16 / sizeof(S);
        if (!vectors || n + V > columns) {
#pragma unroll 1
            for (Index i = n; i < n + V && i < columns; ++i, ++sums)
                if (partial) partial[row + i] = *sums;
                else to[row + i] = value(*sums, this->bias ? S(wide(this->bias[i])) : S(0), beta != 0 ? to[row + i] : T());
            return;
        }
        Vector<S, N> part[V / N];
#pragma unroll
        for (int i = 0; i < V / N; ++i) part[i] = load_vector<N>(sums + i * N);
        if (partial) {
#pragma unroll
            for (int i = 0; i < V / N; ++i) store_vector(partial + row + n + i * N, part[i]);
        } else {
            Vector<T, V> v = {};
            if (beta != 0) v = load_vector<V>(to + row + n);
#pragma unroll
            for (int i = 0; i < V; ++i) v.v[i] = value(part[i / N].v[i % N], bias[i], v.v[i]);
            store_vector(to + row + n, v);
        }
    }
    __device__ __forceinline__ T value(S sum, S bias, T old) const {
        const S v = alpha * sum + bias + beta * wide(old);
        return narrow<T>(relu && v < 0 ? S(0) : v);
    }
};
