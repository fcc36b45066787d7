/* The arithmetic of one particle before and behind the layers of move_poses and weigh_poses, for float or double (REAL, FN:
 * for_each_real.h), and what the layers use. Branch-free; NaN stays NaN. No include guard: a file includes it once for each
 * REAL.
 */
#include "activations.h"

/* A share in [0, 1] chooses a step in [-scale, scale]. */
INLINE REAL FN(stepped)(REAL from, REAL scale, REAL share) { return from + scale * (2 * share - 1); }

/* The angle of a direction, in [-pi, pi) as `wrap` has it. */
INLINE REAL FN(heading_of)(REAL sine, REAL cosine) {
    REAL angle = FN(atan2_real)(sine, cosine);
    return angle >= TOP_ANGLE || angle < -TOP_ANGLE ? -TOP_ANGLE : angle;
}

/* From the gradient of the angle to those of the direction: none where there is no direction, (0, 0). */
INLINE void FN(heading_gradient)(REAL grad, REAL sine, REAL cosine, REAL *grad_sine, REAL *grad_cosine) {
    REAL square = sine * sine + cosine * cosine, g = square == 0 ? 0 : grad / square;
    *grad_sine = g * cosine;
    *grad_cosine = -g * sine;
}

/* log[minimum + (1 - minimum) share], a normal number's, and from its gradient to that of the share. */
INLINE REAL FN(log_of_share)(REAL share, REAL minimum) {
    REAL weight = minimum + (1 - minimum) * share;
    return weight == weight ? (REAL)LN2 * FN(log2_less)(weight, 0) : weight;
}
INLINE REAL FN(share_gradient)(REAL grad, REAL share, REAL minimum) {
    return grad * (1 - minimum) / (minimum + (1 - minimum) * share);
}

/* A value, not below `least`; its gradient, 0 where it was raised or stood there. */
INLINE REAL FN(raised)(REAL value, REAL least) { return value <= least ? least : value; }
INLINE REAL FN(raised_gradient)(REAL grad, REAL value, REAL least) { return value <= least ? 0 : grad; }
