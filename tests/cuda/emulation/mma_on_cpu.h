// The warp instructions of kernels/mma.cuh: the layout of fragments is the one that the PTX ISA gives, tables of its own, so that
// a kernel that puts an element into the wrong lane or register gets wrong numbers here too.
//
// All lanes hand over where their registers are; the first to go on does the work of all 32.
#pragma once

#include <array>

#ifndef EMULATED_ARCH
#define EMULATED_ARCH 800
#endif
#define MMA_ARCH EMULATED_ARCH

namespace emulated {

struct Lane {
    const void* in[2];
    void* out;
    bool done = false;
};

template <class Work>
void with_warp(const void* first, const void* second, void* out, Work work) {
    Lane mine{{first, second}, out};
    Exchange& e = block.meet(0xffffffffu, reinterpret_cast<uint64_t>(&mine));
    if (!mine.done) {
        std::array<Lane*, 32> lanes;
        for (size_t i = 0; i < 32; ++i) lanes[i] = reinterpret_cast<Lane*>(e.value[i]);
        work(lanes);
        for (Lane* l : lanes) l->done = true;
    }
    block.leave(e);
}

inline float half_at(const void* registers, int i) {
    uint16_t raw;
    std::memcpy(&raw, static_cast<const char*>(registers) + 2 * i, 2);
    return from_half(raw);
}
inline float bfloat16_at(const void* registers, int i) {
    uint16_t raw;
    std::memcpy(&raw, static_cast<const char*>(registers) + 2 * i, 2);
    return from_bfloat16(raw);
}

// m16n8k(8 * sizes): `place(matrix, i)` gives row and column of element i in units of the lane's group and its number in the group
template <int K, int A_COUNT, int B_COUNT, class Value, class PlaceA, class PlaceB>
void mma_m16n8(float* c, const unsigned* a, const unsigned* b, Value value, PlaceA place_a, PlaceB place_b) {
    with_warp(a, b, c, [&](std::array<Lane*, 32>& lanes) {
        float left[16][K], right[K][8];
        for (int l = 0; l < 32; ++l) {
            const int group = l >> 2, member = l % 4;
            for (int i = 0; i < A_COUNT; ++i) {
                const auto [row, column] = place_a(group, member, i);
                left[row][column] = value(lanes[static_cast<size_t>(l)]->in[0], i);
            }
            for (int i = 0; i < B_COUNT; ++i) {
                const auto [row, column] = place_b(group, member, i);
                right[row][column] = value(lanes[static_cast<size_t>(l)]->in[1], i);
            }
        }
        for (int l = 0; l < 32; ++l)
            for (int i = 0; i < 4; ++i) {
                const int row = i < 2 ? l >> 2 : (l >> 2) + 8, column = l % 4 * 2 + (i & 1);
                float sum = static_cast<float*>(lanes[static_cast<size_t>(l)]->out)[i];
                for (int k = 0; k < K; ++k) sum += left[row][k] * right[k][column];
                static_cast<float*>(lanes[static_cast<size_t>(l)]->out)[i] = sum;
            }
    });
}

template <class Value>
void mma_16(float* c, const unsigned* a, const unsigned* b, Value value) {
    mma_m16n8<16, 8, 4>(
        c, a, b, value,
        [](int group, int member, int i) {
            const bool upper = i < 2 || (4 <= i && i < 6);
            return std::pair(upper ? group : group + 8, member * 2 + (i & 1) + (i < 4 ? 0 : 8));
        },
        [](int group, int member, int i) { return std::pair(member * 2 + (i & 1) + (i < 2 ? 0 : 8), group); });
}

}  // namespace emulated

inline void mma_m16n8k16(float* c, const unsigned* a, const unsigned* b, __half) { emulated::mma_16(c, a, b, emulated::half_at); }
inline void mma_m16n8k16(float* c, const unsigned* a, const unsigned* b, __nv_bfloat16) {
    emulated::mma_16(c, a, b, emulated::bfloat16_at);
}

inline void mma_m16n8k8(float* c, const unsigned* a, const unsigned* b) {
    emulated::mma_m16n8<8, 4, 2>(
        c, a, b,
        [](const void* registers, int i) {  // the instruction leaves the low 13 bits out
            return emulated::float_of(static_cast<const unsigned*>(registers)[i] & 0xffffe000u);
        },
        [](int group, int member, int i) { return std::pair(i == 0 || i == 2 ? group : group + 8, i < 2 ? member : member + 4); },
        [](int group, int member, int i) { return std::pair(i == 0 ? member : member + 4, group); });
}

template <bool A_ROWS, bool B_COLUMNS>
void mma_m8n8k4(float* c, const unsigned* a, const unsigned* b) {
    emulated::with_warp(a, b, c, [](std::array<emulated::Lane*, 32>& lanes) {
        for (int computation = 0; computation < 4; ++computation) {
            float left[8][4], right[4][8];
            const auto member = [&](int i) { return static_cast<size_t>(computation * 4 + (i < 4 ? i : i - 4 + 16)); };
            for (int t = 0; t < 8; ++t) {
                const int lane = static_cast<int>(member(t)), low = lane % 4, half = lane < 16 ? 0 : 4;
                for (int i = 0; i < 4; ++i) {
                    const float av = emulated::half_at(lanes[member(t)]->in[0], i), bv = emulated::half_at(lanes[member(t)]->in[1], i);
                    if (A_ROWS) left[low + half][i] = av;
                    else left[i + half][low] = av;
                    if (B_COLUMNS) right[i][low + half] = bv;
                    else right[low][i + half] = bv;
                }
            }
            for (int t = 0; t < 8; ++t) {
                const int lane = static_cast<int>(member(t));
                for (int i = 0; i < 8; ++i) {
                    const int x = (lane & 1) + (i & 2), row = lane < 16 ? x : x + 4, column = (i & 4) + (lane & 2) + (i & 1);
                    float* out = static_cast<float*>(lanes[member(t)]->out) + i;
                    for (int k = 0; k < 4; ++k) *out += left[row][k] * right[k][column];
                }
            }
        }
    });
}

inline void mma_m8n8k4(double* c, double a, double b) {
    emulated::with_warp(&a, &b, c, [](std::array<emulated::Lane*, 32>& lanes) {
        double left[8][4], right[4][8];
        for (size_t l = 0; l < 32; ++l) {
            left[l >> 2][l % 4] = *static_cast<const double*>(lanes[l]->in[0]);
            right[l % 4][l >> 2] = *static_cast<const double*>(lanes[l]->in[1]);
        }
        for (size_t l = 0; l < 32; ++l)
            for (size_t i = 0; i < 2; ++i)
                for (size_t k = 0; k < 4; ++k)
                    static_cast<double*>(lanes[l]->out)[i] += left[l >> 2][k] * right[k][l % 4 * 2 + i];
    });
}

template <bool TRANSPOSED>
void load_matrices(unsigned (&r)[4], const void* row) {
    if (reinterpret_cast<uint64_t>(row) % 16) emulated::block.fail("ldmatrix from an address that is no multiple of 16");
    emulated::with_warp(row, nullptr, r, [](std::array<emulated::Lane*, 32>& lanes) {
        for (size_t matrix = 0; matrix < 4; ++matrix)
            for (size_t l = 0; l < 32; ++l)
                for (size_t half = 0; half < 2; ++half) {
                    size_t row = l / 4, column = 2 * (l % 4) + half;
                    if (TRANSPOSED) std::swap(row, column);
                    const char* from = static_cast<const char*>(lanes[8 * matrix + row]->in[0]) + 2 * column;
                    std::memcpy(static_cast<char*>(lanes[l]->out) + 4 * matrix + 2 * half, from, 2);
                }
    });
}

inline unsigned to_tf32(float x) {  // to the nearest, ties away from zero
    const unsigned u = emulated::bits_of(x);
    return (u & 0x7f800000u) == 0x7f800000u ? u : (u + 0x1000u) & 0xffffe000u;
}
