/* Uniform deviates in [0, 1): multiples of 2^-24 (float) or 2^-53 (double).
 *
 *   seed  () or (B)  int64, with a stream number (philox.h)
 *   out   (B, n)     number i of a row comes from word i (float) or words 2 i, 2 i + 1 (double) of the row
 *
 * Items are tiles of PHILOX_TILE numbers: B * ceil(n / PHILOX_TILE). Cost: 1 ns a number (float, vectorised).
 */
#ifndef MDPS_PHILOX_UNIFORM_H
#define MDPS_PHILOX_UNIFORM_H
#include "cuda_launch.h"
#include "philox.h"

enum { PHILOX_TILE = 1024 };

typedef struct {
    int64_t B, n;
    Seed seed;
    void *out;
} PhiloxDraw;

void philox_uniform_f32(int64_t begin, int64_t end, void *parameters);
void philox_uniform_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int philox_uniform_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
