"""What is true of an extension built with CUDA, on a machine without a GPU. Run by cuda_check.py
inside the environment that it makes."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_recoder as fr
from fused_recoder import _C

OPS = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fused_recoder::")]


def check_build():
    assert torch.version.cuda is not None, "this torch was built without CUDA"
    assert _C.build_decision.startswith("CUDA"), _C.build_decision
    print(f"torch {torch.__version__}, built for: {_C.build_decision}")


def check_registration():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for key in ("CPU", "CUDA", "Meta"):
        missing = [name for name in OPS if not has_kernel(name, key)]
        assert not missing, f"no {key} kernel for {missing}"
    print(f"{len(OPS)} ops have CPU, CUDA and fake kernels")


def check_shapes():
    """On tensors that claim to be on a GPU and have no memory. (Forward only: autograd asks the
    driver for the device.)"""
    lm = fr.RecodingLanguageModel(100, 12, 16, 2)
    state = dict(lm.named_parameters()) | dict(lm.named_buffers())
    with FakeTensorMode():
        fake = {
            name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in state.items()
        }
        tokens = torch.zeros(5, 3, dtype=torch.int64, device="cuda")
        out = torch.func.functional_call(lm, fake, (tokens, tokens))
        assert (out.nll.shape, out.nll.device.type) == ((5, 3), "cuda")
        assert (out.hx[0].shape, out.hx[0].device.type) == ((2, 3, 16), "cuda")
        hidden, weight = torch.empty(3, 16, device="cuda"), torch.empty(100, 16, device="cuda")
        delta, grad = fr.functional.signal_gradient(hidden, weight, None, signal="entropy")
        assert (delta.shape, delta.device.type) == ((3,), "cuda")
        assert (grad.shape, grad.device.type) == ((3, 16), "cuda")
    print("shapes and devices are right on fake CUDA tensors")


if __name__ == "__main__":
    check_build()
    check_shapes()
    check_registration()
