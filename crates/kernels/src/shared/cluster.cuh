// What blocks of a launch see of each other; after prelude.cuh. Those of a cluster leave words in each other's shared memory:
// compute capability 9.0 and later. Launches on other chips have clusters of one block, and call nothing of that.
#pragma once

// All threads of a cluster's blocks, in two halves. It orders what expect_words did, nothing else.
__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// By one thread, before the blocks have met: `meeting` will have seen `count` words, those of the own block included.
__device__ __forceinline__ void expect_words(u64* meeting, u32 count) {
#if __CUDA_ARCH__ >= 900
    const u32 own = (u32)__cvta_generic_to_shared(meeting);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(own) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(own), "r"(4 * count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Leaves a word in block `rank`, where `to` and `meeting` lie in the caller's own. After the blocks have met.
__device__ __forceinline__ void leave_in_cluster(float* to, u64* meeting, u32 rank, float value) {
#if __CUDA_ARCH__ >= 900
    const u32 own_to = (u32)__cvta_generic_to_shared(to), own_meeting = (u32)__cvta_generic_to_shared(meeting);
    u32 there, counted;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own_to), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(own_meeting), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 :
                 : "r"(there), "r"(to_bits(value)), "r"(counted)
                 : "memory");
#endif
}

// Until the words are there.
__device__ __forceinline__ void wait_for_words(u64* meeting) {
#if __CUDA_ARCH__ >= 900
    const u32 own = (u32)__cvta_generic_to_shared(meeting);
    u32 done = 0;
    while (done == 0) {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(own)
                     : "memory");
    }
#endif
}

// Four words that another block left before it arrived.
__device__ __forceinline__ float4 left_quad(float4* from) {
    float4 v;
#ifdef TF_EMULATED
    u32* const words = (u32*)from;
    v.x = from_bits(left_word(words));
    v.y = from_bits(left_word(words + 1));
    v.z = from_bits(left_word(words + 2));
    v.w = from_bits(left_word(words + 3));
#else
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
#endif
    return v;
}
