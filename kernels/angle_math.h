/* Angles for float or double (REAL, FN: for_each_real.h): wrapped to one turn, their sine and cosine, and atan2. Branch-free,
 * on the polynomials of real_math.h, which includes this. No include guard: a file includes it once for each REAL.
 */
/* The largest number below pi. */
#undef TOP_ANGLE
#define TOP_ANGLE (IS_DOUBLE ? (REAL)3.1415926535897931 : (REAL)3.1415925f)

/* The same angle in [-pi, pi); unchanged where it is there already. */
INLINE REAL FN(wrap)(REAL theta) {
    REAL w = FN(turns)(theta) * (REAL)(2 * PI);
    w = w < -TOP_ANGLE || w >= TOP_ANGLE ? -TOP_ANGLE : w;
    return theta >= -TOP_ANGLE && theta < TOP_ANGLE ? theta : w;
}

/* Of an angle of any size; absolute errors as those of `turns`. */
INLINE void FN(sine_cosine)(REAL theta, REAL *sine, REAL *cosine) {
    REAL w = 2 * FN(turns)(theta), t = fabs(w);
    bool folded = t > (REAL)0.5; /* the left half of the circle has the right half's sines */
    REAL u = folded ? copysign(1 - t, w) : w, c = FN(cospi_poly)(u * u);
    *sine = u * FN(sinpi_over)(u * u);
    *cosine = folded ? -c : c;
}

/* As C's atan2, signed zeros and infinities included. pi and its half in two parts: their rounding is not added. */
INLINE REAL FN(atan2_real)(REAL y, REAL x) {
    const REAL rest = IS_DOUBLE ? (REAL)1.2246467991473532e-16 : (REAL)-8.7422777e-8f;
    REAL height = fabs(y), width = fabs(x);
    bool steep = height > width;
    REAL low = steep ? width : height, high = steep ? height : width, r = low / high;
    r = low == high ? 1 : r;
    r = high == 0 ? low : r; /* 0, or NaN */
    REAL a = r * FN(atan_over)(r * r);
    a = steep ? (REAL)(PI / 2) - (a - rest / 2) : a;
    a = copysign((REAL)1, x) < 0 ? (REAL)PI - (a - rest) : a;
    return copysign(a, y);
}
