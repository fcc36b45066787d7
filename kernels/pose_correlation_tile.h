/* A tile of 64 cells seen from a pose, for float or double (REAL, FN: for_each_real.h): what forward, backward and the map's
 * gradient share on the CPU.
 *
 * First the cells are lanes: where each lies in the map, into the first-level cache. Then the channels are lanes: four taps of
 * C numbers a cell. A circle around the tile says whether it lies inside of the map, where taps need no tests, or outside,
 * where there is nothing to do, or on the border, where taps are moved into the map and have weights of their own. No include
 * guard: a file includes it once for each REAL.
 */
#include "pose_correlation_taps.h"

#ifndef MDPS_POSE_CORRELATION_TILE_H
#define MDPS_POSE_CORRELATION_TILE_H
enum { POSE_LANES = 8 }; /* channels that are worked on together */
enum { POSE_INSIDE, POSE_BORDER, POSE_OUTSIDE };
typedef struct {
    int where;
    int32_t iu, iv;  /* the pixel that the middle lies in */
    double fu, fv;   /* the middle, from there */
    double xu, xv;   /* the middle, from the pose */
    double v, about; /* its row, and how many rows around it cells can lie in */
} PosePlace;

INLINE PosePlace pose_place(const PoseCorrelation *p, const PoseTile *tile, const PoseTurn *turn) {
    PosePlace a;
    a.xu = tile->x * turn->cosine - tile->y * turn->sine;
    a.xv = tile->x * turn->sine + tile->y * turn->cosine;
    const double r = tile->radius + 1e-3, u = turn->u + a.xu, v = turn->v + a.xv, below_u = floor(u), below_v = floor(v);
    const double right = (double)(p->W - 1), bottom = (double)(p->H - 1);
    a.iu = (int32_t)below_u, a.iv = (int32_t)below_v;
    a.fu = u - below_u, a.fv = v - below_v;
    a.v = v, a.about = r;
    if (u - r > 0 && v - r > 0 && u + r < right && v + r < bottom) a.where = POSE_INSIDE;
    else if (!p->replicate && (u + r < -1 || v + r < -1 || u - r > right + 1 || v - r > bottom + 1)) a.where = POSE_OUTSIDE;
    else a.where = POSE_BORDER;
    return a;
}
#endif

/* Of the cells of a tile: fractions, or weights and slopes of taps on the border; the first tap's pixel, from the middle's
 * pixel (inside) or from the map's first (on the border); and the cell from the middle, turned: its derivatives by theta. */
typedef struct {
    REAL fx[POSE_TILE], fy[POSE_TILE], xu[POSE_TILE], xv[POSE_TILE];
    int32_t pixel[POSE_TILE];
    REAL wu[2][POSE_TILE], wv[2][POSE_TILE], du[2][POSE_TILE], dv[2][POSE_TILE]; /* on the border */
} FN(Taps);

INLINE void FN(taps_inside)(FN(Taps) *restrict q, const REAL *restrict x, const REAL *restrict y, const PosePlace *a,
                        const PoseTurn *turn, int32_t W) {
    const REAL c = (REAL)turn->cosine, s = (REAL)turn->sine, fu = (REAL)a->fu, fv = (REAL)a->fv;
#pragma omp simd
    for (int i = 0; i < POSE_TILE; i++) {
        const REAL xu = x[i] * c - y[i] * s, xv = x[i] * s + y[i] * c, u = fu + xu, v = fv + xv, a = floor(u), b = floor(v);
        q->fx[i] = u - a, q->fy[i] = v - b;
        q->xu[i] = xu, q->xv[i] = xv;
        q->pixel[i] = (int32_t)b * W + (int32_t)a;
    }
}

INLINE void FN(taps_border)(FN(Taps) *restrict q, const REAL *restrict x, const REAL *restrict y, const PosePlace *a,
                        const PoseTurn *turn, int32_t W, int32_t H, bool replicate) {
    const REAL c = (REAL)turn->cosine, s = (REAL)turn->sine, fu = (REAL)a->fu, fv = (REAL)a->fv;
    const int32_t iu = a->iu, iv = a->iv;
#pragma omp simd
    for (int i = 0; i < POSE_TILE; i++) {
        const REAL xu = x[i] * c - y[i] * s, xv = x[i] * s + y[i] * c;
        const FN(Axis) u = FN(axis_of)(fu + xu, iu, W, replicate), v = FN(axis_of)(fv + xv, iv, H, replicate);
        q->xu[i] = xu, q->xv[i] = xv;
        q->wu[0][i] = u.left, q->wu[1][i] = u.right, q->du[0][i] = u.left_slope, q->du[1][i] = u.right_slope;
        q->wv[0][i] = v.left, q->wv[1][i] = v.right, q->dv[0][i] = v.left_slope, q->dv[1][i] = v.right_slope;
        q->pixel[i] = v.first * W + u.first;
    }
}

/* Where a tile's cells lie. */
INLINE void FN(take_taps)(FN(Taps) *q, const PoseCorrelation *p, int64_t i, const PosePlace *a, const PoseTurn *turn) {
    const REAL *x = (const REAL *)p->x + i, *y = (const REAL *)p->y + i;
    if (a->where == POSE_INSIDE) FN(taps_inside)(q, x, y, a, turn, (int32_t)p->W);
    else if (p->replicate) FN(taps_border)(q, x, y, a, turn, (int32_t)p->W, (int32_t)p->H, true);
    else FN(taps_border)(q, x, y, a, turn, (int32_t)p->W, (int32_t)p->H, false);
}

/* The pixel that taps are counted from. */
INLINE int64_t FN(origin_of)(const PoseCorrelation *p, const PosePlace *a) {
    return a->where == POSE_INSIDE ? a->iv * p->W + a->iu : 0;
}

/* Numbers from a tap to the one on its right and below; 0 where the map has one column or row. */
INLINE int64_t FN(right_of)(const PoseCorrelation *p, int64_t C) { return C * (p->W > 1); }
INLINE int64_t FN(below)(const PoseCorrelation *p, int64_t C) { return C * p->W * (p->H > 1); }

INLINE REAL FN(sum_lanes)(const REAL *a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
