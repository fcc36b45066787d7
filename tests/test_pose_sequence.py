"""A sequence as one node of the graph gives what its steps give."""

import pytest
import torch
from test_filters import POSE, tensors

import mdps
from mdps import ops, pose_sequence
from mdps.networks import ObservationEncoder, PoseLikelihood, ResidualDynamics


def filters(dtype, n=1, **options):
    made = []
    for i in range(n):
        torch.manual_seed(i)
        encoder, options = ObservationEncoder(), {"resampling_bandwidth": 0.3, **options}
        made.append(
            mdps.MixtureDensityParticleFilter(
                POSE, ResidualDynamics(), PoseLikelihood(encoder), 9, reverse=i % 2 == 1, **options
            ).to(dtype)
        )
    return made


def results(made, monkeypatch, one_node, B=5, T=6, grads=True):
    """Beliefs, and gradients of everything to everything."""
    dtype = next(made[0].parameters()).dtype
    g = torch.Generator().manual_seed(3)
    observations = [torch.randn(B, T, generator=g, dtype=dtype) for _ in made]
    initial = [torch.randn(B, 9, 3, generator=g, dtype=dtype).requires_grad_(grads) for _ in made]
    seeds = [ops.split_seed(torch.tensor(i), B) for i in range(len(made))]
    calls = []
    ordinary = pose_sequence.run

    def run(*given):
        fields = ordinary(*given) if one_node else None
        calls.append(fields is not None)
        return fields

    with monkeypatch.context() as patch:
        patch.setattr(pose_sequence, "run", run)
        beliefs = mdps.filter_together(made, initial, observations, seeds=seeds)
    assert calls == [one_node]
    values = [x for b in beliefs for x in tensors(b)]
    if not grads:
        return values, []
    weights = [torch.randn(x.shape, generator=g, dtype=dtype) if x.is_floating_point() else None for x in values]
    loss = sum((w * x).sum() for w, x in zip(weights, values) if w is not None)
    inputs = [*initial, *(p for f in made for p in f.parameters() if p is not f.posterior_bandwidth.log_excess)]
    return values, torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["stratified", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_node_gives_what_the_steps_give(monkeypatch, n, scheme, dtype):
    made = filters(dtype, n, resampling=scheme)
    (got, got_grads), (want, want_grads) = (results(made, monkeypatch, one_node) for one_node in (True, False))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))


def test_without_gradients(monkeypatch):
    made = filters(torch.float32, 2)
    with torch.no_grad():
        got, want = (results(made, monkeypatch, one_node, grads=False)[0] for one_node in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradient_of_each_result_alone(monkeypatch):
    """What a loss does not use has no gradient to begin with."""
    (f,) = filters(torch.float64)
    g = torch.Generator().manual_seed(0)
    observations, initial = torch.randn(2, 4, generator=g).double(), torch.randn(2, 9, 3, generator=g).double()
    seed = torch.tensor([1, 2])
    for pick in (
        lambda b: b.posterior.means[:, 1],
        lambda b: b.predicted.log_weights[:, 2],
        lambda b: b.log_evidence[:, 0],
        lambda b: b.ess[:, 3],
    ):
        grads = []
        for one_node in (True, False):
            with monkeypatch.context() as patch:
                if not one_node:
                    patch.setattr(pose_sequence, "run", lambda *given: None)
                loss = pick(f(observations, initial, seed=seed)).sin().sum()
            grads.append(torch.autograd.grad(loss, list(f.parameters()), allow_unused=True, materialize_grads=True))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_what_is_general_takes_the_steps():
    """Missing observations, lengths and references do not fit one node; where they say nothing new the numbers are the same."""
    (f,) = filters(torch.float64)
    observations, initial, seed = torch.randn(3, 4).double(), torch.randn(3, 9, 3).double(), torch.tensor([1, 2, 3])
    want = list(tensors(f(observations, initial, seed=seed)))
    everything = {"observed": torch.ones(3, 4, dtype=torch.bool)}, {"lengths": torch.tensor([4, 4, 4])}
    for more in everything:
        for a, b in zip(tensors(f(observations, initial, seed=seed, **more)), want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    with ops.reference():
        for a, b in zip(tensors(f(observations, initial, seed=seed)), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_second_derivatives_are_refused():
    (f,) = filters(torch.float32)
    loss = f(torch.randn(2, 3), torch.randn(2, 9, 3), seed=torch.tensor(0)).log_evidence.sum()
    (g,) = torch.autograd.grad(loss, [next(f.dynamics.parameters())], create_graph=True)
    with pytest.raises(RuntimeError):
        g.sum().backward()


def test_a_code_of_the_wrong_width_is_told():
    f = mdps.MixtureDensityParticleFilter(POSE, ResidualDynamics(), PoseLikelihood(torch.nn.Identity()), 9)
    with pytest.raises(ValueError, match="expected"):
        f(torch.randn(2, 3, 5), torch.randn(2, 9, 3))
