/* The arithmetic of resampling, element by element, for C and CUDA: from the weights on all sums are sums of integers, and both
 * twins have the same ancestors bit for bit (on x86-64 without FMA, whose weights differ in their last bits, nearly always).
 * resample.c says how it works. Outside of the include guard is what depends on REAL; real_math.h comes first. */
#ifndef MDPS_RESAMPLE_MATH_H
#define MDPS_RESAMPLE_MATH_H
#include "philox.h"

/* Largest power of two by which weights up to 1 are multiplied: N of them stay below 2^62, each below 2^51. */
INLINE double fixed_point(int64_t N) {
    int bits = 0;
    while ((int64_t)1 << bits < N) bits++;
    return (double)((int64_t)1 << (bits > 12 ? 62 - bits : 50));
}
INLINE int64_t nearest_integer(double x) { return bits_f64(x + 0x1.8p52) - bits_f64(0x1.8p52); } /* 0 <= x < 2^51 */

/* The end of a component: k points are below for certain, and one more if word k of the row, less 2^31, is below `cut`. */
typedef struct {
    int32_t k, cut;
} End;

/* Of the component with cumulative weight c; points = M / total. */
INLINE End end_of(int64_t c, int64_t total, double M, double points) {
    double y = (double)c * points;
    y = y < M ? y : M;
    y = c < total ? y : M;
    End e;
    e.k = (int32_t)y;
    e.cut = (int32_t)((y - (double)e.k) * 0x1p32 - 0x1p31); /* (u - 1/2) 2^32: it fits a number with a sign */
    return e;
}

/* Word k of the row, less 2^31. */
INLINE int32_t signed_word(Source s, int64_t k) {
    Words r = words_of_block(s, KIND_RESAMPLE, k / 4);
    uint32_t even = k & 2 ? r.z : r.x, odd = k & 2 ? r.w : r.y;
    return (int32_t)((k & 1 ? odd : even) ^ 0x80000000u);
}

/* In [0, 1), 53 bits. */
INLINE double unit53(uint32_t high, uint32_t low) {
    return ((double)(int32_t)(high ^ 0x80000000u) * 0x1p-32 + 0.5) + (double)(int32_t)(low >> 11) * 0x1p-53;
}

/* Of M w copies of a component, those that are certain, and the integer weight of the rest. */
typedef struct {
    int32_t copies;
    int64_t rest;
} Share;
INLINE Share share_of(int64_t w, double M, double total, double scale) {
    double y = (double)w * M / total;
    Share share;
    share.copies = (int32_t)y;
    share.rest = nearest_integer((y - (double)share.copies) * scale);
    return share;
}
#endif

/* Of a particle, relative to the row's largest. */
INLINE int64_t FN(integer_weight)(REAL log_weight, REAL top, double scale) {
    return nearest_integer((double)FN(exp2_real)((log_weight - top) * (REAL)LOG2E) * scale);
}
