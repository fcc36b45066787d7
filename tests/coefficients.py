"""Prints every polynomial coefficient of kernels/real_math.h and kernels/bessel.h, lowest power first (needs mpmath).

Each is the Chebyshev interpolant of its function on its interval, made with 50 digits, hence close to the best polynomial
of its degree; `error` is its largest absolute error in exact arithmetic.
"""

from collections.abc import Callable

import mpmath as mp

mp.mp.dps = 50
TINY = mp.mpf(10) ** -20


def exp2(r):
    return mp.mpf(2) ** r


def log2(v):
    """With z = (s - 1) / (s + 1) and v = z^2: log2(s) / z."""
    z = mp.sqrt(v)
    return 2 / mp.log(2) * (mp.atanh(z) / z if z > TINY else 1)


def sinpi(v):
    u = mp.sqrt(v)
    return mp.sin(mp.pi * u) / u if u > TINY else mp.pi


def cospi(v):
    return mp.cos(mp.pi * mp.sqrt(v))


def atan(v):
    """With v = r^2: atan(r) / r."""
    r = mp.sqrt(v)
    return mp.atan(r) / r if r > TINY else mp.mpf(1)


def i0_above_one(v):
    """With v = k^2: (I0(k) - 1) / k^2."""
    return (mp.besseli(0, mp.sqrt(v)) - 1) / v if v > TINY else mp.mpf(1) / 4


def i1_over_k(v):
    k = mp.sqrt(v)
    return mp.besseli(1, k) / k if k > TINY else mp.mpf(1) / 2


def i0_correction(u):
    """With u = 16 / k - 1: what remains of log(e^-k I0(k)) beside -log(2 pi k) / 2, times k."""
    if u + 1 < TINY:
        return mp.mpf(1) / 8
    k = 16 / (u + 1)
    return k * mp.log(mp.besseli(0, k) * mp.exp(-k) * mp.sqrt(2 * mp.pi * k))


def ratio_correction(u):
    """With u = 16 / k - 1: k (1 - I1(k) / I0(k))."""
    if u + 1 < TINY:
        return mp.mpf(1) / 2
    k = 16 / (u + 1)
    return k * (1 - mp.besseli(1, k) / mp.besseli(0, k))


def show(name: str, f: Callable, low: float, high: float, degree: int, digits: int = 17) -> None:
    coefficients, error = mp.chebyfit(f, [low, high], degree + 1, error=True)
    print(f"{name}, degree {degree} on [{low}, {high}], error {mp.nstr(error, 2)}")
    for c in reversed(coefficients):
        print(f"    {float(c):.{digits - 1}e},")


def main() -> None:
    show("exp2, float", exp2, -0.5, 0.5, 5, 9)
    show("exp2, double", exp2, -0.5, 0.5, 11)
    show("log2, float", log2, 0, 0.02944, 4, 9)
    show("log2, double", log2, 0, 0.02944, 9)
    show("sinpi, float", sinpi, 0, 0.25, 5, 9)
    show("sinpi, double", sinpi, 0, 0.25, 10)
    show("cospi, float", cospi, 0, 0.25, 6, 9)
    show("cospi, double", cospi, 0, 0.25, 11)
    show("atan, float", atan, 0, 1, 8, 9)
    show("atan, double", atan, 0, 1, 19)
    show("i0_above_one", i0_above_one, 0, 64, 14)
    show("i1_over_k", i1_over_k, 0, 64, 16)
    show("i0_correction", i0_correction, -1, 1, 22)
    show("ratio_correction", ratio_correction, -1, 1, 26)


if __name__ == "__main__":
    main()
