// Built with EMULATED_INT_LIMIT, `i32` and the indices of threads and blocks are integers that overflow above that limit: 32-bit
// arithmetic on what grows with an array then fails in a test of a few thousand elements, as it would on a device above 2^31.
#pragma once

#include <type_traits>

namespace emulated {

#ifdef EMULATED_INT_LIMIT
[[noreturn]] void overflow(long long value);

template <class Base>
struct Small {
    long long v;
    template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
    Small(I value) : v(static_cast<long long>(value)) { check(); }
    Small() : v(0) {}
    template <class Other>
    Small(Small<Other> o) : v(o.v) {}
    template <class I, class = std::enable_if_t<std::is_arithmetic_v<I>>>
    operator I() const { return static_cast<I>(v); }
    void check() const { if (v > EMULATED_INT_LIMIT || v < -EMULATED_INT_LIMIT) overflow(v); }
    Small& operator++() { return *this = Small(v + 1); }
    Small operator++(int) { Small old = *this; ++*this; return old; }
    Small& operator--() { return *this = Small(v - 1); }
    Small operator-() const { return Small(-v); }
    explicit operator bool() const { return v != 0; }
};
using Unsigned = Small<unsigned>;

// With int or smaller the result is small again, with 64 bits it is wide; floats stay floats.
template <class T> struct is_small : std::false_type {};
template <class B> struct is_small<Small<B>> : std::true_type {};
template <class A, class B>
using Result = std::conditional_t<(is_small<A>::value || sizeof(A) <= 4) && (is_small<B>::value || sizeof(B) <= 4), Small<int>, long long>;
template <class T, class = std::enable_if_t<std::is_integral_v<T>>> long long wide(T x) { return static_cast<long long>(x); }
template <class B> long long wide(Small<B> x) { return x.v; }
template <class A, class B>
using Mixed = std::enable_if_t<(is_small<A>::value && (is_small<B>::value || std::is_integral_v<B>)) || (is_small<B>::value && std::is_integral_v<A>)>;

#define EMULATED_OPERATION(op) \
    template <class A, class B, class = Mixed<A, B>> \
    Result<A, B> operator op(A a, B b) { return Result<A, B>(wide(a) op wide(b)); }
#define EMULATED_COMPARISON(op) \
    template <class A, class B, class = Mixed<A, B>> \
    bool operator op(A a, B b) { return wide(a) op wide(b); }
#define EMULATED_ASSIGNMENT(op) \
    template <class A, class B, class = std::enable_if_t<std::is_integral_v<B> || is_small<B>::value>> \
    Small<A>& operator op##=(Small<A>& a, B b) { return a = Small<A>(a.v op wide(b)); }
EMULATED_OPERATION(+) EMULATED_OPERATION(-) EMULATED_OPERATION(*) EMULATED_OPERATION(/) EMULATED_OPERATION(%)
EMULATED_OPERATION(&) EMULATED_OPERATION(|) EMULATED_OPERATION(^) EMULATED_OPERATION(<<) EMULATED_OPERATION(>>)
EMULATED_COMPARISON(==) EMULATED_COMPARISON(!=) EMULATED_COMPARISON(<) EMULATED_COMPARISON(<=) EMULATED_COMPARISON(>) EMULATED_COMPARISON(>=)
EMULATED_ASSIGNMENT(+) EMULATED_ASSIGNMENT(-) EMULATED_ASSIGNMENT(*) EMULATED_ASSIGNMENT(/) EMULATED_ASSIGNMENT(%)
EMULATED_ASSIGNMENT(&) EMULATED_ASSIGNMENT(|) EMULATED_ASSIGNMENT(<<) EMULATED_ASSIGNMENT(>>)
#else
using Unsigned = unsigned;
#endif

}  // namespace emulated

#ifdef EMULATED_INT_LIMIT
using i32 = emulated::Small<int>;
#else
using i32 = int;
#endif
