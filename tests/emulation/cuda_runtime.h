// CUDA for g++: what the .cu files use of <cuda_runtime.h>, so that they run on the host, where sanitizers and the whole test
// suite can look at them. A folder before the toolkit's on the include path makes the difference; the kernels are the same
// text.
//
// One block runs at a time, each of its threads as a fiber (emulation.cpp). Barriers and warp operations are checked: all
// threads at one line, no lane missing that a mask names. Shared memory has its exact size and is NaN when a block starts.
// Not seen: what runs between blocks, the memory model, what nvcc makes of the code, and time.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

// Of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
extern void *block_memory;

namespace emulation {
enum Operation { SYNC_WARP, SHUFFLE, VOTE };
enum class Line : int;
void barrier(int line);
int barrier_vote(int line, int predicate); // how many threads say yes
// A warp operation of the lanes in mask; shuffle returns the value of lane `from`, vote the lanes whose value is not 0.
uint64_t warp(unsigned mask, Operation operation, Line line, uint64_t value, int from);
int run(dim3 blocks, dim3 threads, size_t shared, void (*kernel)(const void *), const void *parameters);

template <typename T> T shuffle(unsigned mask, Line line, T value, int from) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = warp(mask, SHUFFLE, line, bits, from);
    memcpy(&value, &bits, sizeof value);
    return value;
}
} // namespace emulation

#define __syncthreads() emulation::barrier(__LINE__)
#define __syncthreads_count(predicate) emulation::barrier_vote(__LINE__, (predicate) != 0)

// Warp operations take the line they are called at, by a type that no number is taken for.
#define AT emulation::Line line = emulation::Line(__builtin_LINE())
inline void __syncwarp(unsigned mask = ~0u, AT) { emulation::warp(mask, emulation::SYNC_WARP, line, 0, 0); }
template <typename T> T __shfl_sync(unsigned mask, T value, int lane, AT) {
    return emulation::shuffle(mask, line, value, lane & 31);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int bits, AT) {
    return emulation::shuffle(mask, line, value, (int)(threadIdx.x % 32) ^ bits);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, AT) {
    int lane = (int)(threadIdx.x % 32);
    return emulation::shuffle(mask, line, value, lane >= (int)delta ? lane - (int)delta : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, AT) {
    return (unsigned)emulation::warp(mask, emulation::VOTE, line, predicate != 0, 0);
}
#undef AT

// Integers only: sums of floats in the order of arrival are not the same twice.
template <typename T> T atomicAdd(T *address, T value) {
    static_assert(static_cast<T>(0.5) == 0, "atomicAdd of a floating-point number");
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline int __ffs(int x) { return __builtin_ffs(x); }

// The run-time. A kernel that fails says so on stderr and ends the process: there is no way to go on from there.
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoKernelImageForDevice = 209
};
typedef struct CUstream_st *cudaStream_t;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    void *attrs;
    unsigned numAttrs;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
inline cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int bytes) {
    return bytes <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
inline cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
    *value = 227 * 1024;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t status) {
    return status == cudaErrorInvalidValue ? "invalid argument" : "invalid configuration argument";
}
inline cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t) {
    memset(address, value, bytes);
    return cudaSuccess;
}
template <typename P, typename Q>
static cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*kernel)(P), const Q &parameters) {
    struct Job {
        void (*kernel)(P);
        P parameters;
    } job = {kernel, parameters};
    auto body = [](const void *job) { ((const Job *)job)->kernel(((const Job *)job)->parameters); };
    return (cudaError_t)emulation::run(c->gridDim, c->blockDim, c->dynamicSmemBytes, body, &job);
}
