/* Poses (x, y, heading) moved by a small network that sees where they head: the form NETWORK_MOVES_POSES of small_network.h,
 * where the sizes, the layers and the passes are described.
 *
 *   x       (B, N, 3)    poses, heading in radians, of any size
 *   extra   (B, N, E)    noise of each particle
 *   scale   (4)          the largest change of x, y, sine and cosine
 *   y       (B, N, 3)    moved poses, heading in [-pi, pi)
 *
 * The layers map (sin heading, cos heading), two inputs, with extra to four shares u in [0, 1]. Then
 *     (x, y) + scale (2 u - 1)   and the angle of (sin heading, cos heading) + scale (2 u - 1).
 * No gradient flows through the angle of (0, 0). grad_x is that of the poses, scale has none.
 * Source: the paper's dynamics of the bearings-only task. Cost: of the network, and 1 sine, cosine and arctangent a particle.
 */
#ifndef MDPS_MOVE_POSES_H
#define MDPS_MOVE_POSES_H
#include "small_network.h"

/* Sets what small_network_layout has to know. */
void move_poses_form(SmallNetwork *p, const void *scale);
LAUNCHER int move_poses_forward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int move_poses_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
