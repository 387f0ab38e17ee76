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


def on_cuda(module):
    """Parameters and buffers of the shapes of `module`, on a GPU and without memory."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in state.items()}


def check_shapes():
    """On tensors that claim to be on a GPU and have no memory. (Forward only: autograd asks the
    driver for the device.)"""
    lm = fr.RecodingLanguageModel(100, 12, 16, 2)
    with FakeTensorMode():
        fake, tokens = on_cuda(lm), torch.zeros(5, 3, dtype=torch.int64, device="cuda")
        out = torch.func.functional_call(lm, fake, (tokens, tokens))
        assert (out.nll.shape, out.nll.device.type) == ((5, 3), "cuda")
        assert (out.hx[0].shape, out.hx[0].device.type) == ((2, 3, 16), "cuda")
        hidden, weight = torch.empty(3, 16, device="cuda"), torch.empty(100, 16, device="cuda")
        delta, grad = fr.functional.signal_gradient(hidden, weight, None, signal="entropy")
        assert (delta.shape, delta.device.type) == ((3,), "cuda")
        assert (grad.shape, grad.device.type) == ((3, 16), "cuda")
    print("shapes and devices are right on fake CUDA tensors")


def check_autocast():
    """Inputs and weights are rounded, states and losses are not. (torch.autocast itself asks for a
    GPU: its switches are set by hand.)"""
    lm = fr.RecodingLanguageModel(100, 12, 16, 2)
    torch.set_autocast_enabled("cuda", True)
    for dtype in (torch.float16, torch.bfloat16):
        torch.set_autocast_dtype("cuda", dtype)
        with FakeTensorMode():
            tokens = torch.zeros(5, 3, dtype=torch.int64, device="cuda")
            out = torch.func.functional_call(lm, on_cuda(lm), (tokens, tokens))
            assert out.nll.dtype == out.hx[0].dtype == out.hx[1].dtype == torch.float32
            x = torch.empty(5, 3, 12, device="cuda")
            decoder = torch.nn.Linear(16, 100, device="cuda")
            rnn = fr.FusedRecodingLSTM(12, 16, 2, decoder=decoder, device="cuda")
            output, (h, c) = rnn(x)
            assert output.dtype == dtype
            assert h.dtype == c.dtype == torch.float32
    torch.set_autocast_enabled("cuda", False)
    print("autocast rounds operands and keeps states, on fake CUDA tensors")


def check_devices():
    lm = fr.RecodingLanguageModel(100, 12, 16, 2)
    with FakeTensorMode():
        tokens = torch.zeros(5, 3, dtype=torch.int64, device="cuda")
        targets = torch.zeros(5, 3, dtype=torch.int64)
        message = "nothing"
        try:
            torch.func.functional_call(lm, on_cuda(lm), (tokens, targets))
        except ValueError as error:
            message = str(error)
        assert "targets must be on cuda" in message, f"targets on the CPU raised {message}"
    print("tensors on different devices are refused by name")


if __name__ == "__main__":
    check_build()
    check_shapes()
    check_autocast()
    check_devices()
    check_registration()
