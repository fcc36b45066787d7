/* CLONES before a function compiles it three times, for AVX-512, AVX2 + FMA and the baseline of x86-64; the loader takes the
 * best one that the machine has. What such a function calls has to be INLINE, or it stays baseline code. CLONES_AVX2 leaves out
 * AVX-512, for loops over 8 channels: 512-bit instructions beside 256-bit ones cost them more than they save.
 * MDPS_NO_CLONES: sanitizer builds, whose run-time is not up yet when the loader chooses.
 * C++ is CUDA here: the mathematics that both twins share is for the device as well. */
#ifndef MDPS_CLONES_H
#define MDPS_CLONES_H

#ifdef __cplusplus
#include <cuda_runtime.h>
#define INLINE static __host__ __device__ __forceinline__
#else
#define INLINE static inline __attribute__((always_inline))
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(MDPS_NO_CLONES) && !defined(__cplusplus)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define CLONES_AVX2 __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define CLONES
#define CLONES_AVX2
#endif

#endif
