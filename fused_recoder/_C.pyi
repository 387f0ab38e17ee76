# The module that csrc/ops/bindings.cpp makes. Its ops are found in torch.ops.fused_recoder.

torch_version: str
build_decision: str

def cpu_instruction_set() -> str: ...
def spec_fields() -> list[tuple[str, str, str, str]]: ...
def saved_layout(
    spec: str, upper_layers: bool, ensemble: bool, bias: bool
) -> list[tuple[str, str, bool]]: ...
