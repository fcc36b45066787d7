/* A step of mean-shift from each mean, the densities there by mixture_log_prob, then ascents from the best of them.
 * Contract: find_modes.h, the search: find_modes_search.h. Steps have components as lanes and are computed in double for both
 * types, so that an ascent ends within rounding of the mode. Densities at the means themselves are a poorer order: in
 * filters' mixtures of 100 components 8 % of the third modes were missed, 1.5 % with one step.
 * This file includes itself once for float and once for double (for_each_real.h). */
#ifndef REAL
#include "find_modes_search.h"
#define MDPS_FILE "find_modes.c"
#include "for_each_real.h"
#else
#include "real_math.h"

/* A row and the memory of its chunk. */
typedef struct {
    ModeRow row;
    MixtureLogProb densities; /* of this row at its starts */
    REAL *starts;             /* (N, D) */
    int64_t stride;
    double *weight, *state; /* components: log2 weight relative to the largest; G means, A cosines, A sines of half angles */
    double *exponent;       /* (stride) */
    double *found;
} FN(Search);

/* Lays out the chunk's memory. */
INLINE void FN(place)(const FindModes *p, int64_t chunk, FN(Search) *s) {
    const int64_t features = mixture_features(&p->mixture);
    char *at = (char *)p->scratch + chunk * find_modes_bytes(p, sizeof(REAL));
    s->row.G = p->mixture.G, s->row.A = p->mixture.A;
    s->stride = mixture_padded(p->mixture.N);
    s->densities = p->mixture;
    s->densities.B = 1;
    s->densities.bandwidth_stride = 0;
    s->weight = (double *)at;
    s->state = s->weight + s->stride;
    s->exponent = s->state + s->stride * features;
    REAL *reals = (REAL *)(s->exponent + s->stride);
    s->densities.components = reals;
    s->densities.log_prob = reals + s->stride * (1 + features);
    s->densities.log2_sum = reals + s->stride * (2 + features);
    s->densities.x = s->starts = reals + s->stride * (3 + features);
    s->found = (double *)(s->starts + s->stride * (s->row.G + s->row.A));
}

/* Components in double; false where a number among them is not finite. */
INLINE bool FN(load_components)(FN(Search) *s) {
    const int G = s->row.G, A = s->row.A, D = G + A;
    const int64_t N = s->densities.N, stride = s->stride;
    const REAL *means = s->densities.means, *weights = s->densities.log_weights;
    double top = -INFINITY, probe = 0;
    for (int64_t j = 0; j < N; j++) top = weights[j] > top ? weights[j] : top;
    for (int64_t j = 0; j < N; j++) probe += weights[j] < INFINITY ? 0 : NAN;
    for (int64_t j = 0; j < N * D; j++) probe += 0 * means[j];
    for (int64_t j = 0; j < N; j++) s->weight[j] = weights[j] == -INFINITY ? -INFINITY : (weights[j] - top) * LOG2E;
    for (int64_t j = N; j < stride; j++) s->weight[j] = -INFINITY;
    for (int d = 0; d < D; d++) {
        double *state = s->state + d * stride, *sine = state + A * stride;
        for (int64_t j = 0; j < N; j++) state[j] = means[j * D + d];
        for (int64_t j = N; j < stride; j++) state[j] = 0;
        for (int64_t j = 0; d >= G && j < stride; j++) {
            double u = turns_f64(state[j]);
            state[j] = cospi_poly_f64(u * u);
            sine[j] = u * sinpi_over_f64(u * u);
        }
    }
    s->row.top = top;
    return probe == 0;
}

/* Exponents of all components at a place. */
INLINE void FN(exponents_at)(const FN(Search) *s, const double *at) {
    const int G = s->row.G, A = s->row.A;
    const int64_t stride = s->stride;
    double *restrict a = s->exponent;
    memcpy(a, s->weight, (size_t)stride * sizeof *a);
    for (int d = 0; d < G; d++) {
        const double *mean = s->state + d * stride, x = at[d], square = s->row.square[d];
        for (int64_t j = 0; j < stride; j++) a[j] -= square * ((mean[j] - x) * (mean[j] - x));
    }
    for (int d = G; d < G + A; d++) {
        const double *kc = s->state + d * stride, *ks = kc + A * stride, square = s->row.square[d], u = turns_f64(at[d]);
        const double cosine = cospi_poly_f64(u * u), sine = u * sinpi_over_f64(u * u);
        for (int64_t j = 0; j < stride; j++) {
            double half = ks[j] * cosine - kc[j] * sine;
            a[j] -= square * (half * half);
        }
    }
}

/* The log2 density (relative to the largest weight and the kernel's norm) at a place, and the mean-shift step from there. */
INLINE double FN(evaluate)(const FN(Search) *s, const double *at, double *step) {
    const int G = s->row.G, A = s->row.A;
    const int64_t stride = s->stride;
    double *restrict a = s->exponent, top = -INFINITY, sum = 0;
    FN(exponents_at)(s, at);
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < stride; j++) top = a[j] > top ? a[j] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < stride; j++) {
        a[j] = exp2_from_f64(a[j] - top, -1022);
        sum += a[j];
    }
    for (int d = 0; d < G; d++) {
        const double *mean = s->state + d * stride, x = at[d];
        double away = 0;
#pragma omp simd reduction(+ : away)
        for (int64_t j = 0; j < stride; j++) away += a[j] * (mean[j] - x);
        step[d] = away / sum;
    }
    for (int d = G; d < G + A; d++) {
        const double *kc = s->state + d * stride, *ks = kc + A * stride, u = turns_f64(at[d]);
        const double cosine = cospi_poly_f64(u * u), sine = u * sinpi_over_f64(u * u);
        double sines = 0, squares = 0;
#pragma omp simd reduction(+ : sines, squares)
        for (int64_t j = 0; j < stride; j++) {
            double half = ks[j] * cosine - kc[j] * sine, other = kc[j] * cosine + ks[j] * sine;
            sines += a[j] * (half * other);
            squares += a[j] * (half * half);
        }
        step[d] = atan2(2 * sines, sum - 2 * squares);
    }
    return top + log2(sum);
}

/* What depends on the bandwidths. */
INLINE void FN(prepare)(const FindModes *p, FN(Search) *s) {
    MixtureLogProb one = s->densities;
    MixtureRow row;
    one.M = 0; /* not the rest */
    one.rows = &row;
    FN(mixture_prepare)(0, 1, &one);
    for (int d = 0; d < s->row.G + s->row.A; d++)
        prepare_mode_dimension(&s->row, d, ((const REAL *)one.bandwidths)[d], row.scale[d], p->radius[d]);
    s->row.log_norm = row.log_norm;
}

/* Starts and the densities there, -inf for those of dead components. */
INLINE void FN(find_starts)(FN(Search) *s) {
    const int D = s->row.G + s->row.A;
    const int64_t N = s->densities.N;
    const REAL *means = s->densities.means, *weights = s->densities.log_weights;
    REAL *density = s->densities.log_prob;
    MixtureRow row;
    for (int64_t j = 0; j < N; j++) {
        double at[MIXTURE_MAX_D], step[MIXTURE_MAX_D];
        for (int d = 0; d < D; d++) at[d] = means[j * D + d], step[d] = 0;
        if (weights[j] > -INFINITY) FN(evaluate)(s, at, step);
        for (int d = 0; d < D; d++) s->starts[j * D + d] = (REAL)(at[d] + step[d]);
    }
    s->densities.rows = &row;
    if (!mixture_is_short(&s->densities)) FN(mixture_prepare)(0, 1, &s->densities);
    FN(mixture_log_prob)(0, mixture_forward_items(&s->densities), &s->densities);
    for (int64_t j = 0; j < N; j++) density[j] = weights[j] == -INFINITY ? -INFINITY : density[j];
}

/* Fills the list of modes; how many there are. */
INLINE int64_t FN(search)(const FindModes *p, FN(Search) *s) {
    const int D = s->row.G + s->row.A;
    const int64_t N = s->densities.N, most = find_modes_most(p);
    const REAL *starts = s->starts;
    REAL *density = s->densities.log_prob;
    int64_t n = 0;
    FN(prepare)(p, s);
    FN(find_starts)(s);
    while (n < most) {
        int64_t best = 0;
        for (int64_t j = 1; j < N; j++) best = density[j] > density[best] ? j : best;
        if (!(density[best] > -INFINITY)) break;
        Ascent ascent;
        double step[MIXTURE_MAX_D];
        for (int d = 0; d < D; d++) ascent.at[d] = starts[best * D + d];
        begin_ascent(&s->row, &ascent);
        while (!move_ascent(&s->row, FN(evaluate)(s, ascent.at, step), step, MODE_STEP, &ascent)) {}
        const bool accepted = insert_mode(&s->row, &ascent, s->found, &n);
        density[best] = -INFINITY;
        for (int64_t j = 0; accepted && j < N; j++) {
            bool close = true;
            for (int d = 0; d < D; d++) close &= is_close(&s->row, d, starts[j * D + d] - ascent.at[d]);
            if (close) density[j] = -INFINITY;
        }
    }
    return n;
}

CLONES void FN(find_modes)(int64_t begin, int64_t end, void *parameters) {
    const FindModes *p = parameters;
    const MixtureLogProb *m = &p->mixture;
    const int64_t B = m->B, N = m->N, K = p->K, D = m->G + m->A, chunks = find_modes_chunks(p);
    for (int64_t chunk = begin; chunk < end; chunk++) {
        FN(Search) s;
        FN(place)(p, chunk, &s);
        for (int64_t b = chunk * B / chunks; b < (chunk + 1) * B / chunks; b++) {
            REAL *modes = (REAL *)p->modes + b * K * D, *log_densities = (REAL *)p->log_densities + b * K;
            s.densities.means = (const REAL *)m->means + b * N * D;
            s.densities.log_weights = (const REAL *)m->log_weights + b * N;
            s.densities.bandwidths = (const REAL *)m->bandwidths + b * m->bandwidth_stride;
            const bool good = FN(load_components)(&s);
            const int64_t n = good ? FN(search)(p, &s) : 0;
            for (int64_t k = 0; k < K; k++) {
                const double *mode = s.found + (k < n ? k : 0) * (D + 1);
                log_densities[k] = !good ? NAN : k < n ? mode[0] * LN2 + (s.row.top + s.row.log_norm) : -INFINITY;
                for (int64_t d = 0; d < D; d++) {
                    REAL x = n > 0 ? (REAL)mode[1 + d] : ((const REAL *)s.densities.means)[d];
                    modes[k * D + d] = !good ? (REAL)NAN : d < m->G ? x : FN(wrap)(x);
                }
            }
        }
    }
}
#endif
