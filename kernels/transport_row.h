/* What the forward and the backward pass of transport_resample share on the CPU: a row's particles as centred and scaled
 * coordinates, its weights, and the entries of its plan, particles as lanes (REAL, FN: for_each_real.h).
 * No include guard: a file includes it once for each REAL.
 */
#include "real_math.h"
#include "transport_resample.h"

/* Entries exp((f_i + g_j - C_ij) / e) are held below 2^TOP; a sum of them within 2^-FAR and 2^FAR has lost nothing by that, nor
 * by what was flushed to 0. */
#define TRANSPORT_TOP (IS_DOUBLE ? 1000 : 100)
#define TRANSPORT_FAR (IS_DOUBLE ? 0x1p900 : 0x1p60f)

typedef struct {
    int64_t N, padded;
    int K;
    REAL *x, *w, *f, *g; /* (K, padded), then (padded); f is -inf beyond N */
    double scale, centre[TRANSPORT_MAX_K], range;
    int widest; /* the coordinate that gives the scale; -1: all particles are equal */
    bool collapsed;
} FN(Row);

/* Normalised weights; false for NaN or +inf. */
INLINE bool FN(load_weights)(const REAL *l, FN(Row) *row) {
    REAL top = -INFINITY, sum = 0;
    int bad = 0;
    for (int64_t n = 0; n < row->N; n++) {
        bad |= !(l[n] < (REAL)INFINITY);
        top = l[n] > top ? l[n] : top;
    }
    row->collapsed = top == -(REAL)INFINITY;
    for (int64_t n = 0; n < row->N; n++) {
        REAL w = FN(exp2_from)((l[n] - top) * (REAL)LOG2E, IS_DOUBLE ? -1022 : -126);
        row->w[n] = row->collapsed ? 1 : w;
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t n = 0; n < row->N; n++) sum += row->w[n];
    for (int64_t n = 0; n < row->N; n++) row->w[n] /= sum;
    return !bad;
}

/* Centres and scales the coordinates; false where one is not finite. */
INLINE bool FN(scale_coordinates)(FN(Row) *row) {
    double most = 0, low = INFINITY, high = -INFINITY;
    row->widest = -1;
    for (int k = 0; k < row->K; k++) {
        REAL *x = row->x + k * row->padded;
        double sum = 0, square = 0;
        int differ = 0;
        for (int64_t n = 0; n < row->N; n++) sum += x[n], differ |= x[n] != x[0];
        if (!(fabs(sum) < INFINITY)) return false;
        row->centre[k] = differ ? sum / row->N : x[0];
        for (int64_t n = 0; n < row->N; n++) {
            double away = x[n] - row->centre[k];
            square += away * away;
            low = away < low ? away : low;
            high = away > high ? away : high;
        }
        if (square > most) most = square, row->widest = k;
    }
    row->scale = row->widest < 0 ? 1 : sqrt(row->K * most / row->N);
    row->range = (high - low) / row->scale;
    for (int k = 0; k < row->K; k++)
        for (int64_t n = 0; n < row->padded; n++) {
            REAL *x = row->x + k * row->padded + n;
            *x = n < row->N ? (REAL)((*x - row->centre[k]) / row->scale) : 0;
        }
    return true;
}

/* Row b into memory of K + 3 numbers a particle; false where it has no plan. */
INLINE bool FN(load_row)(const TransportResample *p, int64_t b, REAL *memory, FN(Row) *row) {
    const int D = p->G + p->A;
    const REAL *particles = (const REAL *)p->particles + b * p->N * D;
    row->N = p->N, row->padded = transport_padded(p->N), row->K = (int)transport_K(p);
    row->x = memory, row->w = memory + row->K * row->padded, row->f = row->w + row->padded, row->g = row->f + row->padded;
    for (int64_t n = 0; n < p->N; n++)
        for (int g = 0; g < p->G; g++) row->x[g * row->padded + n] = particles[n * D + g];
    for (int a = 0; a < p->A; a++)
        for (int64_t n = 0; n < p->N; n++) {
            REAL angle = particles[n * D + p->G + a];
            row->x[(p->G + a) * row->padded + n] = cos(angle);
            row->x[(p->G + p->A + a) * row->padded + n] = sin(angle);
        }
    for (int64_t n = 0; n < row->padded; n++) row->f[n] = n < p->N ? 0 : -(REAL)INFINITY, row->g[n] = 0;
    bool good = FN(load_weights)((const REAL *)p->log_weights + b * p->N, row);
    return FN(scale_coordinates)(row) && good;
}

/* f of a tile, in units of base 2. */
INLINE void FN(load_tile)(const FN(Row) *row, REAL unit, int64_t i0, REAL *f) {
    for (int l = 0; l < TRANSPORT_TILE; l++) f[l] = row->f[i0 + l] * unit;
}

/* The smaller number, positive top: bit patterns compare as integers, and the compiler does not merge this with other bounds.
 */
INLINE REAL FN(at_most)(REAL a, REAL top) { return FN(real)(FN(bits)(a) < FN(bits)(top) ? FN(bits)(a) : FN(bits)(top)); }

/* exp((f_i + g_j - C_ij) / e) for the tile of particles i from i0 on; unit = log2(e) / e. */
INLINE void FN(entries)(const FN(Row) *row, REAL unit, const REAL *f, int64_t i0, int64_t j, int K, REAL *entry) {
    const REAL g = row->g[j] * unit, half = (REAL)0.5 * unit;
    REAL square[TRANSPORT_TILE] __attribute__((aligned(64))) = {0};
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) {
        const REAL *x = row->x + k * row->padded + i0, xj = row->x[k * row->padded + j];
        for (int l = 0; l < TRANSPORT_TILE; l++) square[l] += (x[l] - xj) * (x[l] - xj);
    }
    for (int l = 0; l < TRANSPORT_TILE; l++) {
        REAL a = FN(at_most)((f[l] + g) - half * square[l], TRANSPORT_TOP);
        entry[l] = FN(exp2_from)(a, IS_DOUBLE ? -1022 : -126);
    }
}

/* sums[j][l % TRANSPORT_LANES] += entry[l]; begins with the tile at 0. */
INLINE void FN(add_lanes)(const REAL *entry, int64_t i0, int64_t j, REAL *sums) {
    REAL *out = sums + j * TRANSPORT_LANES;
    for (int l = 0; l < TRANSPORT_LANES; l++) {
        REAL sum = 0;
        for (int t = 0; t < TRANSPORT_TILE; t += TRANSPORT_LANES) sum += entry[t + l];
        out[l] = (i0 ? out[l] : 0) + sum;
    }
}

/* The sums of n times TRANSPORT_LANES numbers, in their first n places: halving the whole array, neighbours become lanes. */
INLINE void FN(sum_lanes)(int64_t n, REAL *sums) {
    for (int64_t left = n * TRANSPORT_LANES / 2; left >= n; left /= 2)
#pragma GCC ivdep
        for (int64_t i = 0; i < left; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
}
