/* Von Mises deviates on the GPU: a thread a number, which tries until one attempt is accepted; a warp takes as long as the
 * unluckiest of its threads, 4 attempts on average. Contract: philox_von_mises.h. */
#ifndef REAL
#include "philox_von_mises.h"

#include "cuda_block.cuh"
enum { THREADS = 256 };
#define MDPS_FILE "philox_von_mises.cu"
#include "for_each_real.h"

int philox_von_mises_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const PhiloxVonMises *p = (const PhiloxVonMises *)parameters;
    return launch(is_double ? draw_f64 : draw_f32, (p->B * p->n + THREADS - 1) / THREADS, THREADS, 0, stream, *p);
}
#else
#include "real_math.h"

#include "draw.h"

static __global__ void FN(draw)(PhiloxVonMises p) {
    const int64_t i = thread_of_grid(), b = i / p.n;
    if (b >= p.B) return;
    REAL concentration = ((const REAL *)p.concentration)[i];
    ((REAL *)p.out)[i] = FN(draw_one_von_mises)(source_of_row(p.seed, b), (uint32_t)(i - b * p.n), concentration);
}
#endif
