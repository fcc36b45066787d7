/* A multilayer perceptron on every particle on the GPU: small_network_passes.cuh. Contract: small_network.h. */
#include "small_network.h"

enum { FORM = NETWORK_ALONE };
#define MDPS_FILE "small_network_passes.cuh"
#include "for_each_real.h"

int small_network_forward_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const SmallNetwork *p = (const SmallNetwork *)parameters;
    return is_double ? launch_forward_f64(*p, stream) : launch_forward_f32(*p, stream);
}

int small_network_backward_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const SmallNetwork *p = (const SmallNetwork *)parameters;
    return is_double ? launch_backward_f64(*p, stream) : launch_backward_f32(*p, stream);
}
