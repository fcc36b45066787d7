/* Von Mises deviates with mean 0, in [-pi, pi); the method is in draw.h.
 *
 *   seed           () or (B)  int64, with a stream number (philox.h)
 *   concentration  (B, n)     >= 0; 0 is uniform, infinity gives 0, NaN and negative numbers give NaN
 *   out            (B, n)     n < 2^32
 *
 * Items are tiles of VON_MISES_TILE numbers: B * ceil(n / VON_MISES_TILE). Cost: at most 1.6 attempts a number on average.
 */
#ifndef MDPS_PHILOX_VON_MISES_H
#define MDPS_PHILOX_VON_MISES_H
#include "cuda_launch.h"
#include "philox.h"

enum { VON_MISES_TILE = 256 /* = DRAW_TILE of draw.h */ };

typedef struct {
    int64_t B, n;
    Seed seed;
    const void *concentration;
    void *out;
} PhiloxVonMises;

void philox_von_mises_f32(int64_t begin, int64_t end, void *parameters);
void philox_von_mises_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int philox_von_mises_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
