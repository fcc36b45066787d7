/* The template's cells in order, and the score of each pose. Contract: pose_correlation.h; a tile: pose_correlation_tile.h.
 *
 * Valid cells are listed in strips of 8 rows walked column by column, so that 64 of them in a row make a compact patch: its
 * taps lie in few rows of the map, whatever the heading and however wide the map, and one circle says where it is.
 */
#ifndef REAL
#include "pose_correlation.h"
#define MDPS_FILE "pose_correlation.c"
#include "for_each_real.h"
#else
#include "pose_correlation_tile.h"

/* Columns and rows of the valid cells, and their numbers; the last tile is filled with the last cell. */
static int64_t FN(list_cells)(const PoseCorrelation *p, int64_t k, REAL *x, REAL *y, int32_t *cell) {
    const bool *valid = p->valid ? p->valid + k * p->h * p->w : NULL;
    int64_t n = 0;
    for (int64_t i0 = 0; i0 < p->h; i0 += POSE_STRIP)
        for (int64_t j = 0; j < p->w; j++)
            for (int64_t i = i0; i < i0 + POSE_STRIP && i < p->h; i++) {
                if (valid && !valid[i * p->w + j]) continue;
                x[n] = (REAL)j, y[n] = (REAL)i, cell[n++] = (int32_t)(i * p->w + j);
            }
    for (int64_t m = n; m % POSE_TILE; m++) x[m] = x[n - 1], y[m] = y[n - 1];
    return n;
}

/* The circle around a tile's cells, which are counted from its middle then. */
static PoseTile FN(enclose)(const PoseCorrelation *p, REAL *x, REAL *y) {
    REAL left = x[0], right = x[0], top = y[0], bottom = y[0], square = 0;
    for (int i = 0; i < POSE_TILE; i++) {
        left = x[i] < left ? x[i] : left, right = x[i] > right ? x[i] : right;
        top = y[i] < top ? y[i] : top, bottom = y[i] > bottom ? y[i] : bottom;
    }
    const REAL middle_x = (left + right) / 2, middle_y = (top + bottom) / 2;
    for (int i = 0; i < POSE_TILE; i++) {
        x[i] -= middle_x, y[i] -= middle_y;
        square = x[i] * x[i] + y[i] * y[i] > square ? x[i] * x[i] + y[i] * y[i] : square;
    }
    return (PoseTile){middle_x - p->x0, middle_y - p->y0, sqrt((double)square)};
}

void FN(pose_correlation_prepare)(int64_t begin, int64_t end, void *parameters) {
    const PoseCorrelation *p = parameters;
    const int64_t cells = p->h * p->w, padded = pose_cells(p), C = p->C;
    for (int64_t k = begin; k < end; k++) {
        REAL *x = (REAL *)p->x + k * padded, *y = (REAL *)p->y + k * padded, *t = (REAL *)p->t + k * padded * C;
        const REAL *template = (const REAL *)p->templates + k * C * cells;
        int32_t *cell = p->cell + k * padded;
        PoseTile *tile = p->tile + k * pose_tiles(p);
        const int64_t n = p->n_cells[k] = FN(list_cells)(p, k, x, y, cell);
        double reach = 0;
        for (int64_t i = 0; i < n; i += POSE_TILE) {
            const PoseTile a = tile[i / POSE_TILE] = FN(enclose)(p, x + i, y + i);
            const double far = sqrt(a.x * a.x + a.y * a.y) + a.radius;
            reach = far > reach ? far : reach;
        }
        p->reach[k] = reach;
        for (int64_t c = 0; p->t && c < C; c++)
            for (int64_t i = 0; i < n; i++) t[i * C + c] = template[c * cells + cell[i]];
        for (int64_t i = n * C; p->t && i % (POSE_TILE * C); i++) t[i] = 0;
        if (p->grad_templates) memset((REAL *)p->grad_templates + k * C * cells, 0, C * cells * sizeof(REAL));
    }
}

INLINE void FN(add_inside)(const REAL *restrict g, const REAL *restrict below, int64_t right, REAL fx, REAL fy,
                       const REAL *restrict t, int lanes, REAL *sum) {
#pragma omp simd
    for (int k = 0; k < lanes; k++) {
        const REAL top = g[k] + fx * (g[k + right] - g[k]);
        const REAL bottom = below[k] + fx * (below[k + right] - below[k]);
        sum[k] += (top + fy * (bottom - top)) * t[k];
    }
}

INLINE void
FN(add_border)(const REAL *restrict g, int64_t right, int64_t below, const FN(View) *q, int i, const REAL *restrict t,
                       int lanes, REAL *sum) {
    const REAL l = q->wu[0][i], r = q->wu[1][i], a = q->wv[0][i], b = q->wv[1][i];
    const REAL *restrict g1 = g + right, *restrict g2 = g + below, *restrict g3 = g2 + right;
#pragma omp simd
    for (int k = 0; k < lanes; k++) sum[k] += (a * (l * g[k] + r * g1[k]) + b * (l * g2[k] + r * g3[k])) * t[k];
}

INLINE void
FN(add_cell)(const FN(View) *q, int i, const REAL *m, const REAL *below, const REAL *t, int64_t C, int lanes, REAL *sum) {
    const int64_t tap = q->tap[i];
    FN(add_inside)(FN(further)(m, tap), FN(further)(below, tap), C, q->fx[i], q->fy[i], t + i * C, lanes, sum);
}

/* Adds the products of `lanes` channels, from c on, to `total`; t: the template of the tile's cells. Two sums, as the processor
 * adds two at a time. */
INLINE void
FN(add_channels)(const PoseCorrelation *p, const FN(View) *q, const REAL *t, int64_t C, int64_t c, int lanes, REAL *total) {
    const REAL *m = q->map + c;
    REAL even[POSE_LANES] = {0}, odd[POSE_LANES] = {0};
    t += c;
    if (q->place.where == POSE_INSIDE) {
        const REAL *below = m + C * p->W;
        for (int i = 0; i < POSE_TILE; i += 4) {
            FN(add_cell)(q, i, m, below, t, C, lanes, even), FN(add_cell)(q, i + 1, m, below, t, C, lanes, odd);
            FN(add_cell)(q, i + 2, m, below, t, C, lanes, even), FN(add_cell)(q, i + 3, m, below, t, C, lanes, odd);
        }
    } else {
        const int64_t right = FN(right_of)(p, C), below = FN(below)(p, C);
        for (int i = 0; i < POSE_TILE; i += 2) {
            FN(add_border)(m + q->tap[i] * C, right, below, q, i, t + i * C, lanes, even);
            FN(add_border)(m + q->tap[i + 1] * C, right, below, q, i + 1, t + (i + 1) * C, lanes, odd);
        }
    }
#pragma omp simd
    for (int k = 0; k < lanes; k++) total[k] += even[k] + odd[k];
}

INLINE void FN(add_tiles)(const PoseCorrelation *p, const PoseTurn *turn, const REAL *map, int64_t k, int64_t C, REAL *total) {
    const int64_t tiles = (p->n_cells[k] + POSE_TILE - 1) / POSE_TILE;
    FN(View) view[2];
    for (int64_t j = 0; j <= tiles; j++) {
        const FN(View) *before = &view[(j + 1) % 2];
        const REAL *t = (const REAL *)p->t + (k * pose_cells(p) + (j - 1) * POSE_TILE) * C;
        if (j < tiles) FN(look)(&view[j % 2], p, k, j, turn, map, C, false);
        if (j == 0 || before->place.where == POSE_OUTSIDE) continue;
        int64_t c = 0;
        for (; c + POSE_LANES <= C; c += POSE_LANES) FN(add_channels)(p, before, t, C, c, POSE_LANES, total);
        for (; c < C; c++) FN(add_channels)(p, before, t, C, c, 1, total);
    }
}

CLONES_AVX2 void FN(pose_correlation)(int64_t begin, int64_t end, void *parameters) {
    const PoseCorrelation *p = parameters;
    for (int64_t n = begin; n < end; n++) {
        const int64_t map = p->map_index[n / p->N], k = p->template_index[n / p->N];
        const PoseTurn turn = FN(turn_of)(p, (const REAL *)p->poses + 3 * n);
        const bool good = turn.finite && map >= 0 && map < p->M && k >= 0 && k < p->K;
        const REAL *m = (const REAL *)p->map + (good ? map * p->H * p->W * p->C : 0);
        REAL total[POSE_LANES] = {0};
        if (good && p->C == POSE_LANES) FN(add_tiles)(p, &turn, m, k, POSE_LANES, total);
        else if (good) FN(add_tiles)(p, &turn, m, k, p->C, total);
        ((REAL *)p->scores)[n] = good ? FN(sum_lanes)(total) : (REAL)NAN;
    }
}
#endif
