// Losses over classes with a factor per position, Dice over regions, and what metrics follow from. Classes [class_start, class_start + C) may
// be a part of all; positions whose target is `ignore` count nowhere. lbpar/engine/host/label_losses.py says what each computes.
//
//     label_factors            weight of the target's class per position, -1 where it is ignored; partial sums of the weights
//     class_spread             per position: sum over c of weight * (x - m)
//     entropy_partials, entropy_loss, weighed_entropy_backward      cross-entropy, also focal and smoothed, by the sum of all weights
//     region_partials, region_sums     per class, and per sample where samples are apart: p*t, p and t, with p = exp(x - m) / sums[0]
//     region_loss, region_slopes, region_backward, region_backward_data      Dice
//     softmax_first            minus the first local class that has the maximum, -infinity where none has
//     class_confusion, class_counts    how many positions of a class were taken for a class; found, taken for it, of it
//     dice_of_samples          sum of the Dice of samples that have one, per class, and their number
//     error_partials_of_both   sums of |x - t| (grid y 0) and of its square (grid y 1)
//
// x is C-contiguous (rows, C), m (rows) of its type, target (rows) of an integer type I; sums double (3, rows), as are weights (C), all sums
// and losses. Of regions, rows are (samples, positions). Launch: 256 threads; *_partials: the blocks along grid x are partial sums, which
// `sum_partials` (losses.cu) ends; region_partials: grid x tiles of 64 channels, grid y chunks of `each` positions, grid z samples;
// region_sums: grid x over 32 classes each, grid z samples; entropy_loss and region_loss: one block; others any grid. WIDTH lanes (1, 8, 32)
// share a row.
// Limits: 65 535 chunks; samples and classes in any number, offsets have 64 bits.
//
// Called by the loss methods of lbpar/engine/cupy.
#include "channels.cuh"
#include "rows.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(256, 2)
#define PLAIN_KERNEL __global__ void __launch_bounds__(256, 2)

// -- cross-entropy ------------------------------------------------------------------------------------------------------------------

KERNEL(class I) label_factors(double* factors, double* partial, const I* target, const double* weights, i64 ignore, i64 classes, i64 n) {
    partial_sum(partial, n, [&](i64 i) {
        const i64 t = static_cast<i64>(target[i]);
        const bool known = t != ignore;
        const double weight = !known ? 0 : t >= 0 && t < classes ? weights[t] : static_cast<double>(infinity() - infinity());
        factors[i] = known ? weight : -1;
        return weight;
    });
}

KERNEL(class T, int WIDTH) class_spread(double* spread, const T* x, const T* m, const double* weights, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        const Acc<T> most = there ? wide(m[row]) : Acc<T>(0);
        const double sum = row_reduce<WIDTH>(channels, there, lane, 0.0, [&](i64 c) {
            return weights[c] * static_cast<double>(wide(x[row * channels + c]) - most);
        }, Sum());
        if (there && lane == 0) spread[row] = sum;
    });
}

// -log(q) of the softmax at the target, and 1 - q.
__device__ __forceinline__ double nats_of(const double* sums, i64 rows, i64 row) {
    const double nats = log(sums[row]) - sums[rows + row];
    return nats < 0 ? 0 : nats;
}

// Per position f * nats * (1 - q)^gamma and, if `spread` is given, shares of it and of the sum over classes of -w * log(p).
PLAIN_KERNEL entropy_partials(double* partial, const double* sums, const double* factors, const double* spread, double gamma, double even,
                              double smoothing, double all_weights, i64 rows) {
    partial_sum(partial, rows, [&](i64 row) {
        const double f = factors[row];
        if (f < 0) return 0.0;
        const double nats = nats_of(sums, rows, row);
        const double own = f == 0 ? 0 : f * nats * (gamma == 0 ? 1 : pow(-expm1(-nats), gamma));
        return spread ? (1 - smoothing) * own + even * (all_weights * log(sums[row]) - spread[row]) : own;
    });
}

PLAIN_KERNEL entropy_loss(double* loss, const double* partial, const double* total, double scale, i64 count) {
    double sum = 0;
    for (i64 i = threadIdx.x; i < count; i += 256) sum += partial[i];
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) *loss = *total == 0 ? 0 : scale * sum / *total;
}

KERNEL(class T, class I, int WIDTH)
weighed_entropy_backward(T* dx, const T* x, const T* m, const double* sums, const I* target, const double* factors, const double* total,
                         const double* weights, i64 class_start, double gamma, double scale, double even, double smoothing,
                         double all_weights, i64 rows, i64 channels) {
    const double by = *total == 0 ? 0 : scale / *total;
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        if (!there) return;
        const double f = factors[row];
        const bool counts = !(f < 0) && by != 0;
        double slope = counts ? (1 - smoothing) * f : 0;
        if (counts && gamma != 0) {
            const double nats = nats_of(sums, rows, row), rest = -expm1(-nats);
            slope *= rest == 0 ? 0 : pow(rest, gamma) + gamma * exp(-nats) * nats * pow(rest, gamma - 1);
        }
        const Acc<T> most = wide(m[row]), own = static_cast<Acc<T>>(slope * by), each = static_cast<Acc<T>>(even * by);
        const Acc<T> of_p = static_cast<Acc<T>>((slope + even * all_weights) * by / sums[row]);
        const i64 t = static_cast<i64>(target[row]) - class_start;
        for (i64 c = lane; c < channels; c += WIDTH) {
            const i64 at = row * channels + c;
            const Acc<T> less = each * static_cast<Acc<T>>(weights[c]) + (c == t ? own : Acc<T>(0));
            dx[at] = narrow<T>(counts ? exp(wide(x[at]) - most) * of_p - less : Acc<T>(0));
        }
    });
}

// -- Dice -------------------------------------------------------------------------------------------------------------------------

// partial: double (samples, chunks, 3, C).
KERNEL(class T, class I)
region_partials(double* partial, const T* x, const T* m, const double* sums, const I* target, i64 class_start, i64 ignore, i64 samples,
                i64 positions, i64 channels, i64 each) {
    const Chunk chunk = chunk_of(positions, blockIdx.y, each);
    for (i64 sample = blockIdx.z; sample < samples; sample += gridDim.z)
        for (i64 tile = blockIdx.x; tile * COLUMNS < channels; tile += gridDim.x) {
            const Place p = place_in<1>(tile, channels);
            double total[1][3];
            sum_rows<T>(total, p, chunk, [&](i64 position, Acc<T>(&run)[1][3]) {
                const i64 row = sample * positions + position, t = static_cast<i64>(target[row]);
                if (t == ignore) return;
                const Acc<T> probability = exp(wide(x[row * channels + p.channel]) - wide(m[row])) / static_cast<Acc<T>>(sums[row]);
                const bool hit = t - class_start == p.channel;
                run[0][0] += hit ? probability : 0;
                run[0][1] += probability;
                run[0][2] += hit ? 1 : 0;
            });
            if (p.active && p.row == 0)
                for (int k = 0; k < 3; ++k)
                    partial[((sample * gridDim.y + blockIdx.y) * i64(3) + k) * channels + p.channel] = total[0][k];
        }
}

// dsums: double (3, samples, C).
PLAIN_KERNEL region_sums(double* dsums, const double* partial, i64 samples, i64 channels, i64 chunks) {
    for (i64 sample = blockIdx.z; sample < samples; sample += gridDim.z) {
        double mine[1][3] = {};
        const Place p = merge_chunks<3>(mine, partial + sample * chunks * i64(3) * channels, 0, channels, chunks, 0, MergeSums<3>());
        if (p.active)
            for (int k = 0; k < 3; ++k) dsums[(k * samples + sample) * channels + p.channel] = mine[0][k];
    }
}

PLAIN_KERNEL region_loss(double* loss, const double* dsums, const double* factors, double eps, i64 samples, i64 channels) {
    const i64 n = samples * channels;
    double sum = 0;
    for (i64 i = threadIdx.x; i < n; i += 256)
        sum += factors[i % channels] * (1 - (2 * dsums[i] + eps) / (dsums[n + i] + dsums[2 * n + i] + eps));
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) *loss = sum;
}

// slopes: Acc (2, samples, C): the derivative for p of a class, and what the target's class gets besides.
KERNEL(class A) region_slopes(A* slopes, const double* dsums, const double* factors, double eps, i64 samples, i64 channels) {
    const i64 n = samples * channels;
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const double both = dsums[n + i] + dsums[2 * n + i] + eps, factor = factors[i % channels];
        slopes[i] = static_cast<A>(factor * (2 * dsums[i] + eps) / (both * both));
        slopes[n + i] = static_cast<A>(-2 * factor / both);
    }
}

KERNEL(class T, class I, int WIDTH)
region_backward(T* g, double* inner, const T* x, const T* m, const double* sums, const I* target, const Acc<T>* slopes, i64 class_start,
                i64 ignore, i64 samples, i64 positions, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        const Acc<T> most = there ? wide(m[row]) : Acc<T>(0), share = there ? static_cast<Acc<T>>(1 / sums[row]) : Acc<T>(0);
        const i64 t = there ? static_cast<i64>(target[row]) : ignore;
        const Acc<T>* of = slopes + row / positions * channels;
        const Acc<T> sum = row_reduce<WIDTH>(channels, there, lane, Acc<T>(0), [&](i64 c) {
            const Acc<T> more = t - class_start == c ? of[samples * channels + c] : Acc<T>(0);
            const Acc<T> slope = t == ignore ? Acc<T>(0) : of[c] + more;
            g[row * channels + c] = narrow<T>(slope);
            return slope * exp(wide(x[row * channels + c]) - most) * share;
        }, Sum());
        if (there && lane == 0) inner[row] = sum;
    });
}

KERNEL(class T, int WIDTH)
region_backward_data(T* dx, const T* x, const T* m, const double* sums, const T* g, const double* inner, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        if (!there) return;
        const Acc<T> most = wide(m[row]), share = static_cast<Acc<T>>(1 / sums[row]), less = static_cast<Acc<T>>(inner[row]);
        for (i64 c = row * channels + lane; c < (row + 1) * channels; c += WIDTH)
            dx[c] = narrow<T>((wide(g[c]) - less) * exp(wide(x[c]) - most) * share);
    });
}

// -- metrics ------------------------------------------------------------------------------------------------------------------------

struct Smaller {
    __device__ __forceinline__ i64 operator()(i64 a, i64 b) const { return a < b ? a : b; }
};
KERNEL(class T, int WIDTH) softmax_first(double* first, const T* x, const T* m, i64 class_start, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        const Acc<T> most = there ? wide(m[row]) : Acc<T>(0);
        const i64 found = row_reduce<WIDTH>(channels, there, lane, channels, [&](i64 c) {
            return wide(x[row * channels + c]) == most ? c : channels;
        }, Smaller());
        if (there && lane == 0) first[row] = found < channels ? -static_cast<double>(class_start + found) : static_cast<double>(-infinity());
    });
}

// table (classes, classes) is added to; counts are whole numbers, which add up the same in any order. `mine`: each block counts in shared
// memory first, u32 (classes, classes).
KERNEL(class I) class_confusion(double* table, const double* first, const I* target, i64 ignore, i64 classes, bool mine, i64 n) {
    extern __shared__ u32 bins[];
    const i64 size = classes * classes;
    if (mine)
        for (i64 i = threadIdx.x; i < size; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (i64 i = grid_thread(); i < n; i += grid_threads()) {
        const i64 t = static_cast<i64>(target[i]);
        if (t == ignore || t < 0 || t >= classes || !(first[i] > -static_cast<double>(classes))) continue;
        const i64 at = t * classes - static_cast<i64>(first[i]);
        if (mine)
            atomicAdd(bins + at, 1u);
        else
            atomicAdd(table + at, 1.0);
    }
    __syncthreads();
    if (mine)
        for (i64 i = threadIdx.x; i < size; i += blockDim.x)
            if (bins[i]) atomicAdd(table + i, static_cast<double>(bins[i]));
}

PLAIN_KERNEL class_counts(double* counts, const double* table, i64 classes) {
    for (i64 c = grid_thread(); c < classes; c += grid_threads()) {
        double taken = 0, of = 0;
        for (i64 k = 0; k < classes; ++k) {
            taken += table[k * classes + c];
            of += table[c * classes + k];
        }
        counts[c] = table[c * classes + c];
        counts[classes + c] = taken;
        counts[2 * classes + c] = of;
    }
}

// Of `class_counts` of each sample, (samples, 3, classes): per class the sum of the Dice of samples that have one, and how many have.
PLAIN_KERNEL dice_of_samples(double* dice, const double* counts, i64 classes, i64 samples) {
    for (i64 c = grid_thread(); c < classes; c += grid_threads()) {
        double sum = 0, have = 0;
        for (i64 n = 0; n < samples; ++n) {
            const double* own = counts + 3 * n * classes + c;
            const double both = own[classes] + own[2 * classes];
            if (both > 0) {
                sum += 2 * own[0] / both;
                have += 1;
            }
        }
        dice[c] = sum;
        dice[classes + c] = have;
    }
}

KERNEL(class T, class U) error_partials_of_both(double* partial, const T* x, const U* t, i64 n) {
    partial_sum(partial, n, [&](i64 i) {
        const double d = static_cast<double>(wide(x[i])) - static_cast<double>(wide(t[i]));
        return blockIdx.y ? d * d : d < 0 ? -d : d;
    });
}
