"""A sequence as one call gives what its steps give."""

import gc
import math
import weakref

import pytest
import torch
import torch.utils.checkpoint
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
    """Missing observations, lengths and references do not fit one call; where they say nothing new the numbers are the same."""
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


class Kept:
    """What a hook keeps in place of a saved tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_backward_frees_what_forward_kept():
    (f,) = filters(torch.float32)
    kept, shapes = [], []

    def keep(tensor):
        k = Kept(tensor)
        shapes.append(tuple(tensor.shape))
        if tensor.shape[1:3] == (B, 9):  # not the bandwidths of beliefs that the loss does not look at
            kept.append(weakref.ref(k))
        return k

    seed, (B, T) = torch.tensor(0), (2, 5)
    given = torch.randn(B, T), torch.randn(B, 9, 3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda k: k.tensor):
        beliefs = f(*given, seed=seed)
    assert {(T, B, 9, 3), (T - 1, B, 9, 3), (T, B, 9, 4)} <= set(shapes), "the hooks see states, draws and noise"
    loss = beliefs.log_evidence.sum()
    loss.backward(retain_graph=True)
    assert any(k() is not None for k in kept)
    loss.backward()
    gc.collect()
    assert not any(k() is not None for k in kept)
    node = beliefs.posterior.means.grad_fn
    while not hasattr(node, "move_layers"):
        node = node.next_functions[0][0]
    assert vars(node) and not has_tensor(list(vars(node).values()))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def has_tensor(x):
    return isinstance(x, torch.Tensor) or (isinstance(x, (tuple, list)) and any(map(has_tensor, x)))


def test_checkpointing(monkeypatch):
    (f,) = filters(torch.float64)
    given = torch.randn(2, 5).double(), torch.randn(2, 9, 3).double()
    calls, ordinary = [], pose_sequence.run
    monkeypatch.setattr(pose_sequence, "run", lambda *a: calls.append(0) or ordinary(*a))

    def loss():
        return f(*given, seed=torch.tensor(0)).log_evidence.sum()

    want = torch.autograd.grad(loss(), list(f.dynamics.parameters()))
    assert len(calls) == 1
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, use_reentrant=False), list(f.dynamics.parameters()))
    assert len(calls) == 3, "the sequence was run again"
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("one_node", [True, False])
def test_bandwidths_without_a_gradient_are_told_by_name(monkeypatch, one_node):
    """Draws from such mixtures exist, densities do not."""
    (f,) = filters(torch.float32)
    if not one_node:
        monkeypatch.setattr(pose_sequence, "run", lambda *given: None)
    with torch.no_grad():
        f.resampling_bandwidth.log_excess.fill_(math.inf)
    loss = f(torch.randn(2, 3), torch.randn(2, 9, 3), seed=torch.tensor(0)).log_evidence.sum()
    with pytest.raises(ValueError, match="^bandwidths: expected positive finite numbers"):
        loss.backward()


def test_dynamics_without_noise(monkeypatch):
    made = filters(torch.float64)
    made[0].dynamics = ResidualDynamics(noise_size=0).double()
    (got, got_grads), (want, want_grads) = (results(made, monkeypatch, one_node) for one_node in (True, False))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * max(1.0, b.abs().max().item()))
    move, p = made[0].dynamics, torch.randn(2, 9, 3).double()
    assert torch.equal(move(p, torch.empty(2, 9, 0).double()), move(p, None))


def test_a_code_of_the_wrong_width_is_told():
    f = mdps.MixtureDensityParticleFilter(POSE, ResidualDynamics(), PoseLikelihood(torch.nn.Identity()), 9)
    with pytest.raises(ValueError, match="expected"):
        f(torch.randn(2, 3, 5), torch.randn(2, 9, 3))
