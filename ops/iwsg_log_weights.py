"""Importance Weighted Sample Gradients: what lets gradients pass through resampling from a mixture."""

import torch
from torch import Tensor

from . import _arguments as check
from ._operator import map_batch, operator, reference_active
from .mixture_log_prob import flat_mixture, mixture_log_prob_reference, mixture_shapes

_NAMES = ("samples", "means", "log_weights", "bandwidths")


def iwsg_log_weights(samples: Tensor, means: Tensor, log_weights: Tensor, bandwidths: Tensor, *, n_angular: int = 0) -> Tensor:
    """Return log-weights, exactly 0, that carry the gradient of log m(sample; means, log_weights, bandwidths).

    Samples drawn from a mixture are constants; what a change of the mixture changes is their importance weight
    m(z; phi) / m(z; phi_0). Its value is 1, its log's gradient is that of the mixture's log-density at z.

    Args:
        samples: (..., M, D), drawn from the mixture, as by `mixture_resample`. No gradient flows to them.
        means, log_weights, bandwidths, n_angular: the mixture, as in `mixture_log_prob`. Normalise log_weights: the gradient
            is that of log m with the weights as they are.

    Returns:
        (..., M), zeros.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, n_angular; in backward, bandwidths that are not positive and finite.
            A GPU is not waited for to look at bandwidths: there such ones make the gradients of their row NaN.

    Cost: O(M) forward; O(MN) time and O(M + N) memory in backward, the only pass that needs the mixture.
    Source: the paper's equation of the IWSG, section 2.3; Younis & Sudderth 2023.
    """
    if not reference_active():
        try:  # The operator checks its arguments; what it refuses is looked at below.
            if samples.dim() == 3:
                return _iwsg_log_weights(samples, means, log_weights, bandwidths, n_angular)
        except (AttributeError, RuntimeError, TypeError):
            pass
    samples, means, log_weights, bandwidths = check.reals(_NAMES, samples, means, log_weights, bandwidths)
    lead = mixture_shapes(samples, means, log_weights, bandwidths, n_angular)
    if reference_active():
        return iwsg_log_weights_reference(samples, means, log_weights, bandwidths, n_angular)
    return _iwsg_log_weights(*flat_mixture(lead, samples, means, log_weights, bandwidths), n_angular).reshape(
        *lead, samples.size(-2)
    )


def iwsg_log_weights_reference(
    samples: Tensor, means: Tensor, log_weights: Tensor, bandwidths: Tensor, n_angular: int
) -> Tensor:
    """The same in plain PyTorch."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (means, log_weights, bandwidths))):
        return samples.new_zeros(samples.shape[:-1])
    log_prob = mixture_log_prob_reference(samples.detach(), means, log_weights, bandwidths, n_angular)
    log_prob = torch.where(log_prob == -torch.inf, 0.0, log_prob)
    return log_prob - log_prob.detach()


def _save(ctx, args, out):
    ctx.n_angular = args[4]
    ctx.save_for_backward(*args[:4])


def _gradients(ctx, grad):
    try:
        return None, *_backward(grad, *ctx.saved_tensors, ctx.n_angular), None
    except RuntimeError as error:
        raise check.named(error) from None


_backward = operator("iwsg_log_weights_backward")
_iwsg_log_weights = operator("iwsg_log_weights", _save, _gradients)
map_batch("iwsg_log_weights", shared={3: None})
map_batch("iwsg_log_weights_backward", shared={4: 2})


@torch.library.register_fake("mdps::iwsg_log_weights")
def _(samples, means, log_weights, bandwidths, n_angular):
    samples, means, log_weights, bandwidths = check.reals(_NAMES, samples, means, log_weights, bandwidths)
    mixture_shapes(samples, means, log_weights, bandwidths, n_angular)
    return samples.new_empty(samples.shape[:2])


@torch.library.register_fake("mdps::iwsg_log_weights_backward")
def _(grad, samples, means, log_weights, bandwidths, n_angular):
    return tuple(t.new_empty(t.shape) for t in (means, log_weights, bandwidths))
