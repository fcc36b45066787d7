/* exp2, log2, sine, cosine and arc tangent as branch-free polynomials, for float or double (REAL, FN: for_each_real.h).
 *
 * Plain C that a compiler vectorises with -fno-math-errno -fno-trapping-math, and the same formulas on every target.
 * Coefficients: Chebyshev fits made with mpmath (tests/coefficients.py prints them); the largest relative errors, measured by
 * tests/test_real_math.py, are 2.4e-7 (float) and 6e-16 (double).
 * No include guard: a file includes it once for each REAL.
 */
#include "clones.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#ifdef __cplusplus /* overloads, as tgmath.h has them for C */
#include <math.h>
#else
#include <tgmath.h>
#endif

#ifndef MDPS_REAL_MATH_H
#define MDPS_REAL_MATH_H
#define LOG2E 1.4426950408889634
#define LN2 0.69314718055994531
#define PI 3.1415926535897932
#define IS_DOUBLE (sizeof(REAL) == 8)

INLINE int32_t bits_f32(float x) {
    int32_t i;
    memcpy(&i, &x, 4);
    return i;
}
INLINE float real_f32(int32_t i) {
    float x;
    memcpy(&x, &i, 4);
    return x;
}
INLINE int64_t bits_f64(double x) {
    int64_t i;
    memcpy(&i, &x, 8);
    return i;
}
INLINE double real_f64(int64_t i) {
    double x;
    memcpy(&x, &i, 8);
    return x;
}

/* 2^(a + bias) for a + bias <= 127 and an integer |bias| <= 126, added without rounding a; a < least becomes exactly 0
 * (least + bias >= -126). A NaN may become a number: where one can come, exp2_real. */
INLINE float exp2_biased_f32(float a, float least, int bias) {
    const float shift = 12582912.f + (float)bias;
    float b = a < least ? least : a;
    float t = b + shift, r = b - (t - shift);
    float p = 1.33908634e-03f;
    p = p * r + 9.67603192e-03f;
    p = p * r + 5.55035711e-02f;
    p = p * r + 2.40221075e-01f;
    p = p * r + 6.93147188e-01f;
    p = p * r + 1.00000008e+00f;
    int32_t u = (int32_t)((uint32_t)bits_f32(p) + ((uint32_t)bits_f32(t) << 23));
    return real_f32(a < least ? 0 : u);
}
INLINE double exp2_biased_f64(double a, double least, int bias) {
    const double shift = 6755399441055744. + (double)bias;
    double b = a < least ? least : a;
    double t = b + shift, r = b - (t - shift);
    double p = 4.4558179083360645e-10;
    p = p * r + 7.074194297288521e-09;
    p = p * r + 1.0178057087733941e-07;
    p = p * r + 1.3215432535912376e-06;
    p = p * r + 1.5252733841556773e-05;
    p = p * r + 1.5403530463724354e-04;
    p = p * r + 1.3333558146406471e-03;
    p = p * r + 9.6181291075872567e-03;
    p = p * r + 5.5504108664821627e-02;
    p = p * r + 2.402265069591016e-01;
    p = p * r + 6.9314718055994531e-01;
    p = p * r + 1.;
    int64_t u = (int64_t)((uint64_t)bits_f64(p) + ((uint64_t)bits_f64(t) << 52));
    return real_f64(a < least ? 0 : u);
}

/* The same without a bias. */
INLINE float exp2_from_f32(float a, float least) { return exp2_biased_f32(a, least, 0); }
INLINE double exp2_from_f64(double a, double least) { return exp2_biased_f64(a, least, 0); }

/* 2^a, exactly 0 where the result would be denormal; a up to 127 (float), 1023 (double); NaN stays NaN. */
INLINE float exp2_real_f32(float a) { return a == a ? exp2_from_f32(a, -126) : a; }
INLINE double exp2_real_f64(double a) { return a == a ? exp2_from_f64(a, -1022) : a; }

#ifdef __cplusplus
/* 2^a for the GPU's loops over pairs; below the normal numbers 0. */
INLINE float exp2_pair(float a) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
    return y;
#else
    return exp2_real_f32(a);
#endif
}
INLINE double exp2_pair(double a) { return exp2_from_f64(a, -1022); }
#endif

/* log2(s) - less, for a positive normal number s; 0, inf and NaN are the caller's. */
INLINE float log2_less_f32(float s, int less) {
    int32_t i = bits_f32(s), e = (i - 0x3f3504f3) >> 23;
    float f = real_f32(i - (int32_t)((uint32_t)e << 23)) - 1.f; /* in [sqrt(1/2) - 1, sqrt(2) - 1) */
    float z = f / (2.f + f), v = z * z;
    float p = 3.40713998e-01f;
    p = p * v + 4.11673666e-01f;
    p = p * v + 5.77083568e-01f;
    p = p * v + 9.61796673e-01f;
    p = p * v + 2.88539008e+00f;
    return (float)(e - less) + z * p;
}
INLINE double log2_less_f64(double s, int less) {
    int64_t i = bits_f64(s), e = (i - 0x3fe6a09e667f3bcd) >> 52;
    double f = real_f64(i - (int64_t)((uint64_t)e << 52)) - 1.;
    double z = f / (2. + f), v = z * z;
    double p = 1.7374767932404195e-01;
    p = p * v + 1.6832442565235749e-01;
    p = p * v + 1.9240859063312647e-01;
    p = p * v + 2.2195204486058823e-01;
    p = p * v + 2.6230820276523567e-01;
    p = p * v + 3.2059889786844096e-01;
    p = p * v + 4.1219858311161749e-01;
    p = p * v + 5.7707801635558425e-01;
    p = p * v + 9.6179669392597561e-01;
    p = p * v + 2.8853900817779268e+00;
    return (double)(e - less) + z * p;
}

/* sin(pi u) / u and cos(pi u) as polynomials in v = u^2, |u| <= 1/2. */
INLINE float sinpi_over_f32(float v) {
    float p = -7.02830386e-03f;
    p = p * v + 8.20503502e-02f;
    p = p * v - 5.99252187e-01f;
    p = p * v + 2.55016332e+00f;
    p = p * v - 5.16771276e+00f;
    return p * v + 3.14159265e+00f;
}
INLINE float cospi_poly_f32(float v) {
    float p = 1.83998944e-03f;
    p = p * v - 2.57763164e-02f;
    p = p * v + 2.35325437e-01f;
    p = p * v - 1.33526232e+00f;
    p = p * v + 4.05871211e+00f;
    p = p * v - 4.93480220e+00f;
    return p * v + 1.f;
}
INLINE double sinpi_over_f64(double v) {
    double p = 5.2498791140604634e-10;
    p = p * v - 2.2939987135869461e-08;
    p = p * v + 7.9520257362138491e-07;
    p = p * v - 2.1915352859694458e-05;
    p = p * v + 4.6630280568896835e-04;
    p = p * v - 7.3704309457075959e-03;
    p = p * v + 8.2145886611127867e-02;
    p = p * v - 5.9926452932079207e-01;
    p = p * v + 2.5501640398773454e+00;
    p = p * v - 5.16771278004997e+00;
    return p * v + 3.1415926535897932e+00;
}
INLINE double cospi_poly_f64(double v) {
    double p = -7.4968018620777221e-11;
    p = p * v + 3.6033983465372485e-09;
    p = p * v - 1.3878902336378576e-07;
    p = p * v + 4.3030694673489973e-06;
    p = p * v - 1.0463810490596337e-04;
    p = p * v + 1.9295743094019354e-03;
    p = p * v - 2.5806891390013922e-02;
    p = p * v + 2.353306303588932e-01;
    p = p * v - 1.3352627688545895e+00;
    p = p * v + 4.0587121264167682e+00;
    p = p * v - 4.9348022005446793e+00;
    return p * v + 1.;
}

/* atan(r) / r as a polynomial in v = r^2, |r| <= 1. */
INLINE float atan_over_f32(float v) {
    float p = 2.76628350e-03f;
    p = p * v - 1.57312491e-02f;
    p = p * v + 4.21376236e-02f;
    p = p * v - 7.45685483e-02f;
    p = p * v + 1.06183706e-01f;
    p = p * v - 1.41977978e-01f;
    p = p * v + 1.99918720e-01f;
    p = p * v - 3.33330367e-01f;
    return p * v + 9.99999982e-01f;
}
INLINE double atan_over_f64(double v) {
    double p = -1.9342347592892300e-05;
    p = p * v + 2.1423810738603946e-04;
    p = p * v - 1.1252544302234645e-03;
    p = p * v + 3.7511384839651412e-03;
    p = p * v - 8.9910805426582606e-03;
    p = p * v + 1.6719596063507390e-02;
    p = p * v - 2.5568623644371739e-02;
    p = p * v + 3.3871267027006748e-02;
    p = p * v - 4.0811247503178855e-02;
    p = p * v + 4.6687453048485289e-02;
    p = p * v - 5.2374234719188166e-02;
    p = p * v + 5.8768281144872724e-02;
    p = p * v - 6.6657649106897227e-02;
    p = p * v + 7.6921989974582938e-02;
    p = p * v - 9.0908997932173413e-02;
    p = p * v + 1.1111110578002083e-01;
    p = p * v - 1.4285714266926733e-01;
    p = p * v + 1.9999999999647960e-01;
    p = p * v - 3.3333333333330700e-01;
    return p * v + 1.0000000000000000e+00;
}

/* The angle as turns in [-1/2, 1/2]: theta / (2 pi) less its nearest integer. 2 pi in two parts keeps what theta holds. */
INLINE float turns_f32(float theta) {
    float k = rintf(theta * (float)(0.5 / PI));
    float u = ((theta - k * 6.2831855f) + k * 1.7484556e-7f) * (float)(0.5 / PI);
    u = u < -0.5f ? -0.5f : u;
    return u > 0.5f ? 0.5f : u;
}
INLINE double turns_f64(double theta) {
    double k = rint(theta * (0.5 / PI));
    double u = ((theta - k * 6.2831853071795862) - k * 2.4492935982947064e-16) * (0.5 / PI);
    u = u < -0.5 ? -0.5 : u;
    return u > 0.5 ? 0.5 : u;
}
#endif

#include "angle_math.h"
