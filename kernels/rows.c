/* Passes over a matrix of rows (positions, channels) on CPUs: normalisation in its distributed form, relu, copies.
 *
 * No library has these: statistics of several ranks meet between two halves of a normalisation. Every function reads
 * each of its arrays once, is one parallel region (one barrier), and sums in double: memory is slower than either, so
 * it costs nothing (measured). Arrays are C-contiguous unless a stride is given; sizes are 64-bit; `threads`
 * is the number of OpenMP threads. The file is compiled on the machine it runs on, by the C compiler found there.
 *
 * It is compiled twice: with activations, `real`, of float32, and (rows_bfloat16.c) of bfloat16, which are widened as
 * they are read and rounded, to the nearest and of two the even one, as they are written.
 *
 * Letters: n rows, c channels. A matrix is read as wider rows (w channels = a multiple of c, the last one shorter), so
 * that inner loops are long enough to be vectorised.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t idx;

#ifdef BFLOAT16
typedef uint16_t real;
#define PASS(name) lbpar_##name##_bfloat16
static inline float get(real a) {
    const uint32_t bits = (uint32_t)a << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline real put(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    const uint32_t rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16, nan = bits >> 16 | 0x40;
    return (real)((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}
#else
typedef float real;
#define PASS(name) lbpar_##name
static inline float get(real a) { return a; }
static inline real put(float a) { return a; }
#endif

enum { WIDE = 256 };

/* Runs a block with A and B constants: whether `a` and `b` hold. */
#define BY_FLAGS(a, b, ...)                                                                                            \
    if ((a) && (b)) { enum { A = 1, B = 1 }; __VA_ARGS__ }                                                             \
    else if (a) { enum { A = 1, B = 0 }; __VA_ARGS__ }                                                                 \
    else if (b) { enum { A = 0, B = 1 }; __VA_ARGS__ }                                                                 \
    else { enum { A = 0, B = 0 }; __VA_ARGS__ }

static inline idx smaller(idx a, idx b) { return a < b ? a : b; }

static idx wide(idx n, idx c) {
    idx fold = WIDE / c;
    fold = fold < 1 ? 1 : fold;
    return c * (n < 1 ? 1 : smaller(fold, n));
}

/* First of the wide rows (`end` of them in n * c elements, the last may be short) of thread t. */
static inline idx share(idx end, int t, int threads) { return end * t / threads; }

static void tile_double(double *out, const double *v, idx c, idx w) {
    for (idx i = 0; i < w; i += c) memcpy(out + i, v, (size_t)c * sizeof(double));
}

static void tile_float(float *out, idx c, idx w) {
    for (idx i = c; i < w; i += c) memcpy(out + i, out, (size_t)c * sizeof(float));
}

/* Adds the partial sums of all threads (2 * w each) into out (2, c). */
static void merge(const double *part, int threads, idx c, idx w, double *out) {
    memset(out, 0, 2 * (size_t)c * sizeof(double));
    for (int t = 0; t < threads; t++, part += 2 * w)
        for (int k = 0; k < 2; k++)
            for (idx i = 0; i < w; i += c)
                for (idx j = 0; j < c; j++) out[k * c + j] += part[k * w + i + j];
}

/* Double-double arithmetic as in lbpar/engine/double_double.py: a number as the sum of two. */
typedef struct { double high, low; } pair;

static inline pair add(double a, double b) {
    const double s = a + b, t = s - a;
    return (pair){s, (a - (s - t)) + (b - t)};
}

static inline pair plus(pair p, double b) {
    const pair s = add(p.high, b);
    return add(s.high, s.low + p.low);
}

static inline double leading(double a, int bits) {
    const double scaled = a * ((double)((idx)1 << (53 - bits)) + 1);
    return scaled - (scaled - a);
}

static inline pair times(pair p, pair b) {
    const double product = p.high * b.high, x = leading(p.high, 26), y = leading(b.high, 26);
    const double u = p.high - x, v = b.high - y, rest = ((x * y - product) + x * v + u * y) + u * v;
    return add(product, rest + (p.high * b.low + p.low * b.high));
}

/* Moments of n values about `origin` (out[0], out[c]) become those about `shift`, each as leading bits and rest (out[0..3] * c). */
static inline void move(double *out, idx c, double first, double second, double n, double origin, double shift) {
    const pair distance = add(origin, -shift), a = plus(times(distance, (pair){n, 0}), first);
    const pair b = plus(times(plus(a, first), distance), second);
    out[0] = leading(a.high, 32), out[c] = (a.high - out[0]) + a.low;
    out[2 * c] = leading(b.high, 32), out[3 * c] = (b.high - out[2 * c]) + b.low;
}

/* First and second moments about shift as leading bits and rest each, out (4, c); taken about the first row, so that they do not
 * cancel. Returns 0, or 1 if there is no memory. */
int PASS(norm_sums)(const real *x, const double *shift, double *out, idx n, idx c, int threads) {
    const idx w = wide(n, c), total = n * c, end = (total + w - 1) / w;
    double *centre = malloc((size_t)w * sizeof(double)), *part = calloc((size_t)(2 * w * threads), sizeof(double));
    if (!centre || !part) return free(centre), free(part), 1;
    for (idx j = 0; j < w; j++) centre[j] = get(x[j % c]);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        double *restrict s = part + 2 * w * t, *restrict q = s + w;
        const double *restrict m = centre;
        idx r = share(end, t, threads), last = share(end, t + 1, threads);
        for (; r < last;) {
            const real *restrict a = x + r * w;
            if (last - r >= 4 && (r + 4) * w <= total) {
                for (idx j = 0; j < w; j++) {
                    const double d0 = get(a[j]) - m[j], d1 = get(a[j + w]) - m[j];
                    const double d2 = get(a[j + 2 * w]) - m[j], d3 = get(a[j + 3 * w]) - m[j];
                    s[j] += (d0 + d1) + (d2 + d3);
                    q[j] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
                }
                r += 4;
            } else {
                const idx len = smaller(w, total - r * w);
                for (idx j = 0; j < len; j++) {
                    const double d = get(a[j]) - m[j];
                    s[j] += d;
                    q[j] += d * d;
                }
                r++;
            }
        }
    }
    merge(part, threads, c, w, out);
    for (idx j = 0; j < c; j++) move(out + j, c, out[j], out[c + j], (double)n, get(x[j]), shift[j]);
    free(centre), free(part);
    return 0;
}

/* g = dy [+ more] [masked by y > 0], stored where it is not dy itself; out (2, c) = sum(g), invstd * sum(g * (x - mean)). */
int PASS(norm_backward_sums)(const real *x, const real *dy, const real *more, const real *y, real *g,
                             const double *mean, const double *invstd, double *out, idx n, idx c, int threads) {
    const idx w = wide(n, c), total = n * c, end = (total + w - 1) / w;
    double *centre = malloc((size_t)w * sizeof(double)), *part = calloc((size_t)(2 * w * threads), sizeof(double));
    if (!centre || !part) return free(centre), free(part), 1;
    tile_double(centre, mean, c, w);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        double *restrict s = part + 2 * w * t, *restrict q = s + w;
        const double *restrict m = centre;
        const idx last = share(end, t + 1, threads);
        BY_FLAGS(more, y, for (idx r = share(end, t, threads); r < last; r++) {
            const idx at = r * w, len = smaller(w, total - at);
            const real *restrict a = x + at, *restrict b = dy + at, *restrict b2 = A ? more + at : 0;
            const real *restrict f = B ? y + at : 0;
            real *restrict o = A || B ? g + at : 0;
            for (idx j = 0; j < len; j++) {
                float d = get(b[j]);
                if (A) d = get(put(d + get(b2[j]))); /* what is stored */
                if (B) d = get(f[j]) > 0 ? d : 0;
                if (A || B) o[j] = put(d);
                s[j] += d;
                q[j] += (double)d * (get(a[j]) - m[j]);
            }
        })
    }
    merge(part, threads, c, w, out);
    for (idx j = 0; j < c; j++) out[c + j] *= invstd[j];
    free(centre), free(part);
    return 0;
}

/* y = (x - mean) * invstd [* scale] [+ bias] [+ z] [relu]; absent operands are null. */
int PASS(norm_apply)(const real *x, const real *z, const double *mean, const double *invstd, const float *scale,
                     const float *bias, real *y, idx n, idx c, int relu, int threads) {
    const idx w = wide(n, c), total = n * c, end = (total + w - 1) / w;
    float *v = malloc(3 * (size_t)w * sizeof(float));
    if (!v) return 1;
    for (idx j = 0; j < c; j++) {
        v[j] = (float)mean[j];
        const double f = scale ? invstd[j] * scale[j] : invstd[j];
        v[w + j] = (float)f;
        v[2 * w + j] = (float)((v[j] - mean[j]) * f + (bias ? bias[j] : 0));
    }
    for (int k = 0; k < 3; k++) tile_float(v + k * w, c, w);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        const float *restrict m = v, *restrict f = v + w, *restrict b = v + 2 * w;
        const idx last = share(end, t + 1, threads);
        BY_FLAGS(z, relu, for (idx r = share(end, t, threads); r < last; r++) {
            const idx at = r * w, len = smaller(w, total - at);
            const real *restrict a = x + at, *restrict e = A ? z + at : 0;
            real *restrict o = y + at;
            for (idx j = 0; j < len; j++) {
                float d = (get(a[j]) - m[j]) * f[j] + b[j];
                if (A) d += get(e[j]);
                if (B) d = d < 0 ? 0 : d; /* keeps NaN */
                o[j] = put(d);
            }
        })
    }
    free(v);
    return 0;
}

/* dx = scale * invstd * (dy - sums[0]/count - xhat * sums[1]/count) [+ z], rows of z `stride` numbers apart. */
int PASS(norm_backward_data)(const real *x, const real *dy, const real *z, const double *mean, const double *invstd,
                             const float *scale, const double *sums, real *dx, idx stride, idx n, idx c, double count,
                             int threads) {
    const idx w = z ? c : wide(n, c), total = n * c, end = (total + w - 1) / w;
    float *v = malloc(4 * (size_t)w * sizeof(float));
    if (!v) return 1;
    for (idx j = 0; j < c; j++) {
        v[j] = (float)mean[j];
        const double k1 = -invstd[j] * sums[c + j] / count;
        v[w + j] = (float)k1;
        v[2 * w + j] = (float)((v[j] - mean[j]) * k1 - sums[j] / count);
        v[3 * w + j] = (float)(scale ? invstd[j] * scale[j] : invstd[j]);
    }
    for (int k = 0; k < 4; k++) tile_float(v + k * w, c, w);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        const float *restrict m = v, *restrict k1 = v + w, *restrict k0 = v + 2 * w, *restrict f = v + 3 * w;
        for (idx r = share(end, t, threads), last = share(end, t + 1, threads); r < last; r++) {
            const idx at = r * w, len = smaller(w, total - at);
            const real *restrict a = x + at, *restrict b = dy + at, *restrict e = z ? z + r * stride : 0;
            real *restrict o = dx + at;
            if (z)
                for (idx j = 0; j < len; j++)
                    o[j] = put(((get(a[j]) - m[j]) * k1[j] + get(b[j]) + k0[j]) * f[j] + get(e[j]));
            else
                for (idx j = 0; j < len; j++) o[j] = put(((get(a[j]) - m[j]) * k1[j] + get(b[j]) + k0[j]) * f[j]);
        }
    }
    free(v);
    return 0;
}

#ifndef BFLOAT16 /* which statistics never are */

/* Mean less shift, and biased variance, from what lbpar_norm_sums gives. */
static inline double offset(const double *sums, idx c, double count, double *var) {
    const pair first = add(sums[0], sums[c]), second = add(sums[2 * c], sums[3 * c]);
    const pair square = times(first, first), scaled = times(second, (pair){count, 0});
    const double v = ((scaled.high - square.high) + (scaled.low - square.low)) / (count * count);
    *var = v < 0 ? 0 : v;
    return first.high / count;
}

/* From sums about a shift: out (3, c) = mean, 1 / sqrt(var + eps), biased variance. */
int lbpar_norm_moments(const double *sums, const double *shift, double *out, idx c, double count, double eps,
                       int threads) {
    (void)threads; /* so few elements are one thread's work */
    for (idx j = 0; j < c; j++) {
        out[j] = shift[j] + offset(sums + j, c, count, out + 2 * c + j);
        out[c + j] = 1 / sqrt(out[2 * c + j] + eps);
    }
    return 0;
}

/* Moves the running mean and (unbiased) variance by `momentum` towards those of the batch; sums are about the mean. */
int lbpar_norm_running(const double *sums, double *mean, double *var, idx c, double momentum, double count, int threads) {
    (void)threads;
    const double unbias = count / (count > 1 ? count - 1 : 1);
    for (idx j = 0; j < c; j++) {
        double v;
        mean[j] += momentum * offset(sums + j, c, count, &v);
        var[j] += momentum * (v * unbias - var[j]);
    }
    return 0;
}

#endif

/* out (c) = sum over rows, in double. */
int PASS(sum_rows)(const real *x, float *out, idx n, idx c, int threads) {
    const idx w = wide(n, c), total = n * c, end = (total + w - 1) / w;
    double *part = calloc((size_t)(w * threads), sizeof(double)), *all = calloc((size_t)c, sizeof(double));
    if (!part || !all) return free(part), free(all), 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        double *restrict s = part + w * t;
        for (idx r = share(end, t, threads), last = share(end, t + 1, threads); r < last; r++) {
            const real *restrict a = x + r * w;
            const idx len = smaller(w, total - r * w);
            for (idx j = 0; j < len; j++) s[j] += get(a[j]);
        }
    }
    for (idx i = 0; i < w * threads; i += c)
        for (idx j = 0; j < c; j++) all[j] += part[i + j];
    for (idx j = 0; j < c; j++) out[j] = (float)all[j];
    free(part), free(all);
    return 0;
}

/* y = max(x, 0) that keeps NaN; y may be x. */
int PASS(relu)(const real *x, real *y, idx n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (idx i = 0; i < n; i++) y[i] = get(x[i]) < 0 ? 0 : x[i];
    return 0;
}

/* dx = dy where y > 0, else 0 (also where dy is not finite). */
int PASS(relu_backward)(const real *y, const real *dy, real *dx, idx n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (idx i = 0; i < n; i++) dx[i] = get(y[i]) > 0 ? dy[i] : 0;
    return 0;
}

/* y = a + b; y may be either. */
int PASS(add)(const real *a, const real *b, real *y, idx n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (idx i = 0; i < n; i++) y[i] = put(get(a[i]) + get(b[i]));
    return 0;
}

/* n rows of c columns; a call of memcpy for each would take longer than a few columns do. */
static void copy_rows(const real *restrict from, real *restrict to, idx from_stride, idx to_stride, idx n, idx c) {
#define ROWS(c)                                                                                                        \
    for (idx i = 0; i < n; i++) memcpy(to + i * to_stride, from + i * from_stride, (size_t)(c) * sizeof(real));        \
    break
    switch (c) {
    case 1: ROWS(1);
    case 2: ROWS(2);
    case 3: ROWS(3);
    case 4: ROWS(4);
    case 6: ROWS(6);
    case 8: ROWS(8);
    case 12: ROWS(12);
    case 16: ROWS(16);
    case 24: ROWS(24);
    case 32: ROWS(32);
    default: ROWS(c);
    }
#undef ROWS
}

/* n rows of c columns, from one row length and first column to others. */
int PASS(copy)(const real *from, real *to, idx first, idx from_stride, idx at, idx to_stride, idx n, idx c,
               int threads) {
    const idx many = 1024;
    from += first, to += at;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (idx i = 0; i < n; i += many)
        copy_rows(from + i * from_stride, to + i * to_stride, from_stride, to_stride, n - i < many ? n - i : many, c);
    return 0;
}
