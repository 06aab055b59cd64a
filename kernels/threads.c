/* What belongs to threads: how many there are, and how each treats numbers too small to be normal.
 *
 * Processors compute with those (below 1.2e-38 in float32) many times more slowly than with others, unless told to take
 * them as zero: a switch that every thread has for itself.
 */
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
enum { FLUSH = 0x8040 }; /* results (FTZ) and operands (DAZ) */
static uint64_t control(void) { return _mm_getcsr(); }
static void set_control(uint64_t word) { _mm_setcsr((unsigned)word); }
#elif defined(__aarch64__)
enum { FLUSH = 1 << 24 }; /* FZ: both */
static uint64_t control(void) {
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
}
static void set_control(uint64_t word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
enum { FLUSH = 0 };
static uint64_t control(void) { return 0; }
static void set_control(uint64_t word) { (void)word; }
#endif

static void apply(uint64_t bits) {
    const uint64_t word = control(), wanted = (word & ~(uint64_t)FLUSH) | bits;
    if (wanted != word) set_control(wanted);
}

/* Threads that a parallel region started now by this thread would have. */
int lbpar_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

/* Bits of a thread that flushes; none without OpenMP, when the threads of other libraries could not be reached. */
int64_t lbpar_flush_bits(void) {
#ifdef _OPENMP
    return FLUSH;
#else
    return 0;
#endif
}

/* Sets the bits in this thread and in the OpenMP threads that work for it; returns what this thread had.
 *
 * GNU's OpenMP keeps its threads as they are, and is one and the same for all libraries of a process (the loader sees to
 * it). Intel's and LLVM's give their threads the bits of the thread that starts a parallel region, each time.
 */
int64_t lbpar_flush(int64_t bits, int threads) {
    const int64_t before = (int64_t)(control() & FLUSH);
    apply((uint64_t)bits); /* first, for new threads inherit it */
#pragma omp parallel num_threads(threads) if (threads > 1)
    apply((uint64_t)bits);
    return before;
}
