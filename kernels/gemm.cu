// Matrix product, tiled: c = relu(alpha * a·b' + bias + beta * c), for linear layers and pointwise convolutions.
//
//   c[i][m][n] = sum over k of A(i, m, k) * B(i, n, k)      A(m, k) = a[m*pitch_a + k] if A_K, else a[k*pitch_a + m]; B alike
//
//   y = x·w' + b     A_K,  B_K     m N, n F, k C        dx = dy·w     A_K, !B_K     m N, n C, k F
//   dw = dy'·x      !A_K, !B_K     m F, n C, k N
//
// Layout: c (batch, m, n) without gaps, bias (n,) or null. Small results are split over k: block z sums its part into
// partial[z], of c's shape, and `sum_splits` adds the parts up in the order of z, so that results do not depend on timing.
// Limits: at most 65 535 matrices of a batch and 65 535 splits; VEC_A, VEC_B divide rows, pitches and addresses.
// Grid: (tiles of m * tiles of n, batch, splits) of Shape::THREADS threads; dynamic shared memory as launch_gemm.py says.
// Called by: the cupy engine, through lbpar/engine/cupy/launch_gemm.py.
// Limited by the rate of tensor cores (or of fused multiply-adds) where m, n and k are hundreds, else by memory: see tile.cuh.

#include "tile.cuh"

struct GemmSizes {
    i64 m, n, k, pitch_a, pitch_b, batch_a, batch_b, depth, relu, vectors;  // batch_*: elements between matrices; depth: k of a split
    double alpha, beta;
};

template <class T, class S, class Index>
struct MatrixOutput : Output<T, S, Index> {
    Index rows;
    __device__ __forceinline__ Index row(Index m) const { return m * this->columns; }
};

template <class Math, class Index, bool A_K, bool B_K, int BM, int BN, int WM, int STAGES, int VEC_A, int VEC_B>
__global__ void __launch_bounds__(BM / WM * BN, (blocks_of<Math, BM, BN, WM, VEC_A, VEC_B, !A_K && !B_K>())) gemm(
    typename Arithmetic<Math>::Element* c, typename Arithmetic<Math>::Sum* partial, const typename Arithmetic<Math>::Element* a,
    const typename Arithmetic<Math>::Element* b, const typename Arithmetic<Math>::Element* bias, const __grid_constant__ GemmSizes z) {
    using Kind = Shape<Math, Index, BM, BN, WM, STAGES, VEC_A, VEC_B>;
    using T = typename Kind::T;
    using S = typename Kind::S;
    const i64 batch = blockIdx.y, split = blockIdx.z, tiles = (z.n + BN - 1) / BN;
    const Index m = static_cast<Index>(blockIdx.x / tiles) * BM, n = static_cast<Index>(blockIdx.x % tiles) * BN;
    const Matrix<T, Index, A_K> left{a + batch * z.batch_a, static_cast<Index>(z.pitch_a), static_cast<Index>(z.m)};
    const Matrix<T, Index, B_K> right{b + batch * z.batch_b, static_cast<Index>(z.pitch_b), static_cast<Index>(z.n)};
    const i64 k = split * z.depth, end = min(k + z.depth, z.k), size = z.m * z.n;
    extern __shared__ __align__(128) char memory[];
    T* shared = reinterpret_cast<T*>(memory);
    Tile<Kind, decltype(left), decltype(right)> tile;
    tile.multiply(left, right, m, n, static_cast<Index>(k), static_cast<Index>(end), shared);
    const MatrixOutput<T, S, Index> out{{c + batch * size, partial ? partial + (split * gridDim.y + batch) * size : nullptr, bias,
                                         static_cast<S>(z.alpha), static_cast<S>(z.beta), static_cast<Index>(z.n), z.relu != 0,
                                         z.vectors != 0},
                                        static_cast<Index>(z.m)};
    tile.store(out, m, n, shared);
}

struct SplitSizes {
    i64 count, columns, splits, relu;
    double alpha, beta;
};

// c[i] = relu(alpha * (sum over splits of partial[split][i]) + bias[i % columns] + beta * c[i]); a thread an element.
template <class T>
__global__ void sum_splits(T* c, const Acc<T>* partial, const T* bias, const __grid_constant__ SplitSizes z) {
    for (i64 i = grid_thread(); i < z.count; i += grid_threads()) {
        Acc<T> sum = 0;
        for (i64 split = 0; split < z.splits; ++split) sum += partial[split * z.count + i];
        sum *= static_cast<Acc<T>>(z.alpha);
        if (bias) sum += wide(bias[i % z.columns]);
        if (z.beta != 0) sum += static_cast<Acc<T>>(z.beta) * wide(c[i]);
        c[i] = narrow<T>(z.relu && sum < 0 ? Acc<T>(0) : sum);
    }
}
