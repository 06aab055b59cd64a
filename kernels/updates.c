/* Optimizer steps on CPUs, each one pass over memory. All arrays are float32 of n elements.
 *
 * The operations and their order are those of the NumPy code in lbpar/engine/updates.py, each rounded to float32: results are
 * the same to the last bit. (The file must therefore be compiled without contraction of products and sums.)
 */
#include <math.h>
#include <stdint.h>

typedef int64_t idx;

#define INLINE static inline __attribute__((always_inline))

/* Flags are constants where this is inlined. */
INLINE void sgd(float *restrict p, const float *restrict g, float *restrict v, idx n, float momentum, float decay,
                float rate, int threads, const int moving, const int nesterov, const int decaying) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (idx i = 0; i < n; i++) {
        float d = g[i];
        if (decaying) d = p[i] * decay + d;
        if (moving) {
            const float u = v[i] * momentum + d;
            v[i] = u;
            d = nesterov ? u * momentum + d : u;
        }
        p[i] -= d * rate;
    }
}

/* d = g + decay * p; v = momentum * v + d; p -= rate * v, or rate * (d + momentum * v). No v: no momentum. */
int lbpar_sgd(float *p, const float *g, float *v, idx n, double momentum, int nesterov, double decay, double rate,
              int threads) {
    const float m = (float)momentum, d = (float)decay, r = (float)rate;
    const int kind = (v ? nesterov ? 4 : 2 : 0) + (decay != 0);
    switch (kind) {
    case 0: sgd(p, g, v, n, m, d, r, threads, 0, 0, 0); break;
    case 1: sgd(p, g, v, n, m, d, r, threads, 0, 0, 1); break;
    case 2: sgd(p, g, v, n, m, d, r, threads, 1, 0, 0); break;
    case 3: sgd(p, g, v, n, m, d, r, threads, 1, 0, 1); break;
    case 4: sgd(p, g, v, n, m, d, r, threads, 1, 1, 0); break;
    default: sgd(p, g, v, n, m, d, r, threads, 1, 1, 1);
    }
    return 0;
}

/* p *= keep; g += decay * p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= rate * m / (sqrt(v) + eps). */
int lbpar_adam(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, idx n, double keep,
               double decay, double b1, double b2, double eps, double rate, int threads) {
    const float k = (float)keep, w = (float)decay, e = (float)eps, r = (float)rate;
    const float a1 = (float)b1, c1 = (float)(1 - b1), a2 = (float)b2, c2 = (float)(1 - b2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (idx i = 0; i < n; i++) {
        const float q = p[i] * k, d = w != 0 ? q * w + g[i] : g[i];
        const float first = m[i] * a1 + d * c1, second = v[i] * a2 + d * d * c2;
        m[i] = first;
        v[i] = second;
        p[i] = q - first / (sqrtf(second) + e) * r;
    }
    return 0;
}
