// Runs a Metal kernel's threads as fibers, one OS thread, one threadgroup after the other.
//
// Memory: buffers and threadgroup arrays lie in one reserved range, each flush against an inaccessible page. The checked build
// calls a hook before every access (clang's thread-sanitizer pass, these functions being its runtime); for every byte the
// hooks keep who wrote and read it last and in which interval between barriers. So a race, an uninitialised read and an access
// outside an array are seen at the access, whatever the order of the fibers. The plain build has the inaccessible pages only.
#include "runtime.h"
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

namespace msl {

enum State : unsigned { READY, AT_SIMDGROUP, AT_THREADGROUP, DONE };
constexpr size_t PAGE = 4096, ARENA = size_t(256) << 20, STACK = 64 * 1024, KEPT = size_t(16) << 20;
constexpr int STACK_END = 0xe7;
constexpr unsigned THREADS_MAX = 1024, ARRAYS_MAX = 64, BUFFERS_MAX = 31;

struct Region {
    unsigned char *start;
    size_t bytes;
    bool writable, is_threadgroup;
    char name[48];
};

// Who touched a byte: interval << 32 | simdgroup epoch << 16 | thread. Thread values above: several lanes of one SIMD group
// (SEVERAL | group), or of several groups (MANY).
struct Shadow {
    uint64_t write, read;
};
constexpr uint64_t SEVERAL = 0x8000, MANY = 0xffff;
// Beside a thread: it wrote by an atomic operation.
constexpr uint64_t BY_ATOMIC = 0x4000;

struct Request {
    void (*entry)();
    uint32_t grid[3], threads[3];
    uint32_t order; // 0 forward, 1 reverse, 2 random
    uint32_t poison;
    uint64_t seed;
    uint64_t threadgroup_bytes_max;
    uint64_t argument_bytes[BUFFERS_MAX];
    uint64_t switches, threadgroup_bytes;
    char error[512];
};

static unsigned char *arena, *arena_next;
static Shadow *shadow;
static uint8_t page_region[ARENA / PAGE]; // region + 1
static std::vector<Region> regions;
static int buffers[BUFFERS_MAX], arrays[ARRAYS_MAX], arguments[BUFFERS_MAX];

static Thread threads[THREADS_MAX];
static Exchange exchanges[THREADS_MAX / 32];
static unsigned simd_waiting[THREADS_MAX / 32], simd_size[THREADS_MAX / 32], simd_epoch[THREADS_MAX / 32];
static unsigned simd_done[THREADS_MAX / 32], simd_site[THREADS_MAX / 32];
static unsigned thread_count, waiting, done;
static char *stacks;
static void *main_stack_pointer;
static Request *request;
static uint64_t random_state;
static unsigned exchanges_tried;
static uint32_t interval = 1, dispatch_first, threadgroup_first, fence[2]; // fence by kind: device, threadgroup
static bool failed;

extern "C" {
Thread *tf_current;
void tf_switch(void **from, void *to);
}
#ifndef __x86_64__
#error "the fiber switch is written for x86-64"
#endif
asm(R"(.text
.globl tf_switch
.hidden tf_switch
.type tf_switch,@function
tf_switch:
 pushq %rbp
 pushq %rbx
 pushq %r12
 pushq %r13
 pushq %r14
 pushq %r15
 movq %rsp,(%rdi)
 movq %rsi,%rsp
 popq %r15
 popq %r14
 popq %r13
 popq %r12
 popq %rbx
 popq %rbp
 ret
)");

static uint32_t random_next() {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(random_state >> 33);
}

[[noreturn]] static void leave_dispatch() {
    void *unused;
    tf_switch(&unused, main_stack_pointer);
    abort();
}

// Ends the dispatch; the fibers are never resumed.
[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char *format, ...) {
    char *text = request->error;
    size_t left = sizeof request->error;
    const Thread *me = tf_current;
    int n = snprintf(text, left, "threadgroup (%u, %u, %u), thread %u: ", me->threadgroup_position.x,
        me->threadgroup_position.y, me->threadgroup_position.z, me->flat);
    va_list list;
    va_start(list, format);
    vsnprintf(text + n, left - size_t(n), format, list);
    va_end(list);
    failed = true;
    leave_dispatch();
}

// ---- order of the fibers

static Thread *choose(unsigned after) {
    unsigned i = request->order == 2 ? random_next() % thread_count : after;
    const bool down = request->order == 1;
    for (unsigned k = 0; k < thread_count; k++) {
        if (down) i = i ? i - 1 : thread_count - 1;
        else i = i + 1 < thread_count ? i + 1 : 0;
        if (threads[i].state == READY) return &threads[i];
    }
    return nullptr;
}

static const char *state_name(unsigned state) {
    return state == AT_SIMDGROUP ? "waits at a SIMD-group operation" : "waits at a threadgroup barrier";
}

static void yield() {
    Thread *me = tf_current, *next = choose(me->flat);
    request->switches++;
    if (next == me) return;
    if (!next) {
        if (done == thread_count) leave_dispatch();
        for (unsigned i = 0; i < thread_count; i++) {
            const Thread &t = threads[i];
            if (t.state == DONE || t.state == me->state) continue;
            fail("divergent flow: this thread %s (line %u) while thread %u %s (line %u)", state_name(me->state),
                me->site / 1024, i, state_name(t.state), t.site / 1024);
        }
        fail("divergent flow: not every thread of its group arrives at line %u", me->site / 1024);
    }
    tf_current = next;
    tf_switch(&me->stack_pointer, next->stack_pointer);
}

extern "C" void tf_meet_threadgroup(unsigned site, unsigned kinds) {
    Thread *me = tf_current;
    if (done) fail("divergent barrier: line %u is reached after another thread has returned", site / 1024);
    for (unsigned i = 0; i < thread_count; i++) {
        if (threads[i].state == AT_THREADGROUP && threads[i].site != site) {
            fail("divergent barrier: line %u is reached here, line %u by thread %u", site / 1024, threads[i].site / 1024, i);
        }
        if (threads[i].state == AT_THREADGROUP) break;
    }
    me->site = site;
    me->state = AT_THREADGROUP;
    if (++waiting == thread_count) {
        for (unsigned i = 0; i < thread_count; i++) threads[i].state = READY;
        waiting = 0;
        interval++;
        for (unsigned kind = 0; kind < 2; kind++) {
            if (kinds >> kind & 1) fence[kind] = interval;
        }
        // Another thread may go first: the last to arrive has no privilege.
        if (request->order == 2) yield();
    } else {
        yield();
    }
}

extern "C" unsigned tf_meet_simdgroup(unsigned site, bool orders_memory) {
    Thread *me = tf_current;
    const unsigned group = me->simdgroup, size = simd_size[group];
    if (simd_done[group]) {
        fail("divergent SIMD-group operation: line %u is reached after another lane has returned", site / 1024);
    }
    // Who waits is at one site, that of the first to arrive.
    if (simd_waiting[group] && simd_site[group] != site) {
        unsigned i = group * 32;
        while (threads[i].state != AT_SIMDGROUP) i++;
        fail("divergent SIMD-group operation: line %u is reached here, line %u by lane %u of the same group", site / 1024,
            threads[i].site / 1024, i & 31);
    }
    simd_site[group] = site;
    me->site = site;
    me->state = AT_SIMDGROUP;
    if (++simd_waiting[group] == size) {
        for (unsigned i = group * 32; i < group * 32 + size; i++) threads[i].state = READY;
        simd_waiting[group] = 0;
        if (orders_memory) simd_epoch[group]++;
        if (request->order == 2) yield();
        return size;
    }
    if (request->order != 0) {
        yield();
        return size;
    }
    // Forward: its own group's lanes first, whose stacks are at hand.
    Thread *const first = threads + group * 32, *next = me;
    for (unsigned i = 1; i < size; i++) {
        next = next + 1 < first + size ? next + 1 : first;
        if (next->state == READY) {
            request->switches++;
            tf_current = next;
            tf_switch(&me->stack_pointer, next->stack_pointer);
            return size;
        }
    }
    yield();
    return size;
}

static void fiber() {
    request->entry();
    Thread *me = tf_current;
    if (waiting) {
        unsigned i = 0;
        while (threads[i].state != AT_THREADGROUP) i++;
        fail("divergent barrier: this thread returns while thread %u waits at line %u", i, threads[i].site / 1024);
    }
    if (simd_waiting[me->simdgroup]) fail("divergent SIMD-group operation: this lane returns while others of its group wait");
    me->state = DONE;
    simd_done[me->simdgroup]++;
    if (++done == thread_count) leave_dispatch();
    yield();
    abort();
}

// ---- memory

[[noreturn]] static void give_up(const char *what) {
    fprintf(stderr, "metal-emulator: the system refuses to %s memory\n", what);
    abort();
}

static int map_region(size_t bytes, bool writable, bool is_threadgroup, const char *name) {
    const size_t pages = (bytes + PAGE - 1) / PAGE;
    if (arena_next + (pages + 1) * PAGE > arena + ARENA || regions.size() == 254) {
        fprintf(stderr, "metal-emulator: a launch's memory exceeds %zu bytes or 254 arrays\n", ARENA);
        abort();
    }
    unsigned char *first = arena_next;
    arena_next += (pages + 1) * PAGE; // the page between regions stays inaccessible
    if (pages && mprotect(first, pages * PAGE, PROT_READ | PROT_WRITE)) give_up("open");
    Region region{first + pages * PAGE - (bytes + 15) / 16 * 16, bytes, writable, is_threadgroup, {}};
    snprintf(region.name, sizeof region.name, "%s", name);
    regions.push_back(region);
    for (size_t p = 0; p < pages; p++) page_region[(first - arena) / PAGE + p] = uint8_t(regions.size());
    return int(regions.size()) - 1;
}

static void poison(const Region &region) {
    for (size_t i = 0; i < region.bytes; i++) region.start[i] = reinterpret_cast<unsigned char *>(&request->poison)[i % 4];
}

extern "C" void *tf_buffer(unsigned index) {
    if (index >= BUFFERS_MAX || buffers[index] < 0) fail("buffer %u is not bound", index);
    return regions[size_t(buffers[index])].start;
}

static unsigned char *threadgroup_region(int &slot, size_t bytes, const char *name) {
    if (slot < 0) {
        request->threadgroup_bytes += (bytes + 15) / 16 * 16;
        if (request->threadgroup_bytes > request->threadgroup_bytes_max) {
            fail("threadgroup memory: %s makes %llu bytes, the chip has %llu", name,
                (unsigned long long)request->threadgroup_bytes, (unsigned long long)request->threadgroup_bytes_max);
        }
        slot = map_region(bytes, true, true, name);
        poison(regions[size_t(slot)]);
    }
    return regions[size_t(slot)].start;
}

extern "C" void *tf_threadgroup_array(unsigned id, size_t bytes, const char *name) {
    if (id >= ARRAYS_MAX) abort();
    return threadgroup_region(arrays[id], bytes, name);
}

extern "C" void *tf_threadgroup_argument(unsigned index) {
    if (index >= BUFFERS_MAX || !request->argument_bytes[index]) fail("threadgroup(%u) has no length", index);
    char name[32];
    snprintf(name, sizeof name, "threadgroup(%u)", index);
    return threadgroup_region(arguments[index], request->argument_bytes[index], name);
}

extern "C" void *tf_dynamic_memory() { return request->argument_bytes[0] ? tf_threadgroup_argument(0) : nullptr; }

static bool parts_thread(uint64_t stamp, const Thread *me) {
    uint64_t who = stamp & 0xffff;
    if (who == MANY) return true;
    if (!(who & SEVERAL)) who &= ~BY_ATOMIC;
    if (who & SEVERAL) return !((who & 0x7fff) == me->simdgroup && (stamp >> 16 & 0xffff) < simd_epoch[me->simdgroup]);
    if (who == me->flat) return false;
    return !(who / 32 == me->simdgroup && (stamp >> 16 & 0xffff) < simd_epoch[me->simdgroup]);
}

// Whether the access that left `stamp` may happen at the same time as one of this thread.
static bool concurrent(uint64_t stamp, const Region &region, const Thread *me) {
    const uint32_t then = uint32_t(stamp >> 32);
    if (then < dispatch_first) return false;
    if (then < threadgroup_first) return !region.is_threadgroup; // threadgroups of a launch are never ordered
    if (then < fence[region.is_threadgroup]) return false;
    return parts_thread(stamp, me);
}

static void name_stamp(uint64_t stamp, char *text, size_t size) {
    unsigned who = unsigned(stamp & 0xffff);
    if (!(who & SEVERAL)) who &= ~unsigned(BY_ATOMIC);
    if (uint32_t(stamp >> 32) < threadgroup_first) snprintf(text, size, "another threadgroup");
    else if (who & SEVERAL) snprintf(text, size, "several threads");
    else snprintf(text, size, "thread %u", who);
}

// The region that an address between regions was probably meant for.
static const Region &nearest(const unsigned char *at) {
    const Region *best = &regions[0];
    ptrdiff_t least = PTRDIFF_MAX;
    for (const Region &region : regions) {
        const ptrdiff_t distance = at < region.start ? region.start - at : at - region.start - ptrdiff_t(region.bytes);
        if (distance < least) best = &region, least = distance;
    }
    return *best;
}

enum Kind { READ, WRITE, ATOMIC_LOAD, ATOMIC_STORE, ATOMIC };

static void touch(const void *address, size_t bytes, Kind kind, bool aligned) {
    const unsigned char *at = static_cast<const unsigned char *>(address);
    if (at < arena || at >= arena + ARENA || regions.empty()) return;
    const size_t offset = size_t(at - arena);
    const bool writes = kind != READ && kind != ATOMIC_LOAD, is_atomic = kind >= ATOMIC_LOAD;
    const char *verb = writes ? "writes" : "reads";
    const unsigned number = page_region[offset / PAGE];
    const Region &region = number ? regions[number - 1] : nearest(at);
    const ptrdiff_t first = at - region.start;
    if (first < 0 || size_t(first) + bytes > region.bytes) {
        fail("%s %zu bytes at byte %td of %s, which has %zu bytes", verb, bytes, first, region.name, region.bytes);
    }
    if (aligned && (uintptr_t(at) & (bytes - 1))) {
        fail("misaligned: %s %zu bytes at byte %td of %s", verb, bytes, first, region.name);
    }
    if (writes && !region.writable) fail("writes to %s, which is read-only", region.name);
    const Thread *me = tf_current;
    const uint64_t stamp = uint64_t(interval) << 32 | uint64_t(simd_epoch[me->simdgroup] & 0xffff) << 16 | me->flat;
    char other[32];
    for (size_t i = 0; i < bytes; i++) {
        Shadow &seen = shadow[offset + i];
        if (region.is_threadgroup && kind != WRITE && kind != ATOMIC_STORE && uint32_t(seen.write >> 32) < threadgroup_first) {
            fail("uninitialised: reads byte %td of %s, which nobody wrote", first + ptrdiff_t(i), region.name);
        }
        const bool was_atomic = (seen.write & SEVERAL) == 0 && (seen.write & BY_ATOMIC) != 0;
        if (!(is_atomic && was_atomic) && concurrent(seen.write, region, me)) {
            name_stamp(seen.write, other, sizeof other);
            fail("race: %s byte %td of %s, which %s wrote without a barrier between", verb, first + ptrdiff_t(i), region.name,
                other);
        }
        if (writes && concurrent(seen.read, region, me)) {
            name_stamp(seen.read, other, sizeof other);
            fail("race: writes byte %td of %s, which %s read without a barrier between", first + ptrdiff_t(i), region.name,
                other);
        }
        if (writes) {
            seen.write = is_atomic ? stamp | BY_ATOMIC : stamp;
            continue;
        }
        // Atomic loads race with plain writes only, which they have been held against.
        if (is_atomic) continue;
        const uint64_t who = seen.read & 0xffff;
        const bool same_interval = uint32_t(seen.read >> 32) == interval;
        if (!same_interval || who == me->flat) seen.read = stamp;
        else if (who == MANY || (who & SEVERAL ? (who & 0x7fff) : who / 32) != me->simdgroup) seen.read |= MANY;
        else seen.read = (stamp & ~uint64_t(0xffff)) | SEVERAL | me->simdgroup;
    }
}

// Atomic operations are ordered with each other, and race with plain access.
extern "C" void tf_check_atomic(const void *address, unsigned bytes, bool reads) {
    touch(address, bytes, reads ? ATOMIC : ATOMIC_STORE, true);
    if (uintptr_t(address) & (bytes - 1)) fail("misaligned atomic operation");
}
extern "C" void tf_check_atomic_load(const void *address, unsigned bytes) {
    touch(address, bytes, ATOMIC_LOAD, true);
    if (uintptr_t(address) & (bytes - 1)) fail("misaligned atomic operation");
}
extern "C" bool tf_may_succeed() { return (exchanges_tried++ & 1) != 0; }

#define HOOKS(n)                                                                                       \
    extern "C" void __tsan_read##n(void *a) { touch(a, n, READ, true); }                               \
    extern "C" void __tsan_write##n(void *a) { touch(a, n, WRITE, true); }                             \
    extern "C" void __tsan_read_write##n(void *a) { touch(a, n, READ, true), touch(a, n, WRITE, true); } \
    extern "C" void __tsan_unaligned_read##n(void *a) { touch(a, n, READ, false); }                    \
    extern "C" void __tsan_unaligned_write##n(void *a) { touch(a, n, WRITE, false); }                  \
    extern "C" void __tsan_unaligned_read_write##n(void *a) { touch(a, n, READ, false), touch(a, n, WRITE, false); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    touch(from, bytes, READ, false), touch(to, bytes, WRITE, false);
    return memcpy(to, from, bytes);
}
extern "C" void *__tsan_memmove(void *to, const void *from, size_t bytes) {
    touch(from, bytes, READ, false), touch(to, bytes, WRITE, false);
    return memmove(to, from, bytes);
}
extern "C" void *__tsan_memset(void *to, int value, size_t bytes) {
    touch(to, bytes, WRITE, false);
    return memset(to, value, bytes);
}

// ---- faults of the plain build

static struct sigaction previous_fault;

static void report_fault() { fail("accesses memory outside its buffers and arrays, or writes to a read-only buffer"); }

static void on_fault(int number, siginfo_t *info, void *context) {
    auto *registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
    // Another OS thread's fault is none of the kernel's: fibers have stacks of this library's own.
    const char *stack = reinterpret_cast<const char *>(registers[REG_RSP]);
    const bool in_fiber = request && tf_current && stack >= stacks && stack < stacks + STACK * THREADS_MAX;
    if (!in_fiber) {
        if (previous_fault.sa_flags & SA_SIGINFO) return previous_fault.sa_sigaction(number, info, context);
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    // Continues in report_fault on the fiber's own stack, aligned as at a function's entry.
    registers[REG_RSP] = (registers[REG_RSP] - 256) / 16 * 16 - 8;
    registers[REG_RIP] = greg_t(&report_fault);
}

// ---- what the Rust side calls

// Forgets every region; a new launch begins.
extern "C" __attribute__((visibility("default"))) void tf_reset() {
    if (!arena) {
        arena = static_cast<unsigned char *>(mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        shadow = static_cast<Shadow *>(mmap(
            nullptr, ARENA * sizeof(Shadow), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        stacks = static_cast<char *>(
            mmap(nullptr, STACK * THREADS_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (arena == MAP_FAILED || static_cast<void *>(shadow) == MAP_FAILED || stacks == MAP_FAILED) give_up("reserve");
        arena_next = arena + PAGE;
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &previous_fault);
    }
    const size_t used = size_t(arena_next - arena);
    mprotect(arena, used, PROT_NONE);
    // Every byte is written before it is seen again, so a small launch's pages may stay.
    if (used > KEPT) madvise(arena, used, MADV_DONTNEED);
    memset(page_region, 0, used / PAGE + 1);
    regions.clear();
    arena_next = arena + PAGE;
    for (int &b : buffers) b = -1;
    for (int &a : arrays) a = -1;
    for (int &a : arguments) a = -1;
}

extern "C" __attribute__((visibility("default"))) void *tf_map(uint32_t index, uint64_t bytes, int writable) {
    char name[32];
    snprintf(name, sizeof name, "buffer %u", index);
    buffers[index] = map_region(bytes, writable, false, name);
    return regions[size_t(buffers[index])].start;
}

// As tf_map, for an input that is read where the caller has it, with no guard around it. Outside the arena nothing is
// protected, so it counts as writable.
extern "C" __attribute__((visibility("default"))) void tf_bind(uint32_t index, const void *start, uint64_t bytes) {
    buffers[index] = int(regions.size());
    regions.push_back(Region{static_cast<unsigned char *>(const_cast<void *>(start)), size_t(bytes), true, false, {}});
}

// Runs the whole grid. 0, or 1 with the first error's text.
extern "C" __attribute__((visibility("default"))) int tf_dispatch(Request *r) {
    request = r;
    failed = false;
    random_state = r->seed;
    exchanges_tried = 0;
    thread_count = r->threads[0] * r->threads[1] * r->threads[2];
    dispatch_first = ++interval;
    for (const Region &region : regions) {
        if (!region.writable) {
            unsigned char *first = arena + (region.start - arena) / ptrdiff_t(PAGE) * ptrdiff_t(PAGE);
            mprotect(first, size_t(region.start + region.bytes - first), PROT_READ);
        }
    }
    const uint32_t group_count = r->grid[0] * r->grid[1] * r->grid[2], groups = (thread_count + 31) / 32;
    std::vector<uint32_t> order(group_count);
    for (uint32_t g = 0; g < group_count; g++) order[g] = r->order == 1 ? group_count - 1 - g : g;
    if (r->order == 2) {
        for (uint32_t g = group_count; g > 1; g--) std::swap(order[g - 1], order[random_next() % g]);
    }
    for (uint32_t g : order) {
        threadgroup_first = ++interval;
        fence[0] = fence[1] = interval;
        waiting = done = 0;
        for (const Region &region : regions) {
            if (region.is_threadgroup) poison(region);
        }
        for (unsigned s = 0; s < groups; s++) {
            simd_waiting[s] = simd_done[s] = simd_epoch[s] = 0;
            simd_size[s] = thread_count - s * 32 < 32 ? thread_count - s * 32 : 32;
        }
        for (unsigned i = 0; i < thread_count; i++) {
            Thread &t = threads[i];
            t = Thread{};
            t.flat = i, t.lane = i % 32, t.simdgroup = i / 32, t.simdgroups = groups;
            t.exchange = &exchanges[t.simdgroup];
            t.position_in_threadgroup =
                Vector3{i % r->threads[0], i / r->threads[0] % r->threads[1], i / r->threads[0] / r->threads[1]};
            t.threadgroup_position = Vector3{g % r->grid[0], g / r->grid[0] % r->grid[1], g / r->grid[0] / r->grid[1]};
            t.threads_per_threadgroup = Vector3{r->threads[0], r->threads[1], r->threads[2]};
            t.threadgroups = Vector3{r->grid[0], r->grid[1], r->grid[2]};
            t.grid = t.threads_per_threadgroup * t.threadgroups;
            t.position_in_grid = t.threadgroup_position * t.threads_per_threadgroup + t.position_in_threadgroup;
            memset(stacks + STACK * i, STACK_END, 16);
            // Different offsets, so that equal variables of the fibers don't share a cache set.
            void **top = reinterpret_cast<void **>(stacks + STACK * (i + 1) - (i * 7 % 16) * 128);
            *--top = nullptr;
            *--top = reinterpret_cast<void *>(fiber);
            for (int k = 0; k < 6; k++) *--top = nullptr;
            t.stack_pointer = top;
        }
        Thread *first = choose(r->order == 1 ? 0 : thread_count - 1);
        tf_current = first;
        tf_switch(&main_stack_pointer, first->stack_pointer);
        if (failed) break;
        for (unsigned i = 0; i < thread_count; i++) {
            // Not a guard page a stack: a process may load more libraries than it may have mappings.
            for (unsigned k = 0; k < 16; k++) {
                if (static_cast<unsigned char>(stacks[STACK * i + k]) != STACK_END) give_up("hold a thread's variables in its");
            }
        }
    }
    tf_current = nullptr;
    request = nullptr;
    return failed;
}

} // namespace msl
