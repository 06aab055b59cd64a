// One block of threads: who runs, who waits for what, and its shared memory.
//
// Stricter than a device: shared memory starts as NaN in each block, a barrier that a thread leaves out is an error and so is a
// shuffle from a lane that takes no part, copies to shared memory happen as late as they are allowed to, and threads and blocks
// run in an order that the caller chooses (so that a missing barrier shows in one of them).
#pragma once

#include <cstdio>
#include <cstring>
#include <string>

#include "fibres.h"

namespace emulated {

struct Copy {
    char* to;
    const char* from;
    int bytes;  // 0 ends a group
};

struct Exchange {  // a warp's barrier, and what lanes hand each other at it
    unsigned mask = 0, arrived = 0;
    int readers = 0;
    bool complete = false;
    uint64_t value[32];
};

struct Thread {
    enum State { NEW, READY, RUNNING, AT_BARRIER, AT_WARP, ENDED } state = NEW;
    Fibre* fibre = nullptr;
    int line = 0;
    std::vector<Copy> copies;
};

struct Warp {
    std::vector<Exchange*> pending;
};

struct Block {
    Switch turn;
    std::vector<Fibre*> fibres, idle;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Exchange*> spare;
    std::vector<int> ready;
    int self = 0, started = 0, ended = 0, at_barrier = 0, barrier_line = 0;
    int order = 0;  // 0 first to last, 1 last to first, else scattered
    long long serial = 0;
    std::vector<char*> dynamic;
    char* shared = nullptr;
    size_t shared_bytes = 0, static_bytes = 0;
    std::string error;
    void (*body)() = nullptr;  // runs thread `self`
    void (*place)(int) = nullptr;  // sets threadIdx

    int count() const { return static_cast<int>(threads.size()); }

    int nth(int i) const {
        const int n = count();
        if (order == 0) return i;
        if (order == 1) return n - 1 - i;
        return static_cast<int>((static_cast<long long>(i) * 7919 + order) % n);  // 7919 is prime to every block size
    }

    [[noreturn]] void fail(const std::string& what) {
        if (error.empty()) error = "thread " + std::to_string(self) + ": " + what;
        for (;;) turn.leave();  // the scheduler gives up this block
    }

    static Block* of_fibre;
    static void fibre_entry() {
        Block& b = *of_fibre;
        b.turn.arrived(nullptr);
        for (;;) {
            while (b.started < b.count()) {
                b.self = b.nth(b.started++);
                Thread& t = b.threads[static_cast<size_t>(b.self)];
                t.fibre = b.turn.running;
                t.state = Thread::RUNNING;
                b.place(b.self);
                b.body();
                Thread& now = b.threads[static_cast<size_t>(b.self)];
                b.finish_copies(now, 0);
                now.state = Thread::ENDED;
                ++b.ended;
                if (!b.ready.empty()) break;
            }
            b.idle.push_back(b.turn.running);
            b.turn.leave();
        }
    }

    void run() {
        of_fibre = this;
        ++serial;
        started = ended = at_barrier = 0;
        ready.clear();
        for (Thread& t : threads) t.state = Thread::NEW, t.copies.clear();
        while (error.empty() && ended < count()) {
            if (!ready.empty()) {
                self = ready.back();
                ready.pop_back();
                Thread& t = threads[static_cast<size_t>(self)];
                t.state = Thread::RUNNING;
                place(self);
                turn.enter(*t.fibre);
            } else if (started < count()) {
                turn.enter(*next_fibre());
            } else {
                stuck();
            }
        }
        if (!error.empty()) {  // stacks in the middle of something are not used again
            for (Warp& w : warps) {
                for (Exchange* e : w.pending) delete e;
                w.pending.clear();
            }
            idle.clear();
            for (Fibre* f : fibres) std::free(f->stack), delete f;
            fibres.clear();
        }
    }

    void yield(Thread::State state) {
        const int me = self;
        threads[static_cast<size_t>(me)].state = state;
        turn.leave();
    }

    void wake(int thread) {
        threads[static_cast<size_t>(thread)].state = Thread::READY;
        ready.push_back(thread);
    }

    void barrier(int line) {
        Thread& t = threads[static_cast<size_t>(self)];
        t.line = line;
        if (at_barrier == 0) barrier_line = line;
        if (barrier_line != line)
            fail("waits at line " + std::to_string(line) + ", others at line " + std::to_string(barrier_line));
        if (++at_barrier < count()) return yield(Thread::AT_BARRIER);
        at_barrier = 0;
        const int n = count();
        for (int i = n - 1; i >= 0; --i)  // last in, first out: they run in the chosen order
            if (nth(i) != self) wake(nth(i));
    }

    // Waits for the lanes of the mask; the exchange that they share, to be left with `leave`.
    Exchange& meet(unsigned mask, uint64_t value) {
        const int lane = self & 31;
        const size_t number = static_cast<size_t>(self >> 5);
        Warp& warp = warps[number];
        const int lanes = count() - (self & ~31);
        if (lanes < 32) mask &= (1u << lanes) - 1u;
        if (!(mask >> lane & 1u)) fail("calls a warp function whose mask leaves it out");
        Exchange* e = nullptr;
        for (Exchange* p : warp.pending)
            if (!p->complete && p->mask == mask && !(p->arrived >> lane & 1u)) e = p;
        if (!e) {
            if (spare.empty()) spare.push_back(new Exchange);
            e = spare.back();
            spare.pop_back();
            e->mask = mask, e->arrived = 0, e->complete = false, e->readers = 0;
            warp.pending.push_back(e);
        }
        e->value[lane] = value;
        e->arrived |= 1u << lane;
        ++e->readers;
        if (e->arrived != mask) {
            yield(Thread::AT_WARP);
        } else {
            e->complete = true;
            for (int i = 31; i >= 0; --i) {
                const int other = (self & ~31) + (order == 1 ? 31 - i : i);
                if (other != self && (mask >> (other & 31) & 1u)) wake(other);
            }
        }
        return *e;
    }

    void leave(Exchange& e) {
        if (--e.readers) return;
        std::vector<Exchange*>& all = warps[static_cast<size_t>(self >> 5)].pending;
        for (size_t i = 0; i < all.size(); ++i)
            if (all[i] == &e) {
                all[i] = all.back();
                all.pop_back();
                break;
            }
        spare.push_back(&e);
    }

    void finish_copies(Thread& t, int groups_left) {
        int groups = 0;
        for (const Copy& c : t.copies) groups += c.bytes == 0;
        size_t done = 0;
        while (groups > groups_left) {
            const Copy& c = t.copies[done++];
            if (c.bytes) std::memcpy(c.to, c.from, static_cast<size_t>(c.bytes));
            else --groups;
        }
        t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(done));
    }

  private:
    Fibre* next_fibre() {
        if (!idle.empty()) {
            Fibre* f = idle.back();
            idle.pop_back();
            return f;
        }
        fibres.push_back(new Fibre);
        turn.prepare(*fibres.back(), fibre_entry);
        return fibres.back();
    }

    void stuck() {
        for (const Thread& t : threads)
            if (t.state == Thread::AT_BARRIER) {
                error = std::to_string(at_barrier) + " of " + std::to_string(count()) + " threads wait at the barrier of line " +
                        std::to_string(t.line) + ", " + std::to_string(ended) + " have ended";
                return;
            }
        error = "lanes of a warp wait for others that never come";
    }
};

inline Block* Block::of_fibre = nullptr;
inline Block block;

// A variable in static shared memory: its own piece of the heap, so that the sanitizer sees what lies outside of it.
template <class T, int NUMBER>
T& shared_variable() {
    static char* memory = nullptr;
    static long long serial = 0;
    if (!memory) {
        memory = static_cast<char*>(std::aligned_alloc(128, (sizeof(T) + 127) / 128 * 128));
        block.static_bytes += sizeof(T);
    }
    if (serial != block.serial) std::memset(memory, 0xff, sizeof(T));
    serial = block.serial;
    return *reinterpret_cast<T*>(memory);
}

}  // namespace emulated
