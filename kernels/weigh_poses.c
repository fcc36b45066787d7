/* A form of small_network, whose passes do the work (small_network_poses.h). Contract: weigh_poses.h. */
#include "weigh_poses.h"

void weigh_poses_form(SmallNetwork *p, double minimum, double least_extra) {
    p->form = NETWORK_WEIGHS_POSES;
    p->C = 4; /* x, y, sine and cosine */
    p->minimum = minimum;
    p->least_extra = least_extra;
}
