/* Gradients of pose_correlation to poses and templates, in one sweep. Contract: pose_correlation.h.
 *
 * An item has a few tiles of one template and all poses of the rows that use it, 32 poses at a time a tile: a cell's gradient
 * is summed in the order of poses, whatever the number of threads, and a pose's in parts that are added in order.
 */
#ifndef REAL
#include "pose_correlation.h"
#define MDPS_FILE "pose_correlation_backward.c"
#include "for_each_real.h"
#else
#include "pose_correlation_tile.h"

/* Adds grad times the sample to `cell`, and to the sums what the pose's gradient needs. */
INLINE void
FN(back_inside)(const REAL *restrict g, int64_t right, int64_t below, const FN(Taps) *q, int i, const REAL *restrict t,
                        REAL grad, int lanes, REAL *restrict cell, REAL *u, REAL *v, REAL *from_u, REAL *from_v) {
    const REAL fx = q->fx[i], fy = q->fy[i], xu = q->xu[i], xv = q->xv[i];
#pragma omp simd
    for (int k = 0; k < lanes; k++) {
        const REAL d0 = g[k + right] - g[k], d1 = g[k + below + right] - g[k + below];
        const REAL top = g[k] + fx * d0, dv = g[k + below] + fx * d1 - top, du = d0 + fy * (d1 - d0);
        const REAL tu = t[k] * du, tv = t[k] * dv;
        u[k] += tu, v[k] += tv;
        from_u[k] += xv * tu, from_v[k] += xu * tv;
        cell[k] += grad * (top + fy * dv);
    }
}

INLINE void
FN(back_border)(const REAL *restrict g, int64_t right, int64_t below, const FN(Taps) *q, int i, const REAL *restrict t,
                        REAL grad, int lanes, REAL *restrict cell, REAL *u, REAL *v, REAL *from_u, REAL *from_v) {
    const REAL l = q->wu[0][i], r = q->wu[1][i], dl = q->du[0][i], dr = q->du[1][i], xu = q->xu[i], xv = q->xv[i];
    const REAL a = q->wv[0][i], b = q->wv[1][i], da = q->dv[0][i], db = q->dv[1][i];
#pragma omp simd
    for (int k = 0; k < lanes; k++) {
        const REAL top = l * g[k] + r * g[k + right], bottom = l * g[k + below] + r * g[k + below + right];
        const REAL top_slope = dl * g[k] + dr * g[k + right], bottom_slope = dl * g[k + below] + dr * g[k + below + right];
        const REAL tu = t[k] * (a * top_slope + b * bottom_slope), tv = t[k] * (da * top + db * bottom);
        u[k] += tu, v[k] += tv;
        from_u[k] += xv * tu, from_v[k] += xu * tv;
        cell[k] += grad * (a * top + b * bottom);
    }
}

/* Of `lanes` channels of a tile; sums[0..2]: lanes of the gradients by u, v and theta, without grad. */
INLINE void
FN(back_channels)(const PoseCorrelation *p, const PosePlace *a, const FN(Taps) *q, const REAL *m, const REAL *t, REAL grad,
                          int64_t C, int lanes, REAL *cell, REAL (*sums)[POSE_LANES]) {
    const bool inside = a->where == POSE_INSIDE;
    const int64_t right = inside ? C : FN(right_of)(p, C), below = inside ? C * p->W : FN(below)(p, C);
    REAL u[POSE_LANES] = {0}, v[POSE_LANES] = {0}, from_u[POSE_LANES] = {0}, from_v[POSE_LANES] = {0};
    if (inside)
        for (int i = 0; i < POSE_TILE; i++)
            FN(back_inside)(m + q->pixel[i] * C, right, below, q, i, t + i * C, grad, lanes, cell + i * C, u, v, from_u, from_v);
    else
        for (int i = 0; i < POSE_TILE; i++)
            FN(back_border)(m + q->pixel[i] * C, right, below, q, i, t + i * C, grad, lanes, cell + i * C, u, v, from_u, from_v);
    const REAL xu = (REAL)a->xu, xv = (REAL)a->xv;
#pragma omp simd
    for (int k = 0; k < lanes; k++) {
        sums[0][k] += u[k];
        sums[1][k] += v[k];
        sums[2][k] += (from_v[k] + xu * v[k]) - (from_u[k] + xv * u[k]);
    }
}

INLINE void
FN(back_tile)(const PoseCorrelation *p, const PosePlace *a, const PoseTurn *turn, const REAL *m, int64_t i, REAL grad,
                      int64_t C, REAL (*sums)[POSE_LANES]) {
    FN(Taps) q;
    const REAL *t = (const REAL *)p->t + i * C;
    REAL *cell = (REAL *)p->cell_grad + i * C;
    FN(take_taps)(&q, p, i, a, turn);
    m += FN(origin_of)(p, a) * C;
    int64_t c = 0;
    for (; c + POSE_LANES <= C; c += POSE_LANES) FN(back_channels)(p, a, &q, m + c, t + c, grad, C, POSE_LANES, cell + c, sums);
    for (; c < C; c++) FN(back_channels)(p, a, &q, m + c, t + c, grad, C, 1, cell + c, sums);
}

/* Poses n0 to n0 + count of row r, and tiles first to end of template k. */
INLINE void FN(back_block)(const PoseCorrelation *p, int64_t r, int64_t k, int64_t first, int64_t end, int64_t n0, int count) {
    PoseTurn turn[POSE_BLOCK];
    REAL sums[POSE_BLOCK][3][POSE_LANES];
    const int64_t C = p->C, padded = pose_cells(p), row = r * pose_chunks(p) + first / POSE_CHUNK;
    const REAL *m = (const REAL *)p->map + p->map_index[r] * p->H * p->W * C, *grad = (const REAL *)p->grad + r * p->N + n0;
    REAL *out = (REAL *)p->pose_grad + (row * p->N + n0) * 3;
    memset(sums, 0, sizeof sums);
    for (int n = 0; n < count; n++) turn[n] = FN(turn_of)(p, (const REAL *)p->poses + 3 * (r * p->N + n0 + n));
    for (int64_t j = first; j < end; j++)
        for (int n = 0; n < count; n++) {
            const PosePlace a = pose_place(p, p->tile + k * pose_tiles(p) + j, &turn[n]);
            if (!turn[n].finite || a.where == POSE_OUTSIDE) continue;
            const int64_t i = k * padded + j * POSE_TILE;
            if (C == POSE_LANES) FN(back_tile)(p, &a, &turn[n], m, i, grad[n], POSE_LANES, sums[n]);
            else FN(back_tile)(p, &a, &turn[n], m, i, grad[n], C, sums[n]);
        }
    for (int n = 0; n < count; n++)
        for (int d = 0; d < 3; d++) out[3 * n + d] = grad[n] * FN(sum_lanes)(sums[n][d]);
}

CLONES_AVX2 void FN(pose_correlation_backward)(int64_t begin, int64_t end, void *parameters) {
    const PoseCorrelation *p = parameters;
    const int64_t padded = pose_cells(p), cells = p->h * p->w, C = p->C;
    for (int64_t item = begin; item < end; item++) {
        const int64_t k = item / pose_chunks(p), first = item % pose_chunks(p) * POSE_CHUNK, n_cells = p->n_cells[k];
        const int64_t tiles = (n_cells + POSE_TILE - 1) / POSE_TILE,
                      last = first + POSE_CHUNK < tiles ? first + POSE_CHUNK : tiles;
        if (first >= last) continue;
        REAL *cell = (REAL *)p->cell_grad + k * padded * C, *out = (REAL *)p->grad_templates + k * C * cells;
        memset(cell + first * POSE_TILE * C, 0, (last - first) * POSE_TILE * C * sizeof(REAL));
        for (int64_t r = 0; r < p->R; r++) {
            if (p->template_index[r] != k || p->map_index[r] < 0 || p->map_index[r] >= p->M) continue;
            for (int64_t n = 0; n < p->N; n += POSE_BLOCK)
                FN(back_block)(p, r, k, first, last, n, (int)(p->N - n < POSE_BLOCK ? p->N - n : POSE_BLOCK));
        }
        for (int64_t i = first * POSE_TILE; i < last * POSE_TILE && i < n_cells; i++)
            for (int64_t c = 0; c < C; c++) out[c * cells + p->cell[k * padded + i]] = cell[i * C + c];
    }
}

/* A pose's gradient from its parts, those of chunks that have cells. */
void FN(pose_correlation_sum)(int64_t begin, int64_t end, void *parameters) {
    const PoseCorrelation *p = parameters;
    const int64_t most = pose_chunks(p), chunk = POSE_CHUNK * POSE_TILE;
    for (int64_t n = begin; n < end; n++) {
        const int64_t r = n / p->N, k = p->template_index[r];
        const bool known = k >= 0 && k < p->K && p->map_index[r] >= 0 && p->map_index[r] < p->M;
        const bool good = known && FN(turn_of)(p, (const REAL *)p->poses + 3 * n).finite;
        const int64_t chunks = good ? (p->n_cells[k] + chunk - 1) / chunk : 0;
        REAL *out = (REAL *)p->grad_poses + 3 * n;
        for (int d = 0; d < 3; d++) {
            REAL sum = good ? 0 : (REAL)NAN;
            for (int64_t j = 0; j < chunks; j++)
                sum += ((const REAL *)p->pose_grad)[((r * most + j) * p->N + n % p->N) * 3 + d];
            out[d] = sum;
        }
    }
}
#endif
