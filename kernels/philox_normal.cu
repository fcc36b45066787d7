/* Normal deviates on the GPU, four a thread (draw_fours.cuh). Contract: philox_normal.h. */
#ifndef REAL
#include "philox_normal.h"

#include "cuda_block.cuh"
#define MDPS_FILE "philox_normal.cu"
#include "for_each_real.h"

int philox_normal_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const PhiloxDraw *p = (const PhiloxDraw *)parameters;
    return launch(is_double ? draw_f64 : draw_f32, blocks_of_fours(*p), THREADS, 0, stream, *p);
}
#else
#include "draw_fours.cuh"

static __global__ void FN(draw)(PhiloxDraw p) {
    FN(draw_four)(p, [](Source s, int64_t first, int64_t n, REAL *out) { FN(draw_normal)(s, first, n, out); });
}
#endif
