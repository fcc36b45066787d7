/* Gradients of pose_correlation to poses and templates, in one sweep. Contract: pose_correlation.h.
 *
 * An item has a few tiles of one template and all poses of the rows that use it, 32 poses at a time a tile: a cell's gradient
 * is summed in the order of poses, whatever the number of threads, and a pose's in parts that are added in order. Eight
 * channels of the template there and of its gradient lie side by side on the stack, the only copies that there are.
 */
#ifndef REAL
#include "pose_correlation.h"
#define MDPS_FILE "pose_correlation_backward.c"
#include "for_each_real.h"
#else
#include "pose_correlation_tile.h"

/* Eight channels of the tiles of an item. */
typedef struct {
    REAL t[POSE_CHUNK * POSE_TILE * POSE_LANES], grad[POSE_CHUNK * POSE_TILE * POSE_LANES];
} FN(Chunk);

/* Adds grad times the sample to `cell`, and to the sums what the pose's gradient needs. */
INLINE void FN(back_inside)(const REAL *restrict g, const REAL *restrict below, int64_t right, const FN(View) *q, int i,
                        const REAL *restrict t, REAL grad, int lanes, REAL *restrict cell, REAL *du, REAL *dv, REAL *from_u,
                        REAL *from_v) {
    const REAL fx = q->fx[i], fy = q->fy[i], u = q->u[i], v = q->v[i];
#pragma omp simd
    for (int k = 0; k < lanes; k++) {
        const REAL d0 = g[k + right] - g[k], d1 = below[k + right] - below[k];
        const REAL top = g[k] + fx * d0, by_v = below[k] + fx * d1 - top, by_u = d0 + fy * (d1 - d0);
        const REAL tu = t[k] * by_u, tv = t[k] * by_v;
        du[k] += tu, dv[k] += tv;
        from_u[k] += v * tu, from_v[k] += u * tv;
        cell[k] += grad * (top + fy * by_v);
    }
}

INLINE void
FN(back_border)(const REAL *restrict g, int64_t right, int64_t below, const FN(View) *q, int i, const REAL *restrict t,
                        REAL grad, int lanes, REAL *restrict cell, REAL *du, REAL *dv, REAL *from) {
    const REAL l = q->wu[0][i], r = q->wu[1][i], dl = q->du[0][i], dr = q->du[1][i], u = q->u[i], v = q->v[i];
    const REAL a = q->wv[0][i], b = q->wv[1][i], da = q->dv[0][i], db = q->dv[1][i];
#pragma omp simd
    for (int k = 0; k < lanes; k++) {
        const REAL top = l * g[k] + r * g[k + right], bottom = l * g[k + below] + r * g[k + below + right];
        const REAL top_slope = dl * g[k] + dr * g[k + right], bottom_slope = dl * g[k + below] + dr * g[k + below + right];
        const REAL tu = t[k] * (a * top_slope + b * bottom_slope), tv = t[k] * (da * top + db * bottom);
        du[k] += tu, dv[k] += tv;
        from[k] += u * tv - v * tu;
        cell[k] += grad * (a * top + b * bottom);
    }
}

INLINE void
FN(back_cell)(const FN(View) *q, int i, const REAL *m, const REAL *below, const REAL *t, int64_t C, REAL grad, int lanes,
                      REAL *cell, REAL *du, REAL *dv, REAL *from_u, REAL *from_v) {
    const int64_t tap = q->tap[i], k = i * POSE_LANES;
    FN(back_inside)(FN(further)(m, tap),
                    FN(further)(below, tap), C, q, i, t + k, grad, lanes, cell + k, du, dv, from_u, from_v);
}

/* Channels c to c + lanes of a tile; t, cell: theirs. sums[0..2]: lanes of the gradients by u, v and theta, without grad. */
INLINE void
FN(back_channels)(const PoseCorrelation *p, const FN(View) *q, const REAL *t, REAL grad, int64_t C, int64_t c, int lanes,
                          REAL *cell, REAL (*sums)[POSE_LANES]) {
    const REAL *m = q->map + c;
    REAL du[POSE_LANES] = {0}, dv[POSE_LANES] = {0}, from_u[POSE_LANES] = {0}, from_v[POSE_LANES] = {0};
    if (q->place.where == POSE_INSIDE) {
        const REAL *below = m + C * p->W;
        for (int i = 0; i < POSE_TILE; i += 2) {
            FN(back_cell)(q, i, m, below, t, C, grad, lanes, cell, du, dv, from_u, from_v);
            FN(back_cell)(q, i + 1, m, below, t, C, grad, lanes, cell, du, dv, from_u, from_v);
        }
    } else {
        const int64_t right = FN(right_of)(p, C), below = FN(below)(p, C);
        for (int i = 0, k = 0; i < POSE_TILE; i++, k += POSE_LANES)
            FN(back_border)(m + q->tap[i] * C, right, below, q, i, t + k, grad, lanes, cell + k, du, dv, from_v);
    }
    const REAL u = (REAL)(q->place.xu - q->place.fu), v = (REAL)(q->place.xv - q->place.fv); /* of the pixel, from the pose */
#pragma omp simd
    for (int k = 0; k < lanes; k++) {
        sums[0][k] += du[k];
        sums[1][k] += dv[k];
        sums[2][k] += (from_v[k] + u * dv[k]) - (from_u[k] + v * du[k]);
    }
}

/* Channels from c on, eight at most, of tile j for `count` poses. */
INLINE void
FN(back_tile)(const PoseCorrelation *p, const PoseTurn *turn, const REAL *grad, int count, const REAL *map, int64_t k,
                      int64_t j, int64_t C, int64_t c, const REAL *t, REAL *cell, REAL (*sums)[3][POSE_LANES]) {
    FN(View) view[2];
    for (int n = 0; n <= count; n++) {
        const FN(View) *before = &view[(n + 1) % 2];
        if (n < count) FN(look)(&view[n % 2], p, k, j, &turn[n], map, C, true);
        if (n == 0 || before->place.where == POSE_OUTSIDE || !turn[n - 1].finite) continue;
        if (c + POSE_LANES <= C) FN(back_channels)(p, before, t, grad[n - 1], C, c, POSE_LANES, cell, sums[n - 1]);
        else
            for (int64_t d = c; d < C; d++)
                FN(back_channels)(p, before, t + d - c, grad[n - 1], C, d, 1, cell + d - c, sums[n - 1]);
    }
}

/* Poses n0 to n0 + count of row r, and tiles first to end of template k. */
INLINE void FN(back_block)(const PoseCorrelation *p, int64_t r, int64_t k, int64_t first, int64_t end, int64_t n0, int count,
                       int64_t c, FN(Chunk) *chunk) {
    PoseTurn turn[POSE_BLOCK];
    REAL sums[POSE_BLOCK][3][POSE_LANES];
    const int64_t C = p->C, row = r * pose_chunks(p) + first / POSE_CHUNK, size = POSE_TILE * POSE_LANES;
    const REAL *m = (const REAL *)p->map + p->map_index[r] * p->H * p->W * C, *grad = (const REAL *)p->grad + r * p->N + n0;
    REAL *out = (REAL *)p->pose_grad + (row * p->N + n0) * 3;
    memset(sums, 0, sizeof sums);
    for (int n = 0; n < count; n++) turn[n] = FN(turn_of)(p, (const REAL *)p->poses + 3 * (r * p->N + n0 + n));
    for (int64_t j = first, i = 0; j < end; j++, i += size)
        if (C == POSE_LANES) FN(back_tile)(p, turn, grad, count, m, k, j, POSE_LANES, 0, chunk->t + i, chunk->grad + i, sums);
        else FN(back_tile)(p, turn, grad, count, m, k, j, C, c, chunk->t + i, chunk->grad + i, sums);
    for (int n = 0; n < count; n++)
        for (int d = 0; d < 3; d++) out[3 * n + d] = (c > 0 ? out[3 * n + d] : 0) + grad[n] * FN(sum_lanes)(sums[n][d]);
}

CLONES_AVX2 void FN(pose_correlation_backward)(int64_t begin, int64_t end, void *parameters) {
    const PoseCorrelation *p = parameters;
    const int64_t cells = p->h * p->w, C = p->C;
    _Alignas(64) FN(Chunk) chunk;
    for (int64_t item = begin; item < end; item++) {
        const int64_t k = item / pose_chunks(p), first = item % pose_chunks(p) * POSE_CHUNK;
        const int64_t left = p->n_cells[k] - first * POSE_TILE, most = POSE_CHUNK * POSE_TILE,
                      count = left < most ? left : most;
        const int32_t *cell = p->cell + k * pose_cells(p) + first * POSE_TILE;
        for (int64_t c = 0; c < C && count > 0; c += POSE_LANES) {
            const int64_t lanes = C - c < POSE_LANES ? C - c : POSE_LANES, from = (k * C + c) * cells;
            memset(&chunk, 0, sizeof chunk);
            for (int64_t l = 0; l < lanes; l++)
                for (int64_t i = 0; i < count; i++)
                    chunk.t[i * POSE_LANES + l] = ((const REAL *)p->templates)[from + l * cells + cell[i]];
            for (int64_t r = 0; r < p->R; r++) {
                if (p->template_index[r] != k || p->map_index[r] < 0 || p->map_index[r] >= p->M) continue;
                for (int64_t n = 0; n < p->N; n += POSE_BLOCK)
                    FN(back_block)(p, r, k, first, first + (count + POSE_TILE - 1) / POSE_TILE, n,
                               (int)(p->N - n < POSE_BLOCK ? p->N - n : POSE_BLOCK), c, &chunk);
            }
            for (int64_t l = 0; l < lanes; l++)
                for (int64_t i = 0; i < count; i++)
                    ((REAL *)p->grad_templates)[from + l * cells + cell[i]] = chunk.grad[i * POSE_LANES + l];
        }
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
