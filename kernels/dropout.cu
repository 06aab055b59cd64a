// Dropout by global index: y = x / (1 - rate) where kept, else 0, the same for whatever way the tensor is split and as on the CPU.
//
// Element i of the global tensor is kept if word i % 4 of Philox4x32-10 of (key, counter i / 4), taken as a number in (0, 1), is not
// below rate: lbpar/random.py `uniform32`. The key is ``*key_at``, which a recorded launch finds changed, or, where that is null, ``key``. i is the sum of one number per dimension, from lists on the device, null for none.
//
// x and y are C-contiguous with the extents of `Places`, up to five, missing ones 1 and in front; y may be x. A thread takes four
// neighbours, which share a counter where the first one's index is a multiple of 4. Launch: 256 threads, any number of blocks; `Index` is i32
// where there are fewer than 2^31 elements.
// Limits: five dimensions, elements of the global tensor below 2^64, rate below 1.
//
// Called by `Engine.dropout` of lbpar/engine/cupy, forward and backward.
#include "common.cuh"

struct Places {  // by value
    const i64* of[5];
    i64 extent[5];
};

struct Words {
    u32 w[4];
};

__device__ __forceinline__ Words philox(u64 counter, u64 key) {
    u32 a = static_cast<u32>(counter), b = static_cast<u32>(counter >> 32), c = 0, d = 0;
    u32 low = static_cast<u32>(key), high = static_cast<u32>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 first = 0xD2511F53u, second = 0xCD9E8D57u;
        const u32 x = __umulhi(second, c) ^ b ^ low, y = second * c, z = __umulhi(first, a) ^ d ^ high, w = first * a;
        a = x, b = y, c = z, d = w;
        low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
    return {{a, b, c, d}};
}

template <class T, class Index>
__global__ void __launch_bounds__(256, 2) dropout(T* y, const T* x, double rate, u64 key, const u64* key_at, const __grid_constant__ Places places) {
    if (key_at) key = *key_at;
    // (word + 0.5) / 2^32 >= rate, in whole numbers; both operations are exact where they matter
    const double least = rate * 4294967296.0 - 0.5;
    const u64 threshold = least > 0 ? static_cast<u64>(ceil(least)) : 0;
    const Acc<T> factor = static_cast<Acc<T>>(1 / (1 - rate));
    const i64 width = places.extent[4], units = (width + 3) / 4;
    const i64 n = places.extent[0] * places.extent[1] * places.extent[2] * places.extent[3] * units;
    const bool together = width % 4 == 0 && aligned(x, y);
    for (i64 unit = grid_thread(); unit < n; unit += grid_threads()) {
        Index rest = static_cast<Index>(unit) / static_cast<Index>(units);
        const i64 row = rest, start = (unit - row * units) * 4;
        i64 base = 0;
#pragma unroll
        for (int d = 3; d >= 0; --d) {
            const Index extent = static_cast<Index>(places.extent[d]);
            if (places.of[d]) base += places.of[d][rest % extent];
            rest = rest / extent;
        }
        const i64 at = row * width + start;
        Vector<T, 4> v = {};
        if (together) {
            v = load_vector<4>(x + at);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (start + j < width) v.v[j] = x[at + j];
        }
        Words words = {};
        u64 counter = ~0ull;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (start + j >= width) break;
            const u64 index = static_cast<u64>(base + (places.of[4] ? places.of[4][start + j] : 0));
            if (index >> 2 != counter) {
                counter = index >> 2;
                words = philox(counter, key);
            }
            const int which = static_cast<int>(index & 3);
            const u32 word = which == 0 ? words.w[0] : which == 1 ? words.w[1] : which == 2 ? words.w[2] : words.w[3];
            v.v[j] = narrow<T>(word >= threshold ? wide(v.v[j]) * factor : Acc<T>(0));
        }
        if (together) {
            store_vector(y + at, v);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (start + j < width) y[at + j] = v.v[j];
        }
    }
}
