/* How well templates fit a map at poses: N poses in each of R rows, a row having one of K templates and one of M maps.
 *
 *   map             (M, H, W, C)  channels last; pixel centres are integers, or half integers with shift = 1/2
 *   templates       (K, C, h, w)
 *   valid           (K, h, w)     bool; NULL: all cells are valid
 *   poses           (R, N, 3)     u (column) and v (row, downwards) in pixels, theta in radians, clockwise on screen
 *   map_index       (R)           int64, which map a row has; one out of range makes its row NaN
 *   template_index  (R)           the same for the template
 *   scores          (R, N)        sum over valid cells (i, j) and channels of the template times the map, bilinear, at
 *                                 (u - shift + x cos - y sin, v - shift + x sin + y cos), x = j - x0, y = i - y0
 *
 * Outside of the map lie zeros, or with `replicate` the nearest pixel. Nothing of size N x h x w exists, and nothing but
 * arguments is kept for backward. What a template has in cells that are not valid, NaN included, has no effect.
 *
 * Gradients are those of the bilinear pieces; on a pixel's edge that of the right-hand piece (the larger coordinate), and with
 * `replicate` 0 at and beyond the first and last pixel. A pose that is not finite has a NaN score and gradient, and adds
 * nothing to the gradients of templates and map. Poses farther than POSE_FAR from the map count as so far.
 *
 * Steps of the CPU, each with its items:
 *   prepare (templates), forward (poses of all rows);  prepare, backward (templates' chunks of tiles), sum (poses), map (bands)
 * Cost, C = 8, float: 2 ns a pose and valid cell forward, 3 ns backward to poses and templates, 4 ns to the map, and zeros
 * written to all of its gradient.
 * Source: the paper, "Global Localization Task"; the score is that of Sarlin et al. 2023 (OrienterNet), section 3.3, at poses.
 */
#ifndef MDPS_POSE_CORRELATION_H
#define MDPS_POSE_CORRELATION_H
#include <stdbool.h>
#include <stdint.h>

#include "clones.h"
#include "cuda_launch.h"

enum {
    POSE_TILE = 64,     /* cells that are worked on together: 8 x 8 where all are valid */
    POSE_STRIP = 8,     /* rows of the template that a tile is cut from */
    POSE_CHUNK = 8,     /* tiles of a template that one item of backward has */
    POSE_BLOCK = 32,    /* poses that a tile serves one after the other in backward */
    POSE_BAND = 64,     /* rows of the map that one item of its gradient has */
    POSE_FAR = 1 << 22, /* pixels */
};

typedef struct {
    double x, y, radius; /* of the circle around a tile's cells, from the template's origin */
} PoseTile;

typedef struct {
    int64_t R, N, M, H, W, K, C, h, w;
    double x0, y0, shift;
    bool replicate;
    const void *map, *templates, *poses;
    const bool *valid;
    const int64_t *map_index, *template_index;
    void *scores;
    const void *grad;                             /* backward: (R, N) */
    void *grad_map, *grad_templates, *grad_poses; /* backward: NULL where not wanted, the last two together */
    /* Scratch memory; P = pose_cells() */
    void *x, *y;      /* (K, P) of the valid cells, from the middle of their tile; CUDA: from the origin */
    void *t;          /* (K, P, C) the template there; CPU: NULL where only templates' and poses' gradients are wanted */
    int32_t *cell;    /* (K, P) of a valid cell i w + j; CUDA: of cell i w + j its place among the valid ones, or -1 */
    int64_t *n_cells; /* (K) */
    void *cell_grad;  /* CUDA, backward: (pose_parts(), K, P, C) */
    PoseTile *tile;   /* CPU: (K, P / POSE_TILE) */
    double *reach;    /* CPU: (K) the farthest valid cell from the origin */
    void *pose_grad;  /* CPU, backward: (R, pose_chunks(), N, 3) */
} PoseCorrelation;

INLINE int64_t pose_tiles(const PoseCorrelation *p) { return (p->h * p->w + POSE_TILE - 1) / POSE_TILE; }
INLINE int64_t pose_cells(const PoseCorrelation *p) { return pose_tiles(p) * POSE_TILE; }
INLINE int64_t pose_chunks(const PoseCorrelation *p) { return (pose_tiles(p) + POSE_CHUNK - 1) / POSE_CHUNK; }
INLINE int64_t pose_bands(const PoseCorrelation *p) { return (p->H + POSE_BAND - 1) / POSE_BAND; }
/* CUDA: into how many parts the poses of a row are split for the gradient of a template: as many as fill a GPU. */
INLINE int64_t pose_parts(const PoseCorrelation *p) {
    const int64_t blocks = (p->K ? p->K : 1) * (pose_cells(p) / POSE_TILE + 1), most = (p->N + 31) / 32,
                  parts = 2048 / blocks + 1;
    return most < 1 ? 1 : parts < most ? parts : most;
}
/* CUDA: threads that share a pose. */
INLINE int pose_threads(const PoseCorrelation *p) { return p->h * p->w >= 2048 ? 256 : p->h * p->w >= 256 ? 128 : 32; }
/* Whether pixels, and tiles that may have a whole row of the template, have numbers of 32 bits; and POSE_FAR is far. */
INLINE bool pose_fits(const PoseCorrelation *p) {
    const bool origin = p->x0 >= -1e6 && p->x0 <= 1e6 && p->y0 >= -1e6 && p->y0 <= 1e6;
    return origin && p->H <= INT32_MAX / p->W && p->h <= 1000000 && p->w <= 1000000 && p->h * p->w <= INT32_MAX - POSE_TILE &&
           p->w + POSE_STRIP + 4 <= INT32_MAX / (p->W + 1);
}

void pose_correlation_prepare_f32(int64_t begin, int64_t end, void *parameters);
void pose_correlation_prepare_f64(int64_t begin, int64_t end, void *parameters);
void pose_correlation_f32(int64_t begin, int64_t end, void *parameters);
void pose_correlation_f64(int64_t begin, int64_t end, void *parameters);
void pose_correlation_backward_f32(int64_t begin, int64_t end, void *parameters);
void pose_correlation_backward_f64(int64_t begin, int64_t end, void *parameters);
void pose_correlation_sum_f32(int64_t begin, int64_t end, void *parameters);
void pose_correlation_sum_f64(int64_t begin, int64_t end, void *parameters);
void pose_correlation_map_f32(int64_t begin, int64_t end, void *parameters);
void pose_correlation_map_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int pose_correlation_prepare_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int pose_correlation_cuda(const void *parameters, int64_t n, int is_double, void *stream);
/* With what `sum` does on the CPU. */
LAUNCHER int pose_correlation_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int pose_correlation_map_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
