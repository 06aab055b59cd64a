// Launching an instantiation from Python: arguments arrive as pointers to their values, as with the driver's own launch.
#pragma once

namespace emulated {

#ifdef EMULATED_INT_LIMIT
[[noreturn]] inline void overflow(long long value) {
    block.fail("32-bit arithmetic reached " + std::to_string(value) + ", the limit of this test is " + std::to_string(EMULATED_INT_LIMIT));
}
#endif

inline void place(int thread) {
    const int x = static_cast<int>(blockDim.x), y = static_cast<int>(blockDim.y);
    threadIdx.x = thread % x, threadIdx.y = thread / x % y, threadIdx.z = thread / x / y;
}

template <class Kernel>
struct Launcher;

template <class... A>
struct Launcher<void (*)(A...)> {
    inline static void (*kernel)(A...);
    inline static void** values;

    template <size_t... I>
    static void call(std::index_sequence<I...>) { kernel(*static_cast<std::remove_cv_t<A>*>(values[I])...); }
    static void body() { call(std::index_sequence_for<A...>{}); }

    static const char* run(void (*k)(A...), dim3 grid, dim3 threads, size_t shared_bytes, int order, void** v) {
        kernel = k, values = v;
        Block& b = block;
        const size_t n = static_cast<size_t>(threads.x) * threads.y * threads.z;
        b.error.clear();
        b.order = order, b.body = body, b.place = place;
        b.threads.assign(n, Thread());
        b.warps.assign((n + 31) / 32, Warp());
        b.shared_bytes = shared_bytes;
        b.shared = static_cast<char*>(std::aligned_alloc(128, (shared_bytes + 128) / 128 * 128));
        blockDim.x = threads.x, blockDim.y = threads.y, blockDim.z = threads.z;
        gridDim.x = grid.x, gridDim.y = grid.y, gridDim.z = grid.z;
        const long long blocks = static_cast<long long>(grid.x) * grid.y * grid.z;
        for (long long i = 0; i < blocks && b.error.empty(); ++i) {
            const long long at = order == 1 ? blocks - 1 - i : i;
            blockIdx.x = static_cast<int>(at % grid.x);
            blockIdx.y = static_cast<int>(at / grid.x % grid.y);
            blockIdx.z = static_cast<int>(at / grid.x / grid.y);
            std::memset(b.shared, 0xff, shared_bytes);
            b.run();
        }
        std::free(b.shared);
        b.shared = nullptr;
        return b.error.empty() ? nullptr : b.error.c_str();
    }

    static int describe(int* sizes) {  // bytes of each argument, negative for pointers
        int n = 0;
        ((sizes[n++] = std::is_pointer_v<A> ? -8 : static_cast<int>(sizeof(A))), ...);
        return n;
    }
};

}  // namespace emulated

#define EMULATED_KERNEL(number, ...)                                                                                       \
    extern "C" __attribute__((visibility("default"))) const char* launch_##number(const unsigned* g, const unsigned* t, size_t shared, int order, void** values) { \
        using L = emulated::Launcher<decltype(&__VA_ARGS__)>;                                                              \
        return L::run(&__VA_ARGS__, dim3{g[0], g[1], g[2]}, dim3{t[0], t[1], t[2]}, shared, order, values);               \
    }                                                                                                                      \
    extern "C" __attribute__((visibility("default"))) int describe_##number(int* sizes) { return emulated::Launcher<decltype(&__VA_ARGS__)>::describe(sizes); }
