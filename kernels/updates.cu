// Steps of optimizers and norms of gradients, for all parameters in one launch (`Rules` in lbpar/engine/rules.py).
//
//     squares     sums of squares, in double        clip     g *= min(1, max_norm / (sqrt(sum of squares) + 1e-6))
//     sgd         d = g + decay*p; v = momentum*v + d; p -= rate * (nesterov ? d + momentum*v : v); without v: p -= rate * d
//     adam        p *= keep; d = g + decay*p; m, v move towards d, d*d; p -= rate * m / (sqrt(v) + eps)
//     lars        v = momentum*v + rate*t*(g + decay*p); p -= v, with t = trust*|p| / (|g| + decay*|p| + eps)
//     lamb_moments, lamb    m, v move towards g, g*g; u = scale*m / (sqrt(v) + eps) + decay*p; p -= rate * t * u, with t = |p| / |u|
//     unscale     p = g * inverse, and bad = 1 where a result is not finite (p may be g)
//
// P is the type of parameters and of an optimizer's state (float, double), G that of gradients. Each product and sum is rounded
// as on the CPU: results have the same bits. Where `copy` is set, the new parameters also go there, in type G: what layers compute
// with. Where `bad` is given (not null) and not 0, a step changes nothing: loss scaling has found an overflow.
//
// A table on the device lists the arrays, one-dimensional and contiguous; `first_chunk` counts chunks of 8192 elements, one more row
// at the end holds their total. Launch: 256 threads, one block per chunk; sum_blocks: one block per array.
// Limits: 2^31 - 1 chunks, that is 2^44 elements of all arrays; a table has to be copied to the device for each step.
//
// Called by the update rules of lbpar/engine/cupy.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr i64 CHUNK = 8192;

struct Block {
    void *p, *m, *v, *copy;
    const void* g;
    i64 size, first_chunk, adapted;
    double keep, decay, rate;
};

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(THREADS, 2)

// The array that this CUDA block works on: the last whose first chunk is not behind it.
__device__ __forceinline__ i64 block_of_chunk(const Block* table, i64 count) {
    i64 low = 0, high = count;  // table[low].first_chunk <= chunk < table[high].first_chunk
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (table[middle].first_chunk <= static_cast<i64>(blockIdx.x))
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Calls f(p, g, m, v) for each element of this block's chunk; references to p, m and v are stored, if WRITES p as well.
template <class P, class G, bool WRITES, class F>
__device__ __forceinline__ void for_chunk(const Block& b, F f) {
    P *p = static_cast<P*>(b.p), *m = static_cast<P*>(b.m), *v = static_cast<P*>(b.v);
    G* copy = static_cast<G*>(b.copy);
    const G* g = static_cast<const G*>(b.g);
    const i64 first = (blockIdx.x - b.first_chunk) * CHUNK, last = first + CHUNK < b.size ? first + CHUNK : b.size;
    auto run = [&](auto width, i64 from, i64 to) {
        constexpr int N = decltype(width)::value;
        for (i64 i = from + static_cast<i64>(threadIdx.x) * N; i < to; i += THREADS * N) {
            Vector<P, N> a = load_vector<N>(p + i), c = a, d = a;
            Vector<G, N> e;
            if (g) e = load_vector<N>(g + i);
            if (m) c = load_vector<N>(m + i);
            if (v) d = load_vector<N>(v + i);
#pragma unroll
            for (int j = 0; j < N; ++j) f(a.v[j], g ? static_cast<P>(wide(e.v[j])) : P(0), c.v[j], d.v[j]);
            if (WRITES) store_vector(p + i, a);
            if (m) store_vector(m + i, c);
            if (v) store_vector(v + i, d);
            if (copy) {
#pragma unroll
                for (int j = 0; j < N; ++j) e.v[j] = narrow<G>(a.v[j]);
                store_vector(copy + i, e);
            }
        }
    };
    i64 wide_to = first;
    if (aligned(p, g, m, v, copy)) wide_to = last - (last - first) % LANES<P>;
    run(Width<LANES<P>>(), first, wide_to);
    run(Width<1>(), wide_to, last);
}

__device__ __forceinline__ bool skipped(const double* bad) { return bad && *bad; }

template <class P>
__device__ __forceinline__ P multiply_add(P a, P b, P c) {
    return rounded_sum(rounded_product(a, b), c);
}

// -- norms -----------------------------------------------------------------------------------------------------------------------

// partial: double, one per chunk. Of the arrays `g`.
KERNEL(class G) squares(double* partial, const Block* table, i64 count) {
    const Block& b = table[block_of_chunk(table, count)];
    const G* g = static_cast<const G*>(b.g);
    const i64 first = (blockIdx.x - b.first_chunk) * CHUNK, last = first + CHUNK < b.size ? first + CHUNK : b.size;
    double sum = 0;
    for (i64 i = first + threadIdx.x; i < last; i += THREADS) {
        const double x = wide(g[i]);
        sum += x * x;
    }
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// out[i * k + j] = sum of partial[c * k + j] over the chunks of array i.
__global__ void __launch_bounds__(THREADS, 2) sum_blocks(double* out, const double* partial, const Block* table, i64 k) {
    const i64 first = table[blockIdx.x].first_chunk, last = table[blockIdx.x + 1].first_chunk;
    for (i64 j = 0; j < k; ++j) {
        double sum = 0;
        for (i64 c = first + threadIdx.x; c < last; c += THREADS) sum += partial[c * k + j];
        sum = block_sum<THREADS>(sum);
        if (threadIdx.x == 0) out[blockIdx.x * k + j] = sum;
    }
}

// Scales the arrays `p`; squares: double (n).
KERNEL(class P) clip(const Block* table, i64 count, const double* squares, i64 n, double max_norm) {
    double sum = 0;
    for (i64 i = threadIdx.x; i < n; i += THREADS) sum += squares[i];
    const double factor = max_norm / (sqrt(block_sum<THREADS>(sum)) + 1e-6);
    if (factor >= 1) return;  // scaled also where it is not a number
    const Acc<P> by = static_cast<Acc<P>>(factor);
    const Block& b = table[block_of_chunk(table, count)];
    const i64 first = (blockIdx.x - b.first_chunk) * CHUNK;
    P* p = static_cast<P*>(b.p) + first;
    const i64 size = b.size - first < CHUNK ? b.size - first : CHUNK;
    for (i64 i = threadIdx.x; i < size; i += THREADS) p[i] = narrow<P>(wide(p[i]) * by);
}

KERNEL(class P, class G) unscale(double* bad, const Block* table, i64 count, double inverse) {
    const Block& b = table[block_of_chunk(table, count)];
    const Acc<P> by = static_cast<Acc<P>>(inverse);
    const i64 first = (blockIdx.x - b.first_chunk) * CHUNK, last = first + CHUNK < b.size ? first + CHUNK : b.size;
    bool finite = true;
    for (i64 i = first + threadIdx.x; i < last; i += THREADS) {
        const P value = narrow<P>(static_cast<Acc<P>>(wide(static_cast<const G*>(b.g)[i])) * by);
        static_cast<P*>(b.p)[i] = value;
        finite = finite && wide(value) - wide(value) == 0;
    }
    if (!finite) *bad = 1;  // whoever writes writes the same
}

// -- steps -----------------------------------------------------------------------------------------------------------------------

KERNEL(class P, class G) sgd(const Block* table, i64 count, const double* bad, double momentum, i64 nesterov) {
    if (skipped(bad)) return;
    const Block& b = table[block_of_chunk(table, count)];
    const P move = static_cast<P>(momentum), decay = static_cast<P>(b.decay), rate = static_cast<P>(b.rate);
    const bool moving = b.v != nullptr;
    for_chunk<P, G, true>(b, [=](P& p, P g, P&, P& v) {
        P d = decay != 0 ? multiply_add(p, decay, g) : g;
        if (moving) {
            v = multiply_add(v, move, d);
            d = nesterov ? multiply_add(v, move, d) : v;
        }
        p = rounded_sum(p, -rounded_product(d, rate));
    });
}

template <class P>
struct Moments {  // running means of g and of its square
    P keep, take, keep_square, take_square;
    __device__ __forceinline__ Moments(double b1, double b2)
        : keep(static_cast<P>(b1)), take(static_cast<P>(1 - b1)), keep_square(static_cast<P>(b2)), take_square(static_cast<P>(1 - b2)) {}
    __device__ __forceinline__ void move(P& m, P& v, P g) const {
        m = multiply_add(m, keep, rounded_product(g, take));
        v = multiply_add(v, keep_square, rounded_product(rounded_product(g, g), take_square));
    }
};

KERNEL(class P, class G) adam(const Block* table, i64 count, const double* bad, double b1, double b2, double eps) {
    if (skipped(bad)) return;
    const Block& b = table[block_of_chunk(table, count)];
    const P keep = static_cast<P>(b.keep), decay = static_cast<P>(b.decay), rate = static_cast<P>(b.rate), e = static_cast<P>(eps);
    const Moments<P> moments(b1, b2);
    for_chunk<P, G, true>(b, [=](P& p, P g, P& m, P& v) {
        const P kept = rounded_product(p, keep);
        moments.move(m, v, decay != 0 ? multiply_add(kept, decay, g) : g);
        p = rounded_sum(kept, -rounded_product(m / rounded_sum(sqrt(v), e), rate));
    });
}

// squares: double (n, 2), of p and g.
KERNEL(class P, class G)
lars(const Block* table, i64 count, const double* bad, const double* squares, double momentum, double trust, double eps) {
    if (skipped(bad)) return;
    const i64 which = block_of_chunk(table, count);
    const Block& b = table[which];
    const double weight = sqrt(squares[2 * which]);
    const double below = rounded_sum(rounded_sum(sqrt(squares[2 * which + 1]), rounded_product(b.decay, weight)), eps);
    double step = b.rate;
    if (b.adapted && weight > 0 && below > 0) step *= trust * weight / below;
    const P move = static_cast<P>(momentum), decay = static_cast<P>(b.decay), rate = static_cast<P>(step);
    for_chunk<P, G, true>(b, [=](P& p, P g, P&, P& v) {
        v = multiply_add(v, move, rounded_product(decay != 0 ? multiply_add(p, decay, g) : g, rate));
        p = rounded_sum(p, -v);
    });
}

template <class P>
__device__ __forceinline__ P direction(P p, P m, P v, P eps, P scale, P decay) {
    const P u = rounded_product(m / rounded_sum(sqrt(v), eps), scale);
    return decay != 0 ? multiply_add(p, decay, u) : u;
}

// partial: double (chunks, 2), squares of p and of the direction.
KERNEL(class P, class G)
lamb_moments(double* partial, const Block* table, i64 count, const double* bad, double b1, double b2, double eps, double scale) {
    if (skipped(bad)) return;
    const Block& b = table[block_of_chunk(table, count)];
    const P e = static_cast<P>(eps), s = static_cast<P>(scale), decay = static_cast<P>(b.decay);
    const Moments<P> moments(b1, b2);
    double weights = 0, updates = 0;
    for_chunk<P, G, false>(b, [&](P& p, P g, P& m, P& v) {
        moments.move(m, v, g);
        const double u = direction(p, m, v, e, s, decay);
        weights += static_cast<double>(p) * p;
        updates += u * u;
    });
    weights = block_sum<THREADS>(weights);
    updates = block_sum<THREADS>(updates);
    if (threadIdx.x == 0) {
        partial[blockIdx.x * i64(2)] = weights;
        partial[blockIdx.x * i64(2) + 1] = updates;
    }
}

// squares: double (n, 2), of p and the direction. m and v stay.
KERNEL(class P, class G) lamb(const Block* table, i64 count, const double* bad, const double* squares, double eps, double scale) {
    if (skipped(bad)) return;
    const i64 which = block_of_chunk(table, count);
    const Block& b = table[which];
    const double weight = sqrt(squares[2 * which]), update = sqrt(squares[2 * which + 1]);
    double step = b.rate;
    if (b.adapted && weight > 0 && update > 0) step *= weight / update;
    const P e = static_cast<P>(eps), s = static_cast<P>(scale), decay = static_cast<P>(b.decay), rate = static_cast<P>(step);
    for_chunk<P, G, true>(b, [=](P& p, P, P& m, P& v) { p = rounded_sum(p, -rounded_product(direction(p, m, v, e, s, decay), rate)); });
}
