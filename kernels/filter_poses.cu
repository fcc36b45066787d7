/* First weights and sums, a thread a number. Contract: filter_poses.h. */
#ifndef REAL
#include "filter_poses.h"

#include "cuda_block.cuh"
#define MDPS_FILE "filter_poses.cu"
#include "for_each_real.h"

int filter_poses_begin_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    FilterPosesBegin p = *(const FilterPosesBegin *)parameters;
    p.weight = -log((double)p.N);
    return launch_numbers(is_double ? begin_f64 : begin_f32, &p, n, stream);
}

int filter_poses_add_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    return launch_numbers(is_double ? add_f64 : add_f32, parameters, n, stream);
}
#else

static __global__ void FN(begin)(Numbers<FilterPosesBegin> numbers) {
    const FilterPosesBegin &p = numbers.p;
    const int64_t i = thread_of_grid();
    if (i >= numbers.n) return;
    ((REAL *)p.predicted)[i] = (REAL)p.weight;
    if (i < p.B * p.N) p.ancestors[i] = i % p.N;
}

static __global__ void FN(add)(Numbers<FilterPosesAdd> numbers) {
    const FilterPosesAdd &p = numbers.p;
    const int64_t i = thread_of_grid();
    if (i >= numbers.n) return;
    const REAL *a = (const REAL *)p.a, *b = (const REAL *)p.b;
    ((REAL *)p.sum)[i] = a && b ? a[i] + b[i] : a ? a[i] : b ? b[i] : 0;
}
#endif
