/* The modified Bessel functions I0 and I1 as the von Mises density needs them, in double; k >= 0, NaN stays NaN.
 *
 * Idea: below k = 8, I0 and I1 / k are polynomials in k^2 with positive coefficients. Above, 1 / k is the variable and the
 * polynomials are what is left beside the leading terms of the asymptotic series (Abramowitz & Stegun 9.7.1), so nothing
 * large is ever subtracted: everything holds from k = 0 to 1e300.
 * Coefficients: Chebyshev fits made with mpmath (tests/coefficients.py prints them); the largest relative errors, measured by
 * tests/test_real_math.py, are 5e-16, and 6e-15 for 1 - A(k). Cost: a polynomial and at most two logarithms.
 */
#ifndef MDPS_BESSEL_H
#define MDPS_BESSEL_H
#include "clones.h"

#include <math.h>

#define BESSEL_LARGE 8.0

INLINE double bessel_polynomial(const double *c, int degree, double x) {
    double p = c[degree];
    for (int i = degree - 1; i >= 0; i--) p = p * x + c[i];
    return p;
}

/* I0(k) - 1, k <= 8. */
INLINE double bessel_i0_above_one(double k) {
    static const double c[] = {2.5000000000000000e-01, 1.5624999999999986e-02, 4.3402777777779299e-04, 6.7816840277707860e-06,
                               6.7816840279460620e-08, 4.7095027946309725e-10, 2.4028075725315426e-12, 9.3859655030414049e-15,
                               2.8969101729103221e-17, 7.2420370688311040e-20, 1.4968537360644325e-22, 2.5891413445642945e-25,
                               3.9427700235024045e-28, 4.1509899717558784e-31, 8.6790298135203294e-34};
    return k * k * bessel_polynomial(c, 14, k * k);
}

/* I1(k), k <= 8. */
INLINE double bessel_i1(double k) {
    static const double c[] = {5.0000000000000000e-01, 6.2500000000000000e-02, 2.6041666666666670e-03, 5.4253472222222131e-05,
                               6.7816840277780586e-07, 5.6514033564761591e-09, 3.3639305694006162e-11, 1.5017547178772907e-13,
                               5.2144261415935764e-16, 1.4484515319273500e-18, 3.2919412579335861e-21, 6.2345848315302372e-24,
                               9.9942216895029591e-27, 1.3687885297024527e-29, 1.6696390898900487e-32, 1.4710564886031101e-35,
                               2.4334892279361836e-38};
    return k * bessel_polynomial(c, 16, k * k);
}

/* log(e^-k I0(k)) + log(2 pi k) / 2, k >= 8. */
INLINE double bessel_i0_correction(double k) {
    static const double c[] = {
        1.2918919514135854e-01,  4.5054152496849173e-03,  3.5517033968694158e-04,  4.5968427308631022e-05,
        8.8011558758190163e-06,  2.4286754233396336e-06,  9.8240732005369446e-07,  5.4859281537123878e-07,
        2.9464569656769007e-07,  -4.2326684557844707e-09, -2.6931904066746682e-07, -2.5212112046850721e-07,
        5.1232549523156471e-08,  2.2546643629840741e-07,  4.2275968944642500e-08,  -1.4036621573913078e-07,
        -5.1534352309284575e-08, 6.5000605230349721e-08,  3.0074596767684019e-08,  -1.9613588183527523e-08,
        -1.0037974624393548e-08, 2.8109379814829838e-09,  1.5079332090453395e-09};
    return bessel_polynomial(c, 22, 16 / k - 1) / k;
}

/* 1 - I1(k) / I0(k), k >= 8. */
INLINE double bessel_ratio_correction(double k) {
    static const double c[] = {
        5.0835591314944117e-01,  8.9634863481140858e-03,  6.8278671723118374e-04,  8.8905914026506897e-05,
        1.7201728840581831e-05,  4.7885031087027839e-06,  1.9487927110134185e-06,  1.0910152589836476e-06,
        5.8641634398719340e-07,  -4.0061941211821089e-09, -5.3611407657352777e-07, -5.2746662805612143e-07,
        9.2307900580359159e-08,  5.1749335770687479e-07,  1.1391463112304757e-07,  -4.0496014645766714e-07,
        -1.5768935920047706e-07, 2.8598047736969320e-07,  1.2773473546093571e-07,  -1.6922190485934719e-07,
        -7.5122891087506132e-08, 7.4305596025908191e-08,  3.1177525831161105e-08,  -2.0724847160287968e-08,
        -8.1227527240115046e-09, 2.7020268743558015e-09,  9.9196423325689832e-10};
    return bessel_polynomial(c, 26, 16 / k - 1) / k;
}

/* log(e^-k I0(k)): -k near 0, -log(2 pi k) / 2 far out. */
INLINE double log_i0_scaled(double k) {
    if (k <= BESSEL_LARGE) return log1p(bessel_i0_above_one(k)) - k;
    return bessel_i0_correction(k) - 0.5 * (log(k) + 1.8378770664093455);
}

/* log I0(k): k^2 / 4 near 0, k far out. */
INLINE double log_i0_plain(double k) {
    if (k <= BESSEL_LARGE) return log1p(bessel_i0_above_one(k));
    return k < INFINITY ? k + log_i0_scaled(k) : k;
}

/* A(k) = I1(k) / I0(k), the mean resultant length and the derivative of log I0: k / 2 near 0, 1 far out. */
INLINE double bessel_ratio(double k) {
    if (k <= BESSEL_LARGE) return bessel_i1(k) / (1 + bessel_i0_above_one(k));
    return 1 - bessel_ratio_correction(k);
}

/* 1 - A(k), 1 / (2 k) far out, without the cancellation. */
INLINE double one_minus_bessel_ratio(double k) {
    if (k <= BESSEL_LARGE) return 1 - bessel_ratio(k);
    return bessel_ratio_correction(k);
}
#endif
