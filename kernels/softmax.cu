// Softmax over the last dimension, whose channels may be split over ranks: what is reduced over ranks lies between the kernels.
//
//     softmax_max          m = max over c of x            (then the maximum over ranks)
//     softmax_denominator  sum over c of exp(x - m)       (then the sum over ranks)
//     softmax_forward      exp(x - m) / sums
//     softmax_inner        sum over c of y * dy           (then the sum over ranks)
//     softmax_backward     y * (dy - inner)
//
// x, y, dy are C-contiguous (rows, C), m (rows) of the same type, sums and inner double (rows). Launch: 256 threads, any number of
// blocks; WIDTH lanes (1, 8, 32) share a row.
// Limits: rows and channels in any number, offsets have 64 bits; a row of many channels has 32 lanes at most.
//
// Called by the softmax methods of lbpar/engine/cupy; the losses are in losses.cu.
#include "rows.cuh"

#define KERNEL(...) template <__VA_ARGS__> __global__ void __launch_bounds__(256, 2)

KERNEL(class T, int WIDTH) softmax_max(T* m, const T* x, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        const T* of = x + row * channels;
        const Acc<T> most = row_reduce<WIDTH>(channels, there, lane, Acc<T>(-infinity()), [&](i64 c) { return wide(of[c]); }, Larger());
        if (there && lane == 0) m[row] = narrow<T>(most);
    });
}

KERNEL(class T, int WIDTH) softmax_denominator(double* sums, const T* x, const T* m, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        const T* of = x + row * channels;
        const Acc<T> most = there ? wide(m[row]) : Acc<T>(0);
        const Acc<T> sum = row_reduce<WIDTH>(channels, there, lane, Acc<T>(0), [&](i64 c) { return exp(wide(of[c]) - most); }, Sum());
        if (there && lane == 0) sums[row] = sum;
    });
}

KERNEL(class T, int WIDTH) softmax_forward(T* y, const T* x, const T* m, const double* sums, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        if (!there) return;
        const Acc<T> most = wide(m[row]), factor = static_cast<Acc<T>>(1 / sums[row]);
        for (i64 c = lane; c < channels; c += WIDTH) y[row * channels + c] = narrow<T>(exp(wide(x[row * channels + c]) - most) * factor);
    });
}

KERNEL(class T, int WIDTH) softmax_inner(double* inner, const T* y, const T* dy, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        const i64 at = row * channels;
        const Acc<T> sum =
            row_reduce<WIDTH>(channels, there, lane, Acc<T>(0), [&](i64 c) { return wide(y[at + c]) * wide(dy[at + c]); }, Sum());
        if (there && lane == 0) inner[row] = sum;
    });
}

KERNEL(class T, int WIDTH) softmax_backward(T* dx, const T* y, const T* dy, const double* inner, i64 rows, i64 channels) {
    for_rows_of_lanes<WIDTH>(rows, [&](i64 row, bool there, int lane) {
        if (!there) return;
        const Acc<T> less = static_cast<Acc<T>>(inner[row]);
        for (i64 c = row * channels + lane; c < (row + 1) * channels; c += WIDTH) dx[c] = narrow<T>(wide(y[c]) * (wide(dy[c]) - less));
    });
}
