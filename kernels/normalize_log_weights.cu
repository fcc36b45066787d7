/* Softmax statistics of rows on the GPU: one block a row, and the numbers are read from the cache again; rows of more than
 * NORMALIZE_PART particles are measured in parts by a first launch. Contract: normalize_log_weights.h.
 * This file includes itself once for float and once for double (for_each_real.h). */
#ifndef REAL
#include "normalize_log_weights.h"

#include "cuda_block.cuh"
enum { THREADS = 256 };
#define MDPS_FILE "normalize_log_weights.cu"
#include "for_each_real.h"

int normalize_log_weights_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const NormalizeLogWeights *p = (const NormalizeLogWeights *)parameters;
    return is_double ? launch_forward_f64(*p, stream) : launch_forward_f32(*p, stream);
}

int normalize_log_weights_backward_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const NormalizeLogWeights *p = (const NormalizeLogWeights *)parameters;
    return is_double ? launch_backward_f64(*p, stream) : launch_backward_f32(*p, stream);
}
#else
#include "real_math.h"

/* Of a part of a row: its largest number, and the sums of w and w^2 relative to it. Nothing but -inf: 0; NaN stays NaN. */
typedef struct {
    REAL top, sum, sum_of_squares;
} FN(Statistics);

/* Which numbers of which row this block has. */
typedef struct {
    int64_t b, begin, end;
} FN(Part);

DEVICE FN(Part) FN(part_of_block)(const NormalizeLogWeights &p) {
    int64_t parts = normalize_parts(p.N), b = blockIdx.x / parts, part = blockIdx.x % parts;
    return {b, b * p.N + part * p.N / parts, b * p.N + (part + 1) * p.N / parts};
}

DEVICE FN(Statistics) FN(add_up)(REAL top, REAL sum, REAL sum_of_squares) {
    REAL *shared = shared_memory<REAL>();
    return {top, reduce_block(sum, (REAL)0, Add(), shared), reduce_block(sum_of_squares, (REAL)0, Add(), shared)};
}

DEVICE FN(Statistics) FN(measure)(const REAL *l, int64_t begin, int64_t end) {
    REAL top = -INFINITY, sum = 0, sum_of_squares = 0;
    for (int64_t n = begin + threadIdx.x; n < end; n += THREADS) top = Larger()(top, l[n]);
    top = reduce_block(top, (REAL)-INFINITY, Larger(), shared_memory<REAL>());
    for (int64_t n = begin + threadIdx.x; n < end; n += THREADS) {
        REAL w = top > -INFINITY ? FN(exp2_real)((l[n] - top) * (REAL)LOG2E) : l[n] == l[n] ? 0 : l[n];
        sum += w;
        sum_of_squares += w * w;
    }
    return FN(add_up)(top, sum, sum_of_squares);
}

/* Of the row, from those of its parts. */
DEVICE FN(Statistics) FN(merge)(const FN(Statistics) *part, int64_t parts) {
    REAL top = -INFINITY, sum = 0, sum_of_squares = 0;
    for (int64_t i = threadIdx.x; i < parts; i += THREADS) top = Larger()(top, part[i].top);
    top = reduce_block(top, (REAL)-INFINITY, Larger(), shared_memory<REAL>());
    for (int64_t i = threadIdx.x; i < parts; i += THREADS) {
        REAL w = part[i].top > -INFINITY ? FN(exp2_real)((part[i].top - top) * (REAL)LOG2E) : 1;
        sum += w * part[i].sum;
        sum_of_squares += w * w * part[i].sum_of_squares;
    }
    return FN(add_up)(top, sum, sum_of_squares);
}

static __global__ void FN(measure_parts)(NormalizeLogWeights p) {
    FN(Part) here = FN(part_of_block)(p);
    FN(Statistics) s = FN(measure)((const REAL *)p.log_weights, here.begin, here.end);
    if (threadIdx.x == 0) ((FN(Statistics) *)p.scratch)[blockIdx.x] = s;
}

static __global__ void FN(forward)(NormalizeLogWeights p) {
    FN(Part) here = FN(part_of_block)(p);
    const REAL *l = (const REAL *)p.log_weights;
    const int64_t parts = normalize_parts(p.N);
    FN(Statistics) s = parts == 1 ? FN(measure)(l, here.begin, here.end) : FN(merge)((const FN(Statistics) *)p.scratch + here.b * parts, parts);
    REAL log_of_sum = log(s.sum), ess = s.sum * s.sum / s.sum_of_squares, top = s.top;
    bool collapsed = top == -INFINITY, is_nan = s.sum != s.sum;
    for (int64_t n = here.begin + threadIdx.x; n < here.end; n += THREADS)
        ((REAL *)p.normalized)[n] = is_nan ? s.sum : collapsed ? -log((REAL)p.N) : (l[n] - top) - log_of_sum;
    if (threadIdx.x > 0 || here.begin > here.b * p.N) return;
    ((REAL *)p.log_sum)[here.b] = is_nan ? s.sum : collapsed ? top : top + log_of_sum;
    ((REAL *)p.ess)[here.b] = is_nan ? s.sum : collapsed ? (REAL)p.N : ess;
}

DEVICE REAL FN(sum_grad)(const NormalizeLogWeights &p, FN(Part) here) {
    REAL sum = 0;
    for (int64_t n = here.begin + threadIdx.x; n < here.end; n += THREADS) sum += ((const REAL *)p.grad_normalized)[n];
    return reduce_block(sum, (REAL)0, Add(), shared_memory<REAL>());
}

static __global__ void FN(sum_parts)(NormalizeLogWeights p) {
    REAL sum = FN(sum_grad)(p, FN(part_of_block)(p));
    if (threadIdx.x == 0) ((REAL *)p.scratch)[blockIdx.x] = sum;
}

/* The formula is in normalize_log_weights.c. */
static __global__ void FN(backward)(NormalizeLogWeights p) {
    FN(Part) here = FN(part_of_block)(p);
    const int64_t parts = normalize_parts(p.N);
    const REAL *normalized = (const REAL *)p.normalized, *grad = (const REAL *)p.grad_normalized;
    REAL sum = 0;
    if (parts == 1) sum = FN(sum_grad)(p, here);
    else {
        for (int64_t i = threadIdx.x; i < parts; i += THREADS) sum += ((const REAL *)p.scratch)[here.b * parts + i];
        sum = reduce_block(sum, (REAL)0, Add(), shared_memory<REAL>());
    }
    bool collapsed = ((const REAL *)p.log_sum)[here.b] == -INFINITY;
    REAL ess = ((const REAL *)p.ess)[here.b], grad_ess = 2 * ess * ((const REAL *)p.grad_ess)[here.b];
    REAL rest = ((const REAL *)p.grad_log_sum)[here.b] - sum;
    for (int64_t n = here.begin + threadIdx.x; n < here.end; n += THREADS) {
        REAL w = FN(exp2_real)(normalized[n] * (REAL)LOG2E);
        REAL g = grad[n] + w * (rest + grad_ess * (1 - ess * w));
        ((REAL *)p.grad_log_weights)[n] = collapsed ? 0 : g;
    }
}

static int FN(launch_forward)(const NormalizeLogWeights &p, void *stream) {
    const int64_t blocks = p.B * normalize_parts(p.N);
    int status = 0;
    if (normalize_parts(p.N) > 1) status = launch(FN(measure_parts), blocks, THREADS, WARP * sizeof(REAL), stream, p);
    return status ? status : launch(FN(forward), blocks, THREADS, WARP * sizeof(REAL), stream, p);
}

static int FN(launch_backward)(const NormalizeLogWeights &p, void *stream) {
    const int64_t blocks = p.B * normalize_parts(p.N);
    int status = 0;
    if (normalize_parts(p.N) > 1) status = launch(FN(sum_parts), blocks, THREADS, WARP * sizeof(REAL), stream, p);
    return status ? status : launch(FN(backward), blocks, THREADS, WARP * sizeof(REAL), stream, p);
}
#endif
