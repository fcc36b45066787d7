/* Contract: cuda_launch.h. */
#include "cuda_launch.h"

#include <cuda_runtime.h>

const char *cuda_error_text(int status) {
    if (status == cudaErrorNoKernelImageForDevice)
        return "this GPU is older than the architectures that mdps was built for: build with CMAKE_CUDA_ARCHITECTURES=native";
    if (status == cudaErrorInvalidConfiguration) return "too large for one launch: more than 2^31 - 1 blocks";
    return cudaGetErrorString((cudaError_t)status);
}

int cuda_select_device(int index) { return cudaSetDevice(index); }
