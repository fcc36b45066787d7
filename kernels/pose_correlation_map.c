/* The gradient of pose_correlation to the map, in bands of 64 rows: whatever the number of threads, one of them adds to a
 * pixel, and in the order of rows, poses and cells. A tile that crosses the edge of a band is done for both. Contract:
 * pose_correlation.h.
 */
#ifndef REAL
#include "pose_correlation.h"
#define MDPS_FILE "pose_correlation_map.c"
#include "for_each_real.h"
#else
#include "pose_correlation_tile.h"

/* Rows of the map that a thread has, and what a tile adds to the others. */
typedef struct {
    REAL *map, *spare; /* spare: POSE_LANES numbers of two taps */
    int64_t low, high;
} FN(Band);

/* To two taps of the row `top` and two of the row `bottom`. */
INLINE void FN(give_inside)(REAL *top, int64_t top_right, REAL *bottom, int64_t bottom_right, REAL fx, REAL upper, REAL lower,
                        const REAL *t, int lanes) {
#pragma omp simd
    for (int k = 0; k < lanes; k++) {
        const REAL a = upper * t[k], b = lower * t[k], a1 = fx * a, b1 = fx * b;
        top[k] += a - a1;
        top[k + top_right] += a1;
        bottom[k] += b - b1;
        bottom[k + bottom_right] += b1;
    }
}

/* `lanes` channels, from c on, of a tile inside of the map; taps are counted from pixel `first`. */
INLINE void
FN(give_channels)(const PoseCorrelation *p, const FN(View) *q, const FN(Band) *band, int64_t first, bool within_band, REAL grad,
                          const REAL *t, int64_t C, int64_t c, int lanes) {
    const int64_t pixel = C * (int64_t)sizeof(REAL), line = p->W * pixel;
    const int64_t low = band->low * line - first * pixel, high = band->high * line - first * pixel; /* bytes, as taps */
    REAL *map = band->map + first * C + c;
    for (int i = 0; i < POSE_TILE; i++) {
        const int64_t tap = q->tap[i];
        const REAL lower = grad * q->fy[i];
        REAL *top = (REAL *)((char *)map + tap), *bottom = top + p->W * C;
        int64_t top_right = C, bottom_right = C;
        if (!within_band) {
            const bool has_top = tap >= low && tap < high, has_bottom = tap + line >= low && tap + line < high;
            if (!has_top && !has_bottom) continue;
            if (!has_top) top = band->spare, top_right = POSE_LANES;
            if (!has_bottom) bottom = band->spare, bottom_right = POSE_LANES;
        }
        FN(give_inside)(top, top_right, bottom, bottom_right, q->fx[i], grad - lower, lower, t + i * C + c, lanes);
    }
}

/* A tile on the map's border. Taps may coincide: one after the other. */
INLINE void
FN(give_border)(const PoseCorrelation *p, const FN(View) *q, const FN(Band) *band, REAL grad, const REAL *t, int64_t C) {
    const int64_t right = FN(right_of)(p, C), first = band->low * p->W, end = band->high * p->W;
    for (int i = 0; i < POSE_TILE; i++)
        for (int s = 0; s < 2; s++) {
            const int64_t pixel = q->tap[i] + s * p->W;
            if (pixel < first || pixel >= end) continue;
            const REAL g = grad * q->wv[s][i], l = g * q->wu[0][i], r = g * q->wu[1][i];
            REAL *o = band->map + pixel * C;
#pragma omp simd
            for (int64_t c = 0; c < C; c++) o[c] += l * t[i * C + c];
#pragma omp simd
            for (int64_t c = 0; c < C; c++) o[right + c] += r * t[i * C + c];
        }
}

INLINE void
FN(give_tile)(const PoseCorrelation *p, const FN(View) *q, const FN(Band) *band, REAL grad, const REAL *t, int64_t C) {
    const PosePlace *a = &q->place;
    const bool within_band = a->v - a->about >= (double)band->low && a->v + a->about < (double)(band->high - 1);
    const int64_t first = a->iv * p->W + a->iu;
    if (a->where == POSE_BORDER) {
        FN(give_border)(p, q, band, grad, t, C);
        return;
    }
    int64_t c = 0;
    for (; c + POSE_LANES <= C; c += POSE_LANES) FN(give_channels)(p, q, band, first, within_band, grad, t, C, c, POSE_LANES);
    for (; c < C; c++) FN(give_channels)(p, q, band, first, within_band, grad, t, C, c, 1);
}

/* Whether what is at most `about` rows away from v has taps among the rows [low, high). Beyond the map, with `replicate`, the
 * first and last rows are meant. */
INLINE bool FN(meets)(const PoseCorrelation *p, double v, double about, int64_t low, int64_t high) {
    const double bottom = (double)(p->H - 1), top = v - about, end = v + about;
    if (!p->replicate) return end > (double)(low - 1) && top < (double)high;
    return within(end, 0, bottom) > (double)(low - 1) && within(top, 0, bottom) < (double)high;
}

INLINE void
FN(give_pose)(const PoseCorrelation *p, const PoseTurn *turn, int64_t k, REAL grad, const FN(Band) *band, int64_t C) {
    const int64_t tiles = (p->n_cells[k] + POSE_TILE - 1) / POSE_TILE;
    FN(View) q;
    for (int64_t j = 0; j < tiles; j++) {
        q.place = pose_place(p, p->tile + k * pose_tiles(p) + j, turn);
        if (q.place.where == POSE_OUTSIDE || !FN(meets)(p, q.place.v, q.place.about, band->low, band->high)) continue;
        FN(take_taps)(&q, p, k, j, turn, band->map, C, false);
        FN(give_tile)(p, &q, band, grad, (const REAL *)p->t + (k * pose_cells(p) + j * POSE_TILE) * C, C);
    }
}

/* Bands that are neighbours are one. */
CLONES_AVX2 void FN(pose_correlation_map)(int64_t begin, int64_t end, void *parameters) {
    const PoseCorrelation *p = parameters;
    const int64_t line = p->W * p->C, bands = pose_bands(p);
    REAL *map = p->grad_map, spare[2 * POSE_LANES] = {0};
    for (int64_t item = begin, next; item < end; item = next) {
        const int64_t m = item / bands;
        next = (m + 1) * bands < end ? (m + 1) * bands : end;
        const int64_t low = item % bands * POSE_BAND, high = (next - m * bands) * POSE_BAND;
        const FN(Band) band = {map + m * p->H * line, spare, low, high < p->H ? high : p->H};
        memset(band.map + low * line, 0, (band.high - low) * line * sizeof(REAL));
        for (int64_t r = 0; r < p->R; r++) {
            const int64_t k = p->template_index[r];
            if (p->map_index[r] != m || k < 0 || k >= p->K) continue;
            for (int64_t n = r * p->N; n < (r + 1) * p->N; n++) {
                const PoseTurn turn = FN(turn_of)(p, (const REAL *)p->poses + 3 * n);
                if (!turn.finite || !FN(meets)(p, turn.v, p->reach[k] + 1, low, band.high)) continue;
                const REAL grad = ((const REAL *)p->grad)[n];
                if (p->C == POSE_LANES) FN(give_pose)(p, &turn, k, grad, &band, POSE_LANES);
                else FN(give_pose)(p, &turn, k, grad, &band, p->C);
            }
        }
    }
}
#endif
