// What the fiber runtime (runtime.cpp) offers to the built-ins (metal_stdlib) and to the generated entry points.
#pragma once
#include <cstddef>
#include <cstdint>

namespace msl {

typedef unsigned Vector3 __attribute__((ext_vector_type(3)));

// Values that the lanes of a SIMD group show each other: two sides used in turn, so that one meeting an operation is enough.
struct Exchange {
    alignas(64) unsigned char side[2][32][16];
};

// One fiber is one GPU thread. Positions have the Metal names.
struct Thread {
    void *stack_pointer;
    Vector3 position_in_grid, position_in_threadgroup, threadgroup_position, threads_per_threadgroup, threadgroups, grid;
    unsigned lane, simdgroup, simdgroups, flat;
    unsigned state, site, parity;
    // Of its SIMD group.
    Exchange *exchange;
};

extern "C" {
extern Thread *tf_current;
void *tf_buffer(unsigned index);
// The array of one threadgroup; every thread gets the same.
void *tf_threadgroup_array(unsigned id, size_t bytes, const char *name);
void *tf_threadgroup_argument(unsigned index);
// The first of them; null where the launch has none.
void *tf_dynamic_memory();
// All threads of the threadgroup meet here. Memory of the named kinds (1 device, 2 threadgroup) is ordered by it.
void tf_meet_threadgroup(unsigned site, unsigned kinds);
// All lanes of the SIMD group meet here; the count of lanes that exist.
unsigned tf_meet_simdgroup(unsigned site, bool orders_memory);
// Ends the dispatch with an error when an atomic operation may not touch these bytes; `reads`: takes their value too.
void tf_check_atomic(const void *address, unsigned bytes, bool reads);
void tf_check_atomic_load(const void *address, unsigned bytes);
// False for every other attempt of a weak exchange.
bool tf_may_succeed();
}

} // namespace msl
