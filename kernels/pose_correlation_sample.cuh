/* A cell's sample of the map on the GPU: what forward, backward and the map's gradient share. Contract: pose_correlation.h.
 * Positions are REAL from the pixel that the pose lies in. No include guard: a file includes it once for each REAL.
 */
#include "pose_correlation_taps.h"

#ifndef MDPS_POSE_CORRELATION_SAMPLE_CUH
#define MDPS_POSE_CORRELATION_SAMPLE_CUH
#include "cuda_block.cuh"

enum { POSE_GROUP = 8 }; /* channels whose sums a thread keeps */

/* How far a cell of a template may lie from its origin. */
DEVICE double pose_reach(const PoseCorrelation &p) {
    const double right = (double)(p.w - 1) - p.x0, bottom = (double)(p.h - 1) - p.y0;
    const double x = fabs(p.x0) > fabs(right) ? p.x0 : right, y = fabs(p.y0) > fabs(bottom) ? p.y0 : bottom;
    return sqrt(x * x + y * y) + 0.01;
}

DEVICE bool pose_row_is_known(const PoseCorrelation &p, int64_t r) {
    const int64_t m = p.map_index[r], k = p.template_index[r];
    return m >= 0 && m < p.M && k >= 0 && k < p.K;
}

/* As many numbers as one load takes: `most` where C and the map's address allow it. */
static int pose_vector(const PoseCorrelation &p, int most, size_t size) {
    return p.C % most == 0 && (uintptr_t)p.map % (most * size) == 0 ? most : 1;
}
#endif

template <int V> struct alignas(V * sizeof(REAL)) FN(Vector) {
    REAL v[V];
};

/* A pose; `inside`: no cell of its template needs a test. */
typedef struct {
    REAL fu, fv, c, s, grad;
    int32_t iu, iv;
    bool finite, inside;
} FN(Seen);

DEVICE FN(Seen) FN(see)(const PoseCorrelation &p, const PoseTurn &turn) {
    const double u = floor(turn.u), v = floor(turn.v), reach = pose_reach(p);
    FN(Seen) a;
    a.fu = (REAL)(turn.u - u), a.fv = (REAL)(turn.v - v);
    a.c = (REAL)turn.cosine, a.s = (REAL)turn.sine, a.grad = 0;
    a.iu = (int32_t)u, a.iv = (int32_t)v;
    a.finite = turn.finite;
    a.inside = turn.u > reach && turn.v > reach && turn.u + reach < (double)(p.W - 1) && turn.v + reach < (double)(p.H - 1);
    return a;
}

/* An axis at i0 + z, where the map has both taps. */
DEVICE FN(Axis) FN(axis_inside)(REAL z, int32_t i0) {
    const REAL f = floor(z), t = z - f;
    FN(Axis) a;
    a.left = 1 - t, a.right = t, a.left_slope = -1, a.right_slope = 1;
    a.first = (int32_t)f + i0;
    return a;
}

typedef struct {
    FN(Axis) u, v;
    REAL xu, xv;                 /* the cell from the pose, turned */
    int64_t first, right, below; /* numbers of the map: the first tap's, and how far the others are */
} FN(Cell);

DEVICE FN(Cell) FN(cell_of)(const PoseCorrelation &p, const FN(Seen) &a, REAL x, REAL y) {
    FN(Cell) cell;
    cell.xu = x * a.c - y * a.s, cell.xv = x * a.s + y * a.c;
    if (a.inside) {
        cell.u = FN(axis_inside)(a.fu + cell.xu, a.iu), cell.v = FN(axis_inside)(a.fv + cell.xv, a.iv);
    } else {
        cell.u = FN(axis_of)(a.fu + cell.xu, a.iu, (int32_t)p.W, p.replicate);
        cell.v = FN(axis_of)(a.fv + cell.xv, a.iv, (int32_t)p.H, p.replicate);
    }
    cell.first = ((int64_t)cell.v.first * p.W + cell.u.first) * p.C;
    cell.right = p.W > 1 ? p.C : 0, cell.below = p.H > 1 ? p.W * p.C : 0;
    return cell;
}

/* V channels of the four taps around a cell; m: the map from the first of the channels. */
template <int V> struct FN(Four) {
    FN(Vector)<V> g[4];
};
template <int V> DEVICE FN(Four)<V> FN(load_four)(const REAL *m, const FN(Cell) &cell) {
    typedef FN(Vector)<V> Channels;
    const REAL *at = m + cell.first;
    return {{*(const Channels *)at, *(const Channels *)(at + cell.right), *(const Channels *)(at + cell.below),
             *(const Channels *)(at + cell.below + cell.right)}};
}
