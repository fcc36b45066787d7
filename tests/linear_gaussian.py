"""A linear Gaussian model: its networks for the filters, and the exact answers in float64 (Kalman, Rauch-Tung-Striebel).

The stationary chain x_t = A x_{t-1} + noise with covariance Q = S - A S A' has covariance S at all times, and backwards it is
x_t = A_r x_{t+1} + noise with A_r = S A' S^-1. Observations are y_t = C x_t + noise of covariance R.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Gaussians(NamedTuple):
    means: Tensor  # (T, D)
    covariances: Tensor  # (T, D, D)


class Model(NamedTuple):
    A: Tensor
    S: Tensor
    C: Tensor
    R: Tensor

    @property
    def Q(self) -> Tensor:
        return self.S - self.A @ self.S @ self.A.mT

    def reversed(self) -> "Model":
        return self._replace(A=self.S @ self.A.mT @ torch.linalg.inv(self.S))


def model(D: int) -> Model:
    """Neither diagonal nor symmetric for D > 1; D - 1 observed numbers, or 1."""
    g = torch.Generator().manual_seed(D)
    E = max(D - 1, 1)
    A = 0.8 * torch.linalg.qr(torch.randn(D, D, generator=g, dtype=torch.float64))[0]
    if D == 1:
        A = torch.tensor([[0.8]], dtype=torch.float64)
    S = torch.eye(D, dtype=torch.float64) + 0.3 * torch.ones(D, D, dtype=torch.float64)
    C = torch.randn(E, D, generator=g, dtype=torch.float64) / math.sqrt(D) + torch.eye(E, D, dtype=torch.float64)
    return Model(A, S, C, 0.5 * torch.eye(E, dtype=torch.float64))


def simulate(m: Model, T: int, seed: int = 0) -> Tensor:
    """Observations (T, E)."""
    g = torch.Generator().manual_seed(seed)
    D, E = m.A.size(0), m.C.size(0)
    root_q, root_r = torch.linalg.cholesky(m.Q), torch.linalg.cholesky(m.R)
    x = torch.linalg.cholesky(m.S) @ torch.randn(D, generator=g, dtype=torch.float64)
    y = []
    for _ in range(T):
        y.append(m.C @ x + root_r @ torch.randn(E, generator=g, dtype=torch.float64))
        x = m.A @ x + root_q @ torch.randn(D, generator=g, dtype=torch.float64)
    return torch.stack(y)


def stationary(m: Model, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Particles (*shape, D) from N(0, S)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, m.S.size(0), generator=g, dtype=torch.float64) @ torch.linalg.cholesky(m.S).mT
    return x.to(dtype)


def kalman(m: Model, y: Tensor, bandwidth: float = 0.0, observed: Tensor | None = None) -> tuple[Gaussians, Gaussians, Tensor]:
    """Predicted and filtered Gaussians (T) and log p(y_t | y_1 ... y_{t-1}), starting from N(0, S).

    Before each move the belief is convolved with a Gaussian kernel of this bandwidth, as a regularised particle filter does.
    """
    eye = torch.eye(m.A.size(0), dtype=y.dtype)
    mean, cov = y.new_zeros(m.A.size(0)), m.S
    predicted, filtered, evidence = [], [], []
    for t in range(y.size(0)):
        if t > 0:
            mean, cov = m.A @ mean, m.A @ (cov + bandwidth**2 * eye) @ m.A.mT + m.Q
        predicted.append((mean, cov))
        if observed is None or observed[t]:
            F, e = m.C @ cov @ m.C.mT + m.R, y[t] - m.C @ mean
            K = cov @ m.C.mT @ torch.linalg.inv(F)
            evidence.append(-0.5 * (e @ torch.linalg.solve(F, e) + torch.logdet(F) + len(e) * math.log(2 * math.pi)))
            mean, cov = mean + K @ e, (eye - K @ m.C) @ cov
        else:
            evidence.append(y.new_zeros(()))
        filtered.append((mean, cov))
    return _stack(predicted), _stack(filtered), torch.stack(evidence)


def rauch_tung_striebel(m: Model, y: Tensor) -> Gaussians:
    predicted, filtered, _ = kalman(m, y)
    mean, cov = filtered.means[-1], filtered.covariances[-1]
    out = [(mean, cov)]
    for t in range(y.size(0) - 2, -1, -1):
        G = filtered.covariances[t] @ m.A.mT @ torch.linalg.inv(predicted.covariances[t + 1])
        mean = filtered.means[t] + G @ (mean - predicted.means[t + 1])
        cov = filtered.covariances[t] + G @ (cov - predicted.covariances[t + 1]) @ G.mT
        out.append((mean, cov))
    return _stack(out[::-1])


def two_filters(m: Model, y: Tensor, resampling: float = 0.0, predicted: float = 0.0) -> Gaussians:
    """The smoothed Gaussians p(y_t | x) m_f(x) m_b(x) / N(x; 0, S), with kernels of these bandwidths in m_f and m_b.

    Without kernels that is the exact smoother, by another way than rauch_tung_striebel.
    """
    eye = torch.eye(m.A.size(0), dtype=y.dtype)
    f, b = kalman(m, y, resampling)[0], kalman(m.reversed(), y.flip(0), resampling)[0]
    out = []
    for t in range(y.size(0)):
        precision, vector = (
            m.C.mT @ torch.linalg.solve(m.R, m.C) - torch.linalg.inv(m.S),
            m.C.mT @ torch.linalg.solve(m.R, y[t]),
        )
        for g, s in ((f, t), (b, y.size(0) - 1 - t)):
            inverse = torch.linalg.inv(g.covariances[s] + predicted**2 * eye)
            precision, vector = precision + inverse, vector + inverse @ g.means[s]
        cov = torch.linalg.inv(precision)
        out.append((cov @ vector, cov))
    return _stack(out)


def _stack(pairs: list[tuple[Tensor, Tensor]]) -> Gaussians:
    return Gaussians(torch.stack([mean for mean, _ in pairs]), torch.stack([cov for _, cov in pairs]))


class LinearDynamics(nn.Module):
    def __init__(self, m: Model):
        super().__init__()
        self.noise_size = m.A.size(0)
        self.A, self.root = nn.Parameter(m.A.float()), nn.Parameter(torch.linalg.cholesky(m.Q).float())

    def forward(self, particles, noise, action=None):
        return particles @ self.A.mT + noise @ self.root.mT


class GaussianLikelihood(nn.Module):
    def __init__(self, m: Model):
        super().__init__()
        self.C, self.R = nn.Parameter(m.C.float()), nn.Parameter(m.R.float())

    def forward(self, particles, observation):
        error = observation.unsqueeze(1) - particles @ self.C.mT
        quadratic = (error * torch.linalg.solve(self.R, error, left=False)).sum(-1)
        return -0.5 * (quadratic + torch.logdet(self.R) + error.size(-1) * math.log(2 * math.pi))


class SmoothedLikelihood(GaussianLikelihood):
    """log p(y | x) + log m_f + log m_b - log N(x; 0, S), up to a constant."""

    def __init__(self, m: Model):
        super().__init__(m)
        self.register_buffer("precision", torch.linalg.inv(m.S).float())

    def forward(self, particles, observation, log_forward, log_backward):
        log_prior = -0.5 * (particles @ self.precision * particles).sum(-1)
        return super().forward(particles, observation) + log_forward + log_backward - log_prior
