/* Softmax over classes that may be split over ranks, and the losses, on CPUs; what each pass means: lbpar/engine/base.py.
 *
 * Logits are C-contiguous float32 (n positions, c classes); everything is computed and summed in double, so results agree
 * with a float64 reference to about 1e-14 before they are rounded. A pass reads its arrays once, in tiles of a few
 * positions whose exponentials stay in the first-level cache. Exponentials are taken over whole tiles, across positions,
 * so that two or three classes vectorise as well as a thousand.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t idx;

enum { TILE = 512, FEW = 4 };

#define INLINE static inline __attribute__((always_inline))

#ifdef FP_FAST_FMA
#define FMA(a, b, c) __builtin_fma(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

INLINE idx smaller(idx a, idx b) { return a < b ? a : b; }

/* First of n things that belongs to thread t. */
INLINE idx share(idx n, int t, int threads) { return n * t / threads; }

/* Positions in a tile. */
static idx depth(idx c) { return c < TILE ? TILE / c : 1; }

/* exp(v) to 1e-14; below -708 it is 0. Branches would keep loops from being vectorised. */
INLINE double exponential(double v) {
    const double shift = 0x1.8p52; /* adding it rounds to a whole number, which the low bits then hold */
    const double t = FMA(v, 1.44269504088896338700e+00, shift), k = t - shift;
    double r = FMA(-k, 6.93147180369123816490e-01, v);
    r = FMA(-k, 1.90821492927058770002e-10, r);
    double p = 1.0 / 39916800;
    p = FMA(p, r, 1.0 / 3628800);
    p = FMA(p, r, 1.0 / 362880);
    p = FMA(p, r, 1.0 / 40320);
    p = FMA(p, r, 1.0 / 5040);
    p = FMA(p, r, 1.0 / 720);
    p = FMA(p, r, 1.0 / 120);
    p = FMA(p, r, 1.0 / 24);
    p = FMA(p, r, 1.0 / 6);
    p = FMA(p, r, 0.5);
    p = FMA(p, r, 1.0);
    p = FMA(p, r, 1.0);
    uint64_t bits;
    memcpy(&bits, &t, sizeof bits);
    bits = (bits + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    p *= scale;
    p = v < -708 ? 0 : p;
    return v > 709 ? INFINITY : p; /* NaN has come through */
}

/* log(1 + e) for e in [0, 1]: 2 artanh(e / (2 + e)), accurate however small e is. */
INLINE double log_one_plus(double e) {
    const double s = e / (2 + e), z = s * s;
    double p = 1.0 / 29;
    p = FMA(p, z, 1.0 / 27);
    p = FMA(p, z, 1.0 / 25);
    p = FMA(p, z, 1.0 / 23);
    p = FMA(p, z, 1.0 / 21);
    p = FMA(p, z, 1.0 / 19);
    p = FMA(p, z, 1.0 / 17);
    p = FMA(p, z, 1.0 / 15);
    p = FMA(p, z, 1.0 / 13);
    p = FMA(p, z, 1.0 / 11);
    p = FMA(p, z, 1.0 / 9);
    p = FMA(p, z, 1.0 / 7);
    p = FMA(p, z, 1.0 / 5);
    p = FMA(p, z, 1.0 / 3);
    p = FMA(p, z, 1.0);
    return 2 * s * p;
}

INLINE double sum(const double *v, idx c) {
    double s = 0;
    if (c <= FEW) {
        for (idx j = 0; j < c; j++) s += v[j];
    } else {
#pragma omp simd reduction(+ : s)
        for (idx j = 0; j < c; j++) s += v[j];
    }
    return s;
}

INLINE double dot(const double *v, const double *w, idx c) {
    double s = 0;
    if (c <= FEW) {
        for (idx j = 0; j < c; j++) s += v[j] * w[j];
    } else {
#pragma omp simd reduction(+ : s)
        for (idx j = 0; j < c; j++) s += v[j] * w[j];
    }
    return s;
}

/* e = x - m over some positions. */
INLINE void differences(const float *x, const float *m, idx rows, idx c, double *restrict e) {
    for (idx i = 0; i < rows; i++)
        for (idx j = 0; j < c; j++) e[i * c + j] = (double)x[i * c + j] - m[i];
}

/* Not inlined: the compiler would spend its time on a copy per class count and pass. */
static __attribute__((noinline)) void exponentials(double *e, idx size) {
    for (idx k = 0; k < size; k++) e[k] = exponential(e[k]);
}

/* e = exp(x - m) / s: the softmax. */
INLINE void softmax(const float *x, const float *m, const double *s, idx rows, idx c, double *restrict e) {
    differences(x, m, rows, c, e);
    exponentials(e, rows * c);
    for (idx i = 0; i < rows; i++) {
        const double f = 1 / s[i];
        for (idx j = 0; j < c; j++) e[i * c + j] *= f;
    }
}

INLINE void maxima(const float *x, idx n, idx c, float *restrict m) {
    for (idx i = 0; i < n; i++) {
        const float *a = x + i * c;
        float best = -INFINITY;
        if (c <= FEW) {
            for (idx j = 0; j < c; j++) best = a[j] > best || a[j] != a[j] ? a[j] : best;
        } else if (c < 32) { /* too short for vectors */
            int bad = 0;
            for (idx j = 0; j < c; j++) {
                best = a[j] > best ? a[j] : best;
                bad |= a[j] != a[j];
            }
            best = bad ? NAN : best;
        } else {
            int bad = 0;
#pragma omp simd reduction(max : best) reduction(| : bad)
            for (idx j = 0; j < c; j++) {
                best = a[j] > best ? a[j] : best;
                bad |= a[j] != a[j];
            }
            best = bad ? NAN : best;
        }
        m[i] = best;
    }
}

/* Runs a block for every tile: `rows` positions from `r` on, of C classes, with room `e` for as many doubles. Threads share the
 * positions; each also has room `own` for `more` doubles, zero at first, which lies in `work` at `w * t` until the caller frees
 * that. Where there are few classes, C is a constant: their loops then vanish. */
#define IN_TILES(more, ...)                                                                               \
    const idx w = (more) + depth(c) * c;                                                                  \
    double *work = calloc((size_t)(w * threads), sizeof(double));                                         \
    if (!work) return 1;                                                                                  \
    _Pragma("omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)")                 \
    for (int t = 0; t < threads; t++) {                                                                   \
        const idx begin = share(n, t, threads), last = share(n, t + 1, threads);                          \
        double *own = work + w * t, *e = own + (more);                                                    \
        (void)e;                                                                                          \
        switch (c) {                                                                                      \
        case 2: { EACH_TILE(2, __VA_ARGS__) } break;                                                      \
        case 3: { EACH_TILE(3, __VA_ARGS__) } break;                                                      \
        case 4: { EACH_TILE(4, __VA_ARGS__) } break;                                                      \
        default: { EACH_TILE(c, __VA_ARGS__) }                                                            \
        }                                                                                                 \
    }
#define EACH_TILE(classes, ...)                                                                           \
    const idx C = classes, most = depth(C);                                                               \
    for (idx r = begin; r < last; r += most) {                                                            \
        const idx rows = smaller(most, last - r);                                                         \
        __VA_ARGS__                                                                                       \
    }

/* The target of position r + i, counted from the first class here; C or more, or negative, where it is elsewhere. */
#define TARGET(i) (target[r + (i)] - start)

INLINE int within(idx j, idx c) { return j >= 0 && j < c; }

/* m (n) = maximum over classes; NaN where there is one. */
int lbpar_softmax_max(const float *x, float *m, idx n, idx c, int threads) {
    IN_TILES(0, maxima(x + r * C, rows, C, m + r);)
    free(work);
    return 0;
}

/* out (3, n): sum exp(x - m); x - m at the target if that is here, else 0; sum (x - m). Here: classes from `start` on. */
int lbpar_softmax_sums(const float *x, const float *m, const idx *target, double *out, idx start, idx n, idx c,
                       int threads) {
    IN_TILES(0, {
        differences(x + r * C, m + r, rows, C, e);
        for (idx i = 0; i < rows; i++) out[2 * n + r + i] = sum(e + i * C, C);
        for (idx i = 0; i < rows; i++) out[n + r + i] = within(TARGET(i), C) ? e[i * C + TARGET(i)] : 0;
        exponentials(e, rows * C);
        for (idx i = 0; i < rows; i++) out[r + i] = sum(e + i * C, C);
    })
    free(work);
    return 0;
}

/* dx = scale * (softmax - hit * onehot(target) - even). */
int lbpar_cross_entropy_backward(const float *x, const float *m, const double *s, const idx *target, float *dx,
                                 idx start, idx n, idx c, double even, double hit, double scale, int threads) {
    IN_TILES(0, {
        softmax(x + r * C, m + r, s + r, rows, C, e);
        for (idx i = 0; i < rows; i++)
            if (within(TARGET(i), C)) e[i * C + TARGET(i)] -= hit;
        float *restrict o = dx + r * C;
        for (idx k = 0; k < rows * C; k++) o[k] = (float)((e[k] - even) * scale);
    })
    free(work);
    return 0;
}

/* out (n) = number of classes with x - m > at, or equal and before the target; infinite where s, the sum of exponentials, is not
 * finite. Here: classes from `start` on. */
int lbpar_softmax_rank(const float *x, const float *m, const double *s, const double *at, const idx *target,
                       double *out, idx start, idx n, idx c, int threads) {
    IN_TILES(0, {
        for (idx i = 0; i < rows; i++) {
            const float *a = x + (r + i) * C;
            const double centre = m[r + i], least = at[r + i];
            const idx own_class = TARGET(i);
            idx before = 0;
            for (idx j = 0; j < C; j++) {
                const double d = a[j] - centre;
                before += (d > least) | ((d == least) & (j < own_class));
            }
            out[r + i] = isfinite(s[r + i]) ? (double)before : INFINITY;
        }
    })
    free(work);
    return 0;
}

/* out (3, c): sums over positions of softmax where the class is the target's, of softmax, and of targets. */
int lbpar_dice_sums(const float *x, const float *m, const double *s, const idx *target, double *out, idx start, idx n,
                    idx c, int threads) {
    IN_TILES(3 * c, {
        softmax(x + r * C, m + r, s + r, rows, C, e);
        double *restrict all = own + C;
        for (idx i = 0; i < rows; i++)
            for (idx j = 0; j < C; j++) all[j] += e[i * C + j];
        for (idx i = 0; i < rows; i++)
            if (within(TARGET(i), C)) {
                own[TARGET(i)] += e[i * C + TARGET(i)];
                own[2 * C + TARGET(i)] += 1;
            }
    })
    memset(out, 0, (size_t)(3 * c) * sizeof(double));
    for (int t = 0; t < threads; t++)
        for (idx j = 0; j < 3 * c; j++) out[j] += work[w * t + j];
    free(work);
    return 0;
}

/* g = rest + hit * onehot(target), per class; inner (n) = sum over classes of g * softmax. */
int lbpar_dice_backward(const float *x, const float *m, const double *s, const idx *target, const double *rest,
                        const double *hit, float *g, double *inner, idx start, idx n, idx c, int threads) {
    IN_TILES(0, {
        softmax(x + r * C, m + r, s + r, rows, C, e);
        for (idx i = 0; i < rows; i++) {
            float *restrict o = g + (r + i) * C;
            const double *p = e + i * C;
            const idx k = TARGET(i);
            double all = dot(p, rest, C);
            for (idx j = 0; j < C; j++) o[j] = (float)rest[j];
            if (within(k, C)) {
                o[k] = (float)(rest[k] + hit[k]);
                all += p[k] * hit[k];
            }
            inner[r + i] = all;
        }
    })
    free(work);
    return 0;
}

/* dx = softmax * (g - inner). */
int lbpar_dice_backward_data(const float *x, const float *m, const double *s, const float *g, const double *inner,
                             float *dx, idx n, idx c, int threads) {
    IN_TILES(0, {
        softmax(x + r * C, m + r, s + r, rows, C, e);
        for (idx i = 0; i < rows; i++) {
            const idx at = (r + i) * C;
            const double centre = inner[r + i];
            for (idx j = 0; j < C; j++) dx[at + j] = (float)((g[at + j] - centre) * e[i * C + j]);
        }
    })
    free(work);
    return 0;
}

/* Sum of (x - t)^2. */
double lbpar_mse_loss(const float *x, const float *t, idx n, int threads) {
    double total = 0;
#pragma omp parallel for simd num_threads(threads) if (parallel : threads > 1) schedule(static) reduction(+ : total)
    for (idx i = 0; i < n; i++) {
        const double d = (double)x[i] - t[i];
        total += d * d;
    }
    return total;
}

/* dx = factor * (x - t). */
int lbpar_mse_backward(const float *x, const float *t, float *dx, idx n, double factor, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (idx i = 0; i < n; i++) dx[i] = (float)(factor * ((double)x[i] - t[i]));
    return 0;
}

/* Sum of max(x, 0) - x t + log(1 + exp(-|x|)), which never overflows. */
double lbpar_bce_loss(const float *x, const float *t, idx n, int threads) {
    double total = 0;
#pragma omp parallel for simd num_threads(threads) if (parallel : threads > 1) schedule(static) reduction(+ : total)
    for (idx i = 0; i < n; i++) {
        const double z = x[i];
        total += (z > 0 ? z : 0) - z * t[i] + log_one_plus(exponential(-fabs(z)));
    }
    return total;
}

/* dx = scale * (sigmoid(x) - t). */
int lbpar_bce_backward(const float *x, const float *t, float *dx, idx n, double scale, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (idx i = 0; i < n; i++) {
        const double z = x[i], e = exponential(-fabs(z));
        dx[i] = (float)(scale * ((z >= 0 ? 1 : e) / (1 + e) - t[i]));
    }
    return 0;
}
