// Threads of a block as fibres: stacks that are switched by hand, one running at a time.
//
// A kernel's thread runs until it waits (a barrier, a shuffle); then the next one starts, on a stack of its own. A stack whose
// thread has ended starts the next thread, so kernels without barriers use a single one and pay for no switch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

// A switch of our own where it is written down, else the C library's, many times slower.
#if !defined(EMULATED_SWITCH)
#if defined(__x86_64__)
#define EMULATED_SWITCH 1
#else
#define EMULATED_SWITCH 0
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !EMULATED_SWITCH
#include <ucontext.h>
#endif

namespace emulated {

constexpr size_t STACK = 256 << 10;  // bytes; kernels hold their tiles in registers, here on the stack

#if EMULATED_SWITCH
extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.type emulated_switch,@function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulated_switch, .-emulated_switch
)");
#endif

struct Fibre {
    char* stack = nullptr;
    void* fake = nullptr;  // the sanitizer's own stack
#if EMULATED_SWITCH
    void* at = nullptr;
#else
    ucontext_t at;
#endif
};

// The two sides of a switch: the scheduler, and the fibre that it has started.
struct Switch {
    Fibre home;
    const void* home_bottom = nullptr;
    size_t home_size = 0;
    Fibre* running = nullptr;

    void prepare(Fibre& f, void (*entry)()) {
        if (!f.stack) f.stack = static_cast<char*>(std::aligned_alloc(64, STACK));
#if EMULATED_SWITCH
        void** top = reinterpret_cast<void**>(f.stack + STACK);
        *--top = nullptr;  // where a called function finds its return address
        *--top = reinterpret_cast<void*>(entry);
        for (int i = 0; i < 6; ++i) *--top = nullptr;
        f.at = top;
#else
        getcontext(&f.at);
        f.at.uc_stack.ss_sp = f.stack;
        f.at.uc_stack.ss_size = STACK;
        makecontext(&f.at, entry, 0);
#endif
    }

    void enter(Fibre& f) {  // from the scheduler
        running = &f;
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(&home.fake, f.stack, STACK);
#endif
        jump(home, f);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(home.fake, nullptr, nullptr);
#endif
    }

    void leave() {  // back to the scheduler
        Fibre& f = *running;
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(&f.fake, home_bottom, home_size);
#endif
        jump(f, home);
        arrived(f.fake);
    }

    void arrived(void* fake) {  // on a fibre's stack, first thing
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake, &home_bottom, &home_size);
#else
        (void)fake;
#endif
    }

  private:
    void jump(Fibre& from, Fibre& to) {
#if EMULATED_SWITCH
        emulated_switch(&from.at, to.at);
#else
        swapcontext(&from.at, &to.at);
#endif
    }
};

}  // namespace emulated
