/* A tile of 64 cells seen from a pose, for float or double (REAL, FN: for_each_real.h): what forward, backward and the map's
 * gradient share on the CPU.
 *
 * First the cells are lanes: where each lies in the map, into the first-level cache. Then the channels are lanes: four taps of
 * C numbers a cell. A circle around the tile says whether it lies inside of the map, where taps need no tests, or outside,
 * where there is nothing to do, or on the border, where taps are moved into the map and have weights of their own. Users look
 * at a tile before they work on the one looked at before, so that nothing waits until taps are known. No include guard: a file
 * includes it once for each REAL.
 */
#include "pose_correlation_taps.h"

#ifndef MDPS_POSE_CORRELATION_TILE_H
#define MDPS_POSE_CORRELATION_TILE_H
enum { POSE_LANES = 8 };      /* channels that are worked on together */
enum { POSE_NEAR = 1 << 24 }; /* numbers between taps that a float counts exactly; farther tiles are as if on the border */
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
    const bool near = (r + 2) * (double)((p->W + 1) * p->C) < POSE_NEAR;
    if (u - r > 0 && v - r > 0 && u + r < right && v + r < bottom && near) a.where = POSE_INSIDE;
    else if (!p->replicate && (u + r < -1 || v + r < -1 || u - r > right + 1 || v - r > bottom + 1)) a.where = POSE_OUTSIDE;
    else a.where = POSE_BORDER;
    return a;
}
#endif

/* A tile as a pose sees it. Of its cells: bytes from `map` to the first tap (inside), or the pixel of it (on the border); from
 * the pixel that the middle lies in, for derivatives; fractions inside, and on the border weights and slopes of taps. */
typedef struct {
    PosePlace place;
    const REAL *map; /* from the pixel that the middle lies in, on the border from the first */
    _Alignas(64) int32_t tap[POSE_TILE];
    REAL u[POSE_TILE], v[POSE_TILE], fx[POSE_TILE], fy[POSE_TILE];
    REAL wu[2][POSE_TILE], wv[2][POSE_TILE], du[2][POSE_TILE], dv[2][POSE_TILE];
} FN(View);

INLINE void FN(taps_inside)(
    FN(View) *restrict q, const REAL *restrict x, const REAL *restrict y, const PoseTurn *turn, REAL below,
                        REAL right, bool derive) {
    const REAL c = (REAL)turn->cosine, s = (REAL)turn->sine, fu = (REAL)q->place.fu, fv = (REAL)q->place.fv;
#pragma omp simd
    for (int i = 0; i < POSE_TILE; i++) {
        const REAL u = fu - y[i] * s + x[i] * c, v = fv + y[i] * c + x[i] * s, a = floor(u), b = floor(v);
        if (derive) q->u[i] = u, q->v[i] = v;
        q->fx[i] = u - a, q->fy[i] = v - b;
        q->tap[i] = (int32_t)(b * below + a * right);
    }
}

INLINE void FN(taps_border)(
    FN(View) *restrict q, const REAL *restrict x, const REAL *restrict y, const PoseTurn *turn, int32_t W,
                        int32_t H, bool replicate, bool derive) {
    const REAL c = (REAL)turn->cosine, s = (REAL)turn->sine, fu = (REAL)q->place.fu, fv = (REAL)q->place.fv;
    const int32_t iu = q->place.iu, iv = q->place.iv;
#pragma omp simd
    for (int i = 0; i < POSE_TILE; i++) {
        const REAL at_u = fu - y[i] * s + x[i] * c, at_v = fv + y[i] * c + x[i] * s;
        const FN(Axis) u = FN(axis_of)(at_u, iu, W, replicate), v = FN(axis_of)(at_v, iv, H, replicate);
        q->wu[0][i] = u.left, q->wu[1][i] = u.right, q->wv[0][i] = v.left, q->wv[1][i] = v.right;
        q->tap[i] = v.first * W + u.first;
        if (!derive) continue;
        q->u[i] = at_u, q->v[i] = at_v;
        q->du[0][i] = u.left_slope, q->du[1][i] = u.right_slope, q->dv[0][i] = v.left_slope, q->dv[1][i] = v.right_slope;
    }
}

/* The taps of tile j of template k, whose place is known; `derive`: with what only derivatives by the pose need. */
INLINE void FN(take_taps)(
    FN(View) *q, const PoseCorrelation *p, int64_t k, int64_t j, const PoseTurn *turn, const REAL *map, int64_t C,
                      bool derive) {
    const int64_t i = k * pose_cells(p) + j * POSE_TILE, right = C * (int64_t)sizeof(REAL);
    const REAL *x = (const REAL *)p->x + i, *y = (const REAL *)p->y + i;
    const int32_t W = (int32_t)p->W, H = (int32_t)p->H;
    q->map = map + (q->place.where == POSE_INSIDE ? (q->place.iv * p->W + q->place.iu) * C : 0);
    if (q->place.where == POSE_INSIDE) FN(taps_inside)(q, x, y, turn, (REAL)(W * right), (REAL)right, derive);
    else if (p->replicate) FN(taps_border)(q, x, y, turn, W, H, true, derive);
    else FN(taps_border)(q, x, y, turn, W, H, false, derive);
}

/* The tile on a map, from a pose. */
INLINE void FN(look)(
    FN(View) *q, const PoseCorrelation *p, int64_t k, int64_t j, const PoseTurn *turn, const REAL *map, int64_t C,
                 bool derive) {
    q->place = pose_place(p, p->tile + k * pose_tiles(p) + j, turn);
    if (q->place.where != POSE_OUTSIDE) FN(take_taps)(q, p, k, j, turn, map, C, derive);
}

/* Numbers from a tap to the one on its right and below; 0 where the map has one column or row. */
INLINE int64_t FN(right_of)(const PoseCorrelation *p, int64_t C) { return C * (p->W > 1); }
INLINE int64_t FN(below)(const PoseCorrelation *p, int64_t C) { return C * p->W * (p->H > 1); }

INLINE const REAL *FN(further)(const REAL *map, int64_t bytes) { return (const REAL *)((const char *)map + bytes); }

INLINE REAL FN(sum_lanes)(const REAL *a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
