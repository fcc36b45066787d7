/* The gradient of pose_correlation to the map on the GPU: a pixel gathers, so that nothing is added by chance. Contract:
 * pose_correlation.h.
 *
 * A thread has a pixel and 8 channels; its block has 16 x 8 pixels, finds which poses reach them, 128 at a time in shared
 * memory, and every thread looks up the cells whose samples lie less than a pixel away: those within a turned square of 2 x 2
 * around the pixel, seen from the pose, 9 places at most. With `replicate` the border's pixels stand for all beyond: each has a
 * block of its own, which goes through all cells of the poses that reach it.
 */
#ifndef REAL
#include "pose_correlation.h"

#include "cuda_block.cuh"
enum { ACROSS = 16, DOWN = 8, PIXELS = ACROSS * DOWN, BORDER = 64 };
#define MDPS_FILE "pose_correlation_map.cu"
#include "for_each_real.h"

int pose_correlation_map_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const PoseCorrelation *p = (const PoseCorrelation *)parameters;
    return is_double ? launch_map_f64(*p, stream) : launch_map_f32(*p, stream);
}
#else
#include "pose_correlation_sample.cuh"

/* The poses that a block looks at together, in the order of poses. */
typedef struct {
    int work[WARP];
    FN(Seen) seen[PIXELS];
} FN(Seers);

/* Lists those poses of row r from `first` on, one for each thread, that reach the pixels left to right and top to bottom. */
DEVICE int FN(list_seers)(const PoseCorrelation &p, int64_t r, int64_t first, int64_t left, int64_t right, int64_t top,
                      int64_t bottom, FN(Seers) *s) {
    const int64_t n = first + threadIdx.x;
    const double reach = pose_reach(p), last_u = (double)(p.W - 1), last_v = (double)(p.H - 1);
    bool reaches = false;
    PoseTurn turn;
    if (n < p.N) {
        turn = FN(turn_of)(&p, (const REAL *)p.poses + 3 * (r * p.N + n));
        double u0 = turn.u - reach, u1 = turn.u + reach, v0 = turn.v - reach, v1 = turn.v + reach;
        if (p.replicate) {
            u0 = within(u0, 0, last_u), u1 = within(u1, 0, last_u);
            v0 = within(v0, 0, last_v), v1 = within(v1, 0, last_v);
        }
        reaches = turn.finite && u0 < (double)(right + 1) && u1 > (double)(left - 1) && v0 < (double)(bottom + 1) &&
                  v1 > (double)(top - 1);
    }
    int total;
    const int place = scan_block((int)reaches, &total, s->work);
    if (reaches) {
        s->seen[place] = FN(see)(p, turn);
        s->seen[place].grad = ((const REAL *)p.grad)[r * p.N + n];
    }
    __syncthreads();
    return total;
}

DEVICE void FN(add_cell)(const PoseCorrelation &p, const REAL *t, REAL weight, int64_t channels, REAL *sum) {
#pragma unroll
    for (int q = 0; q < POSE_GROUP; q++)
        if (q < channels) sum[q] += weight * t[q];
}

/* What pixel (column, row) gets from a pose's cells, of template k, channels from c on. */
DEVICE void
FN(gather)(const PoseCorrelation &p, const FN(Seen) &a, int64_t k, int64_t column, int64_t row, int64_t c, REAL *sum) {
    const REAL u = (REAL)(column - a.iu) - a.fu, v = (REAL)(row - a.iv) - a.fv, r = fabs(a.c) + fabs(a.s) + (REAL)0.01;
    const REAL x = u * a.c + v * a.s + (REAL)p.x0, y = v * a.c - u * a.s + (REAL)p.y0;
    const int64_t j0 = (int64_t)ceil(x - r), j1 = (int64_t)floor(x + r), i0 = (int64_t)ceil(y - r), i1 = (int64_t)floor(y + r);
    const int64_t padded = pose_cells(&p);
    for (int64_t i = i0 < 0 ? 0 : i0; i <= i1 && i < p.h; i++)
        for (int64_t j = j0 < 0 ? 0 : j0; j <= j1 && j < p.w; j++) {
            const REAL at_x = (REAL)((double)j - p.x0), at_y = (REAL)((double)i - p.y0);
            const REAL to_u = 1 - fabs(at_x * a.c - at_y * a.s - u), to_v = 1 - fabs(at_x * a.s + at_y * a.c - v);
            if (!(to_u > 0 && to_v > 0)) continue;
            const int64_t place = p.cell[k * padded + i * p.w + j];
            if (place < 0) continue;
            FN(add_cell)(p, (const REAL *)p.t + (k * padded + place) * p.C + c, a.grad * to_u * to_v, p.C - c, sum);
        }
}

static __global__ void FN(gather_pixels)(PoseCorrelation p) {
    const int64_t groups = (p.C + POSE_GROUP - 1) / POSE_GROUP, wide = (p.W + ACROSS - 1) / ACROSS,
                  high = (p.H + DOWN - 1) / DOWN;
    const int64_t c = blockIdx.x % groups * POSE_GROUP, left = blockIdx.x / groups % wide * ACROSS;
    const int64_t top = blockIdx.x / groups / wide % high * DOWN, m = blockIdx.x / groups / wide / high;
    const int64_t column = left + threadIdx.x % ACROSS, row = top + threadIdx.x / ACROSS;
    const bool is_border = column == 0 || row == 0 || column == p.W - 1 || row == p.H - 1;
    const bool has_pixel = column < p.W && row < p.H && !(p.replicate && is_border);
    FN(Seers) *s = shared_memory<FN(Seers)>();
    REAL sum[POSE_GROUP] = {};
    for (int64_t r = 0; r < p.R; r++) {
        if (p.map_index[r] != m || !pose_row_is_known(p, r)) continue;
        for (int64_t first = 0; first < p.N; first += PIXELS) {
            const int count = FN(list_seers)(p, r, first, left, left + ACROSS - 1, top, top + DOWN - 1, s);
            for (int n = 0; has_pixel && n < count; n++) FN(gather)(p, s->seen[n], p.template_index[r], column, row, c, sum);
            __syncthreads();
        }
    }
    if (!has_pixel) return;
    REAL *out = (REAL *)p.grad_map + ((m * p.H + row) * p.W + column) * p.C + c;
#pragma unroll
    for (int q = 0; q < POSE_GROUP; q++)
        if (c + q < p.C) out[q] = sum[q];
}

/* Pixels on the map's border, and the column and row of each. */
INLINE int64_t FN(border_pixels)(const PoseCorrelation *p) {
    return p->W * p->H - (p->W > 2 && p->H > 2 ? (p->W - 2) * (p->H - 2) : 0);
}
DEVICE void FN(border_pixel)(const PoseCorrelation &p, int64_t e, int64_t *column, int64_t *row) {
    const int64_t rows = p.H > 1 ? 2 : 1, columns = p.W > 1 ? 2 : 1, beside = e - rows * p.W;
    *column = beside < 0 ? e % p.W : beside % columns * (p.W - 1);
    *row = beside < 0 ? e / p.W * (p.H - 1) : 1 + beside / columns;
}

static __global__ void FN(gather_border)(PoseCorrelation p) {
    const int64_t groups = (p.C + POSE_GROUP - 1) / POSE_GROUP, pixels = FN(border_pixels)(&p), padded = pose_cells(&p);
    const int64_t c = blockIdx.x % groups * POSE_GROUP, m = blockIdx.x / groups / pixels;
    int64_t column, row;
    FN(border_pixel)(p, blockIdx.x / groups % pixels, &column, &row);
    FN(Seers) *s = shared_memory<FN(Seers)>();
    REAL sum[POSE_GROUP] = {};
    for (int64_t r = 0; r < p.R; r++) {
        if (p.map_index[r] != m || !pose_row_is_known(p, r)) continue;
        const int64_t k = p.template_index[r], cells = p.n_cells[k];
        const REAL *x = (const REAL *)p.x + k * padded, *y = (const REAL *)p.y + k * padded;
        for (int64_t first = 0; first < p.N; first += BORDER) {
            const int count = FN(list_seers)(p, r, first, column, column, row, row, s);
            for (int n = 0; n < count; n++)
                for (int64_t i = threadIdx.x; i < cells; i += BORDER) {
                    const FN(Cell) cell = FN(cell_of)(p, s->seen[n], x[i], y[i]);
                    const REAL to_u = cell.u.first == column ? cell.u.left : cell.u.first + 1 == column ? cell.u.right : 0;
                    const REAL to_v = cell.v.first == row ? cell.v.left : cell.v.first + 1 == row ? cell.v.right : 0;
                    if (to_u == 0 || to_v == 0) continue;
                    FN(add_cell)(p, (const REAL *)p.t + (k * padded + i) * p.C + c, s->seen[n].grad * to_u * to_v, p.C - c, sum);
                }
            __syncthreads();
        }
    }
    REAL *out = (REAL *)p.grad_map + ((m * p.H + row) * p.W + column) * p.C + c, *shared = (REAL *)s->seen;
#pragma unroll
    for (int q = 0; q < POSE_GROUP; q++) {
        const REAL all = reduce_block(sum[q], (REAL)0, Add(), shared);
        if (threadIdx.x == 0 && c + q < p.C) out[q] = all;
    }
}

static int FN(launch_map)(const PoseCorrelation &p, void *stream) {
    const int64_t groups = (p.C + POSE_GROUP - 1) / POSE_GROUP;
    const int64_t tiles = ((p.W + ACROSS - 1) / ACROSS) * ((p.H + DOWN - 1) / DOWN);
    const int status = launch(FN(gather_pixels), p.M * tiles * groups, PIXELS, sizeof(FN(Seers)), stream, p);
    if (status || !p.replicate) return status;
    return launch(FN(gather_border), p.M * FN(border_pixels)(&p) * groups, BORDER, sizeof(FN(Seers)), stream, p);
}
#endif
