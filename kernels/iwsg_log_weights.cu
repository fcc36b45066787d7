/* Contract: iwsg_log_weights.h. */
#include "iwsg_log_weights.h"

#include <cuda_runtime.h>

int iwsg_log_weights_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    const IwsgLogWeights *p = (const IwsgLogWeights *)parameters;
    return cudaMemsetAsync(p->log_weights, 0, (size_t)n * (is_double ? 8 : 4), (cudaStream_t)stream);
}
