/* Standard normal deviates; the method is in draw.h.
 *
 *   seed  () or (B)  int64, with a stream number (philox.h)
 *   out   (B, n)     numbers 4 i to 4 i + 3 of a row (float) or 2 i, 2 i + 1 (double) come from block i of the row
 *
 * Items are tiles of PHILOX_TILE numbers. PhiloxDraw is philox_uniform.h's. Cost: 2 ns a number (float, vectorised).
 */
#ifndef MDPS_PHILOX_NORMAL_H
#define MDPS_PHILOX_NORMAL_H
#include "cuda_launch.h"
#include "philox_uniform.h"

void philox_normal_f32(int64_t begin, int64_t end, void *parameters);
void philox_normal_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int philox_normal_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
