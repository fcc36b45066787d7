/* Noise, drawn in the order of philox_normal and philox_von_mises and then added to the ancestors' means. Contract:
 * mixture_resample.h.
 *
 * Items are taken in batches, so that the angles of many short rows are drawn as one tile: a third of the attempts is rejected,
 * and what tries again fills the vectors that a row of 50 would leave half empty. A draw depends on its row and number alone,
 * hence not on what it is drawn with. */
#ifndef REAL
#include "mixture_resample.h"
#define MDPS_FILE "mixture_resample.c"
#include "for_each_real.h"
#else
#include "real_math.h"

#include "draw.h"

/* Whether a row can be drawn from at all. */
INLINE bool FN(is_drawable)(int64_t N, int64_t D, const REAL *log_weights, const REAL *bandwidths) {
    int32_t good = 1;
    for (int64_t d = 0; d < D; d++) good &= bandwidths[d] >= 0;
#pragma omp simd reduction(& : good)
    for (int64_t n = 0; n < N; n++) good &= log_weights[n] < (REAL)INFINITY;
    return good;
}

/* Samples [m, m + n) of a row. */
typedef struct {
    int64_t m;
    int n;
    bool good;
    Source source;
    const REAL *means, *log_weights, *bandwidths;
    const int64_t *ancestors;
    REAL *samples;
} FN(Part);

/* Up to MIXTURE_BATCH samples, the tile that their angles pass through, and the angles. */
typedef struct {
    int n_parts, n_angles;
    FN(Part) part[MIXTURE_PARTS];
    FN(Tile) tile;
    REAL angle[MIXTURE_BATCH * MOST_DIMENSIONS];
} FN(Batch);

/* Draws what the tile holds. Compiled by itself: it is called from three places. */
CLONES void FN(mixture_draw_tile)(FN(Batch) *batch) {
    const int n = batch->tile.n;
    FN(draw_tile)(&batch->tile, false, batch->angle + batch->n_angles);
    batch->n_angles += n;
}

INLINE void FN(take_part)(const MixtureResample *p, int64_t item, FN(Part) *part) {
    const Resample *r = &p->resample;
    const int64_t tiles = (r->M + MIXTURE_DRAWS - 1) / MIXTURE_DRAWS, b = item / tiles, m = item % tiles * MIXTURE_DRAWS;
    const int64_t first = b * r->M + m;
    part->m = m;
    part->n = r->M - m < MIXTURE_DRAWS ? (int)(r->M - m) : MIXTURE_DRAWS;
    part->source = source_of_row(r->seed, b);
    part->means = (const REAL *)p->means + b * r->N * p->D;
    part->log_weights = (const REAL *)r->log_weights + b * r->N;
    part->bandwidths = (const REAL *)p->bandwidths + (p->bandwidths_per_row ? b * p->D : 0);
    part->ancestors = r->ancestors + first;
    part->samples = (REAL *)p->samples + first * p->D;
}

/* Puts the angles of a part into the batch's tile, which is drawn when it is full. */
INLINE void FN(add_angles)(FN(Batch) *batch, const FN(Part) *part, const REAL *bandwidths, const int A) {
    FN(Tile) *tile = &batch->tile;
    REAL concentration[MOST_DIMENSIONS], k[MOST_DIMENSIONS], K[MOST_DIMENSIONS], t[MOST_DIMENSIONS];
    for (int a = 0; a < A; a++) {
        concentration[a] = 1 / (bandwidths[a] * bandwidths[a]);
        k[a] = FN(drawn_concentration)(concentration[a]);
        FN(von_mises_constants)(k[a], &K[a], &t[a]);
    }
    for (int first = 0, count; first < part->n * A; first += count) {
        const int start = tile->n, left = part->n * A - first;
        count = left < DRAW_TILE - start ? left : DRAW_TILE - start;
        for (int i = 0; i < count; i++) {
            int a = A == 1 ? 0 : (first + i) % A;
            tile->concentration[start + i] = concentration[a];
            tile->k[start + i] = k[a];
            tile->K[start + i] = K[a];
            tile->t[start + i] = t[a];
        }
        FN(add_elements)(tile, part->source, part->m * A + first, count);
        if (tile->n == DRAW_TILE) FN(mixture_draw_tile)(batch);
    }
}

/* Ancestors' means and noise. */
INLINE void FN(add_noise)(const FN(Part) *part, const int G, const int A, const REAL *normal, REAL *angle) {
    const int D = G + A;
    for (int i = 0; i < part->n; i++) {
        const REAL *mean = part->means + part->ancestors[i] * D;
        REAL *sample = part->samples + i * D;
        for (int g = 0; g < G; g++) sample[g] = mean[g] + part->bandwidths[g] * normal[i * G + g];
        for (int a = 0; a < A; a++) angle[i * A + a] += mean[G + a];
    }
    for (int i = 0; i < part->n * A; i++) angle[i] = FN(wrap)(angle[i]);
    for (int i = 0; i < part->n; i++)
        for (int a = 0; a < A; a++) part->samples[i * D + G + a] = angle[i * A + a];
    if (!part->good)
        for (int i = 0; i < part->n * D; i++) part->samples[i] = (REAL)NAN;
}

/* Draws the noise of the parts and makes their samples. */
INLINE void FN(draw_batch)(FN(Batch) *batch, const int G, const int A) {
    REAL normal[MIXTURE_DRAWS * MOST_DIMENSIONS], *angle = batch->angle;
    batch->n_angles = 0;
    for (int i = 0; i < batch->n_parts; i++) {
        const FN(Part) *part = &batch->part[i];
        if (A == 1) FN(add_angles)(batch, part, part->bandwidths + G, 1);
        else FN(add_angles)(batch, part, part->bandwidths + G, A);
    }
    if (batch->tile.n > 0) FN(mixture_draw_tile)(batch);
    for (int i = 0; i < batch->n_parts; i++) {
        const FN(Part) *part = &batch->part[i];
        FN(draw_normal)(part->source, part->m * G, (part->n * G + 31) / 32 * 32, normal); /* 32: no vector half empty */
        if (G == 2 && A == 1) FN(add_noise)(part, 2, 1, normal, angle);
        else FN(add_noise)(part, G, A, normal, angle);
        angle += part->n * A;
    }
}

CLONES void FN(mixture_resample)(int64_t begin, int64_t end, void *parameters) {
    const MixtureResample *p = parameters;
    const int64_t N = p->resample.N, M = p->resample.M;
    const int A = (int)p->A, G = (int)(p->D - A), most = M < MIXTURE_DRAWS ? (int)M : MIXTURE_DRAWS;
    FN(Batch) batch;
    bool good = false;
    batch.tile.n = 0;
    for (int64_t item = begin; item < end;) {
        batch.n_parts = 0;
        for (int n = 0; item < end && batch.n_parts < MIXTURE_PARTS && n + most <= MIXTURE_BATCH; item++) {
            FN(Part) *part = &batch.part[batch.n_parts++];
            FN(take_part)(p, item, part);
            if (item == begin || part->m == 0) good = FN(is_drawable)(N, p->D, part->log_weights, part->bandwidths);
            part->good = good;
            n += part->n;
        }
        FN(draw_batch)(&batch, G, A);
    }
}
#endif
