/* tanh and the logistic function as branch-free formulas, for float or double (REAL, FN: for_each_real.h).
 *
 * NaN stays NaN. The relative errors, which tests/test_small_network.py measures, are those of exp: it rounds its argument.
 * No include guard: a file includes it once for each REAL.
 */
#include "real_math.h"

/* As in Cephes (Moshier 1989): x + x^3 P(x^2) / Q(x^2) below 0.625, where 1 - exp(-2|x|) would cancel. */
INLINE REAL FN(tanh_real)(REAL x) {
    REAL t = fabs(x), v = x * x;
    REAL u = IS_DOUBLE ? exp2_from_f64(-2 * LOG2E * t, -1022) : exp2_from_f32((float)(-2 * LOG2E) * t, -126.f);
    REAL large = (1 - u) / (1 + u), small;
    if (IS_DOUBLE)
        small = ((-9.64399179425052238628e-1 * v - 9.92877231001918586564e1) * v - 1.61468768441708447952e3) /
                (((v + 1.12811678491632931402e2) * v + 2.23548839060100448583e3) * v + 4.84406305325125486048e3);
    else
        small = (((-5.70498872745e-3f * v + 2.06390887954e-2f) * v - 5.37397155531e-2f) * v + 1.33314422036e-1f) * v -
                3.33332819422e-1f;
    small = x + x * v * small;
    large = x < 0 ? -large : x > 0 ? large : x; /* NaN, whose bits exp2 may have lost */
    return t < (REAL)0.625 ? small : large;
}

INLINE REAL FN(sigmoid_real)(REAL x) {
    REAL t = -fabs(x);
    REAL u = IS_DOUBLE ? exp2_from_f64(LOG2E * t, -1022) : exp2_from_f32((float)LOG2E * t, -126.f);
    return (x < 0 ? u : x >= 0 ? 1 : x) / (1 + u);
}
