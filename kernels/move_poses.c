/* A form of small_network, whose passes do the work (small_network_poses.h). Contract: move_poses.h. */
#include "move_poses.h"

void move_poses_form(SmallNetwork *p, const void *scale) {
    p->form = NETWORK_MOVES_POSES;
    p->C = 2; /* sine and cosine */
    p->scale = scale;
}
