"""kernels/real_math.h and kernels/bessel.h alone, compiled into a small library: errors against mpmath over their ranges."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import mpmath
import numpy as np
import pytest

KERNELS = Path(__file__).parents[1] / "kernels"
BESSEL = ("log_i0_scaled", "log_i0_plain", "bessel_ratio", "one_minus_bessel_ratio")
SOURCE = """
#ifndef REAL
#include "bessel.h"
#define MDPS_FILE "functions.c"
#define ALL(NAME, TYPE, CALL) \\
    void NAME(long n, const TYPE *x, TYPE *y) { for (long i = 0; i < n; i++) y[i] = CALL; }
#include "for_each_real.h"
ALL(log2_all_f32, float, log2_less_f32(x[i], 0))
ALL(log2_all_f64, double, log2_less_f64(x[i], 0))
ALL(turns_all_f32, float, turns_f32(x[i]))
ALL(turns_all_f64, double, turns_f64(x[i]))
ALL(sinpi_all_f32, float, x[i] * sinpi_over_f32(x[i] * x[i]))
ALL(sinpi_all_f64, double, x[i] * sinpi_over_f64(x[i] * x[i]))
ALL(cospi_all_f32, float, cospi_poly_f32(x[i] * x[i]))
ALL(cospi_all_f64, double, cospi_poly_f64(x[i] * x[i]))
ALL(log_i0_scaled_all, double, log_i0_scaled(x[i]))
ALL(log_i0_plain_all, double, log_i0_plain(x[i]))
ALL(bessel_ratio_all, double, bessel_ratio(x[i]))
ALL(one_minus_bessel_ratio_all, double, one_minus_bessel_ratio(x[i]))
#else
#include "real_math.h"
ALL(FN(exp2_real_all), REAL, FN(exp2_real)(x[i]))
ALL(FN(wrap_all), REAL, FN(wrap)(x[i]))
void FN(sine_cosine_all)(long n, const REAL *x, REAL *y) { /* y: the sines, then the cosines */
    for (long i = 0; i < n; i++) FN(sine_cosine)(x[i], &y[i], &y[n + i]);
}
void FN(atan2_all)(long n, const REAL *x, REAL *y) { /* x: the ordinates, then the abscissae */
    for (long i = 0; i < n; i++) y[i] = FN(atan2_real)(x[i], x[n + i]);
}
#endif
"""
FLAGS = ["-O3", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
F32, F64 = np.float32, np.float64
real = pytest.mark.parametrize("real", [F32, F64], ids=["f32", "f64"])


@pytest.fixture(scope="module", params=["baseline", "fma"])
def library(request, tmp_path_factory):
    """Compiled twice, because the kernels are: without and with fused multiply-add."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    if request.param == "fma" and " fma " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no fused multiply-add")
    folder = tmp_path_factory.mktemp("real_math")
    (folder / "functions.c").write_text(SOURCE)
    target = ["-march=x86-64-v3"] if request.param == "fma" else []
    command = [compiler, *FLAGS, *target, f"-I{KERNELS}", "-I.", "functions.c", "-o", "functions.so", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "functions.so"))


def call(library, name, x):
    suffix = "" if name in BESSEL else "_f32" if x.dtype == F32 else "_f64"
    y = np.empty_like(x)
    getattr(library, f"{name}_all{suffix}")(
        ctypes.c_long(x.size), x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p)
    )
    return y


def largest_error(f, x, y):
    """Largest relative error of y against f by mpmath with 100 digits."""
    with mpmath.workdps(100):
        pairs = ((f(mpmath.mpf(float(a))), float(b)) for a, b in zip(x, y))
        return max(float(abs(b / want - 1)) if want else float(abs(b)) for want, b in pairs)


def spread(low, high, real, n=4000):
    """Random points and the two ends."""
    return np.concatenate([np.random.default_rng(0).uniform(low, high, n), [low, high]]).astype(real)


@real
def test_exp2(library, real):
    least, most = (-126, 127) if real is F32 else (-1022, 1023)
    for x in (spread(least, most, real), spread(-1, 1, real)):
        error = largest_error(lambda a: mpmath.mpf(2) ** a, x, call(library, "exp2_real", x))
        assert error <= (2.4e-7 if real is F32 else 6e-16)
    below = np.array([least - 0.001, -1e30, -np.inf, np.nan], dtype=real)
    assert call(library, "exp2_real", below).tolist()[:3] == [0, 0, 0] and np.isnan(call(library, "exp2_real", below)[3])
    whole = np.arange(least, most + 1).astype(real)
    assert np.allclose(np.log2(call(library, "exp2_real", whole)), whole, rtol=0, atol=3e-7)


@real
def test_log2(library, real):
    tiny, huge = np.finfo(real).tiny, np.finfo(real).max
    wide = np.exp2(spread(np.log2(tiny) + 1, np.log2(huge) - 1, F64)).astype(real)
    for x in (wide, np.array([tiny, huge, 2.0, 1024.0], dtype=real)):
        assert largest_error(lambda s: mpmath.log(s, 2), x, call(library, "log2", x)) <= (2.4e-7 if real is F32 else 6e-16)
    near = spread(0.5, 2, real)
    assert largest_error(lambda s: mpmath.log(s, 2), near, call(library, "log2", near)) <= (2.4e-7 if real is F32 else 6e-16)
    assert call(library, "log2", np.ones(1, real))[0] == 0


@real
def test_sine_and_cosine_of_half_a_turn(library, real):
    bound = 2.4e-7 if real is F32 else 6e-16
    x = spread(-0.5, 0.5, real)
    assert largest_error(lambda u: mpmath.sinpi(u), x, call(library, "sinpi", x)) <= bound
    y = call(library, "cospi", x)
    with mpmath.workdps(50):
        error = max(float(abs(float(b) - mpmath.cospi(mpmath.mpf(float(a))))) for a, b in zip(x, y))
    assert error <= bound  # absolute: the cosine is 0 at the ends


@real
@pytest.mark.parametrize("reach", [3.0, 50.0, 1e4])
def test_turns(library, real, reach):
    """Absolute error of the angle in units of the last place of what came in, or of pi."""
    x = spread(-reach, reach, real)
    u = call(library, "turns", x)
    assert np.abs(u).max() <= 0.5
    with mpmath.workdps(50):
        for a, b in zip(x, u):
            exact = mpmath.mpf(float(a)) / (2 * mpmath.pi) - float(b)
            error = float(abs(exact - mpmath.nint(exact)) * 2 * mpmath.pi)
            assert error <= np.finfo(real).eps * max(abs(float(a)), np.pi)


@real
def test_wrap(library, real):
    top = np.nextafter(real(np.pi), real(0)) if real(np.pi) >= np.pi else real(np.pi)
    x = np.concatenate([spread(-1e4, 1e4, real), np.array([np.pi, -np.pi, 3 * np.pi, -3 * np.pi, 1e7, 0.0], dtype=real)])
    w = call(library, "wrap", x)
    assert w.min() >= -np.pi and w.max() < np.pi
    distance = np.abs(np.exp(1j * w.astype(F64)) - np.exp(1j * x.astype(F64)))
    assert (distance <= np.finfo(real).eps * np.maximum(np.abs(x.astype(F64)), np.pi)).all()
    inside = np.concatenate([spread(-3.14, 3.14, real), np.array([-top], dtype=real)])
    assert np.array_equal(call(library, "wrap", inside), inside)
    assert np.isnan(call(library, "wrap", np.array([np.nan, np.inf], dtype=real))).all()


@real
@pytest.mark.parametrize("reach", [3.2, 50.0, 1e4])
def test_sine_and_cosine_of_an_angle(library, real, reach):
    """Absolute errors: of the polynomial, and of the angle as in test_turns. Quarter turns are where it is folded."""
    quarters = (np.arange(-8, 9) * np.pi / 2).astype(real)
    x = np.concatenate([spread(-reach, reach, real), quarters, np.nextafter(quarters, real(9)), np.array([0.0], dtype=real)])
    y = np.empty(2 * x.size, dtype=real)
    suffix = "f32" if real is F32 else "f64"
    function = getattr(library, f"sine_cosine_all_{suffix}")
    function(ctypes.c_long(x.size), x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p))
    with mpmath.workdps(50):
        for a, sine, cosine in zip(x, y, y[x.size :]):
            error = max(
                abs(mpmath.sin(mpmath.mpf(float(a))) - float(sine)), abs(mpmath.cos(mpmath.mpf(float(a))) - float(cosine))
            )
            assert float(error) <= np.finfo(real).eps * (2 + max(abs(float(a)), np.pi))


def atan2(library, y, x):
    joined, out = np.concatenate([y, x]), np.empty_like(y)
    function = getattr(library, "atan2_all_f32" if y.dtype == F32 else "atan2_all_f64")
    function(ctypes.c_long(y.size), joined.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p))
    return out


@real
def test_atan2(library, real):
    """In units of the last place of the result: all directions, ratios of all sizes, both sides of the diagonals."""
    g = np.random.default_rng(0)
    tiny, huge = np.finfo(real).tiny, np.finfo(real).max
    logs = g.uniform(np.log(tiny), np.log(huge), (2, 3000))
    signs = g.choice([-1.0, 1.0], (2, 3000))
    near = g.normal(size=1000).astype(real)
    y = np.concatenate([g.normal(size=4000), signs[0] * np.exp(logs[0]), near, near, [tiny, huge, 1.0]]).astype(real)
    x = np.concatenate(
        [g.normal(size=4000), signs[1] * np.exp(logs[1]), near, -np.nextafter(near, real(9)), [huge, huge, -huge]]
    )
    x = x.astype(real)
    got = atan2(library, y, x)
    with mpmath.workdps(400 if real is F64 else 60):
        for a, b, c in zip(y, x, got):
            want = mpmath.atan2(mpmath.mpf(float(a)), mpmath.mpf(float(b)))
            place = float(np.spacing(real(abs(float(want)))))
            assert abs(float(want - float(c))) <= 3 * place, (a, b, c)


@real
def test_atan2_at_the_ends(library, real):
    """Axes, signed zeros, infinities and NaN: numpy's answers, which are the C standard's."""
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, np.finfo(real).tiny / 8, np.finfo(real).max], dtype=real)
    y, x = (m.ravel() for m in np.meshgrid(values, values))
    got, want = atan2(library, y, x), np.arctan2(y, x)
    np.testing.assert_allclose(got, want, rtol=2 * np.finfo(real).eps, atol=0)
    same = np.isnan(want) | (np.signbit(got) == np.signbit(want))
    assert same.all()


def ratio(k):
    return mpmath.besseli(1, k) / mpmath.besseli(0, k)


@pytest.mark.parametrize(
    "name, exact, bound",
    [
        ("log_i0_scaled", lambda k: mpmath.log(mpmath.besseli(0, k)) - k, 5e-16),
        ("log_i0_plain", lambda k: mpmath.log(mpmath.besseli(0, k)), 5e-16),
        ("bessel_ratio", ratio, 5e-16),
        ("one_minus_bessel_ratio", lambda k: 1 - ratio(k), 6e-15),
    ],
)
def test_bessel(library, name, exact, bound):
    k = np.concatenate([10 ** spread(-30, 6, F64, 500), spread(1e-3, 40, F64, 1000), [8.0, np.nextafter(8, 9)]])
    assert largest_error(exact, k, call(library, name, k)) <= bound


def test_bessel_at_the_ends(library):
    k = np.array([0.0, 1e300, np.nan])
    half_log = -0.5 * (np.log(2 * np.pi) + 300 * np.log(10))
    for name, want in zip(BESSEL, ([0, half_log], [0, 1e300], [0, 1], [1, 5e-301])):
        np.testing.assert_allclose(call(library, name, k), [*want, np.nan], rtol=1e-15)


def test_coefficients_are_those_of_the_script(capsys):
    """Every number that tests/coefficients.py prints stands in one of the two headers, to its last digit."""
    import coefficients

    coefficients.main()
    printed = [abs(float(c)) for c in re.findall(r"^ +(\S+),$", capsys.readouterr().out, re.M)]
    text = (KERNELS / "real_math.h").read_text() + (KERNELS / "bessel.h").read_text()
    known = sorted({abs(float(c)) for c in re.findall(r"\d+\.\d*(?:e[+-]?\d+)?", text)})
    assert len(printed) > 100
    for c in printed:
        assert min(abs(k - c) for k in known) <= 2.3e-16 * c
