/* Scores of poses on the GPU: a block for each pose, a thread for each of its cells, C / 4 loads of 16 bytes a tap (float,
 * where C is a multiple of 4). First the templates' valid cells are listed, by blocks that each count what comes before theirs.
 * Contract: pose_correlation.h.
 */
#ifndef REAL
#include "pose_correlation.h"

#include "cuda_block.cuh"
enum { LISTED = 256 };
#define MDPS_FILE "pose_correlation.cu"
#include "for_each_real.h"

int pose_correlation_prepare_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const PoseCorrelation *p = (const PoseCorrelation *)parameters;
    const int64_t blocks = p->K * ((p->h * p->w + LISTED - 1) / LISTED);
    return launch(is_double ? list_cells_f64 : list_cells_f32, blocks, LISTED, WARP * sizeof(int), stream, *p);
}

int pose_correlation_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    const PoseCorrelation *p = (const PoseCorrelation *)parameters;
    return is_double ? launch_scores_f64(*p, n, stream) : launch_scores_f32(*p, n, stream);
}
#else
#include "pose_correlation_sample.cuh"

/* 256 cells of a template: those that are valid, behind those of the blocks before. */
static __global__ void FN(list_cells)(PoseCorrelation p) {
    const int64_t cells = p.h * p.w, parts = (cells + LISTED - 1) / LISTED, k = blockIdx.x / parts;
    const int64_t first = blockIdx.x % parts * LISTED, i = first + threadIdx.x, padded = pose_cells(&p);
    const bool *valid = p.valid ? p.valid + k * cells : NULL;
    int before = 0, total, *shared = shared_memory<int>();
    for (int64_t j = threadIdx.x; j < first; j += LISTED) before += valid ? valid[j] : 1;
    before = reduce_block(before, 0, Add(), shared);
    const bool is_valid = i < cells && (!valid || valid[i]);
    const int place = before + scan_block((int)is_valid, &total, shared);
    if (threadIdx.x == 0 && first + LISTED >= cells) p.n_cells[k] = before + total;
    if (i < cells) p.cell[k * padded + i] = is_valid ? place : -1;
    if (!is_valid) return;
    ((REAL *)p.x)[k * padded + place] = (REAL)((double)(i % p.w) - p.x0);
    ((REAL *)p.y)[k * padded + place] = (REAL)((double)(i / p.w) - p.y0);
    const REAL *from = (const REAL *)p.templates + k * p.C * cells + i;
    REAL *t = (REAL *)p.t + (k * padded + place) * p.C;
    for (int64_t c = 0; c < p.C; c++) t[c] = from[c * cells];
}

template <int V> static __global__ void FN(scores)(PoseCorrelation p) {
    const int64_t n = blockIdx.x, r = n / p.N, padded = pose_cells(&p);
    const FN(Seen) seen = FN(see)(p, FN(turn_of)(&p, (const REAL *)p.poses + 3 * n));
    const bool good = pose_row_is_known(p, r) && seen.finite;
    REAL sum = 0;
    if (good) {
        const int64_t k = p.template_index[r], count = p.n_cells[k];
        const REAL *m = (const REAL *)p.map + p.map_index[r] * p.H * p.W * p.C;
        const REAL *x = (const REAL *)p.x + k * padded, *y = (const REAL *)p.y + k * padded;
        const REAL *t = (const REAL *)p.t + k * padded * p.C;
        for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
            const FN(Cell) cell = FN(cell_of)(p, seen, x[i], y[i]);
#pragma unroll 2
            for (int64_t c = 0; c < p.C; c += V) {
                const FN(Four)<V> four = FN(load_four)<V>(m + c, cell);
                const FN(Vector)<V> of_template = *(const FN(Vector)<V> *)(t + i * p.C + c);
                for (int q = 0; q < V; q++) {
                    const REAL top = cell.u.left * four.g[0].v[q] + cell.u.right * four.g[1].v[q];
                    const REAL bottom = cell.u.left * four.g[2].v[q] + cell.u.right * four.g[3].v[q];
                    sum += (cell.v.left * top + cell.v.right * bottom) * of_template.v[q];
                }
            }
        }
    }
    sum = reduce_block(sum, (REAL)0, Add(), shared_memory<REAL>());
    if (threadIdx.x == 0) ((REAL *)p.scores)[n] = good ? sum : (REAL)NAN;
}

static int FN(launch_scores)(const PoseCorrelation &p, int64_t poses, void *stream) {
    const int most = 16 / sizeof(REAL), threads = pose_threads(&p);
    void (*kernel)(PoseCorrelation) = pose_vector(p, most, sizeof(REAL)) == 1 ? FN(scores)<1> : FN(scores)<most>;
    return launch(kernel, poses, threads, WARP * sizeof(REAL), stream, p);
}
#endif
