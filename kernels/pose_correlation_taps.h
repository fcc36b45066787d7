/* Where a pose puts a template's cells in the map, for float or double (REAL, FN: for_each_real.h): shared by both twins.
 * Positions are doubles once a pose and once a tile, and REAL within: as exact on a map of thousands of pixels as on a small
 * one. No include guard: a file includes it once for each REAL.
 */
#include "real_math.h"

#ifndef MDPS_POSE_CORRELATION_TAPS_H
#define MDPS_POSE_CORRELATION_TAPS_H
typedef struct {
    double u, v, cosine, sine;
    bool finite;
} PoseTurn;

INLINE double within(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

/* sin and cos as angle_math.h has them, in double whatever REAL is. */
INLINE void pose_sine_cosine(double theta, double *sine, double *cosine) {
    const double w = 2 * turns_f64(theta), t = fabs(w), u = t > 0.5 ? copysign(1 - t, w) : w, c = cospi_poly_f64(u * u);
    *sine = u * sinpi_over_f64(u * u);
    *cosine = t > 0.5 ? -c : c;
}
#endif

/* The pose in pixels whose centres are integers. */
INLINE PoseTurn FN(turn_of)(const PoseCorrelation *p, const REAL *pose) {
    PoseTurn turn = {0, 0, 1, 0, false};
    turn.finite = pose[0] * 0 == 0 && pose[1] * 0 == 0 && pose[2] * 0 == 0;
    if (!turn.finite) return turn;
    turn.u = within(pose[0] - p->shift, -POSE_FAR, (double)p->W + POSE_FAR);
    turn.v = within(pose[1] - p->shift, -POSE_FAR, (double)p->H + POSE_FAR);
    pose_sine_cosine(pose[2], &turn.sine, &turn.cosine);
    return turn;
}

/* One axis of `size` pixels at i0 + z: the first of its two taps, moved into the map; the weights follow it, and so do their
 * slopes. Where size is 1 the second tap has weight 0 and is not there. One comparison a line: gcc 12 vectorises no && here. */
typedef struct {
    REAL left, right, left_slope, right_slope;
    int32_t first;
} FN(Axis);

INLINE FN(Axis) FN(axis_of)(REAL z, int32_t i0, int32_t size, bool replicate) {
    const REAL f = floor(z), t = z - f;
    const int32_t i = (int32_t)f + i0, last = size > 1 ? size - 2 : 0, end = size - 1;
    FN(Axis) a;
    a.first = i < 0 ? 0 : i;
    a.first = a.first > last ? last : a.first;
    if (replicate) {
        const REAL only = size == 1 ? 1 : 0, from_first = i == 0 ? t : 1;
        REAL slope = i < 0 ? 0 : 1;
        slope = i >= end ? 0 : slope;
        slope = from_first == 0 ? 0 : slope;
        a.left = i >= end ? only : 1 - t;
        a.left = i < 0 ? 1 : a.left;
        a.right = 1 - a.left;
        a.left_slope = -slope, a.right_slope = slope;
    } else {
        const int32_t first = a.first;
        REAL l = i < 0 ? 0 : 1 - t, r = i < -1 ? 0 : t, dl = i < 0 ? 0 : -1, dr = i < -1 ? 0 : 1;
        l = i > end ? 0 : l;
        r = i >= end ? 0 : r;
        dl = i > end ? 0 : dl;
        dr = i >= end ? 0 : dr;
        a.left = i < first ? r : l;
        a.left = i > first ? 0 : a.left;
        a.right = i > first ? l : r;
        a.right = i < first ? 0 : a.right;
        a.left_slope = i < first ? dr : dl;
        a.left_slope = i > first ? 0 : a.left_slope;
        a.right_slope = i > first ? dl : dr;
        a.right_slope = i < first ? 0 : a.right_slope;
    }
    return a;
}
