"""What Python does with CUDA tensors, without a GPU: fake tensors have a device and no numbers, so that whatever asks for a
number, which would wait for the GPU and cannot be captured into a CUDA graph, is an error, and so is a stray CPU tensor.

Where torch was built without CUDA its fake tensors can neither be indexed nor have gradients. So filters and smoothers, and
all gradients, are looked at on the device "meta", which is as little the CPU, and indexing on CUDA where it can be.
"""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mdps
from mdps import metrics, ops
from mdps.networks import ObservationEncoder, PoseLikelihood, PoseSmootherLikelihood, ResidualDynamics

SPACE = mdps.StateSpace(linear=("x", "y"), angular=("heading",))
B, T, N, M, D = 2, 3, 5, 7, 3


class StaysOn(TorchDispatchMode):
    """Every tensor that any function returns is on this kind of device; nothing is copied from or to another."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
        assert devices <= {self.device}, f"{func} has tensors on {devices}"
        return out


@contextlib.contextmanager
def fake(device):
    """Yields a function that makes a fake tensor on the device."""
    with FakeTensorMode(allow_non_fake_inputs=False), StaysOn(device):
        yield lambda *shape, grad=False, **kwargs: torch.randn(shape, device=device, **kwargs).requires_grad_(grad)


def check(out, device):
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    assert tensors
    assert {t.device.type for t in tensors} == {device}


DEVICES = pytest.mark.parametrize("device", ["cuda", "meta"])
built = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch with CUDA, though no GPU")
INDEXED_DEVICES = pytest.mark.parametrize("device", [pytest.param("cuda", marks=built), "meta"])
LAYERS = (ops.Layer(4, "prelu"), ops.Layer(2, "none", extra=True, condition=True))


def mixture(real, grad, n=N):
    return real(B, n, D, grad=grad), real(B, n, grad=grad), real(D, grad=grad)


def seed(real):
    return ops.make_seed(device=real(1).device)


# Given a maker of real tensors and whether they have gradients.
FACES = {
    "make_seed": lambda real, g: ops.make_seed(batch=B, device=real(1).device),
    "split_seed": lambda real, g: ops.split_seed(seed(real), 4),
    "philox_uniform": lambda real, g: ops.philox_uniform(seed(real), (B, N)),
    "philox_normal": lambda real, g: ops.philox_normal(seed(real), (B, N), dtype=torch.float64),
    "philox_von_mises": lambda real, g: ops.philox_von_mises(seed(real), real(B, N, grad=g)),
    "normalize_log_weights": lambda real, g: ops.normalize_log_weights(real(B, T, N, grad=g)),
    "resample": lambda real, g: ops.resample(real(B, N, grad=g), seed(real), M),
    "resample 3": lambda real, g: ops.resample(real(B, T, N, grad=g), ops.split_seed(seed(real), B * T).view(B, T)),
    "mixture_resample": lambda real, g: ops.mixture_resample(*mixture(real, g), seed(real), M, n_angular=1),
    "mixture_log_prob": lambda real, g: ops.mixture_log_prob(real(B, M, D, grad=g), *mixture(real, g), n_angular=1),
    "mixture_log_prob 2": lambda real, g: ops.mixture_log_prob(real(M, D), real(N, D, grad=g), real(N), real(D), n_angular=1),
    "iwsg_log_weights": lambda real, g: ops.iwsg_log_weights(real(B, M, D), *mixture(real, g), n_angular=1),
    "two_filter_log_prob": lambda real, g: ops.two_filter_log_prob(
        real(B, M, D, grad=g), *mixture(real, g), *mixture(real, g, 4), n_angular=1
    ),
    "find_modes": lambda real, g: ops.find_modes(real(B, N, D), real(B, N), real(D), 3, (1.0,) * D, n_angular=1),
    "transport_resample": lambda real, g: ops.transport_resample(real(B, N, D, grad=g), real(B, N, grad=g), n_angular=1),
    "pose_correlation": lambda real, g: ops.pose_correlation(
        real(B, 1, 2, 8, 7, grad=g),
        real(B, T, 2, 3, 4, grad=g),
        real(B, T, N, 3, grad=g),
        real(3, 4) > 0,
        origin=(2, 3),
        confidence=real(B, T, 3, 4, grad=g),
        normalize="valid",
    ),
    "von_mises_log_prob": lambda real, g: ops.von_mises_log_prob(real(B, M, grad=g), real(M, grad=g), real(1, grad=g)),
    "log_i0": lambda real, g: ops.log_i0(real(B, M, grad=g)),
    "small_network": lambda real, g: ops.small_network(
        real(B, N, D, grad=g), real(33, grad=g), LAYERS, extra=real(B, N, 1, grad=g), condition=real(B, 2)
    ),
    "move_poses": lambda real, g: ops.move_poses(
        real(B, N, 3, grad=g), real(B, N, 2), real(20, grad=g), (ops.Layer(4, "sigmoid", extra=True),), real(4)
    ),
    "filter_poses": lambda real, g: ops.filter_poses(
        real(B, N, 3, grad=g),
        real(B, T, 2, grad=g),
        real(B, T).long(),
        real(3, grad=g),
        (real(16, grad=g), (ops.Layer(4, "sigmoid", extra=True),)),
        (real(7, grad=g), (ops.Layer(1, "sigmoid", condition=True),)),
        real(4),
        noise=real(B, T, N, 1),
    ),
    "weigh_poses": lambda real, g: ops.weigh_poses(
        real(B, N, 3, grad=g), real(7, grad=g), (ops.Layer(1, "sigmoid", condition=True),), condition=real(B, 2, grad=g)
    ),
}


def test_every_operator_is_here():
    results = {"FilteredPoses", "NormalizedWeights", "Transported"}
    others = {"Layer", "flatten_parameters", "layers_of", "reference", "reference_active"}
    public = {n for n in dir(ops) if not n.startswith("_")} - results - others
    assert public == {n.split()[0] for n in FACES}


@DEVICES
@pytest.mark.parametrize("name", FACES)
def test_operators(name, device):
    with fake(device) as real:
        out = FACES[name](real, device == "meta")
        check(out, device)
        if device == "meta":
            differentiable = [t.sum() for t in tree_leaves(out) if t.requires_grad]
            if differentiable:
                sum(differentiable[1:], differentiable[0]).backward()


def models():
    encoder = ObservationEncoder()
    forward, backward = (
        mdps.MixtureDensityParticleFilter(
            SPACE, ResidualDynamics(), PoseLikelihood(encoder), N, reverse=reverse, resampling_bandwidth=0.3
        )
        for reverse in (False, True)
    )
    return mdps.MixtureDensityParticleSmoother(forward, backward, PoseSmootherLikelihood(encoder))


def fake_parameters(module, device):
    """Replace parameters and buffers by fakes on the device, in place."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, x in table.items():
                is_leaf = isinstance(x, torch.nn.Parameter) and device == "meta"
                table[name] = torch.empty(x.shape, dtype=x.dtype, device=device).requires_grad_(is_leaf)
    return module


@INDEXED_DEVICES
def test_filter_online(device):
    filters = models().forward_filter, models().backward_filter
    for f in filters:
        with fake(device) as real:
            fake_parameters(f, device)
            time = {"time": T - 1} if f.reverse else {}
            state = f.start(real(B, N, D), real(B), seed=seed(real), **time)
            check(state, device)
            observed = real(B) > 0
            state = f.step(state, real(B), action=real(B, 2), observed=observed)
            check(state, device)
            belief = f.posterior(state)
            at = real(B, D)
            check((belief.log_prob(at), belief.sample((4,)), belief.mean, belief.variance), device)
            check(belief.marginal(("x", "heading")).log_prob(at[:, :2]), device)
            if device == "meta":
                (belief.log_prob(at).sum() + state.log_evidence.sum()).backward()
                check([p.grad for p in f.parameters()], device)


@INDEXED_DEVICES
@pytest.mark.parametrize("masks", [False, True], ids=["whole", "masks"])
def test_smoother(device, masks):
    smoother = models()
    with fake(device) as real:
        fake_parameters(smoother, device)
        options = {}
        if masks:
            options = {"lengths": torch.full((B,), T, device=device), "observed": real(B, T) > 0, "actions": real(B, T, 2)}
        beliefs = smoother(real(B, T), real(B, N, D), real(B, N, D), **options)
        belief, filtered = beliefs.smoothed, beliefs.forward
        check(
            (belief.means, belief.log_weights, belief.bandwidths, beliefs.collapsed, filtered.ess, filtered.ancestors), device
        )
        if device == "meta":
            loss = metrics.negative_log_likelihood(belief, real(B, T, D)).sum()
            loss.backward()
            check([p.grad for p in smoother.parameters()], device)


@INDEXED_DEVICES
def test_other_devices_are_named(device):
    """A tensor on the CPU among those on a GPU."""
    f = models().forward_filter
    with FakeTensorMode(allow_non_fake_inputs=False):
        fake_parameters(f, device)
        on, off = ({"device": d} for d in (torch.empty((), device=device).device, torch.device("cpu")))
        w, x, b = torch.zeros(B, N, **on), torch.zeros(B, N, D, **on), torch.ones(D, **on)
        far_seed, near_seed = torch.zeros((), dtype=torch.int64, **off), torch.zeros((), dtype=torch.int64, **on)
        y, far = torch.zeros(B, T, **on), torch.zeros(B, T, **off)
        rows = [
            (lambda: ops.resample(w, far_seed), "seed: expected the device of log_weights"),
            (lambda: ops.mixture_resample(x, w, b, far_seed), "seed: expected the device of means"),
            (lambda: ops.philox_von_mises(far_seed, w), "seed: expected the device of concentration"),
            (lambda: ops.mixture_log_prob(x, x, w, b.to("cpu")), "bandwidths: expected the device of x"),
            (lambda: ops.iwsg_log_weights(x, x, w.to("cpu"), b), "log_weights: expected the device of samples"),
            (lambda: ops.von_mises_log_prob(w, w, w.to("cpu")), "concentration: expected the device of x"),
            (lambda: ops.make_seed(torch.Generator(), device=device), "generator: expected one of the seed's device"),
            (lambda: f(y, x.to("cpu"), seed=near_seed), "initial: expected device"),
            (lambda: f(far, x, seed=near_seed), "observations: expected device"),
            (lambda: f(y, x, actions=far, seed=near_seed), "actions: expected device"),
            (lambda: f(y, x, observed=far > 0, seed=near_seed), "observed: expected device"),
            (lambda: f(y, x, lengths=torch.full((B,), T), seed=near_seed), "lengths: expected device"),
            (lambda: f(y, x, seed=far_seed), "seed: expected device"),
            (lambda: f.start(x, far[:, 0], seed=near_seed), "observation: expected device"),
        ]
        for call, words in rows:
            with pytest.raises(ValueError, match=words):
                call()


def test_waiting_is_seen():
    """What the tests above rely on."""
    with fake("cuda") as real:
        with pytest.raises(DataDependentOutputException):
            real(1).item()
        with pytest.raises(DataDependentOutputException):
            bool((real(3) > 0).all())
        with pytest.raises(AssertionError, match="tensors on"):
            torch.zeros(3)
