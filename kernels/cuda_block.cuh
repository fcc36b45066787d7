/* What every .cu file is written with: the launch, shared memory, and reductions and scans of a block.
 *
 * Blocks are one-dimensional, of whole warps. Shared memory is dynamic: shared_memory<T>() is its start, in units of T, so that
 * its size is exact (tests/emulation finds what lies beyond). Everything is deterministic: a reduction has one order.
 * Source of the shuffle scan: Hillis & Steele 1986, in warps, then over the warps' sums.
 */
#ifndef MDPS_CUDA_BLOCK_CUH
#define MDPS_CUDA_BLOCK_CUH
#include <cuda_runtime.h>
#include <stdint.h>

#include "clones.h"
#include "cuda_launch.h"

#define DEVICE static __device__ __forceinline__

enum { WARP = 32 };
#define FULL_WARP 0xffffffffu

/* Lets a kernel have more than 48 KiB. The limit becomes the device's own, not `shared`, since another thread of the host may
 * be about to launch the same kernel with more. */
static inline cudaError_t allow_shared(const void *kernel, size_t shared) {
    int device, most;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess) return status;
    return shared > (size_t)most ? cudaErrorInvalidValue
                                 : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

/* kernel<<<blocks, threads, shared, stream>>>(parameters). The error of a failed launch is returned and not left behind. */
template <typename P>
static int launch(void (*kernel)(P), int64_t blocks, int threads, size_t shared, void *stream, const P &parameters) {
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = (cudaStream_t)stream;
    cudaError_t status = cudaSuccess;
    if (shared > 48 * 1024) status = allow_shared((const void *)kernel, shared);
    if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kernel, parameters);
    if (status != cudaSuccess) (void)cudaGetLastError();
    return status;
}

/* For kernels with a thread for each of n numbers: their parameters, and their launch. */
template <typename P> struct Numbers {
    P p;
    int64_t n;
};
template <typename P> static int launch_numbers(void (*kernel)(Numbers<P>), const void *parameters, int64_t n, void *stream) {
    return launch(kernel, (n + 255) / 256, 256, 0, stream, Numbers<P>{*(const P *)parameters, n});
}

#ifdef __CUDACC__
extern __shared__ double2 block_memory[];
#endif
template <typename T> DEVICE T *shared_memory() { return (T *)block_memory; }

DEVICE int lane_of_warp() { return threadIdx.x % WARP; }
DEVICE int warp_of_block() { return threadIdx.x / WARP; }
DEVICE int64_t thread_of_grid() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }

struct Add {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Larger { /* a NaN is passed over */
    template <typename T> __device__ T operator()(T a, T b) const { return b > a ? b : a; }
};

/* Of the warp's 32 values; every lane gets the same bits. */
template <typename T, typename Op> DEVICE T reduce_warp(T value, Op op) {
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) value = op(value, __shfl_xor_sync(FULL_WARP, value, d));
    return value;
}

/* Of the block's values; every thread gets the same bits. `shared` has room for WARP values and may be in use before. */
template <typename T, typename Op> DEVICE T reduce_block(T value, T neutral, Op op, T *shared) {
    value = reduce_warp(value, op);
    __syncthreads();
    if (lane_of_warp() == 0) shared[warp_of_block()] = value;
    __syncthreads();
    return reduce_warp(lane_of_warp() < (int)blockDim.x / WARP ? shared[lane_of_warp()] : neutral, op);
}

/* The sum of the values of the threads before this one, and *total of all. `shared` as above. For integers. */
template <typename T> DEVICE T scan_block(T value, T *total, T *shared) {
    T sum = value;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        T below = __shfl_up_sync(FULL_WARP, sum, d);
        sum += lane_of_warp() >= d ? below : 0;
    }
    __syncthreads();
    if (lane_of_warp() == WARP - 1) shared[warp_of_block()] = sum;
    __syncthreads();
    T of_warp = lane_of_warp() < (int)blockDim.x / WARP ? shared[lane_of_warp()] : 0;
    T before = reduce_warp(lane_of_warp() < warp_of_block() ? of_warp : 0, Add());
    *total = reduce_warp(of_warp, Add());
    return before + sum - value;
}
#endif
