/* Uniform deviates on the GPU: a thread draws four numbers and stores them at once where every row begins at a multiple of
 * four. Contract: philox_uniform.h. */
#ifndef REAL
#include "philox_uniform.h"

#include "cuda_block.cuh"
enum { THREADS = 256 };
#define MDPS_FILE "philox_uniform.cu"
#include "for_each_real.h"

int philox_uniform_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const PhiloxDraw *p = (const PhiloxDraw *)parameters;
    const int64_t blocks = (p->B * ((p->n + 3) / 4) + THREADS - 1) / THREADS;
    return launch(is_double ? draw_f64 : draw_f32, blocks, THREADS, 0, stream, *p);
}
#else
#include "real_math.h"

#include "draw.h"

typedef struct alignas(16) {
    REAL number[4];
} FN(Four);

static __global__ void FN(draw)(PhiloxDraw p) {
    const int64_t fours = (p.n + 3) / 4, i = thread_of_grid(), b = i / fours, first = i % fours * 4;
    if (b >= p.B) return;
    REAL *out = (REAL *)p.out + b * p.n + first;
    FN(Four) four;
    FN(draw_uniform)(source_of_row(p.seed, b), first, 4, four.number);
    if (p.n % 4 == 0) *(FN(Four) *)out = four;
    else
        for (int j = 0; j < 4; j++)
            if (first + j < p.n) out[j] = four.number[j];
}
#endif
