/* The proposal's log-density and the shares of its gradient, a number at a time, for float or double (REAL, FN:
 * for_each_real.h). Include real_math.h first. */

/* log q, by the larger of its two parts f = log(mixing m_f) and b = log((1 - mixing) m_b). */
INLINE REAL FN(log_proposal)(REAL f, REAL b) {
    REAL high = f > b ? f : b, low = f > b ? b : f;
    REAL part = FN(exp2_real)((low - high) * (REAL)LOG2E);
    REAL sum = low == -(REAL)INFINITY ? high : high + FN(log2_less)(1 + part, 0) * (REAL)LN2;
    return f == f && b == b ? sum : f + b; /* log2_less makes a number of a NaN */
}

/* What the parts get of q's gradient g. */
INLINE void FN(share)(REAL f, REAL b, REAL g, REAL *of_forward, REAL *of_backward) {
    bool forward_is_high = f > b, dead = f == -(REAL)INFINITY && b == -(REAL)INFINITY;
    REAL part = FN(exp2_real)((forward_is_high ? b - f : f - b) * (REAL)LOG2E);
    REAL high = 1 / (1 + part), low = part * high;
    *of_forward = dead ? 0 : g * (forward_is_high ? high : low);
    *of_backward = dead ? 0 : g * (forward_is_high ? low : high);
}
