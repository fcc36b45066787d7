/* What the twins of find_modes share: where an ascent goes next, and the list of modes found. Everything in double.
 *
 * Mean-shift is an EM algorithm (Carreira-Perpinan 2007): every step raises the density, and the last steps are slow. So two
 * steps r = F(x) - x and F(F(x)) - F(x) = r + v are followed by a jump to x + 2 a r + a^2 v with a = |r| / |v| (SQUAREM,
 * Varadhan & Roland 2008, scheme S3), which is kept if it raises the density as well and goes no farther than a bandwidth.
 * A step of an angle is a difference, so nothing here wraps but the distance of two modes.
 * An ascent begins a little beside the mean: at a saddle, where symmetry may have put the mean, it does not rest then.
 */
#ifndef MDPS_FIND_MODES_SEARCH_H
#define MDPS_FIND_MODES_SEARCH_H
#include "find_modes.h"

#include <math.h>

enum { MODE_EVALUATIONS = 500 };                /* an ascent ends here at the latest */
enum { ASCENT_BASE, ASCENT_STEP, ASCENT_JUMP }; /* what was evaluated: x, F(x), the jump */
#define MODE_BESIDE 1e-3                        /* bandwidths from the mean to the start */
#define MODE_ROUNDING 1e-10                     /* log2 densities that differ by this are the same */

/* Of a row: */
typedef struct {
    double square[MIXTURE_MAX_D]; /* factor of the squared difference, or of sin^2(difference / 2), in the exponent */
    double unit[MIXTURE_MAX_D];   /* bandwidth; of an angle at most 1 */
    double radius[MIXTURE_MAX_D];
    double log_norm; /* of the kernel at its mean */
    double top;      /* log-weight that the densities are relative to */
    int G, A;
} ModeRow;

typedef struct {
    double at[MIXTURE_MAX_D];   /* where density and step are wanted next; in the end the mode */
    double value;               /* log2 density, in the end at the mode */
    double x[MIXTURE_MAX_D];    /* the base of the two steps */
    double step[MIXTURE_MAX_D]; /* there */
    double next[MIXTURE_MAX_D]; /* after both steps */
    int phase, evaluations;
} Ascent;

/* Dimension d of a row from its bandwidth and the scale of mixture_log_prob.h. */
INLINE void prepare_mode_dimension(ModeRow *row, int d, double bandwidth, double scale, double radius) {
    row->square[d] = scale * scale;
    row->unit[d] = d >= row->G && bandwidth > 1 ? 1 : bandwidth;
    row->radius[d] = radius > 0.01 * row->unit[d] ? radius : 0.01 * row->unit[d];
}

/* The start: ascent->at is the mean of a component before. */
INLINE void begin_ascent(const ModeRow *row, Ascent *ascent) {
    for (int d = 0; d < row->G + row->A; d++)
        ascent->at[d] += (d % 2 ? -MODE_BESIDE : MODE_BESIDE) * (1 + 0.1 * d) * row->unit[d];
    ascent->phase = ASCENT_BASE;
    ascent->evaluations = 0;
    ascent->value = -INFINITY;
}

/* From F(x) with the step there: to the jump, or to F(F(x)). */
INLINE void leave_second_step(const ModeRow *row, const double *step, Ascent *ascent) {
    const int D = row->G + row->A;
    double r2 = 0, v2 = 0, jump2 = 0;
    for (int d = 0; d < D; d++) {
        const double r = ascent->step[d] / row->unit[d], v = step[d] / row->unit[d] - r;
        r2 += r * r;
        v2 += v * v;
        ascent->next[d] = ascent->at[d] + step[d];
    }
    const double a = sqrt(r2 / v2);
    for (int d = 0; d < D; d++) {
        const double r = ascent->step[d] / row->unit[d], v = step[d] / row->unit[d] - r;
        const double jump = 2 * a * r + a * a * v;
        ascent->at[d] = ascent->x[d] + jump * row->unit[d];
        jump2 += (jump - 2 * r - v) * (jump - 2 * r - v);
    }
    ascent->phase = a > 1 && jump2 < 1 ? ASCENT_JUMP : ASCENT_BASE;
    for (int d = 0; d < D && ascent->phase == ASCENT_BASE; d++) ascent->at[d] = ascent->next[d];
}

/* Takes the log2 density and the mean-shift step at ascent->at; whether that is the mode. */
INLINE bool move_ascent(const ModeRow *row, double value, const double *step, double tolerance, Ascent *ascent) {
    const int D = row->G + row->A;
    ascent->evaluations++;
    if (ascent->phase == ASCENT_JUMP && !(value >= ascent->value - MODE_ROUNDING)) {
        for (int d = 0; d < D; d++) ascent->at[d] = ascent->next[d];
        ascent->phase = ASCENT_BASE;
        return false;
    }
    double most = 0;
    for (int d = 0; d < D; d++) {
        const double length = fabs(step[d]) / row->unit[d];
        most = length > most ? length : most;
    }
    ascent->value = value;
    if (most <= tolerance || ascent->evaluations >= MODE_EVALUATIONS) return true;
    if (ascent->phase == ASCENT_STEP) {
        leave_second_step(row, step, ascent);
        return false;
    }
    for (int d = 0; d < D; d++) {
        ascent->x[d] = ascent->at[d];
        ascent->step[d] = step[d];
        ascent->at[d] += step[d];
    }
    ascent->phase = ASCENT_STEP;
    return false;
}

/* Whether two places that are this far apart in dimension d can be one mode. */
INLINE bool is_close(const ModeRow *row, int d, double away) {
    if (d >= row->G) away -= 6.2831853071795862 * rint(away * 0.15915494309189535);
    return fabs(away) < row->radius[d];
}
INLINE bool is_one_mode(const ModeRow *row, const double *x, const double *y) {
    bool close = true;
    for (int d = 0; d < row->G + row->A; d++) close &= is_close(row, d, x[d] - y[d]);
    return close;
}

/* Puts the ascent's end into the list of *n modes (its value, then D coordinates, by falling value), unless a higher one is
 * close; whether it is there then. */
INLINE bool insert_mode(const ModeRow *row, const Ascent *ascent, double *found, int64_t *n) {
    const int D = row->G + row->A, size = D + 1;
    int64_t place = 0, left;
    for (; place < *n && found[place * size] >= ascent->value; place++)
        if (is_one_mode(row, found + place * size + 1, ascent->at)) return false;
    left = place;
    for (int64_t i = place; i < *n; i++) {
        if (is_one_mode(row, found + i * size + 1, ascent->at)) continue;
        for (int d = 0; d < size; d++) found[left * size + d] = found[i * size + d];
        left++;
    }
    for (int64_t i = left * size - 1; i >= place * size; i--) found[i + size] = found[i];
    found[place * size] = ascent->value;
    for (int d = 0; d < D; d++) found[place * size + 1 + d] = ascent->at[d];
    *n = left + 1;
    return true;
}
#endif
