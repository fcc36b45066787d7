/* Gradients of pose_correlation to poses and templates on the GPU. Contract: pose_correlation.h.
 *
 * To a pose: a block, as forward. To a template: a thread for each cell and 8 channels goes through the poses in their order,
 * whose turns its block makes together, 64 at a time, in shared memory. So that many blocks have work, each row's poses are
 * split into pose_parts() parts, which are added in their order: no atomics, the same bits on every run and card.
 */
#ifndef REAL
#include "pose_correlation.h"

#include "cuda_block.cuh"
enum { CELLS = 64 };
#define MDPS_FILE "pose_correlation_backward.cu"
#include "for_each_real.h"

int pose_correlation_backward_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const PoseCorrelation *p = (const PoseCorrelation *)parameters;
    return is_double ? launch_gradients_f64(*p, stream) : launch_gradients_f32(*p, stream);
}
#else
#include "pose_correlation_sample.cuh"

template <int V> static __global__ void FN(of_poses)(PoseCorrelation p) {
    const int64_t n = blockIdx.x, r = n / p.N, padded = pose_cells(&p);
    const FN(Seen) seen = FN(see)(p, FN(turn_of)(&p, (const REAL *)p.poses + 3 * n));
    const bool good = pose_row_is_known(p, r) && seen.finite;
    REAL sum_u = 0, sum_v = 0, sum_theta = 0;
    if (good) {
        const int64_t k = p.template_index[r], count = p.n_cells[k];
        const REAL *m = (const REAL *)p.map + p.map_index[r] * p.H * p.W * p.C;
        const REAL *x = (const REAL *)p.x + k * padded, *y = (const REAL *)p.y + k * padded;
        const REAL *t = (const REAL *)p.t + k * padded * p.C;
        for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
            const FN(Cell) cell = FN(cell_of)(p, seen, x[i], y[i]);
            REAL du = 0, dv = 0;
#pragma unroll 2
            for (int64_t c = 0; c < p.C; c += V) {
                const FN(Four)<V> four = FN(load_four)<V>(m + c, cell);
                const FN(Vector)<V> of_template = *(const FN(Vector)<V> *)(t + i * p.C + c);
                for (int q = 0; q < V; q++) {
                    const REAL g0 = four.g[0].v[q], g1 = four.g[1].v[q], g2 = four.g[2].v[q], g3 = four.g[3].v[q];
                    const REAL top = cell.u.left_slope * g0 + cell.u.right_slope * g1;
                    const REAL bottom = cell.u.left_slope * g2 + cell.u.right_slope * g3;
                    const REAL left = cell.v.left_slope * g0 + cell.v.right_slope * g2;
                    const REAL right = cell.v.left_slope * g1 + cell.v.right_slope * g3;
                    du += (cell.v.left * top + cell.v.right * bottom) * of_template.v[q];
                    dv += (cell.u.left * left + cell.u.right * right) * of_template.v[q];
                }
            }
            sum_u += du, sum_v += dv;
            sum_theta += cell.xu * dv - cell.xv * du;
        }
    }
    REAL *shared = shared_memory<REAL>(), *out = (REAL *)p.grad_poses + 3 * n;
    const REAL grad = good ? ((const REAL *)p.grad)[n] : (REAL)NAN;
    sum_u = grad * reduce_block(sum_u, (REAL)0, Add(), shared);
    sum_v = grad * reduce_block(sum_v, (REAL)0, Add(), shared);
    sum_theta = grad * reduce_block(sum_theta, (REAL)0, Add(), shared);
    if (threadIdx.x == 0) out[0] = sum_u, out[1] = sum_v, out[2] = sum_theta;
}

/* Adds the samples of one cell from `count` poses, times their gradients, to `sum`; m: the map from the first channel. */
template <int V>
DEVICE void
FN(add_samples)(const PoseCorrelation &p, const FN(Seen) *seen, int count, REAL x, REAL y, const REAL *m, int64_t channels,
                        REAL *sum) {
    for (int n = 0; n < count; n++) {
        if (!seen[n].finite) continue;
        const FN(Cell) cell = FN(cell_of)(p, seen[n], x, y);
#pragma unroll
        for (int c = 0; c < POSE_GROUP; c += V) {
            if (c >= channels) continue;
            const FN(Four)<V> four = FN(load_four)<V>(m + c, cell);
            for (int q = 0; q < V; q++) {
                const REAL top = cell.u.left * four.g[0].v[q] + cell.u.right * four.g[1].v[q];
                const REAL bottom = cell.u.left * four.g[2].v[q] + cell.u.right * four.g[3].v[q];
                sum[c + q] += seen[n].grad * (cell.v.left * top + cell.v.right * bottom);
            }
        }
    }
}

/* Poses of one part, 64 cells of one template, and 8 channels. */
template <int V> static __global__ void FN(of_templates)(PoseCorrelation p) {
    const int64_t padded = pose_cells(&p), groups = (p.C + POSE_GROUP - 1) / POSE_GROUP, blocks = padded / CELLS;
    const int64_t c = blockIdx.x % groups * POSE_GROUP, i = blockIdx.x / groups % blocks * CELLS + threadIdx.x;
    const int64_t k = blockIdx.x / groups / blocks % p.K, part = blockIdx.x / groups / blocks / p.K, parts = pose_parts(&p);
    const int64_t begin = part * p.N / parts, end = (part + 1) * p.N / parts, count = p.n_cells[k];
    const bool has_cell = i < count;
    FN(Seen) *seen = shared_memory<FN(Seen)>();
    REAL sum[POSE_GROUP] = {};
    if (i - threadIdx.x >= count) return;
    const REAL x = has_cell ? ((const REAL *)p.x)[k * padded + i] : 0, y = has_cell ? ((const REAL *)p.y)[k * padded + i] : 0;
    for (int64_t r = 0; r < p.R; r++) {
        if (p.template_index[r] != k || !pose_row_is_known(p, r)) continue;
        const REAL *m = (const REAL *)p.map + p.map_index[r] * p.H * p.W * p.C + c;
        for (int64_t first = begin; first < end; first += CELLS) {
            const int64_t n = first + threadIdx.x;
            __syncthreads();
            if (n < end) {
                seen[threadIdx.x] = FN(see)(p, FN(turn_of)(&p, (const REAL *)p.poses + 3 * (r * p.N + n)));
                seen[threadIdx.x].grad = ((const REAL *)p.grad)[r * p.N + n];
            }
            __syncthreads();
            const int poses = (int)(end - first < CELLS ? end - first : CELLS);
            if (has_cell) FN(add_samples)<V>(p, seen, poses, x, y, m, p.C - c, sum);
        }
    }
    if (!has_cell) return;
    REAL *out = (REAL *)p.cell_grad + ((part * p.K + k) * padded + i) * p.C + c;
#pragma unroll
    for (int q = 0; q < POSE_GROUP; q++)
        if (c + q < p.C) out[q] = sum[q];
}

/* The parts' sums to the places of their cells; a thread for each number of grad_templates. */
static __global__ void FN(add_parts)(Numbers<PoseCorrelation> numbers) {
    const PoseCorrelation &p = numbers.p;
    const int64_t n = thread_of_grid(), cells = p.h * p.w, padded = pose_cells(&p), parts = pose_parts(&p);
    if (n >= numbers.n) return;
    const int64_t k = n / (p.C * cells), c = n / cells % p.C, place = p.cell[k * padded + n % cells];
    REAL sum = 0;
    for (int64_t part = 0; place >= 0 && part < parts; part++)
        sum += ((const REAL *)p.cell_grad)[((part * p.K + k) * padded + place) * p.C + c];
    ((REAL *)p.grad_templates)[n] = sum;
}

static int FN(launch_gradients)(const PoseCorrelation &p, void *stream) {
    const int most = 16 / sizeof(REAL);
    const bool one = pose_vector(p, most, sizeof(REAL)) == 1;
    const int64_t groups = (p.C + POSE_GROUP - 1) / POSE_GROUP,
                  blocks = pose_parts(&p) * p.K * (pose_cells(&p) / CELLS) * groups;
    void (*of_poses)(PoseCorrelation) = one ? FN(of_poses)<1> : FN(of_poses)<most>;
    void (*of_templates)(PoseCorrelation) = one ? FN(of_templates)<1> : FN(of_templates)<most>;
    int status = launch(of_poses, p.R * p.N, pose_threads(&p), WARP * sizeof(REAL), stream, p);
    if (!status) status = launch(of_templates, blocks, CELLS, CELLS * sizeof(FN(Seen)), stream, p);
    return status ? status : launch_numbers(FN(add_parts), &p, p.K * p.C * p.h * p.w, stream);
}
#endif
