/* The form of small_network that moves poses: small_network_poses.cuh. Contract: move_poses.h. */
#include "move_poses.h"

enum { FORM = NETWORK_MOVES_POSES };
#define MDPS_FILE "small_network_passes.cuh"
#include "for_each_real.h"

int move_poses_forward_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const SmallNetwork *p = (const SmallNetwork *)parameters;
    return is_double ? launch_forward_f64(*p, stream) : launch_forward_f32(*p, stream);
}

int move_poses_backward_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const SmallNetwork *p = (const SmallNetwork *)parameters;
    return is_double ? launch_backward_f64(*p, stream) : launch_backward_f32(*p, stream);
}
