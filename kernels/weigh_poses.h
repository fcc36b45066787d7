/* Log-weights of poses (x, y, heading) by a small network: the form NETWORK_WEIGHS_POSES of small_network.h, where the sizes,
 * the layers and the passes are described.
 *
 *   x             (B, N, 3)    poses, heading in radians, of any size
 *   extra         (B, N, E)    as there; a number below least_extra is raised to it and has gradient 0
 *   condition     (B, K)       as there
 *   y             (B, N)       log[minimum + (1 - minimum) u], in [log minimum, 0]
 *
 * The layers map (x, y, sin heading, cos heading), four inputs, to one share u in [0, 1]. minimum is in [1e-30, 1): a normal
 * number in either type. grad_x is that of the poses.
 * Source: the paper's measurement models of the bearings-only task. Cost: of the network, and 1 sine, cosine and logarithm a
 * particle.
 */
#ifndef MDPS_WEIGH_POSES_H
#define MDPS_WEIGH_POSES_H
#include "small_network.h"

/* Sets what small_network_layout has to know. */
void weigh_poses_form(SmallNetwork *p, double minimum, double least_extra);
LAUNCHER int weigh_poses_forward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int weigh_poses_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
