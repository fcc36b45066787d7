/* Draws from mixtures of B rows: M ancestors among N components, then a kernel draw around each ancestor's mean.
 *
 *   means       (B, N, D)         D = G + A state dimensions, the last A are angles in radians; D <= 16
 *   log_weights (B, N)            as in resample.h
 *   bandwidths  (D) or (B, D)     standard deviations: Gaussian, and von Mises with concentration bandwidth^-2
 *   seed        () or (B)         int64, with a stream number
 *   ancestors   (B, M)            from resample
 *   samples     (B, M, D)         means[ancestor] + noise; angles in [-pi, pi)
 *
 * The noise of sample m, dimension g is number m G + g of philox_normal's row times the bandwidth; of angle a, number m A + a
 * of philox_von_mises' row. Bandwidth 0 copies the mean. A row with a NaN or negative bandwidth, or NaN or +inf among its
 * log-weights, is NaN. A row that is -inf throughout has uniform ancestors and is drawn as usual.
 * Items are tiles of MIXTURE_DRAWS samples: B * ceil(M / MIXTURE_DRAWS), after resample. CUDA: the launcher resamples as well,
 * in the same launch, with the scratch memory of resample.h. Cost: a normal for each linear and a von Mises draw for each
 * angular dimension of a sample.
 */
#ifndef MDPS_MIXTURE_RESAMPLE_H
#define MDPS_MIXTURE_RESAMPLE_H
#include "cuda_launch.h"
#include "resample.h"

enum { MIXTURE_DRAWS = 256, MOST_DIMENSIONS = 16 };
/* CPU: items that are drawn together, and their samples. */
enum { MIXTURE_PARTS = 32, MIXTURE_BATCH = 512 };

typedef struct {
    Resample resample;
    int64_t D, A;
    int64_t bandwidths_per_row; /* 1: (B, D), 0: (D) */
    const void *means, *bandwidths;
    void *samples;
} MixtureResample;

void mixture_resample_f32(int64_t begin, int64_t end, void *parameters);
void mixture_resample_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int mixture_resample_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
